"""The end of a process with communicators that are not closed: the other ranks are told, and MPI ends."""

from __future__ import annotations

import faulthandler
import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gpucoll.core.output import say
from gpucoll.core.parsing import text_of
from gpucoll.errors import RankFailedError
from gpucoll.health.farewell import Why
from gpucoll.launch.bootstrap import DEATH, FINALIZE
from gpucoll.progress.exits import drain_all
from gpucoll.transport.process import PROCESS

if TYPE_CHECKING:
    from gpucoll.communicator.lifecycle import Lifecycle


def end_process(comms: Iterable[Lifecycle]) -> None:
    """Tell waiting ranks that this rank leaves without `close`; then end MPI.

    MPI's end waits for all ranks, for ever if a rank has died. A deadline therefore limits MPI's end after a failure of
    a communicator, a short one if a process is known to have ended. At the deadline the interpreter's watchdog, which
    is no thread of Python's, prints the stack of this process and ends the process with status 1.
    """
    # Other ranks may wait for a dropped work: complete it first. CUDA may end next: the watchdog thread must not call
    # it any more.
    _run_all(drain_all, *(comm.stop_watches for comm in comms))
    _run_all(*(functools.partial(_leave, comm) for comm in comms), _end_mpi)


def _run_all(*steps: Callable[[], object]) -> None:
    """Run all steps of the end: the error of one is printed, and must not keep the other ranks from being told."""
    for step in steps:
        try:
            step()
        except BaseException as error:  # Ctrl-C, too
            PROCESS.limits.append(FINALIZE)  # the other ranks may not come to MPI's end
            say(text_of(type(error), error, error.__traceback__))


def _leave(comm: Lifecycle) -> None:
    """Tell the other ranks of a communicator, unless it has ended, that this process ends."""
    if not (comm.closed or comm.is_forked or comm.link.mpi is None or comm.link.has_ended()):
        _run_all(functools.partial(_limit_end, comm), functools.partial(
            comm.host.fail, RankFailedError("the process has ended", ranks=(comm.link.place.rank,))), comm.abort)
        comm.end_calls()  # MPI's end frees communicators, and so would close this one again


def _limit_end(comm: Lifecycle) -> None:
    """Limit MPI's end after the failure of a rank: MPI may wait for ever."""
    try:
        is_lost = any(one.why >= Why.FAILED for one in comm.link.farewells().values())
    except comm.link.foreign:  # MPI raises if it knows of a dead rank
        is_lost = True
    if is_lost:
        PROCESS.limits.append(FINALIZE)
    if comm.link.processes.ended():
        PROCESS.limits.append(DEATH)


def _end_mpi() -> None:
    """End MPI, if its end has a deadline; without a failure, mpi4py ends MPI."""
    if not PROCESS.limits:
        return
    limit = DEATH if DEATH in PROCESS.limits else max(PROCESS.limits)
    MPI = sys.modules.get("mpi4py.MPI")  # None for ranks joined by a store
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        # First, because MPI's end stops the threads of Python that answer other ranks.
        _run_all(PROCESS.close)
        faulthandler.dump_traceback_later(limit, exit=True, file=2)
        MPI.Finalize()
        faulthandler.cancel_dump_traceback_later()
