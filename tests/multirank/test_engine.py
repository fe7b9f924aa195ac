"""The engine: schedules between processes of a node, run in C++."""

import contextlib
import itertools
import os
import signal
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.executors.engine.tables import FAILURE
from gpucoll.health import guard
from harness.pace import seconds


def another_root_is_told_later(mpi):
    """If a second rank acts as the root of a broadcast, the call ends on all ranks, and the next common call raises."""
    x, out = numpy.arange(12.0), numpy.zeros(12)
    with gc.Communicator.from_mpi(mpi, executor="shared", check="deferred", timeout=seconds(60)) as comm:
        for _ in range(3):
            comm.broadcast(x, 0, algorithm="chain")
            comm.all_reduce(x, out, algorithm="ring")
        last = comm.size - 1
        comm.broadcast(x, last if comm.rank == last else 0, algorithm="chain")
        with pytest.raises(gc.MismatchError):
            comm.all_reduce(x, out, algorithm="ring")


LOOKS = 3


def one_fails_later(mpi):
    """A call ends well if all ranks have done their parts, although a rank has failed since.

    The guard's grace outlasts any delay of rank 1 on a loaded machine, so that only the engine is tested.
    """
    with (mock.patch.object(guard, "LEFT_TIME", seconds(60)),
          gc.Communicator.from_mpi(mpi, executor="shared", check="deferred", timeout=seconds(60)) as comm):
        x = numpy.zeros(5)
        for _ in range(3):
            comm.broadcast(x, 0, algorithm="chain")
        x[:] = comm.rank + 7
        failed, looks = comm._core.host.executors[0].node_ranks.words[0], itertools.count()

        def look():
            """Count the polls of the waiting rank after the failure of rank 0; wake rank 1 at poll number LOOKS."""
            if failed[FAILURE] and next(looks) == LOOKS:
                mpi.send(None, 1)

        if comm.rank == 2:  # rank 2 polls the other ranks between sleeps
            comm._core.waits.hooks.append(look)
        if comm.rank == 1:  # late
            mpi.recv(source=2)
        comm.broadcast(x, 0, algorithm="chain")
        assert (x == 7).all()
        if comm.rank == 0:
            comm._core.host.fail(gc.UsageError("on purpose"))
        comm._core.waits.failure = gc.UsageError("on purpose")


class Interrupt(Exception):
    """The exception raised by the signal handler."""


def interruptible(mpi, comm, x):
    mpi.Barrier()  # afterwards the other rank sends the signal
    comm.all_reduce(x, algorithm="ring")
    while True:  # the signal may also arrive after the call
        os.sched_yield()


def interrupted(mpi):
    """An exception raised by a signal handler during a wait is not lost, even if the awaited rank arrives meanwhile."""
    def handler(*_):
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    for _ in range(20):
        comm = gc.Communicator.from_mpi(mpi, executor="shared", timeout=seconds(60))
        x = numpy.ones(5)
        for _ in range(3):
            comm.all_reduce(x, algorithm="ring")
        process = mpi.bcast(os.getpid())
        if mpi.rank:
            mpi.Barrier()
            os.kill(process, signal.SIGUSR1)
            with contextlib.suppress(gc.GpucollError):
                comm.all_reduce(x, algorithm="ring")
        else:
            with pytest.raises(Interrupt):
                interruptible(mpi, comm, x)
        comm._core.waits.failure = comm._core.waits.failure or gc.UsageError("on purpose")
        comm.close()
        mpi.Barrier()
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(("body", "size"), [(one_fails_later, 3), (another_root_is_told_later, 3), (interrupted, 2)])
def test_engine(ranks, body, size):
    ranks(body, size)
