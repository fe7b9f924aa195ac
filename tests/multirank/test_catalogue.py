"""Rows of the catalogue of faults (tests/catalogue.txt) not covered by other tests; most on the pool's ranks."""

import errno
import itertools
import resource
import signal
import threading
import time
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll import training
from gpucoll.health import guard
from gpucoll.transport.rendezvous import becomes
from harness.grids import naming
from harness.pace import seconds
from harness.thread_ranks import all_on_threads, on_threads

TOLD = 1.5  # seconds: three times the limit for ranks to learn of a mismatch


def nothing_on_one(mpi):
    """On 8 ranks, an empty array on one rank is a prompt error of all ranks, and the communicator stays usable."""
    x, other = numpy.ones(6, "f4"), mpi.rank == 5
    for executor in (None, "mpi"):
        with gc.Communicator.from_mpi(mpi, executor=executor, timeout=seconds(60)) as comm:
            comm.barrier()
            began = time.monotonic()
            with pytest.raises(gc.MismatchError) as found:
                comm.all_reduce(x[:0] if other else x)
            lasted = time.monotonic() - began
            assert (found.value.code, found.value.ranks) == ("GC-SHAPE", (5,))
            assert lasted < seconds(TOLD)
            assert (comm.all_reduce(x) == mpi.size).all()


def crossed(mpi):
    """Calls on two communicators, in opposite orders on the two ranks, end at the deadline instead of a deadlock."""
    first, second = (gc.Communicator.from_mpi(mpi, timeout=seconds(0.5)) for _ in range(2))
    began = time.monotonic()
    one, other = (first, second) if mpi.rank else (second, first)

    def both():
        for comm in (one, other):
            comm.all_reduce(numpy.ones(3), algorithm="ring")

    with pytest.raises(gc.CollectiveTimeout, match="all_reduce") as late:
        both()
    assert late.value.ranks in ((1 - mpi.rank,), ())
    for comm in (first, second):
        comm.close()
    assert time.monotonic() - began < seconds(4)


def crosswise(mpi):
    """Two threads with a communicator each finish with exact results, in whatever order the threads call on a rank.

    Another thread may wait for a call's handle, more than once.
    """
    comms = [gc.Communicator.from_mpi(mpi, timeout=seconds(60)) for _ in range(2)]
    first, waits = mpi.rank % 2, threading.Event()
    comms[first]._core.waits.hooks.append(waits.set)

    def calls(number):
        if number != first:  # until the first thread waits or has ended: the other rank starts with the other call
            assert waits.wait(seconds(60))
        for turn, algorithm in itertools.product(range(20), ("auto", "ring")):
            x = numpy.full(1000 * number + 3, turn + mpi.rank + 7 * number)
            total = comms[number].all_reduce(x, algorithm=algorithm)
            assert (total == sum(range(mpi.size)) + mpi.size * (turn + 7 * number)).all(), turn
        waits.set()  # the calls of a rank that comes last may all end without a wait

    all_on_threads(range(2), calls)
    work, found = comms[0].all_reduce(numpy.ones(5), algorithm="ring", async_op=True), []
    waiter = threading.Thread(target=lambda: found.append(work.wait()))
    waiter.start()
    waiter.join()
    assert work.wait() is found[0]
    assert (found[0] == mpi.size).all()
    for comm in comms:
        comm.close()


def waited_for(mpi):
    """A rank that is slow, but in time, is named in a warning; a jump of the wall clock causes no timeout."""
    said = []
    with mock.patch.object(guard.log, "warning", lambda text, *values: said.append(text % values)), \
            gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm, mock.patch.object(guard, "SLOW", 0.1), \
            mock.patch("time.time", side_effect=itertools.cycle([0.0, 4e9])):
        x = numpy.ones(3)
        comm.all_reduce(x)
        if comm.rank == 1:
            assert becomes(mpi.Irecv(numpy.empty(1), 0).Test, seconds(10))  # until rank 0 has logged the warning
            assert (comm.all_reduce(x) == comm.size).all()
        else:
            work = comm.all_reduce(x, async_op=True)
            comm._core.waits.hooks.append(lambda: said and not sent and sent.append(mpi.Send(numpy.ones(1), 1)))
            sent = [] if comm.rank == 0 else [None]
            assert (work.wait() == comm.size).all()
            assert comm.rank or any("rank 0 has waited" in one and "rank 1" in one for one in said)


def denied(mpi, where):
    """A resource denied to one rank while a communicator is created is a typed error on all ranks; a retry succeeds."""
    def unlimited():
        pass

    def limited(kind, most):
        before = resource.getrlimit(kind)
        resource.setrlimit(kind, (most, before[1]))
        return lambda: resource.setrlimit(kind, before)

    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        def make():
            return comm.split(0) if where == "split" else gc.Communicator.from_mpi(mpi, timeout=seconds(60))

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for deny in (lambda: limited(resource.RLIMIT_FSIZE, 4096), lambda: limited(resource.RLIMIT_NOFILE, 3)):
            with naming(deny):
                allow = deny() if mpi.rank == 1 else unlimited
                try:
                    with pytest.raises(gc.BackendError) as refused:
                        make()
                finally:
                    allow()
                assert (refused.value.code, refused.value.ranks) == ("GC-MEMORY", (1,))
        without = mock.patch("os.memfd_create", side_effect=OSError(errno.ENOSYS, "none")) if mpi.rank == 1 else \
            mock.MagicMock()
        with without, pytest.raises(gc.BackendError, match="Function not implemented"):
            make()
        with make() as part:
            assert (part.all_reduce(numpy.ones(3)) == part.size).all()


def taken_out(mpi):
    """If a signal or a lack of memory ends a communicator's creation on one rank, the other ranks name this rank."""
    comm = gc.Communicator.from_mpi(mpi, timeout=seconds(10))
    if mpi.rank == 0:
        def rings():
            raise KeyboardInterrupt

        comm._core.waits.hooks.append(rings)
        with pytest.raises(KeyboardInterrupt):
            comm.split(0)
    mpi.Barrier()
    if mpi.rank:
        with pytest.raises(gc.RankFailedError) as failed:
            comm.split(0)
        assert failed.value.ranks == (0,)
    comm.close()
    lacks = mock.patch("gpucoll.communicator.core.registry", side_effect=MemoryError) if mpi.rank == 1 else \
        mock.MagicMock()
    with lacks, pytest.raises(MemoryError if mpi.rank == 1 else gc.RankFailedError) as failed:
        gc.Communicator.from_mpi(mpi, timeout=seconds(10))
    assert mpi.rank == 1 or failed.value.ranks == (1,)


def unlike_versions(mpi):
    for name in ("gpucoll.launch.bootstrap.__version__", "numpy.__version__"):
        other = mock.patch(name, "0.0.other") if mpi.rank == 1 else mock.MagicMock()
        with other, pytest.raises(gc.UsageError, match="version of") as refused:
            gc.Communicator.from_mpi(mpi, timeout=seconds(60))
        assert (refused.value.code, refused.value.ranks) == ("GC-OPTION", (1,))


@pytest.mark.parametrize(("body", "size"), [
    (crossed, 2), (crosswise, 2), (waited_for, 3), (taken_out, 3), (unlike_versions, 3),
    pytest.param(nothing_on_one, 8, marks=pytest.mark.slow)])
def test_rows(ranks, body, size):
    ranks(body, size)


@pytest.mark.parametrize("where", ["init", "split"])
def test_what_one_rank_is_denied(ranks, where):
    ranks(denied, 3, where)


def served(comm):
    """Workers of a failed parameter server raise an error instead of waiting."""
    place = training.ParameterServer({"w": numpy.zeros(100)}, comm, 1, training.SGD(1.0))
    if place.is_server:
        for pair in place._pairs:
            pair._core.waits.failure = gc.UsageError("this server has died")
            pair.close()
        return

    def work():
        for _ in range(3):
            place.pull()
            place.push({"w": numpy.ones(100)})

    with pytest.raises((gc.RankFailedError, gc.CollectiveTimeout)):
        work()


def test_a_server_that_is_lost_is_told():
    on_threads(3, served, timeout=seconds(2))
