"""Scatter: the root tells the other ranks shape and dtype before data move."""

import math

import numpy
import pytest

import gpucoll as gc
from harness.node_ranks import on_shared
from harness.pace import seconds
from oracles import oracle


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


@pytest.mark.parametrize(("body", "size"), [(scattered, 3), (scattered, 2), (roots_of_scatter_that_differ, 3)])
def test_metadata(ranks, body, size):
    ranks(body, size)
