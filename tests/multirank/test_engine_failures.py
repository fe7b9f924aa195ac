"""The engine with ranks that are interrupted, missing or failed: no rank waits for ever."""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.cli import main
from gpucoll.executors.engine.digest import MODULE
from gpucoll.executors.engine.extension import library
from gpucoll.health import guard
from harness.node_ranks import on_shared
from harness.pace import seconds


class Rung(Exception):
    """The exception raised by the signal handler."""


@on_shared
def interrupted(comm, raises):
    """A rank taken out of a call by a signal is revoked, and the other ranks raise before the deadline.

    Python handles a signal after the engine's wait, at the first line of `slow_wait`; the test replaces `slow_wait`.
    """
    x, out = numpy.ones(4), numpy.empty(4)

    def rings(*_):
        if raises:
            raise Rung
        call()

    def call(times=1):
        for _ in range(times):
            comm.all_reduce(x, out, algorithm="one_shot")

    call(3)
    if comm.rank == 0:
        comm._core.waits.slow_wait = rings
        with pytest.raises(Rung if raises else gc.UsageError, match="" if raises else "inside another call"):
            call()
        with pytest.raises(gc.RevokedError):
            call()
        comm.mpi.Send(numpy.ones(1), 1)
    else:
        if comm.rank == 1:  # rank 1 keeps the other ranks waiting
            comm.mpi.Recv(numpy.empty(1), 0)
        with pytest.raises(gc.RankFailedError):
            call(2)  # the first may still be complete
    comm.mpi.Barrier()


@on_shared
def somebody_stays_away(comm):
    """Ranks waiting for a missing rank raise at the deadline, shortened for this call, and later calls are revoked."""
    x, out = numpy.ones(4), numpy.empty(4)
    for _ in range(3):
        comm.all_reduce(x, out, algorithm="one_shot")
    if comm.rank:
        comm._core.waits.timeout = 0.2
        for error in (gc.CollectiveTimeout, gc.RevokedError):
            with pytest.raises(error):
                comm.all_reduce(x, out, algorithm="one_shot")
    comm.mpi.Barrier()


@on_shared
def a_failed_rank_closes(comm):
    """If a failed rank closes, the engine ends the waits of the other ranks before the guard's grace has passed."""
    with mock.patch.object(guard, "LEFT_TIME", seconds(600)):
        comm.all_reduce(numpy.ones(4))
        if comm.rank == 0:
            comm._core.waits.failure = gc.BackendError("no more")
            comm.close()
        else:
            with pytest.raises(gc.RankFailedError) as failed:
                comm.all_reduce(numpy.ones(4))
            assert failed.value.ranks == (0,)
        comm.mpi.Barrier()


def one_cannot(mpi):
    """All ranks take another way if one rank cannot map the memory of other ranks."""
    lacking = mock.patch("gpucoll.executors.engine.neighbours.attach", refuse)
    with lacking if mpi.rank == 1 else contextlib.nullcontext(), \
            gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        total = comm.size * (comm.size + 1) // 2
        assert comm.all_reduce(numpy.full(3, comm.rank + 1)).tolist() == [total] * 3


def refuse(*_):
    raise PermissionError("not yours")


@pytest.mark.parametrize(("body", "arguments"), [
    (interrupted, (True,)), (interrupted, (False,)), (one_cannot, ()), (somebody_stays_away, ()),
    (a_failed_rank_closes, ())])
def test_failures(ranks, body, arguments):
    ranks(body, 3, *arguments)


@pytest.mark.parametrize(("lacking", "said"), [
    (None, "it was not built when gpucoll was installed"),
    (SimpleNamespace(sources="others"), "it was built from other sources")])
def test_without_an_engine_that_fits_no_communicator_is_made(monkeypatch, capsys, lacking, said):
    monkeypatch.setitem(sys.modules, MODULE, lacking)
    library.cache_clear()
    for make in (gc.init, lambda: gc.run_local(len, 2)):
        with pytest.raises(gc.UsageError, match=said) as told:
            make()
        assert told.value.code == "GC-ENGINE"
    assert main(["doctor"]) == 1
    assert "[GC-ENGINE]" in (told := " ".join(capsys.readouterr().out.split()))
    assert said in told
