"""gpucoll.distributed on NumPy arrays: values, what is written where, groups, messages, objects, and every refusal."""

import contextlib
import datetime
import os
import sys
import time
import warnings

import numpy
import pytest

import gpucoll as gc
import gpucoll.distributed as dist
from gpucoll.distributed import groups, monitored, start
from grids import sampled

SIZES = (1, 2, 3, 4, 5, 7, 8)


@contextlib.contextmanager
def world(mpi, timeout=30.0):
    """The default group on the ranks of a program; what fails leaves nothing to the next one."""
    start._init_from(gc.Communicator.from_mpi(mpi, timeout=timeout))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
    finally:
        groups.state.groups.clear()
        start._clear_variables()


@pytest.fixture
def ranks(ranks_anywhere):
    return ranks_anywhere


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
    if async_op:
        assert isinstance(found, dist.Work)
        assert found.wait() is True
        assert found.is_completed()
        assert found.is_success()
        assert found.exception() is None
        return found.result()
    assert found is None
    return None


# ---------------------------------------------------------------- values


def reductions(mpi, dtype, async_op):
    with world(mpi) as (rank, size):
        everyone = numpy.stack([data(peer, dtype=dtype) for peer in range(size)])
        real = numpy.dtype(dtype).kind != "c"
        ops = {"SUM": everyone.sum(0, dtype=dtype)}
        ops |= {"MIN": everyone.min(0), "MAX": everyone.max(0)} if real else {}
        if numpy.dtype(dtype).kind in "iu":
            ops |= {"BAND": numpy.bitwise_and.reduce(everyone), "BOR": numpy.bitwise_or.reduce(everyone),
                    "BXOR": numpy.bitwise_xor.reduce(everyone)}
        else:
            ops |= {"AVG": (everyone.sum(0) / size).astype(dtype)}
        for name, expected in ops.items():
            op = getattr(dist.ReduceOp, name)
            x = data(rank, dtype=dtype)
            found = done(dist.all_reduce(x, op=op, async_op=async_op), async_op)
            assert found is None or found[0] is x
            same(x, expected)
            x, root = data(rank, dtype=dtype), size // 2
            done(dist.reduce(x, root, op, async_op=async_op), async_op)
            same(x, expected if rank == root else data(rank, dtype=dtype))
        factors = numpy.stack([data(peer, dtype=dtype) % 2 + 1 if real else data(peer, dtype=dtype).real % 2 + 1
                               for peer in range(size)]).astype(dtype)  # their product is a power of 2
        x = factors[rank].copy()
        done(dist.all_reduce(x, op=dist.ReduceOp.PRODUCT, async_op=async_op), async_op)
        same(x, factors.prod(0, dtype=dtype))
    return True


def premultiplied(mpi):
    with world(mpi) as (rank, size):
        x = data(rank)
        dist.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM(2.0))
        same(x, 2 * sum(data(peer) for peer in range(size)))
    return True


def movements(mpi, dtype, async_op):
    with world(mpi) as (rank, size):
        root, shape = size - 1, (2, 3)
        x = data(rank, dtype=dtype)
        done(dist.broadcast(x, root, async_op=async_op), async_op)
        same(x, data(root, dtype=dtype))

        x, outs = data(rank, dtype=dtype), [numpy.zeros(shape, dtype) for _ in range(size)]
        found = done(dist.all_gather(outs, x, async_op=async_op), async_op)
        assert found is None or all(one is out for one, out in zip(found, outs, strict=True))
        for peer, out in enumerate(outs):
            same(out, data(peer, dtype=dtype))

        outs = [numpy.zeros(shape, dtype) for _ in range(size)] if rank == root else None
        done(dist.gather(x, outs, root, async_op=async_op), async_op)
        for peer, out in enumerate(outs or []):
            same(out, data(peer, dtype=dtype))

        given = [data(peer, dtype=dtype) for peer in range(size)] if rank == root else []
        x = numpy.zeros(shape, dtype)
        done(dist.scatter(x, given, root, async_op=async_op), async_op)
        same(x, data(rank, dtype=dtype))

        given = [data(rank * size + peer, dtype=dtype) for peer in range(size)]
        outs = [numpy.zeros(shape, dtype) for _ in range(size)]
        done(dist.all_to_all(outs, given, async_op=async_op), async_op)
        for peer, out in enumerate(outs):
            same(out, data(peer * size + rank, dtype=dtype))
        done(dist.barrier(async_op=async_op), async_op)
    return True


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
        done(dist.all_gather_into_tensor(whole, whole[rank], async_op=async_op), async_op)
        same(whole, everyone)
        done(dist.reduce_scatter_tensor(whole[rank], whole, async_op=async_op), async_op)
        same(whole[rank], size * data(rank))

        number = numpy.zeros(size)
        dist.all_gather_into_tensor(output_tensor=number, input_tensor=numpy.array(float(rank)))
        same(number, numpy.arange(float(size)))
    return True


def uneven(mpi, async_op):
    """Blocks of different lengths, and of different shapes."""
    with world(mpi) as (rank, size):
        outs = [numpy.zeros((peer + 1, 2)) for peer in range(size)]
        done(dist.all_gather(outs, data(rank, (rank + 1, 2)), async_op=async_op), async_op)
        for peer, out in enumerate(outs):
            same(out, data(peer, (peer + 1, 2)))

        blocks = [data(rank, (peer, 2)) for peer in range(size)]
        out = numpy.zeros((rank, 2))
        done(dist.reduce_scatter(out, blocks, async_op=async_op), async_op)
        same(out, sum((data(peer, (rank, 2)) for peer in range(size)), numpy.zeros((rank, 2))))

        outs = [numpy.zeros(peer + 2 * rank) for peer in range(size)]
        done(dist.all_to_all(outs, [data(rank, (rank + 2 * peer,)) for peer in range(size)], async_op=async_op),
             async_op)
        for peer, out in enumerate(outs):
            same(out, data(peer, (peer + 2 * rank,)))

        given, taken = [rank + 2 * peer for peer in range(size)], [peer + 2 * rank for peer in range(size)]
        out = numpy.zeros((sum(taken), 3))
        parts = [data(rank * size + peer, (length, 3)) for peer, length in enumerate(given)]
        done(dist.all_to_all_single(out, numpy.concatenate(parts), taken, numpy.array(given), async_op=async_op),
             async_op)
        same(out, numpy.concatenate([data(peer * size + rank, (length, 3)) for peer, length in enumerate(taken)]))
    return True


def all_to_all_alike(mpi, async_op):
    with world(mpi) as (rank, size):
        given = numpy.concatenate([data(rank * size + peer) for peer in range(size)])
        expected = numpy.concatenate([data(peer * size + rank) for peer in range(size)])
        out = numpy.zeros_like(given)
        done(dist.all_to_all_single(out, given, async_op=async_op), async_op)
        same(out, expected)
        out = numpy.zeros(given.size)
        done(dist.all_to_all_single(out, given, async_op=async_op), async_op)
        same(out, expected.reshape(-1))
        done(dist.all_to_all_single(given, given, async_op=async_op), async_op)
        same(given, expected)
        blocks = [data(rank * size + peer) for peer in range(size)]
        out = numpy.zeros((2, 3))
        done(dist.reduce_scatter(out, blocks, async_op=async_op), async_op)
        same(out, sum(data(peer * size + rank) for peer in range(size)))
    return True


def strided(mpi):
    """Arrays with gaps, Fortran order, 0-d and empty ones: written where they are, and nowhere else."""
    with world(mpi) as (rank, size):
        room = numpy.full((4, 6), -1.0)
        room[::2, ::2] = data(rank)
        dist.all_reduce(room[::2, ::2])
        same(room[::2, ::2], sum(data(peer) for peer in range(size)))
        assert (room[1::2] == -1).all()
        turned = numpy.asfortranarray(data(rank))
        dist.broadcast(turned, 0)
        same(turned, data(0))
        room = numpy.zeros((2, 3, size))  # no two of its entries share an element, but their bytes interleave
        dist.all_gather([room[..., peer] for peer in range(size)], data(rank))
        same(room, numpy.stack([data(peer) for peer in range(size)], -1))
        numbers = [numpy.array(0) for _ in range(size)]
        dist.all_gather(numbers, numpy.array(rank))
        assert [int(number) for number in numbers] == list(range(size))
        outs = [numpy.zeros((0, 2)) for _ in range(size)]
        dist.all_gather(outs, numpy.zeros((0, 2)))
        dist.all_to_all(outs, outs)
        dist.all_reduce(outs[0])
        same(outs[0], numpy.zeros((0, 2)))
    return True


DTYPES = ("bool", "int8", "int64", "uint16", "float16", "float32", "float64", "complex64")
REDUCED = [dtype for dtype in DTYPES if dtype != "bool"]


@pytest.mark.parametrize(("size", "dtype", "async_op"), sampled(
    [(size, dtype, async_op) for size in SIZES for dtype in REDUCED for async_op in (False, True)], keep=40, seed=1))
def test_reductions(ranks, size, dtype, async_op):
    ranks(reductions, size, dtype, async_op)


@pytest.mark.parametrize(("size", "dtype", "async_op"), sampled(
    [(size, dtype, async_op) for size in SIZES for dtype in DTYPES for async_op in (False, True)], keep=40, seed=2))
def test_movements(ranks, size, dtype, async_op):
    ranks(movements, size, dtype, async_op)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("program", [into_tensors, uneven, all_to_all_alike])
def test_shapes(ranks, program, size, async_op):
    ranks(program, size, async_op)


@pytest.mark.parametrize("program", [premultiplied, strided])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_special_cases(ranks, program, size):
    ranks(program, size)


# ---------------------------------------------------------------- groups


def in_groups(mpi):
    """`src` and `dst` are ranks of the world; who is not in the group is warned and does nothing."""
    with world(mpi) as (rank, size):
        odd = dist.new_group(rank for rank in range(size) if rank % 2)
        members = list(range(1, size, 2))
        if rank not in members:
            return outside(odd, rank)
        assert (dist.get_rank(odd), dist.get_world_size(odd)) == (members.index(rank), len(members))
        assert dist.get_process_group_ranks(odd) == members
        assert [dist.get_group_rank(odd, member) for member in members] == list(range(len(members)))
        assert [dist.get_global_rank(odd, number) for number in range(len(members))] == members
        x, root = data(rank), members[-1]
        dist.broadcast(x, root, group=odd)
        same(x, data(root))
        dist.broadcast(x, group=odd, group_src=0)
        same(x, data(root))
        x = data(rank)
        dist.reduce(x, root, group=odd)
        same(x, sum(data(member) for member in members) if rank == root else data(rank))
        outs = [numpy.zeros((2, 3)) for _ in members]
        dist.gather(data(rank), outs if rank == members[0] else None, group=odd, group_dst=0)
        if rank == members[0]:
            same(numpy.stack(outs), numpy.stack([data(member) for member in members]))
        x = numpy.zeros((2, 3))
        dist.scatter(x, [data(member) for member in members] if rank == root else None, root, group=odd)
        same(x, data(rank))
        found = [None] * len(members)
        dist.all_gather_object(found, rank, group=odd)
        assert found == members
        dist.barrier(odd)
        dist.monitored_barrier(odd, timeout=20)
        for call in (lambda: dist.broadcast(x, 0, group=odd), lambda: dist.gather(x, group=odd),
                     lambda: dist.scatter(x, group=odd), lambda: dist.reduce(x, group=odd)):
            with pytest.raises(gc.ArgumentError, match="not one of the group's ranks") as refused:
                call()
            assert refused.value.code == "GC-ROOT"
        dist.destroy_process_group(odd)
        with pytest.raises(gc.ClosedError):
            dist.barrier(odd)
        with pytest.raises(gc.ArgumentError, match="destroyed before"):
            dist.destroy_process_group(odd)
    return True


def outside(group, rank):
    assert group is dist.GroupMember.NON_GROUP_MEMBER
    assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
    x, untouched = data(rank), [None]
    calls = [
        lambda: dist.all_reduce(x, group=group), lambda: dist.reduce(x, 1, group=group),
        lambda: dist.broadcast(x, 1, group=group), lambda: dist.barrier(group),
        lambda: dist.gather(x, group=group), lambda: dist.scatter(x, group=group),
        lambda: dist.all_gather([x], x, group=group), lambda: dist.all_gather_into_tensor(x, x, group=group),
        lambda: dist.reduce_scatter(x, [x], group=group), lambda: dist.reduce_scatter_tensor(x, x, group=group),
        lambda: dist.all_to_all([x], [x], group=group), lambda: dist.all_to_all_single(x, x, group=group),
        lambda: dist.isend(x, 1, group=group), lambda: dist.irecv(x, 1, group=group),
        lambda: dist.send(x, 1, group=group), lambda: dist.monitored_barrier(group),
        lambda: dist.all_gather_object(untouched, 1, group=group), lambda: dist.gather_object(1, group=group),
        lambda: dist.broadcast_object_list(untouched, 1, group=group),
        lambda: dist.scatter_object_list(untouched, group=group),
    ]
    for call in calls:
        with pytest.warns(UserWarning, match=rf"on global rank {rank} which does not belong"):
            assert call() is None
    with pytest.warns(UserWarning, match="does not belong"):
        assert dist.recv(x, 1, group=group) == -1
    with pytest.raises(gc.ArgumentError):
        dist.get_backend(group)
    dist.destroy_process_group(group)  # nothing to destroy, no error
    same(x, data(rank))
    assert untouched == [None]
    return True


def many_groups(mpi):
    """Groups of all kinds of iterables, in the order of ranks or in the order given; two of them at a time."""
    with world(mpi) as (rank, size):
        everyone = dist.new_group()
        assert dist.get_process_group_ranks(everyone) == list(range(size))
        for ranks in (range(size), set(range(size)), tuple(range(size)), numpy.arange(size), {0: "a"} | {1: "b"}):
            group = dist.new_group(ranks)
            members = sorted(int(one) for one in ranks)
            assert dist.get_rank(group) == (members.index(rank) if rank in members else -1)
        backwards = dist.new_group(range(size)[::-1], sort_ranks=False)
        assert dist.get_rank(backwards) == size - 1 - rank
        assert dist.get_process_group_ranks(backwards) == list(range(size))[::-1]
        x = data(rank)
        first = dist.all_reduce(x, group=everyone, async_op=True)
        y = data(rank)
        second = dist.broadcast(y, 0, group=backwards, async_op=True)
        assert first.wait()
        assert second.wait()
        same(x, sum(data(peer) for peer in range(size)))
        same(y, data(0))
        assert dist.new_group([]) is dist.GroupMember.NON_GROUP_MEMBER
        quick = dist.new_group(timeout=datetime.timedelta(seconds=7), backend="gloo")
        assert quick.communicator.timeout == 7
        assert dist.group.WORLD is dist.GroupMember.WORLD
        assert dist.get_rank(dist.group.WORLD) == rank
        assert dist.get_backend() == dist.get_backend(everyone) == "mpi"
        assert "rank=" in repr(everyone)
        for wrong, code in (([0, 0], "GC-GROUP"), ([size], "GC-GROUP"), ([-1], "GC-GROUP"), ([0.0], "GC-GROUP"),
                            ([True], "GC-GROUP"), (3, "GC-GROUP")):
            with pytest.raises(gc.ArgumentError) as refused:
                dist.new_group(wrong)
            assert refused.value.code == code
        with pytest.raises(gc.ArgumentError, match="use_local_synchronization"):
            dist.new_group([0], use_local_synchronization=True)
        with pytest.raises(gc.ArgumentError, match="did you mean nccl"):
            dist.new_group([0], backend="ncll")
        with pytest.raises(gc.ArgumentError, match="pass what new_group returned"):
            dist.all_reduce(x, group=[0])
    return True


def disagreeing(mpi):
    with world(mpi) as (rank, _), pytest.raises(gc.MismatchError, match="must pass the same"):
        dist.new_group([0, 1] if rank == 0 else [0, 1, 2])
    return True


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_groups(ranks, size):
    ranks(in_groups, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_groups_of_all_kinds(ranks, size):
    ranks(many_groups, size)


def test_a_group_on_which_ranks_do_not_agree(ranks):
    ranks(disagreeing, 3)


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

        first, second = numpy.zeros(3), numpy.zeros(3)
        later, sooner = dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1)
        sent = dist.isend(numpy.full(3, 1.0 + rank), right, tag=1), dist.isend(numpy.full(3, -1.0 - rank), right, tag=2)
        for work in (*sent, later, sooner):
            assert work.wait(datetime.timedelta(seconds=20))
        same(first, numpy.full(3, 1.0 + left))
        same(second, numpy.full(3, -1.0 - left))

        if rank:
            dist.send(data(rank), 0)
        else:
            sources = [dist.recv(came) for _ in range(1, size)]
            assert sorted(sources) == list(range(1, size))
            for peer in range(1, size):
                dist.send(data(peer), dst=peer)
        if rank:
            assert dist.recv(came, src=0) == 0
            same(came, data(rank))
        assert dist.batch_isend_irecv([]) == []

        group = dist.new_group(range(size)[::-1], sort_ranks=False)
        assert dist.recv(came, group=group, group_src=0) == size - 1 if rank == 0 and size > 1 else True
        if rank == size - 1 and size > 1:
            dist.send(data(7), 0, group=group)
        if rank == 0 and size > 1:
            same(came, data(7))
    return True


def from_anybody(mpi):
    with world(mpi, timeout=1.0) as (rank, _):
        came = numpy.zeros(2)
        if rank == 0:
            work = dist.irecv(came)
            assert not work.is_completed()
            dist.send(numpy.ones(2), 1)
            assert work.wait()
            assert work.source_rank() == 1
            with pytest.raises(gc.CollectiveTimeout, match="no rank sent"):
                dist.recv(came)
            dist.send(numpy.ones(2), 1)
            same(came, numpy.full(2, 2.0))
        if rank == 1:
            dist.recv(came, 0)
            dist.send(came + 1, 0)
            time.sleep(0.5)
            work = dist.irecv(came, 0)
            with pytest.raises(gc.CollectiveTimeout, match="the call goes on"):
                work.wait(datetime.timedelta(microseconds=1))
            work.wait()
    return True


def wrong_messages(mpi):
    with world(mpi) as (rank, size):
        x = data(rank)
        group = dist.new_group()
        cases = [
            (lambda: dist.send(x, rank), "GC-ROOT", "is this rank"), (lambda: dist.send(x, size), "GC-ROOT", "not one"),
            (lambda: dist.send(x), "GC-ROOT", "None"), (lambda: dist.isend(x, -1), "GC-ROOT", "-1"),
            (lambda: dist.recv(x, True), "GC-ROOT", "True"), (lambda: dist.irecv(x, 0, tag=-1), "GC-TAG", "tag"),
            (lambda: dist.send([1.0], (rank + 1) % size), "GC-ARRAY", "list"),
            (lambda: dist.send(x, 1, group_dst=1), "GC-ROOT", "both") if rank != 1 else
            (lambda: dist.recv(x, 1, group_src=1), "GC-ROOT", "both"),
            (lambda: dist.send(x, group_dst=size), "GC-ROOT", "group_dst"),
            (lambda: dist.P2POp(dist.all_reduce, x, 0), "GC-OP", "isend"),
            (lambda: dist.P2POp(dist.isend, x, size), "GC-ROOT", "peer"),
            (lambda: dist.P2POp(dist.isend, x), "GC-ROOT", "peer"),
            (lambda: dist.batch_isend_irecv([x]), "GC-OP", "P2POp"),
            (lambda: dist.batch_isend_irecv(dist.P2POp(dist.isend, x, 0)), "GC-OP", "P2POp"),
            (lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0), dist.P2POp(dist.isend, x, 0, group)]),
             "GC-GROUP", "one group"),
        ]
        for call, code, words in cases:
            with pytest.raises(gc.ArgumentError, match=words) as refused:
                call()
            assert refused.value.code == code
        work = dist.irecv(numpy.zeros(2, "f4"), (rank - 1) % size)
        dist.send(numpy.zeros(3, "f4"), (rank + 1) % size)
        with pytest.raises(gc.MismatchError, match="bytes"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), gc.MismatchError)
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_messages(ranks, size):
    ranks(messages, size)


def test_messages_from_anybody(ranks):
    ranks(from_anybody, 2)


def test_wrong_messages(ranks):
    ranks(wrong_messages, 2)


# ---------------------------------------------------------------- objects


class Stubborn:
    def __reduce__(self):
        raise ValueError("not me")


def objects(mpi):
    with world(mpi) as (rank, size):
        things = [{"rank": peer, "data": data(peer)} for peer in range(size)]
        found = [None] * (size + 1)
        dist.all_gather_object(found, things[rank])
        assert [one["rank"] for one in found[:size]] == list(range(size))
        assert found[size] is None
        same(found[0]["data"], data(0))
        root = size // 2
        found = [None] * size if rank == root else None
        dist.gather_object("x" * rank, found, root)
        assert found is None or found == ["x" * peer for peer in range(size)]
        found = ["a", (1, 2), None] if rank == root else [0, 0, 0]
        dist.broadcast_object_list(found, root)
        assert found == ["a", (1, 2), None]
        found = [0, "stays"]
        dist.scatter_object_list(found, list(range(10, 10 + size)) if rank == root else None, root)
        assert found == [10 + rank, "stays"]
        empty = []
        dist.broadcast_object_list(empty, 0)
        assert empty == []
    return True


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
            lambda wrong: dist.scatter_object_list([0], None, 1),
            lambda wrong: dist.scatter(numpy.zeros(2), [numpy.zeros(2)] if wrong else None, 1),
            lambda wrong: dist.scatter(numpy.zeros(2), [numpy.zeros(3)] * size if wrong else None, 1),
            lambda wrong: dist.scatter(numpy.zeros(2), None, 1),
        ]
        for call in cases:
            with pytest.raises(gc.ArgumentError if rank == 1 else gc.PeerError) as refused:
                call(rank == 1)
            if rank != 1:
                assert refused.value.ranks == (1,)
        assert kept == [None] * size
        short = [0] if rank == 0 else [0, 0]
        if rank == 0:
            dist.broadcast_object_list(short, 0)
        else:
            with pytest.raises(gc.ArgumentError, match="has 2 objects"):
                dist.broadcast_object_list(short, 0)
        room = [] if rank == 1 else [0]
        with contextlib.ExitStack() as stack:
            if rank == 1:
                stack.enter_context(pytest.raises(gc.ArgumentError, match="room for 1"))
            dist.scatter_object_list(room, [5] * size if rank == 0 else None)
        objects_after = [None] * size
        dist.all_gather_object(objects_after, rank)
        assert objects_after == list(range(size))
    return True


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_objects(ranks, size):
    ranks(objects, size)


def test_refused_objects(ranks):
    ranks(refused_objects, 3)


# ---------------------------------------------------------------- wrong arguments


def read_only(shape):
    array = numpy.zeros(shape)
    array.flags.writeable = False
    return array


def wrong_arguments(mpi):
    """A typed error on every rank before data moves: every array is as it was, and the next call works."""
    with world(mpi) as (rank, size):
        x, memory = data(rank), numpy.zeros((size + 1, 2, 3))
        outs = list(memory[:size])
        cases = {
            "no list": (lambda: dist.all_gather(memory[:size], x), "GC-COUNTS", "list of"),
            "short list": (lambda: dist.all_gather(outs[1:], x), "GC-COUNTS", f"has {size - 1}"),
            "aliased": (lambda: dist.all_gather([outs[0]] * size, x), "GC-OVERLAP", "share memory"),
            "aliased in part": (lambda: dist.all_gather([memory.reshape(-1)[2 * peer:2 * peer + 6].reshape(2, 3)
                                                         for peer in range(size)], x), "GC-OVERLAP", "overwrite"),
            "nested": (lambda: dist.all_gather([memory[0], memory[:1], *outs[2:]], x), "GC-OVERLAP", "share memory"),
            "shape": (lambda: dist.all_gather([numpy.zeros(6) for _ in outs], x), "GC-SHAPE", r"\(6,\)"),
            "dtype": (lambda: dist.all_gather([numpy.zeros((2, 3), "f4") for _ in outs], x), "GC-DTYPE", "float32"),
            "read-only": (lambda: dist.all_gather([read_only((2, 3)) for _ in outs], x), "GC-READONLY", "read-only"),
            "no array": (lambda: dist.all_gather(outs, [1.0]), "GC-ARRAY", "list"),
            "number": (lambda: dist.all_reduce(3.0), "GC-ARRAY", "float"),
            "object dtype": (lambda: dist.all_gather(outs, numpy.array([None])), "GC-DTYPE", "object"),
            "output short": (lambda: dist.all_gather_into_tensor(memory, x), "GC-SHAPE", "concatenated"),
            "output odd": (lambda: dist.all_gather_into_tensor(numpy.zeros((3, size, 2)), x), "GC-SHAPE", "stacked"),
            "output dtype": (lambda: dist.all_gather_into_tensor(numpy.zeros((2 * size, 3), "i8"), x), "GC-DTYPE",
                             "int64"),
            "input long": (lambda: dist.reduce_scatter_tensor(x, memory), "GC-SHAPE", "for an output of shape"),
            "input list short": (lambda: dist.reduce_scatter(x, outs[1:]), "GC-COUNTS", "input_list"),
            "input list shape": (lambda: dist.reduce_scatter(numpy.zeros(6), outs), "GC-SHAPE", "output"),
            "input list dtypes": (lambda: dist.reduce_scatter(x, [x.astype("f4"), *outs[1:]]), "GC-DTYPE", "float32"),
            "gather list missing": (lambda: dist.gather(x, None, rank), "GC-COUNTS", "NoneType"),
            "gather list off dst": (lambda: dist.gather(x, outs, (rank + 1) % size), "GC-ROOT", "not dst"),
            "gather list shape": (lambda: dist.gather(x, [numpy.zeros(6) for _ in outs], rank), "GC-SHAPE", "alike"),
            "gather list aliased": (lambda: dist.gather(x, [x] * size, rank), "GC-OVERLAP", "share memory"),
            "scatter list off src": (lambda: dist.scatter(x, outs, (rank + 1) % size), "GC-ROOT", "not src"),
            "all_to_all short": (lambda: dist.all_to_all(outs, outs[1:]), "GC-COUNTS", "input_list"),
            "all_to_all output short": (lambda: dist.all_to_all(outs[1:], outs), "GC-COUNTS", "output_list"),
            "all_to_all aliased": (lambda: dist.all_to_all([x] * size, outs), "GC-OVERLAP", "share memory"),
            "all_to_all dtype": (lambda: dist.all_to_all(outs, [x.astype(int)] * size), "GC-DTYPE", "int64"),
            "rows do not divide": (lambda: dist.all_to_all_single(memory, memory.copy()), "GC-COUNTS", "None"),
            "0-d": (lambda: dist.all_to_all_single(numpy.array(1.0), numpy.array(1.0), [1], [1]), "GC-COUNTS", "first"),
            "split sum": (lambda: dist.all_to_all_single(memory, memory.copy(), None, [2] * size), "GC-COUNTS", "sum"),
            "split count": (lambda: dist.all_to_all_single(memory, memory.copy(), [size + 1], [size + 1]), "GC-COUNTS",
                            "whole numbers"),
            "split float": (lambda: dist.all_to_all_single(x, x.copy(), None, [0.5] * size), "GC-COUNTS", "0.5"),
            "lengths": (lambda: dist.all_to_all_single(numpy.zeros(2 * size), numpy.zeros(size)), "GC-SHAPE", "length"),
            "src": (lambda: dist.broadcast(x, size), "GC-ROOT", "not one of"),
            "src None": (lambda: dist.broadcast(x, None), "GC-ROOT", "None"),
            "src bool": (lambda: dist.broadcast(x, True), "GC-ROOT", "True"),
            "src twice": (lambda: dist.broadcast(x, 1, group_src=1), "GC-ROOT", "both"),
            "dst float": (lambda: dist.reduce(x, 0.0), "GC-ROOT", "0.0"),
            "op": (lambda: dist.all_reduce(x, op="mean"), "GC-OP", "mean"),
            "op without factor": (lambda: dist.all_reduce(x, op=dist.ReduceOp.PREMUL_SUM), "GC-OP", "premul_sum"),
            "avg of integers": (lambda: dist.all_reduce(x.astype(int), op=dist.ReduceOp.AVG), "GC-OP-DTYPE", "avg"),
            "bits of floats": (lambda: dist.all_reduce(x, op=dist.ReduceOp.BOR), "GC-OP-DTYPE", "bor"),
            "max of complex": (lambda: dist.reduce(x * 1j, op=dist.ReduceOp.MAX), "GC-OP-DTYPE", "max"),
            "timeout": (lambda: dist.monitored_barrier(timeout=-1), "GC-TIMEOUT", "positive"),
        }
        for name, (call, code, words) in cases.items():
            with pytest.raises((gc.ArgumentError, gc.DtypeError), match=words) as refused:
                call()
            assert refused.value.code == code, name
            assert not memory.any(), name
            same(x, data(rank))
        dist.all_gather(outs, x)
        same(memory[:size], numpy.stack([data(peer) for peer in range(size)]))
    return True


def lengths_differ(mpi):
    """What only another rank knows: MismatchError on who has too much or too little room, nothing written."""
    with world(mpi) as (rank, size):
        outs = [numpy.zeros(2) for _ in range(size)]
        if rank == 0:
            outs[1] = numpy.zeros(3)
        with contextlib.ExitStack() as stack:
            if rank == 0:
                stack.enter_context(pytest.raises(gc.MismatchError, match=r"rank 1 of the group sent 2 elements"))
            dist.all_to_all(outs, [numpy.ones(2) for _ in range(size)])
        assert all(out.any() == (rank != 0) for out in outs)
        work = dist.all_to_all(outs, [numpy.ones(2) for _ in range(size)], async_op=True)
        if rank == 0:
            with pytest.raises(gc.MismatchError) as refused:
                work.wait()
            assert refused.value.ranks == (1,)
            assert work.exception() is refused.value
        else:
            assert work.wait()
        dist.barrier()
    return True


def test_wrong_arguments(ranks):
    ranks(wrong_arguments, 2)


def test_lengths_that_differ(ranks):
    ranks(lengths_differ, 3)


# ---------------------------------------------------------------- monitored_barrier


def missing_ranks(mpi):
    """Who does not come is named by all who do, in about the time given, and the group goes on."""
    with world(mpi) as (rank, _):
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=20), wait_all_ranks=True)
        absent, began = (2,), time.monotonic()
        if rank not in absent:
            with pytest.raises(gc.CollectiveTimeout, match="rank 2 did not come within 1 s") as late:
                dist.monitored_barrier(timeout=1)
            assert late.value.ranks == absent
            assert time.monotonic() - began < 30
            dist.barrier()
        else:
            dist.barrier()  # comes late, and finds the verdict
            with pytest.raises(gc.CollectiveTimeout) as late:
                dist.monitored_barrier(timeout=30)
            assert late.value.ranks == absent
            assert time.monotonic() - began < 30
        dist.monitored_barrier(timeout=30)
        if rank:
            with pytest.raises(gc.CollectiveTimeout) as late:
                dist.monitored_barrier(timeout=0.5)
            assert late.value.ranks == (0,)
        dist.barrier()
        if rank == 0:
            with pytest.raises(gc.CollectiveTimeout, match="ranks 1, 2, 3 did not") as late:
                dist.monitored_barrier(timeout=0.2)
            assert late.value.ranks == (1, 2, 3)
        dist.barrier()
        dist.monitored_barrier(timeout=30)
        dist.all_reduce(numpy.ones(3))
    return True


def many_barriers(mpi):
    """Rank 0 is on its way to the next barrier, and has said so, while the others are still in this one."""
    with world(mpi) as (rank, size):
        for number in range(20):
            dist.monitored_barrier(timeout=10)
            if (number + rank) % size == 0:
                time.sleep(1e-3)
        group, ahead, late = dist.group.WORLD, 100, time.monotonic() + 20
        if rank == 0:
            for barrier in (ahead + 1, ahead - 1, ahead):
                monitored._send(group, 1, (barrier, barrier))
        if rank == 1:
            came = []
            while not came and time.monotonic() < late:
                came = monitored._messages(group, ahead)
            assert came == [(0, ahead)]
            assert monitored._messages(group, ahead + 1) == [(0, ahead + 1)]
            assert group.heard == []
        dist.barrier()
    return True


@pytest.mark.parametrize("size", [2, 5, 8])
def test_monitored_barriers_in_a_row(ranks, size):
    ranks(many_barriers, size)


def test_monitored_barrier_names_who_is_missing(ranks):
    assert ranks(missing_ranks, 4) == [True] * 4


# ---------------------------------------------------------------- start and end, in jobs of their own

START = """
import os, sys, datetime
import pytest
import gpucoll as gc, gpucoll.distributed as dist
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
assert not any(name in os.environ for name in names)
assert not dist.is_initialized() and dist.is_available()
for call in (dist.get_rank, dist.get_world_size, dist.get_backend, dist.barrier, dist.new_group, dist.monitored_barrier,
             dist.destroy_process_group, lambda: dist.all_reduce(1), lambda: dist.P2POp(dist.isend, 1, 0),
             dist.distributed_c10d._get_default_group):
    with pytest.raises(gc.UsageError, match="call gpucoll.distributed.init_process_group"):
        call()
assert dist.group.WORLD is None
for options, error in [
        (dict(backend="ncll"), gc.ArgumentError), (dict(backend="cpu:gloo,tpu:nccl"), gc.ArgumentError),
        (dict(init_method="shared"), gc.ArgumentError), (dict(init_method=3), gc.ArgumentError),
        (dict(timeout=0), gc.ArgumentError), (dict(timeout="1"), gc.ArgumentError),
        (dict(timeout=datetime.timedelta(0)), gc.ArgumentError),
        (dict(world_size=7), gc.UsageError), (dict(rank=7), gc.UsageError), (dict(rank="x"), gc.UsageError)]:
    with pytest.raises(error):
        dist.init_process_group(**options)
    assert not dist.is_initialized()
os.environ["WORLD_SIZE"] = "7"
with pytest.raises(gc.UsageError, match="the environment says world_size '7', MPI says 3"):
    dist.init_process_group()
del os.environ["WORLD_SIZE"]
os.environ["MASTER_PORT"] = "1234"
dist.init_process_group("cpu:gloo,cuda:nccl", "env://", datetime.timedelta(seconds=9), world_size=3)
rank = dist.get_rank()
found = {name: os.environ[name] for name in names}
assert found.pop("MASTER_ADDR") == "127.0.0.1"
assert found == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3",
                 "MASTER_PORT": "1234"}
assert dist.group.WORLD.communicator.timeout == 9
with pytest.raises(gc.UsageError, match="was called before"):
    dist.init_process_group()
pair = dist.new_group([0, 2])
dist.destroy_process_group(dist.group.WORLD)
assert not dist.is_initialized() and "RANK" not in os.environ and os.environ["MASTER_PORT"] == "1234"
dist.init_process_group(backend="NCCL", init_method="tcp://127.0.0.1:1", timeout=5.5, rank=rank, device_id="cuda:0")
ports = [None] * 3
dist.all_gather_object(ports, os.environ["MASTER_PORT"])
assert len(set(ports)) == 1
assert gc.init() is not dist.group.WORLD.communicator
print(f"right{rank}")
"""


def test_start_and_end(mpiexec):
    variables = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    job = mpiexec(3, sys.executable, "-c", START, env=dict.fromkeys([*variables, "PYTHONUNBUFFERED"]))
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split()) == ["right0", "right1", "right2"]


def test_no_warning_in_a_plain_program(ranks):
    ranks(quiet, 2)


def quiet(mpi):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with world(mpi) as (rank, _):
            assert os.environ["RANK"] == str(rank)
            dist.all_reduce(numpy.ones(2))
    assert "RANK" not in os.environ
    return True
