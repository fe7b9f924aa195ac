"""Mismatches under the deferred check, where a call does not wait for the comparison: all raise by the next call."""

import sys

import numpy
import pytest

import gpucoll as gc
from harness.node_ranks import on_two_nodes
from harness.pace import seconds
from multirank.deferred import TOLD, check_cells, outcomes

STEP = 48  # the default tier runs one cell in STEP
EXECUTORS = ["nccl", "peer"]


@pytest.fixture
def ranks(rank_pool, emulated_kernels):
    def run(program, *arguments):
        return rank_pool.run(program, 3, *arguments, timeout=seconds(600), env={"GPUCOLL_DEVICE": "emulated"})

    return run


@pytest.mark.parametrize("executor", EXECUTORS)
def test_all_are_told_in_the_call_or_in_the_next(ranks, executor):
    ranks(check_cells, executor, 0, STEP)


@pytest.mark.nightly
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("start", range(1, STEP))
def test_the_whole_grid(ranks, executor, start):
    ranks(check_cells, executor, start, STEP)


def scatter_or_broadcast(mpi, root, scatters):
    """In a communicator's first call, some ranks scatter and the others broadcast: all ranks raise by the next call."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(20)) as comm:
        x = numpy.ones((comm.size, 8), "f4")
        first = comm.scatter if comm.rank in scatters else lambda x: comm.broadcast(x[0].copy())
        found = outcomes(comm, [lambda: first(x), lambda: comm.all_reduce(x)])
        assert isinstance(found[0], TOLD) or isinstance(found[1], TOLD), found
        for error in found:
            assert error is None or (isinstance(error, TOLD) and error.ranks == (root,)), found
    mpi.Barrier()


@pytest.mark.parametrize(("odd", "scatters"), [(0, (1, 2)), (1, (1,))])
def test_the_first_call_of_a_communicator_is_compared(ranks, odd, scatters):
    ranks(scatter_or_broadcast, odd, scatters)


def stays_away(mpi):
    """Only the missing rank is named at the deadline, not the ranks waiting in the same call."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        comm.all_reduce(numpy.ones(5))
        if comm.rank != 2:
            comm._core.waits.timeout = 0.5
            with pytest.raises(gc.CollectiveTimeout) as late:
                comm.all_reduce(numpy.ones(5))
            assert late.value.ranks == (2,)
        mpi.Barrier()


def test_the_rank_that_stays_away_is_named(ranks):
    ranks(stays_away)


def two_threads(mpi, nodes):
    """Let the progress thread and a thread waiting in a barrier poll the same asynchronous calls."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with gc.Communicator.from_mpi(mpi, check="deferred", timeout=seconds(60)) if nodes == 1 \
                else on_two_nodes(mpi, None, check="deferred") as comm:
            for number in range(60):
                works = [comm.all_reduce(numpy.full(4, number), async_op=True) for _ in range(3)]
                comm.barrier()
                assert all((work.wait() == comm.size * number).all() for work in works)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_threads_compare_calls(ranks, nodes):
    ranks(two_threads, nodes)


def apart(mpi):
    """Between hosts the ranks compare by messages, and find what differs."""
    with on_two_nodes(mpi, None, check="deferred") as comm:
        x = numpy.ones(4)
        for _ in range(4):
            assert (comm.all_reduce(x) == comm.size).all()
        found = outcomes(comm, [lambda: comm.all_reduce(x, op="max" if comm.rank == 2 else "sum"),
                                lambda: comm.all_reduce(x)])
        told = [error for error in found if error is not None]
        assert told, found
        assert all(isinstance(error, TOLD) and error.ranks == (2,) for error in told), found
    mpi.Barrier()


def test_between_hosts_calls_are_compared_by_messages(ranks):
    ranks(apart)


def all_refuse(mpi):
    """If every rank refuses its arguments, each raises its own refusal, and the communicator goes on."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(20)) as comm:
        for wrong in ("smallest", f"of{comm.rank}"):
            with pytest.raises(gc.ArgumentError, match=wrong):
                comm.all_reduce(numpy.ones(4), op=wrong)
            assert (comm.all_reduce(numpy.ones(4)) == comm.size).all()
    mpi.Barrier()


def test_arguments_that_all_ranks_refuse_leave_the_communicator(ranks):
    ranks(all_refuse)


def whose_end_is_unknown(mpi):
    """The work of a call on a device goes on after its comparison: no rank takes another's call for ended."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(20)) as comm:
        comm.all_reduce(numpy.ones(4))
        mpi.Barrier()
        last = comm._core.life.last_call((comm.rank + 1) % comm.size)
        assert last.has_ended is None
        assert "all_reduce" in last.describe()
        mpi.Barrier()


def test_a_call_on_a_device_is_not_known_to_have_ended(ranks):
    ranks(whose_end_is_unknown)


def test_a_mismatch_names_the_first_failure_in_later_calls(ranks):
    ranks(revoked_names)


def revoked_names(mpi):
    with gc.Communicator.from_mpi(mpi, check="deferred", timeout=seconds(20)) as comm:
        x = numpy.ones(4)
        found = outcomes(comm, [lambda: comm.all_reduce(x, op="max" if comm.rank == 2 else "sum"),
                                *[lambda: comm.all_reduce(x)] * 2])
        assert isinstance(found[2], gc.RevokedError)
        assert found[2].ranks == (2,)
    mpi.Barrier()
