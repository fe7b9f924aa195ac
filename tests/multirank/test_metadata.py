"""Calls with metadata exchanged before data move: scatter, and the v-variants."""

import math
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.call import table
from harness.node_ranks import on_shared
from harness.pace import seconds
from oracles import oracle

pytestmark = pytest.mark.usefixtures("engine")


@on_shared
def scattered(comm):
    """Scatter blocks of changing shapes known only to the root, with `out` and without, from any root."""
    shapes = [(3,), (2, 5), (), (3,), (0, 2), (700,)]
    for turn in range(40):
        root, shape = turn // 6 % comm.size, shapes[turn * turn % 6]
        name = ("int64", "float32", "uint8")[turn // 2 % 3]
        everything = (numpy.arange(comm.size * math.prod(shape)) + turn).reshape(comm.size, *shape).astype(name)
        given = everything.copy() if comm.rank == root else None
        out = numpy.full(shape, 99, name) if (turn + comm.rank) % 2 else None
        found = comm.scatter(given, out, root)
        assert out is None or found is out
        if given is not None:
            given[...] = 99  # no rank reads `given` any more, and no result may share its memory
        assert oracle.same_bits(numpy.asarray(found), everything[comm.rank]), turn
    x = numpy.arange(comm.size * 4).reshape(comm.size, 4)
    for turn in range(4):
        before = comm._core.calls.engine.call_count
        assert (comm.scatter(x + turn if comm.rank == 0 else None) == x[comm.rank] + turn).all()
    assert comm._core.calls.engine.call_count == before + 1
    for out in (numpy.empty(5, x.dtype), numpy.empty((2, 2), x.dtype), numpy.empty(4, "f4")):
        with pytest.raises((gc.ArgumentError, gc.DtypeError)):
            comm.scatter(x if comm.rank == 0 else None, out)
        assert (comm.scatter(x if comm.rank == 0 else None) == x[comm.rank]).all()


def roots_of_scatter_that_differ(mpi):
    """Ranks that disagree about a scatter's root may all wait: nevertheless the error comes before the deadline."""
    for root in (lambda rank: (rank + 1) % 3, lambda rank: 1 - min(rank, 1), lambda rank: min(rank, 1)):
        with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
            x = numpy.ones((3, 2))
            for known in range(3):
                comm.scatter(x if comm.rank == known else None, root=known)
            chosen = root(comm.rank)

            def call(chosen=chosen, comm=comm, x=x):
                comm.scatter(x if comm.rank == chosen else None, root=chosen)
                for _ in range(2):  # a rank that only sent has left the scatter without an error
                    comm.barrier()

            with pytest.raises((gc.MismatchError, gc.PeerError), match="root"):
                call()
        mpi.Barrier()


@on_shared
def lengths_that_change(comm):
    """Block lengths may change from rank to rank and from call to call, with an unchanged total."""
    everyone = range(comm.size)
    for turn in range(24):
        counts = [(rank + turn // 2) % comm.size * 2 for rank in everyone]
        whole = numpy.arange(sum(counts) * 3.0).reshape(-1, 3) + turn
        parts = numpy.split(whole, numpy.cumsum(counts)[:-1])
        root, mine = turn % comm.size, parts[comm.rank]
        found = comm.all_gather_v(mine.copy())
        assert [one.tolist() for one in found] == [one.tolist() for one in parts], turn
        found = comm.gather_v(mine.copy(), root)
        assert (found is None) == (comm.rank != root)
        assert found is None or [one.tolist() for one in found] == [one.tolist() for one in parts], turn
        found = comm.scatter_v([one.copy() for one in parts] if comm.rank == root else None, root)
        assert found.tolist() == mine.tolist()
        found = comm.all_to_all_v([parts[(comm.rank + other) % comm.size] + comm.rank for other in everyone])
        assert [one.tolist() for one in found] == [(parts[(comm.rank + other) % comm.size] + other).tolist()
                                                   for other in everyone], turn
        for op, expected in (("sum", whole * comm.size + comm.size * (comm.size - 1) / 2),
                             ("max", whole + comm.size - 1)):
            found = comm.reduce_scatter_v(whole + comm.rank, counts, op)
            assert found.tolist() == numpy.split(expected, numpy.cumsum(counts)[:-1])[comm.rank].tolist(), (turn, op)
    for name, x in (("all_gather_v", numpy.ones((2, 3))), ("reduce_scatter_v", numpy.ones((2 * comm.size, 3)))):
        more = () if name == "all_gather_v" else ([2] * comm.size,)
        getattr(comm, name)(x, *more)
        with mock.patch.object(table.Calls, "resolve", side_effect=AssertionError(name)):
            getattr(comm, name)(x, *more)


@on_shared
def known_blocks_are_checked(comm):
    """A call that the engine knows still refuses a wrong `out`, on all ranks, and wrong arguments of one rank."""
    rank, size = comm.rank, comm.size
    whole = numpy.arange(40.0)
    counts = [2 + other for other in range(size)]
    x, rows = whole[:counts[rank]], numpy.arange(2.0 * sum(counts)).reshape(-1, 2) + rank
    mine = whole + rank
    xs = [mine[other:2 * other + 1] for other in range(size)]
    calls = {"all_gather_v": lambda **more: comm.all_gather_v(x, **more),
             "reduce_scatter_v": lambda **more: comm.reduce_scatter_v(rows, counts, **more),
             "all_to_all_v": lambda **more: comm.all_to_all_v(xs, **more)}
    read_only = numpy.zeros(sum(counts))
    read_only.flags.writeable = False
    wrong = {"all_gather_v": (read_only, numpy.zeros(3), whole[1:sum(counts) + 1], numpy.zeros(sum(counts), "f4")),
             "reduce_scatter_v": (rows[1:counts[rank] + 1], numpy.zeros(1), numpy.zeros((counts[rank], 2), "i8")),
             "all_to_all_v": (mine[2:2 + size * (rank + 1)], numpy.zeros(99), [numpy.zeros(99)] * size)}
    for name, call in calls.items():
        first = [call() for _ in range(3)][-1]
        for out in wrong[name]:
            before = repr(out)
            with pytest.raises((gc.ArgumentError, gc.DtypeError)):
                call(out=out)
            assert repr(out) == before
            again = call()
            assert repr(again) == repr(first), name
    for bad in ([[one] for one in counts], counts[:-1], [1.0] * size, numpy.array(counts) + 1, None):
        with pytest.raises(gc.ArgumentError if rank == 1 else gc.PeerError):
            comm.reduce_scatter_v(rows, bad if rank == 1 else counts)
    calls["reduce_scatter_v"]()
    with pytest.raises(gc.ArgumentError if rank == 1 else gc.PeerError):
        comm.reduce_scatter_v(rows[1:] if rank == 1 else rows, counts)
    for more in ({"root": [0]}, {"root": 9}, {"algorithm": ["auto"]}, {"algorithm": "nonsense"}):
        comm.gather_v(x)
        with pytest.raises(gc.ArgumentError if rank == 1 else gc.PeerError):
            comm.gather_v(x, **(more if rank == 1 else {}))
    assert repr(calls["all_gather_v"]()) == repr([whole[:count] for count in counts])


CASES = [(scattered, (), (3, 2)), (roots_of_scatter_that_differ, (), (3,)),
         (lengths_that_change, (), (2, 3)), (known_blocks_are_checked, (), (2, 3))]


@pytest.mark.parametrize(("body", "arguments", "size"), [
    pytest.param(body, arguments, size, id="-".join([body.__name__, *arguments, str(size)]))
    for body, arguments, sizes in CASES for size in sizes])
def test_metadata(ranks, body, arguments, size):
    ranks(body, size, *arguments)
