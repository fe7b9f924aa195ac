"""Repeated short calls are eager: a rank goes on without waiting for ranks whose data the rank does not read."""

import functools

import numpy
import pytest

import gpucoll as gc
from gpucoll.executors.engine.tables import SLOTS
from harness.node_ranks import on_shared
from harness.pace import seconds
from multirank.deferred import outcomes

ALIKE = 4  # equal calls before the first eager call
AHEAD = SLOTS - 1  # the most calls for a rank to be ahead of its readers
COUNT = 6  # elements


def values(rank, turn, count=COUNT):
    return numpy.arange(count) * 5 + 1000 * rank + turn


def is_eager(comm):
    """Return whether the last call was eager on any rank. (`call_count` is the number of the last call.)"""
    return any(comm._core.calls.engine.is_eager(rank, comm._core.calls.engine.call_count) for rank in range(comm.size))


def broadcast(comm, turn):
    x = values(0, turn) if comm.rank == 0 else numpy.zeros(COUNT, numpy.int64)
    assert (comm.broadcast(x) == values(0, turn)).all()


def gather(comm, turn):
    found = comm.gather(values(comm.rank, turn))
    assert found is None or (found == [values(other, turn) for other in range(comm.size)]).all()


@on_shared
def goes_on(comm, call, givers):
    """Let the ranks that only send make AHEAD calls while the other ranks are in none of the calls."""
    for turn in range(ALIKE + 1):
        call(comm, turn)
    gives = comm.rank in givers
    if not gives:
        comm.mpi.Barrier()
    for turn in range(AHEAD):
        call(comm, 100 + turn)
    if gives:
        comm.mpi.Barrier()
    for turn in range(3 * SLOTS):
        call(comm, 200 + turn)
    assert is_eager(comm)
    comm.barrier()
    assert not is_eager(comm)
    for turn in range(3):
        call(comm, 300 + turn)
        assert is_eager(comm)  # at once: enough equal calls were made in a row before
        comm.all_reduce(numpy.ones(turn + 1))


CALLS = [(broadcast, (0,)), (gather, (1, 2))]


@pytest.mark.parametrize(("call", "givers"), CALLS)
def test_a_rank_that_only_gives_goes_on(ranks, call, givers):
    ranks(goes_on, 3, call, givers)


@on_shared
def long_inputs(comm):
    """Inputs up to the size of a slot are eager, longer inputs are not; length and root change in between."""
    for root, count, fits in ((0, 2048, True), (1, 2049, False), (2, 1, True), (2, 2, True)):
        for turn in range(ALIKE + SLOTS):
            x = values(root, turn, count) if comm.rank == root else numpy.zeros(count, numpy.int64)
            assert (comm.broadcast(x, root, algorithm="linear") == values(root, turn, count)).all()
        assert is_eager(comm) == fits, count


def test_a_slot_holds_16_kib(ranks):
    ranks(long_inputs, 3)


@on_shared
def other_shapes(comm):
    """After eager calls a root may scatter another shape: ranks without `out` know no shape, and must be told."""
    for turn in range(20):
        for count in (3, 5):
            for _ in range((ALIKE + 3) * (turn < 2) + 1):  # from turn 2 on, every call changes the shape
                x = numpy.stack([values(other, turn, count) for other in range(comm.size)]) if comm.rank == 0 else None
                assert (comm.scatter(x) == values(comm.rank, turn, count)).all()


def test_a_root_of_eager_calls_may_scatter_another_shape(ranks):
    ranks(other_shapes, 3)


def differ_after(mpi, way, culprit):
    """If one rank makes another call after eager calls, all ranks raise, and the culprit's array is not overwritten."""
    with gc.Communicator.from_mpi(mpi, executor="shared", timeout=seconds(20)) as comm:
        for turn in range(ALIKE + 5):
            broadcast(comm, turn)
        other = {"op": lambda x: comm.all_reduce(x, x), "root": lambda x: comm.broadcast(x, 1),
                 "dtype": lambda x: comm.broadcast(x.view(numpy.float64))}[way]
        x = numpy.full(COUNT, 7) if comm.rank == culprit else None
        calls = [lambda: other(x)] if comm.rank == culprit else []
        calls += [functools.partial(broadcast, comm, 20 + turn) for turn in range(2 * SLOTS)]
        found = outcomes(comm, calls)
        first = next(error for error in found if error)
        assert isinstance(first, gc.MismatchError), found
        assert first.ranks == (culprit,), (comm.rank, first)
        assert comm.rank != culprit or ((x == 7).all() and found[0] is first)
        assert all(isinstance(error, gc.RevokedError) for error in found[found.index(first) + 1:])
    mpi.Barrier()


@pytest.mark.parametrize("way", ["op", "root", "dtype"])
@pytest.mark.parametrize("culprit", [1, 2])
def test_a_rank_that_differs_after_eager_calls_is_told(ranks, way, culprit):
    ranks(differ_after, 3, way, culprit)


def differ_behind_once(mpi):
    """Rank 2 makes the call of the root, which has gone on: the call is the root's too, and rank 1 alone is named."""
    with gc.Communicator.from_mpi(mpi, executor="shared", timeout=seconds(20)) as comm:
        for turn in range(ALIKE + 5 + (AHEAD - 10 if comm.rank == 0 else 0)):
            broadcast(comm, turn)
        mpi.Barrier()
        if comm.rank == 1:
            with pytest.raises(gc.MismatchError) as told:
                comm.all_reduce(numpy.ones(COUNT))
            assert told.value.ranks == (1,)
        elif comm.rank == 2:
            outcomes(comm, [functools.partial(broadcast, comm, ALIKE + 5)])
        mpi.Barrier()


@pytest.mark.parametrize("program", [differ_behind_once])
def test_a_rank_that_differs_where_the_root_is_far_ahead_is_the_culprit(ranks, program):
    ranks(program, 3)


def broadcasts_go_on(mpi):
    goes_on(mpi, broadcast, (0,))
