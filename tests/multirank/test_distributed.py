"""gpucoll.distributed on NumPy arrays: values, what is written where, groups, messages, objects, and every refusal."""

import contextlib
import datetime
import os
import sys
import warnings

import numpy
import pytest

import gpucoll as gc
import gpucoll.distributed as dist
from gpucoll.distributed import groups, monitored, start
from grids import sampled
from pace import seconds

SIZES = (1, 2, 3, 4, 5, 8)


@contextlib.contextmanager
def world(mpi):
    """The default group on the ranks of a program; what fails leaves nothing to the next one."""
    start._init_from(gc.Communicator.from_mpi(mpi, timeout=seconds(60)))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
    finally:
        groups.state.groups.clear()
        start._clear_variables()


def data(rank, shape=(2, 3), dtype="float64"):
    """Small whole numbers, different on every rank and at every index."""
    count = int(numpy.prod(shape))
    return (numpy.arange(count).reshape(shape) % 5 + 10 * rank + 1).astype(dtype)


def same(found, expected):
    """`found` is what was to be written, dtype included."""
    expected = numpy.asarray(expected)
    assert found.dtype == expected.dtype
    assert numpy.array_equal(found, expected), (found, expected)


def done(found, async_op):
    """The call has returned what torch's does, and its data are there."""
    assert isinstance(found, dist.Work) if async_op else found is None
    if async_op:
        assert found.wait() is True
        assert (found.is_completed(), found.is_success(), found.exception()) == (True, True, None)
        return found.result()
    return None


# ---------------------------------------------------------------- values


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
    """Concatenated, stacked and in one row; also where one side is a slot of the other, or has gaps."""
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
    """Blocks of one length, and of different lengths and shapes; lists, and arrays with split sizes."""
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

        room = numpy.zeros((2, 3, size))  # no two of its entries share an element, but their bytes interleave
        done(dist.all_gather([room[..., peer] for peer in range(size)], data(rank), async_op=async_op), async_op)
        same(room, numpy.stack([data(peer) for peer in range(size)], -1))
        numbers, nothing = [numpy.array(0) for _ in range(size)], [numpy.zeros((0, 2)) for _ in range(size)]
        dist.all_gather(numbers, numpy.array(rank))
        assert [int(number) for number in numbers] == list(range(size))
        dist.all_to_all(nothing, nothing)

        given = numpy.concatenate([data(rank * size + peer) for peer in range(size)])
        expected = numpy.concatenate([data(peer * size + rank) for peer in range(size)])
        for out in (numpy.zeros_like(given), numpy.zeros(given.size), given):
            done(dist.all_to_all_single(out, given, async_op=async_op), async_op)
            same(out, expected.reshape(out.shape))


DTYPES = ("int8", "int64", "uint16", "float16", "float32", "float64", "complex64")


@pytest.mark.parametrize(("size", "dtype", "async_op"), sampled(
    [(size, dtype, async_op) for size in SIZES for dtype in DTYPES for async_op in (False, True)], keep=7, seed=1))
def test_reductions(ranks, size, dtype, async_op):
    ranks(reductions, size, dtype, async_op)


@pytest.mark.parametrize(("size", "dtype", "async_op"), sampled(
    [(size, dtype, flag) for size in SIZES for dtype in ("bool", *DTYPES) for flag in (False, True)], keep=8, seed=2))
def test_movements(ranks, size, dtype, async_op):
    ranks(movements, size, dtype, async_op)


@pytest.mark.parametrize(("program", "size", "async_op"), sampled(
    [(program, size, async_op) for program in (into_tensors, in_parts)
     for size in SIZES for async_op in (False, True)], keep=7, seed=3))
def test_shapes(ranks, program, size, async_op):
    ranks(program, size, async_op)


@pytest.mark.emulated
@pytest.mark.parametrize(("program", "arguments"), [
    (reductions, ("float32", False)), (movements, ("int64", True)), (into_tensors, (True,)), (in_parts, (False,))])
def test_on_the_emulated_device(ranks, emulated_kernels, program, arguments):
    ranks(program, 3, *arguments, env={"GPUCOLL_DEVICE": "emulated"})


# ---------------------------------------------------------------- groups


def in_groups(mpi):
    """`src` and `dst` are ranks of the world; who is not in the group is warned and does nothing."""
    with world(mpi) as (rank, size):
        odd, members = dist.new_group(rank for rank in range(size) if rank % 2), list(range(1, size, 2))
        if rank not in members:
            outside(odd, rank)
            return
        assert (dist.get_rank(odd), dist.get_world_size(odd)) == (members.index(rank), len(members))
        assert dist.get_process_group_ranks(odd) == members
        assert [dist.get_group_rank(odd, member) for member in members] == list(range(len(members)))
        assert [dist.get_global_rank(odd, number) for number in range(len(members))] == members
        x, y, root = data(rank), data(rank), members[-1]
        dist.reduce(x, root, group=odd)
        same(x, sum(data(member) for member in members) if rank == root else data(rank))
        dist.broadcast(x, root, group=odd)
        dist.broadcast(y, group=odd, group_src=0)
        same(y, data(1))
        outs = [numpy.zeros((2, 3)) for _ in members] if rank == 1 else None
        dist.gather(data(rank), outs, group=odd, group_dst=0)
        assert rank != 1 or numpy.array_equal(outs, [data(member) for member in members])
        dist.scatter(x, [data(member) for member in members] if rank == root else None, root, group=odd)
        same(x, data(rank))
        found = [None] * len(members)
        dist.all_gather_object(found, rank, group=odd)
        assert found == members
        dist.monitored_barrier(odd, timeout=seconds(60))
        for call in (dist.broadcast, dist.gather, dist.scatter, dist.reduce):  # of rank 0, which is not in the group
            with pytest.raises(gc.ArgumentError, match="not one of the group's ranks"):
                call(x, group=odd)
        dist.destroy_process_group(odd)
        for error, call in ((gc.ClosedError, dist.barrier), (gc.ArgumentError, dist.destroy_process_group)):
            with pytest.raises(error):
                call(odd)


def outside(group, rank):
    assert group is dist.GroupMember.NON_GROUP_MEMBER
    assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
    x, untouched = data(rank), [None]
    calls = {dist.all_reduce: (x,), dist.reduce: (x, 1), dist.broadcast: (x, 1), dist.barrier: (), dist.gather: (x,),
             dist.scatter: (x,), dist.all_gather: ([x], x), dist.all_gather_into_tensor: (x, x),
             dist.reduce_scatter: (x, [x]), dist.reduce_scatter_tensor: (x, x), dist.all_to_all: ([x], [x]),
             dist.all_to_all_single: (x, x), dist.isend: (x, 1), dist.irecv: (x, 1), dist.send: (x, 1),
             dist.recv: (x, 1), dist.monitored_barrier: (), dist.all_gather_object: (untouched, 1),
             dist.gather_object: (1,), dist.broadcast_object_list: (untouched, 1),
             dist.scatter_object_list: (untouched,)}
    for call, arguments in calls.items():
        with pytest.warns(UserWarning, match=rf"on global rank {rank} which does not belong"):
            assert call(*arguments, group=group) == (-1 if call is dist.recv else None)
    with pytest.raises(gc.ArgumentError):
        dist.get_backend(group)
    dist.destroy_process_group(group)  # nothing to destroy, no error
    same(x, data(rank))
    assert untouched == [None]


def many_groups(mpi):
    """Groups of all kinds of iterables, in the order of ranks or in the order given; two of them at a time."""
    with world(mpi) as (rank, size):
        everyone, x, y = dist.new_group(), data(rank), data(rank)
        for ranks in (range(size), {*range(size)}, numpy.arange(size), {0: "a", 1: "b"}):
            members = sorted(int(one) for one in ranks)
            assert dist.get_rank(dist.new_group(ranks)) == (members.index(rank) if rank in members else -1)
        backwards = dist.new_group(range(size)[::-1], sort_ranks=False)
        assert dist.get_rank(backwards) == size - 1 - rank
        works = dist.all_reduce(x, group=everyone, async_op=True), dist.broadcast(y, 0, backwards, async_op=True)
        assert all(work.wait() for work in works)
        same(x, sum(data(peer) for peer in range(size)))
        same(y, data(0))
        assert dist.new_group([]) is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.new_group(timeout=datetime.timedelta(seconds=77), backend="gloo").communicator.timeout == 77
        assert dist.group.WORLD is dist.GroupMember.WORLD
        assert dist.get_backend() == dist.get_backend(everyone) == "mpi"
        for wrong in ([0, 0], [size], [-1], [0.0], [True], 3):
            with pytest.raises(gc.ArgumentError) as refused:
                dist.new_group(wrong)
            assert refused.value.code == "GC-GROUP"
        for options in ({"use_local_synchronization": True}, {"backend": "ncll"}):
            with pytest.raises(gc.ArgumentError):
                dist.new_group([0], **options)
        with pytest.raises(gc.ArgumentError, match="pass what new_group returned"):
            dist.all_reduce(x, group=[0])
        with pytest.raises(gc.MismatchError, match="must pass the same"):
            dist.new_group([0, 1] if rank == 0 else [0, 1, 2])


# ---------------------------------------------------------------- messages


def messages(mpi):
    with world(mpi) as (rank, size):
        right, left = (rank + 1) % size, (rank - 1) % size
        came = numpy.zeros((2, 3))
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, came, left), dist.P2POp(dist.isend, data(rank), right)])
        assert [work.wait() for work in works] == [True, True]
        same(came, data(left))
        assert works[0].source_rank() == left
        assert works[0].result()[0] is came
        assert dist.batch_isend_irecv([]) == []

        first, second = numpy.zeros(3), numpy.zeros(3)
        works = [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1),
                 dist.isend(numpy.full(3, 1.0 + rank), right, tag=1), dist.isend(-numpy.ones(3), right, tag=2)]
        assert all(work.wait(datetime.timedelta(seconds=seconds(60))) for work in works)
        same(first, numpy.full(3, 1.0 + left))
        same(second, -numpy.ones(3))

        backwards = dist.new_group(range(size)[::-1], sort_ranks=False)
        if rank:
            dist.send(data(rank), 0)
            assert dist.recv(came, src=0) == 0
            same(came, data(rank))
        else:
            assert sorted(dist.recv(came) for _ in range(1, size)) == list(range(1, size))
            for peer in range(1, size):
                dist.send(data(peer), dst=peer)
        if rank == size - 1 > 0:
            dist.send(data(7), 0, group=backwards)
        elif rank == 0 and size > 1:
            assert dist.recv(came, group=backwards, group_src=0) == size - 1
            same(came, data(7))


def from_anybody(mpi):
    """Messages from any rank; a deadline, of the group or of one wait, is told from an error, and the call goes on."""
    with world(mpi) as (rank, _):
        impatient = dist.new_group(timeout=datetime.timedelta(seconds=0.1))
        came, late = numpy.zeros(2), numpy.zeros(1)
        if rank == 0:
            work = dist.irecv(came)
            assert not work.is_completed()
            dist.send(numpy.ones(2), 1)
            assert work.wait()
            assert work.source_rank() == 1
            same(came, numpy.full(2, 2.0))
            with pytest.raises(gc.CollectiveTimeout, match="no rank sent"):
                dist.recv(came, group=impatient)
            dist.recv(late, 1)
            dist.send(numpy.ones(2), 1, tag=1)
        else:
            dist.recv(came, 0)
            dist.send(came + 1, 0)
            work = dist.irecv(came, 0, tag=1)
            with pytest.raises(gc.CollectiveTimeout, match="the call goes on"):
                work.wait(datetime.timedelta(microseconds=1))
            dist.send(late, 0)
            work.wait()


def too_long(mpi):
    """A message that does not fit is an error of whoever waits for it."""
    with world(mpi) as (rank, size):
        work = dist.irecv(numpy.zeros(2, "f4"), (rank - 1) % size)
        dist.send(numpy.zeros(3, "f4"), (rank + 1) % size)
        with pytest.raises(gc.MismatchError, match="bytes"):
            work.wait()
        assert (work.is_completed(), work.is_success()) == (True, False)
        assert isinstance(work.exception(), gc.MismatchError)


# ---------------------------------------------------------------- objects


class Stubborn:
    def __reduce__(self):
        raise ValueError("not me")


def objects(mpi):
    with world(mpi) as (rank, size):
        found, root = [None] * (size + 1), size // 2
        dist.all_gather_object(found, {"rank": rank, "data": data(rank)})
        assert [one["rank"] for one in found[:size]] == list(range(size))
        assert found[size] is None
        same(found[0]["data"], data(0))
        found = [None] * size if rank == root else None
        dist.gather_object("x" * rank, found, root)
        assert found is None or found == ["x" * peer for peer in range(size)]
        found, empty, mine = ["a", (1, 2), None] if rank == root else [0, 0, 0], [], [0, "stays"]
        dist.broadcast_object_list(found, root)
        dist.broadcast_object_list(empty, 0)
        assert (found, empty) == (["a", (1, 2), None], [])
        dist.scatter_object_list(mine, list(range(10, 10 + size)) if rank == root else None, root)
        assert mine == [10 + rank, "stays"]


def refused_objects(mpi):
    """Whoever refuses says so, and the others raise PeerError; nothing is written, and the group goes on."""
    with world(mpi) as (rank, size):
        kept = [None] * size
        cases = [
            lambda wrong: dist.all_gather_object(kept, Stubborn() if wrong else 1),
            lambda wrong: dist.all_gather_object(kept[:1] if wrong else kept, 1),
            lambda wrong: dist.gather_object(Stubborn() if wrong else 1, kept if rank == 0 else None),
            lambda wrong: dist.gather_object(1, kept if rank == 0 or wrong else None),
            lambda wrong: dist.broadcast_object_list([Stubborn()] if wrong else [0], 1),
            lambda wrong: dist.broadcast_object_list(() if wrong else [0], 1),
            lambda wrong: dist.scatter_object_list([0], [Stubborn()] * size if wrong else None, 1),
            lambda wrong: dist.scatter_object_list([0], [1] if wrong else None, 1),
            lambda wrong: dist.scatter(numpy.zeros(2), [numpy.zeros(2)] if wrong else None, 1),
            lambda wrong: dist.scatter(numpy.zeros(2), [numpy.zeros(3)] * size if wrong else None, 1),
        ]
        for call in cases:
            with pytest.raises(gc.ArgumentError if rank == 1 else gc.PeerError) as refused:
                call(rank == 1)
            if rank != 1:
                assert refused.value.ranks == (1,)
        assert kept == [None] * size
        own, room = [0] * (1 if rank == 0 else 2), [0] * (rank != 1)  # what no check before the messages can find
        with contextlib.ExitStack() as stack:
            if rank:
                stack.enter_context(pytest.raises(gc.ArgumentError, match="has 2 objects"))
            dist.broadcast_object_list(own, 0)
        with contextlib.ExitStack() as stack:
            if rank == 1:
                stack.enter_context(pytest.raises(gc.ArgumentError, match="room for 1"))
            dist.scatter_object_list(room, [5] * size if rank == 0 else None)
        dist.all_gather_object(kept, rank)
        assert kept == list(range(size))


# ---------------------------------------------------------------- wrong arguments


def read_only(shape):
    array = numpy.zeros(shape)
    array.flags.writeable = False
    return array


def wrong_arguments(mpi):
    """A typed error on every rank before data moves: every array is as it was, and the next call works."""
    with world(mpi) as (rank, size):
        x, memory, group, P2POp = data(rank), numpy.zeros((size + 1, 2, 3)), dist.new_group(), dist.P2POp
        outs = list(memory[:size])
        cases = {
            "no list": (lambda: dist.all_gather(memory[:size], x), "GC-COUNTS", "list of"),
            "short list": (lambda: dist.all_gather(outs[1:], x), "GC-COUNTS", f"has {size - 1}"),
            "aliased": (lambda: dist.all_gather([outs[0]] * size, x), "GC-OVERLAP", "share memory"),
            "nested": (lambda: dist.all_gather([memory[0], memory[:1], *outs[2:]], x), "GC-OVERLAP", "share memory"),
            "shape": (lambda: dist.all_gather([numpy.zeros(6) for _ in outs], x), "GC-SHAPE", r"\(6,\)"),
            "dtype": (lambda: dist.all_gather([numpy.zeros((2, 3), "f4") for _ in outs], x), "GC-DTYPE", "float32"),
            "read-only": (lambda: dist.all_gather([read_only((2, 3)) for _ in outs], x), "GC-READONLY", "read-only"),
            "no array": (lambda: dist.all_gather(outs, [1.0]), "GC-ARRAY", "list"),
            "object dtype": (lambda: dist.all_gather(outs, numpy.array([None])), "GC-DTYPE", "object"),
            "output short": (lambda: dist.all_gather_into_tensor(memory, x), "GC-SHAPE", "concatenated"),
            "input long": (lambda: dist.reduce_scatter_tensor(x, memory), "GC-SHAPE", "for an output of shape"),
            "input list shape": (lambda: dist.reduce_scatter(numpy.zeros(6), outs), "GC-SHAPE", "output"),
            "gather list missing": (lambda: dist.gather(x, None, rank), "GC-COUNTS", "NoneType"),
            "gather list off dst": (lambda: dist.gather(x, outs, (rank + 1) % size), "GC-ROOT", "not dst"),
            "all_to_all dtype": (lambda: dist.all_to_all(outs, [x.astype(int)] * size), "GC-DTYPE", "int64"),
            "rows do not divide": (lambda: dist.all_to_all_single(memory, memory.copy()), "GC-COUNTS", "None"),
            "0-d": (lambda: dist.all_to_all_single(numpy.array(1.0), numpy.array(1.0), [1], [1]), "GC-COUNTS", "first"),
            "split sum": (lambda: dist.all_to_all_single(memory, memory.copy(), None, [2] * size), "GC-COUNTS", "sum"),
            "split count": (lambda: dist.all_to_all_single(memory, memory.copy(), [size + 1], [size + 1]), "GC-COUNTS",
                            "whole numbers"),
            "lengths": (lambda: dist.all_to_all_single(numpy.zeros(2 * size), numpy.zeros(size)), "GC-SHAPE", "length"),
            "src": (lambda: dist.broadcast(x, size), "GC-ROOT", "not one of"),
            "src twice": (lambda: dist.broadcast(x, 1, group_src=1), "GC-ROOT", "both"),
            "dst float": (lambda: dist.reduce(x, 0.0), "GC-ROOT", "0.0"),
            "op": (lambda: dist.all_reduce(x, op="mean"), "GC-OP", "mean"),
            "avg of integers": (lambda: dist.all_reduce(x.astype(int), op=dist.ReduceOp.AVG), "GC-OP-DTYPE", "avg"),
            "max of complex": (lambda: dist.reduce(x * 1j, op=dist.ReduceOp.MAX), "GC-OP-DTYPE", "max"),
            "timeout": (lambda: dist.monitored_barrier(timeout=-1), "GC-TIMEOUT", "positive"),
            "to itself": (lambda: dist.send(x, rank), "GC-ROOT", "is this rank"),
            "nobody": (lambda: dist.isend(x), "GC-ROOT", "None"),
            "tag": (lambda: dist.irecv(x, 0, tag=-1), "GC-TAG", "tag"),
            "no message": (lambda: dist.send([1.0], 1 - rank), "GC-ARRAY", "list"),
            "group_dst": (lambda: dist.send(x, group_dst=size), "GC-ROOT", "group_dst"),
            "P2POp": (lambda: P2POp(dist.all_reduce, x, 0), "GC-OP", "isend"),
            "peer": (lambda: P2POp(dist.isend, x, size), "GC-ROOT", "peer"),
            "no batch": (lambda: dist.batch_isend_irecv(P2POp(dist.isend, x, 0)), "GC-OP", "P2POp"),
            "two groups": (lambda: dist.batch_isend_irecv([P2POp(dist.isend, x, 0), P2POp(dist.isend, x, 0, group)]),
                           "GC-GROUP", "one group"),
        }
        for name, (call, code, words) in cases.items():
            with pytest.raises((gc.ArgumentError, gc.DtypeError), match=words) as refused:
                call()
            assert refused.value.code == code, name
            assert not memory.any(), name
            same(x, data(rank))
        dist.all_gather(outs, x)
        same(memory[:size], numpy.stack([data(peer) for peer in range(size)]))


def lengths_differ(mpi):
    """What only another rank knows: MismatchError on who has too much or too little room, nothing written."""
    with world(mpi) as (rank, size):
        outs = [numpy.zeros(3 if (rank, peer) == (0, 1) else 2) for peer in range(size)]
        work = dist.all_to_all(outs, [numpy.ones(2) for _ in range(size)], async_op=True)
        if rank == 0:
            with pytest.raises(gc.MismatchError, match=r"rank 1 of the group sent 2 elements") as refused:
                work.wait()
            assert refused.value.ranks == (1,)
            assert work.exception() is refused.value
        else:
            assert work.wait()
        assert all(out.any() == (rank != 0) for out in outs)
        dist.barrier()


# ---------------------------------------------------------------- monitored_barrier


def missing_ranks(mpi):
    """Who does not come is named by all who do, and the group goes on."""
    with world(mpi) as (rank, _):
        patience = seconds(60)
        dist.monitored_barrier(timeout=patience)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=patience), wait_all_ranks=True)
        if rank == 2:
            dist.barrier()  # comes late, and finds the verdict
        with pytest.raises(gc.CollectiveTimeout, match="" if rank == 2 else "rank 2 did not come within") as late:
            dist.monitored_barrier(timeout=patience if rank == 2 else seconds(1))
        assert late.value.ranks == (2,)
        if rank != 2:
            dist.barrier()
        dist.monitored_barrier(timeout=patience)
        if rank:
            with pytest.raises(gc.CollectiveTimeout) as late:
                dist.monitored_barrier(timeout=0.2)
            assert late.value.ranks == (0,)
        dist.barrier()
        if rank == 0:
            with pytest.raises(gc.CollectiveTimeout, match="ranks 1, 2, 3 did not") as late:
                dist.monitored_barrier(timeout=0.2)
            assert late.value.ranks == (1, 2, 3)
        dist.barrier()
        dist.monitored_barrier(timeout=patience)
        dist.all_reduce(numpy.ones(3))


def early_messages(mpi):
    """Rank 0 is on its way to the next barrier, and has said so, while the others are still in this one."""
    with world(mpi) as (rank, size):
        for _ in range(20):
            dist.monitored_barrier(timeout=seconds(60))
        group, ahead = dist.group.WORLD, 100
        for barrier in (ahead + 1, ahead - 1, ahead) if rank == 0 else ():
            monitored._send(group, 1, (barrier, barrier))
        came = []
        while rank == 1 and not came:
            came = monitored._messages(group, ahead)
        assert came == [(0, ahead)] * (rank == 1)
        assert rank != 1 or monitored._messages(group, ahead + 1) == [(0, ahead + 1)]
        assert group.heard == []
        dist.barrier()


# ---------------------------------------------------------------- start and end, in jobs of their own

START = """
import os, datetime
import pytest
import gpucoll as gc, gpucoll.distributed as dist
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
assert not dist.is_initialized() and dist.is_available() and dist.group.WORLD is None
for call in (dist.get_rank, dist.get_backend, dist.barrier, dist.new_group, dist.monitored_barrier,
             dist.destroy_process_group, lambda: dist.all_reduce(1), lambda: dist.P2POp(dist.isend, 1, 0),
             dist.distributed_c10d._get_default_group):
    with pytest.raises(gc.UsageError, match="call gpucoll.distributed.init_process_group"):
        call()
for options, error in [
        (dict(backend="ncll"), gc.ArgumentError), (dict(init_method="shared"), gc.ArgumentError),
        (dict(timeout=datetime.timedelta(0)), gc.ArgumentError), (dict(world_size=7), gc.UsageError),
        (dict(rank="x"), gc.UsageError)]:
    with pytest.raises(error):
        dist.init_process_group(**options)
    assert not dist.is_initialized()
os.environ["WORLD_SIZE"] = "7"
with pytest.raises(gc.UsageError, match="the environment says world_size '7', MPI says 3"):
    dist.init_process_group()
del os.environ["WORLD_SIZE"]
os.environ["MASTER_PORT"] = "1234"
dist.init_process_group("cpu:gloo,cuda:nccl", "env://", datetime.timedelta(seconds=99), world_size=3)
rank = dist.get_rank()
assert {name: os.environ[name] for name in names} == {
    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
assert dist.group.WORLD.communicator.timeout == 99
with pytest.raises(gc.UsageError, match="was called before"):
    dist.init_process_group()
dist.new_group([0, 2])
dist.destroy_process_group(dist.group.WORLD)
assert not dist.is_initialized() and "RANK" not in os.environ and os.environ["MASTER_PORT"] == "1234"
dist.init_process_group(backend="NCCL", init_method="tcp://127.0.0.1:1", timeout=55.5, rank=rank, device_id="cuda:0")
assert gc.init() is not dist.group.WORLD.communicator
print(f"right{rank}")
"""


def test_start_and_end(mpiexec):
    variables = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    job = mpiexec(3, sys.executable, "-c", START, env=dict.fromkeys([*variables, "PYTHONUNBUFFERED"]))
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split()) == ["right0", "right1", "right2"]


def quiet(mpi):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with world(mpi) as (rank, _):
            assert os.environ["RANK"] == str(rank)
            dist.all_reduce(numpy.ones(2))
    assert "RANK" not in os.environ


PROGRAMS = [
    (quiet, 2), (in_groups, 3), (in_groups, 8), (many_groups, 3), (messages, 1), (messages, 2), (messages, 5),
    (from_anybody, 2), (too_long, 2), (objects, 1), (objects, 4), (refused_objects, 3), (wrong_arguments, 2),
    (lengths_differ, 3), (early_messages, 2), (early_messages, 5), (missing_ranks, 4)]


@pytest.mark.parametrize(("program", "size"), PROGRAMS)
def test_program(ranks, program, size):
    ranks(program, size)
