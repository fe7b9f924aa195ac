"""Communicators that were created and closed leave no resources behind."""

import numpy
import pytest

import gpucoll as gc
import mixture
from harness.thread_ranks import on_threads

WARM_UP, ROOM = 0.1, 16  # share of the communicators; MiB of growth allowed, since allocators keep memory


def comes_and_goes(comm):
    """Split off half the ranks and one rank; call on each part by the engine, by headers, and on symmetric memory."""
    half, alone = comm.split(comm.rank % 2, -comm.rank), comm.split(0 if comm.rank == 0 else None)
    for part in filter(None, (half, alone)):
        with part:
            room = part.zeros(100, "float32")
            for algorithm in ("auto", "ring"):
                assert (part.all_reduce(room + 1, algorithm=algorithm) == part.size).all()
            part.all_gather_v(numpy.ones(part.rank))


def by_mpi(mpi, count, executor):
    def once():
        with gc.Communicator.from_mpi(mpi, executor=executor) as comm:
            assert comm.all_reduce(numpy.array([1]), algorithm="ring")[0] == comm.size
            comes_and_goes(comm)

    return grown(count, once)


def grown(count, once):
    """Return the growth of this process' resources between the warm-up and the last communicator."""
    for number in range(count):
        once()
        if number == int(count * WARM_UP):
            before = mixture.held()
    after = mixture.held()
    return {key: after[key] - before[key] for key in after}


def assert_nothing(more):
    assert max(more.pop("MiB"), ROOM) == ROOM
    assert max(more.values()) <= 0, more


COUNTS = [pytest.param(60, marks=pytest.mark.slow), pytest.param(700, marks=pytest.mark.nightly)]  # times three


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("executor", [None, "mpi"])
def test_communicators_leave_nothing(ranks, count, executor):
    for one in ranks(by_mpi, 2, count, executor, timeout=10 * count):
        assert_nothing(one)


@pytest.mark.parametrize("count", COUNTS)
def test_communicators_of_threads_leave_nothing(count):
    assert_nothing(grown(count, lambda: on_threads(2, comes_and_goes)))
