"""gpucoll.distributed on NumPy arrays: values, the arrays written, objects, and every refusal."""

import contextlib

import numpy
import pytest

import gpucoll as gc
import gpucoll.distributed as dist
from harness.grids import naming, sampled
from multirank.distributed_world import data, done, same, world

SIZES = (1, 2, 3, 4, 5, 8)


def reductions(mpi, dtype, async_op):
    with world(mpi) as (rank, size):
        everyone = numpy.stack([data(peer, dtype=dtype) for peer in range(size)])
        kind, root = numpy.dtype(dtype).kind, size // 2
        ops = {"SUM": everyone.sum(0, dtype=dtype)}
        ops |= {"MIN": everyone.min(0), "MAX": everyone.max(0)} if kind != "c" else {}
        ops |= {"BAND": numpy.bitwise_and.reduce(everyone), "BXOR": numpy.bitwise_xor.reduce(everyone)} \
            if kind in "iu" else {"AVG": (everyone.sum(0) / size).astype(dtype)}
        for name, expected in ops.items():
            op, x = getattr(dist.ReduceOp, name), data(rank, dtype=dtype)
            found = done(dist.all_reduce(x, op=op, async_op=async_op), async_op)
            assert found is None or found[0] is x
            same(x, expected)
            x = data(rank, dtype=dtype)
            done(dist.reduce(x, root, op, async_op=async_op), async_op)
            same(x, expected if rank == root else data(rank, dtype=dtype))
        x = data(rank, dtype=dtype)
        dist.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM(2))
        same(x, 2 * ops["SUM"])
        x = numpy.full(3, 1 + rank % 2, dtype)
        done(dist.all_reduce(x, op=dist.ReduceOp.PRODUCT, async_op=async_op), async_op)
        same(x, numpy.full(3, 2 ** (size // 2), dtype))


def movements(mpi, dtype, async_op):
    with world(mpi) as (rank, size):
        root, everyone = size - 1, [data(peer, dtype=dtype) for peer in range(size)]
        x = data(rank, dtype=dtype)
        done(dist.broadcast(x, root, async_op=async_op), async_op)
        same(x, everyone[root])
        x, outs = data(rank, dtype=dtype), [numpy.zeros((2, 3), dtype) for _ in range(size)]
        found = done(dist.all_gather(outs, x, async_op=async_op), async_op)
        assert found is None or all(one is out for one, out in zip(found, outs, strict=True))
        same(numpy.stack(outs), everyone)
        outs = [numpy.zeros((2, 3), dtype) for _ in range(size)] if rank == root else None
        done(dist.gather(x, outs, root, async_op=async_op), async_op)
        assert rank != root or numpy.array_equal(outs, everyone)
        x = numpy.zeros((2, 3), dtype)
        done(dist.scatter(x, everyone if rank == root else [], root, async_op=async_op), async_op)
        same(x, everyone[rank])
        given = [data(rank * size + peer, dtype=dtype) for peer in range(size)]
        outs = [numpy.zeros((2, 3), dtype) for _ in range(size)]
        done(dist.all_to_all(outs, given, async_op=async_op), async_op)
        same(numpy.stack(outs), [data(peer * size + rank, dtype=dtype) for peer in range(size)])
        done(dist.barrier(async_op=async_op), async_op)


def into_tensors(mpi, async_op):
    """Gather and reduce-scatter tensors: concatenated, stacked, in one row, with gaps, and in place (as a slot)."""
    with world(mpi) as (rank, size):
        everyone = numpy.stack([data(peer) for peer in range(size)])
        for shape in ((2 * size, 3), (size, 2, 3), (6 * size,)):
            out, given = numpy.zeros(shape), data(rank)
            done(dist.all_gather_into_tensor(out, given, async_op=async_op), async_op)
            same(out, everyone.reshape(shape))
            same(given, data(rank))
            out = numpy.zeros((2, 3))
            done(dist.reduce_scatter_tensor(out, everyone.reshape(shape) + rank, async_op=async_op), async_op)
            same(out, size * data(rank) + sum(range(size)))
        gaps = numpy.full((2 * size, 6), -1.0)
        done(dist.all_gather_into_tensor(gaps[:, ::2], data(rank), async_op=async_op), async_op)
        same(gaps[:, ::2], everyone.reshape(-1, 3))
        assert (gaps[:, 1::2] == -1).all()
        whole = numpy.zeros((size, 2, 3))
        whole[rank] = data(rank)
        done(dist.all_gather_into_tensor(output_tensor=whole, input_tensor=whole[rank], async_op=async_op), async_op)
        same(whole, everyone)
        done(dist.reduce_scatter_tensor(whole[rank], whole, async_op=async_op), async_op)
        same(whole[rank], size * data(rank))


def in_parts(mpi, async_op):
    """Exchange blocks of equal and different lengths and shapes, as lists and as arrays with split sizes."""
    with world(mpi) as (rank, size):
        outs = [numpy.zeros((peer + 1, 2)) for peer in range(size)]
        done(dist.all_gather(outs, data(rank, (rank + 1, 2)), async_op=async_op), async_op)
        for peer, out in enumerate(outs):
            same(out, data(peer, (peer + 1, 2)))
        for rows in ([2] * size, range(size)):
            out = numpy.zeros((rows[rank], 2))
            done(dist.reduce_scatter(out, [data(rank, (number, 2)) for number in rows], async_op=async_op), async_op)
            same(out, sum(data(peer, (rows[rank], 2)) for peer in range(size)))

        given, taken = [rank + 2 * peer for peer in range(size)], [peer + 2 * rank for peer in range(size)]
        parts = [data(rank * size + peer, (length, 3)) for peer, length in enumerate(given)]
        expected = numpy.concatenate([data(peer * size + rank, (length, 3)) for peer, length in enumerate(taken)])
        outs, out = [numpy.zeros((length, 3)) for length in taken], numpy.zeros((sum(taken), 3))
        done(dist.all_to_all(outs, parts, async_op=async_op), async_op)
        same(numpy.concatenate(outs), expected)
        done(dist.all_to_all_single(out, numpy.concatenate(parts), taken, numpy.array(given), async_op=async_op),
             async_op)
        same(out, expected)

        room = numpy.zeros((2, 3, size))  # the slices share no element, but their bytes interleave
        done(dist.all_gather([room[..., peer] for peer in range(size)], data(rank), async_op=async_op), async_op)
        same(room, numpy.stack([data(peer) for peer in range(size)], -1))
        numbers, nothing = [numpy.array(0) for _ in range(size)], [numpy.zeros((0, 2)) for _ in range(size)]
        dist.all_gather(numbers, numpy.array(rank))
        assert [int(number) for number in numbers] == list(range(size))
        dist.all_gather_into_tensor(row := numpy.zeros(size, int), numpy.array(rank + 1))
        same(row, numpy.arange(size) + 1)
        dist.all_to_all(nothing, nothing)

        given = numpy.concatenate([data(rank * size + peer) for peer in range(size)])
        expected = numpy.concatenate([data(peer * size + rank) for peer in range(size)])
        for out in (numpy.zeros_like(given), numpy.zeros(given.size), given):
            done(dist.all_to_all_single(out, given, async_op=async_op), async_op)
            same(out, expected.reshape(out.shape))


DTYPES = ("int8", "int64", "uint16", "float16", "float32", "float64", "complex64")
CASES = [(program, (*dtype, flag), size) for program, dtypes in (
    (reductions, [(name,) for name in DTYPES]), (movements, [(name,) for name in ("bool", *DTYPES)]),
    (into_tensors, [()]), (in_parts, [()])) for dtype in dtypes for flag in (False, True) for size in SIZES]


@pytest.mark.parametrize(("program", "arguments", "size"), sampled(CASES, keep=9, seed=1))
def test_values(ranks, program, arguments, size):
    ranks(program, size, *arguments)


class Stubborn:
    def __reduce__(self):
        raise ValueError("not me")


def objects(mpi):
    with world(mpi) as (rank, size):
        found, root = [None] * (size + 1), size // 2
        dist.all_gather_object(found, {"rank": rank, "data": data(rank)})
        assert [one and one["rank"] for one in found] == [*range(size), None]
        same(found[0]["data"], data(0))
        found = [None] * size if rank == root else None
        dist.gather_object("x" * rank, found, root)
        assert found is None or found == ["x" * peer for peer in range(size)]
        found, empty, mine = ["a", (1, 2), None] if rank == root else [0, 0, 0], [], [0, "stays"]
        dist.broadcast_object_list(found, root)
        dist.broadcast_object_list(empty, 0)
        dist.scatter_object_list(mine, list(range(10, 10 + size)) if rank == root else None, root)
        assert (found, empty, mine) == (["a", (1, 2), None], [], [10 + rank, "stays"])


def refused_objects(mpi):
    """A refusal on one rank is PeerError on the other ranks; nothing is written, and the group stays usable."""
    with world(mpi) as (rank, size):
        kept = [None] * size
        cases = [
            lambda wrong: dist.all_gather_object(kept[:1] if wrong else kept, 1),
            lambda wrong: dist.gather_object(Stubborn() if wrong else 1, kept if rank == 0 else None),
            lambda wrong: dist.broadcast_object_list([Stubborn()] if wrong else [0], 1),
            lambda wrong: dist.scatter_object_list([0], [1] if wrong else None, 1),
            lambda wrong: dist.scatter(numpy.zeros(2), [numpy.zeros(3)] * size if wrong else None, 1),
        ]
        for call in cases:
            with pytest.raises(gc.ArgumentError if rank == 1 else gc.PeerError) as refused:
                call(rank == 1)
            if rank != 1:
                assert refused.value.ranks == (1,)
        assert kept == [None] * size
        own, room = [0] * (1 if rank == 0 else 2), [0] * (rank != 1)  # only the messages reveal this error
        with pytest.raises(gc.ArgumentError, match="has 2 objects") if rank else contextlib.nullcontext():
            dist.broadcast_object_list(own, 0)
        with pytest.raises(gc.ArgumentError, match="but has 0") if rank == 1 else contextlib.nullcontext():
            dist.scatter_object_list(room, [5] * size if rank == 0 else None)
        dist.all_gather_object(kept, rank)
        assert kept == list(range(size))


def wrong_arguments(mpi):
    """Wrong arguments raise a typed error on every rank before data move: no array changes, and the next call works."""
    with world(mpi) as (rank, size):
        x, memory, group, other = data(rank), numpy.zeros((size + 1, 2, 3)), dist.new_group(), 1 - rank
        outs, single = list(memory[:size]), dist.all_to_all_single
        to = [dist.P2POp(dist.isend, x, other, each) for each in (None, group)]
        refused = {
            "GC-COUNTS": [
                (dist.all_gather, memory[:size], x), (dist.all_gather, outs[1:], x), (dist.gather, x, None, rank),
                (single, memory, memory.copy()), (single, memory, memory.copy(), None, [2] * size),
                (dist.all_to_all, outs, outs[1:]), (dist.reduce_scatter, x, outs[1:])],
            "GC-OVERLAP": [(dist.all_gather, [outs[0]] * size, x), (dist.all_to_all, [x] * size, outs)],
            "GC-SHAPE": [(dist.all_gather, [*numpy.zeros((size, 6))], x), (dist.reduce_scatter_tensor, x, memory),
                         (dist.all_gather_into_tensor, memory, x), (dist.reduce_scatter, numpy.zeros(6), outs),
                         (single, numpy.zeros(2 * size), numpy.zeros(size))],
            "GC-DTYPE": [(dist.all_gather, list(numpy.zeros((size, 2, 3), "f4")), x),
                         (dist.all_to_all, outs, [x.astype(int)] * size)],
            "GC-ARRAY": [(dist.all_gather, outs, [1.0]), (dist.send, [1.0], other)],
            "GC-ROOT": [(dist.gather, x, outs, other), (dist.scatter, x, outs, other), (dist.broadcast, x, size),
                        (dist.broadcast, x, 1, None, False, 1), (dist.send, x, rank), (dist.isend, x)],
            "GC-OP": [(dist.P2POp, dist.all_reduce, x, 0), (dist.batch_isend_irecv, to[0])],
            "GC-OP-DTYPE": [(dist.all_reduce, x.astype(int), dist.ReduceOp.AVG)],
            "GC-GROUP": [(dist.batch_isend_irecv, to)], "GC-TAG": [(dist.irecv, x, other, None, -1)],
            "GC-TIMEOUT": [(dist.monitored_barrier, None, -1)],
        }
        for code, (function, *arguments) in ((code, call) for code, calls in refused.items() for call in calls):
            with naming((code, function)), pytest.raises((gc.ArgumentError, gc.DtypeError), match=code + "]"):
                function(*arguments)
            assert not memory.any()
            same(x, data(rank))
        dist.all_gather(outs, x)
        same(memory[:size], numpy.stack([data(peer) for peer in range(size)]))


def lengths_differ(mpi):
    """A rank with an output of the wrong length raises MismatchError when the blocks arrive, and nothing is written."""
    with world(mpi) as (rank, size):
        outs = [numpy.zeros(3 if (rank, peer) == (0, 1) else 2) for peer in range(size)]
        work = dist.all_to_all(outs, [numpy.ones(2) for _ in range(size)], async_op=True)
        if rank == 0:
            with pytest.raises(gc.MismatchError, match=r"rank 1 of the group sent 2 elements") as refused:
                work.wait()
            assert refused.value.ranks == (1,)
            assert (work.exception(), work.is_success()) == (refused.value, False)
        else:
            assert work.wait()
        assert all(out.any() == (rank != 0) for out in outs)
        dist.barrier()


@pytest.mark.parametrize(("program", "size"), [
    (objects, 1), (objects, 4), (refused_objects, 3), (wrong_arguments, 2), (lengths_differ, 3)])
def test_program(ranks, program, size):
    ranks(program, size)
