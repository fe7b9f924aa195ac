"""The end of a communicator: a call like any other, compared with the other ranks' calls and told to these ranks.

A rank that closes says farewell with the numbers of its calls, and waits for the farewells of the others. A rank in a
later call learns from the farewell that its call can never end (`gpucoll.health.guard`), and raises at once. The
farewell of that rank then tells the rank in `close`, which ends with a warning: leaving is allowed, and the others may
go on by `shrink`. Ranks that all close, after unlike numbers of calls, raise MismatchError. At the end of a process
with communicators that are not closed, `end_process` tells the other ranks, and MPI ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from gpucoll.core.output import say
from gpucoll.core.parsing import text_of
from gpucoll.core.signature import LastCall, described
from gpucoll.errors import BackendError, CollectiveTimeout, GpucollError, MismatchError, RankFailedError, UsageError
from gpucoll.executors import call_site, inner_site
from gpucoll.health.farewell import Farewell, Sent, Why, named
from gpucoll.launch.bootstrap import DEATH, FINALIZE
from gpucoll.progress.exits import drain_all
from gpucoll.progress.operations import Operation
from gpucoll.transport.process import PROCESS

if TYPE_CHECKING:
    from gpucoll.communicator.lifecycle import Lifecycle

MESSAGE_WAITS = ("send", "recv", "sendrecv", "probe")  # the names of waits for messages between two ranks
TRANSPORT_CODES = ("GC-BACKEND", "GC-MEMORY")  # codes of errors of the transport: other ranks may be the reason
REASON = 100  # characters of an exception's text that are told to the other ranks

log: logging.Logger = logging.getLogger("gpucoll")


class BlockLeft(UsageError):
    """A `with` block was left by an exception."""


class Leaving:
    """The end of one communicator: `place` is where the program leaves, `awaited` the ranks awaited in `close`."""

    def __init__(self, life: Lifecycle) -> None:
        self._life, self._rank = life, life.link.place.rank
        self.place: str = ""
        self.awaited: Callable[[], set[int]] | None = None
        self._sent: Sent | None = None  # the farewell of a rank that closes
        self._away: Sent | None = None  # told here while the rank waits elsewhere, in `close` or `from_mpi`
        self._parts: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
        self._wholes: list[weakref.ref[Lifecycle]] = []  # the communicators of which this one is a part
        self._meetings = 0  # calls of `from_mpi` that all ranks of this communicator make
        life.guard.is_away, life.guard.is_closing = self._is_away, lambda: self.awaited is not None

    def leave_block(self, error: BaseException | None) -> None:
        """Fail if a `with` block was left by `error`: the other ranks may be elsewhere, and are not waited for."""
        if error is not None and self._life.waits.failure is None:
            self.place = inner_site(error.__traceback__)
            said = str(error).partition("\n")[0][:REASON]
            self._life.waits.failure = BlockLeft(f"its `with` block was left by {type(error).__name__}"
                                                 + (f": {said}" if said else ""))

    def farewell(self, failure: GpucollError | None, *, closes: bool = False) -> Farewell:
        """Return what this rank tells the others: that it closes, that its process ends, or how it has failed."""
        life, last = self._life, self._life.last_call(self._rank) or LastCall()
        before = f"after its call {last.number}" if last.number else "before its first call"
        has_closed = f"has closed the communicator {before}" + (f" ({self.place})" if self.place else "")
        culprits: tuple[int, ...] = ()
        if failure is None:
            why, words = (Why.CLOSES, has_closed) if closes else (Why.ENDS, f"{has_closed} by the end of its process")
        else:
            why = Why.LATE if isinstance(failure, CollectiveTimeout) else Why.FAILED
            # Other ranks' failures, and broken connections, are the fault of the ranks named. A transport error without
            # a name is nobody's known fault, and any other error this rank's own.
            is_caused = isinstance(failure, RankFailedError | CollectiveTimeout | BackendError) and failure.ranks
            is_open = failure.code in TRANSPORT_CODES
            culprits = failure.ranks if is_caused else () if is_open else (self._rank,)
            where = f"in {life.waits.name} {before}" if life.waits.name in MESSAGE_WAITS else \
                f"in its call {last.number}" if last.number and not last.has_ended else before
            said = str(failure).partition("\n")[0].removesuffix("; close this communicator")
            words = f"has failed {where}: {said}"
            if isinstance(failure, BlockLeft):
                words = f"{has_closed}: {failure.args[0]}"
        call, _, first = last.text.partition("\n")
        if call:
            words += f"; that call was {described(call)}" + (f", first made at {first}" if first else "")
        position, (refused_at, refused) = life.position(), life.refused
        return Farewell(why, culprits, *position, refused if position == refused_at else 0, words)

    def tell(self, failure: GpucollError | None) -> None:
        """Say farewell to the living ranks after a failure, or at the end of the process; wait for nothing."""
        sent = self._life.link.tell(self._living(), self.farewell(failure))
        if sent is not None:
            sent.abandon()

    def _living(self) -> list[int]:
        """Return the other ranks, after a failure without the dead ones: MPI may crash in a send to a dead rank."""
        link, failure = self._life.link, self._life.waits.failure
        others = {*range(link.place.size)} - {self._rank}
        if failure is None:
            return sorted(others)
        # A rank that has said farewell lives, and is told what its end has caused.
        with contextlib.suppress(BackendError):  # the process with the store may have ended
            self._life.guard.hear()
        lost = {*failure.ranks} - self._life.guard.left.keys() if isinstance(failure, RankFailedError) else set()
        return sorted(others - lost - {*link.processes.ended()})

    def add(self, part: Lifecycle) -> None:
        """Remember a part of this communicator, made by `split`; its ranks are told when this rank closes the whole."""
        # A program may drop the communicators in between.
        part.leaving._wholes = [*self._wholes, weakref.ref(self._life)]
        for whole in part.leaving._living_wholes():
            whole.leaving._parts.add(part)

    def _is_away(self, farewell: Farewell) -> bool:
        """Return whether the sender waits for this rank, in `from_mpi` or in `close` of a larger communicator."""
        if farewell.meeting:
            return self._meetings < farewell.meeting
        wholes = self._living_wholes()
        return bool(wholes) and not any(whole.closed for whole in wholes)

    def _living_wholes(self) -> list[Lifecycle]:
        return [whole for one in self._wholes if (whole := one()) is not None]

    def tell_parts(self, place: str) -> None:
        """Tell the ranks of all open parts that this rank waits in `close`, at `place`, and makes no call there."""
        for part in [*self._parts]:
            part.leaving._tell_away(f"has closed a communicator of which this one is a part ({place}),")

    def meet(self, place: str) -> None:
        """Tell the other ranks that this rank waits for them in `from_mpi`, at `place`."""
        self._meetings += 1
        self._tell_away(f"waits in from_mpi ({place}),", self._meetings)

    def _tell_away(self, does: str, meeting: int = 0) -> None:
        """Tell the other ranks that this rank makes no call here until they have come elsewhere, where it waits."""
        life, link = self._life, self._life.link
        # Another thread of this process, or a queued call, may still make calls of this communicator.
        *_, queued, _ = life.waits.gate()
        is_ours = not queued and {life.waits.thread, life.host.thread()} <= {0, threading.get_native_id()}
        if life.closed or life.is_forked or life.waits.failure is not None or link.has_ended() or not is_ours:
            return
        closes = self.farewell(None, closes=True)
        farewell = closes._replace(why=Why.AWAY, meeting=meeting, words=closes.words.replace(
            "has closed the communicator", does, 1))
        with contextlib.suppress(GpucollError, *link.foreign):
            self._away = link.tell(self._living(), farewell)

    def announce(self) -> None:
        """Tell the other ranks that this rank is about to close; do nothing after a failure, or between threads.

        For a program that closes several communicators: the other ranks may be in a call of the last one.
        """
        life = self._life
        if life.closed or life.is_forked or life.waits.failure is not None or not life.link.meets_to_close \
                or life.link.has_ended():
            return
        self.place = self.place or call_site()
        with contextlib.suppress(GpucollError):  # raised again by `close`
            life.waits.run(self._announcing(), "close")

    def _announcing(self) -> Operation:
        """Say farewell once this rank has no message under way: until then the others may still take part in it."""
        waits = self._life.waits
        if waits.has_messages:
            yield lambda: not waits.has_messages
        if self._sent is None:
            self._sent = self._life.link.tell(self._living(), self.farewell(None, closes=True))
            self.tell_parts(self.place)

    def _meeting(self) -> Operation:
        """Say farewell, and wait for the farewells of all other ranks."""
        yield from self._announcing()
        sent, guard, others = self._sent, self._life.guard, {*self._living()}
        assert sent is not None

        def awaited() -> set[int]:
            # The guard raises the failure of a rank: only farewells without a failure end this wait.
            guard.hear()
            return others - {rank for rank, one in guard.left.items() if one.why < Why.FAILED}

        self.awaited = awaited
        try:
            yield lambda: sent.has_ended() and not awaited()
        except BaseException:
            sent.abandon()
            raise

    def leave(self) -> tuple[bool, GpucollError | None]:
        """Leave in `close`; a failed rank tells, and does not wait.

        Return whether all ranks have come to `close` without failure, and the error of unlike numbers of calls.
        """
        life = self._life
        if life.link.has_ended():
            return False, None
        # A dead rank never comes to `close`: fail now, not at the deadline.
        if life.waits.failure is None and life.link.processes.ended():
            life.waits.failure = life.guard.cause()
        if life.waits.failure is not None:
            life.host.fail(life.waits.failure)
            life.abort()
            return False, None
        try:
            # A deferred comparison may still be under way: judge it first, since no later call will.
            if life.preflight is not None:
                life.waits.run(life.preflight.settled(), "close")
            life.waits.run(self._meeting(), "close")
        except GpucollError as error:
            life.devices_have_ended(awaited=False)
            self._warn(error)
            return False, None
        finally:
            self.awaited = None
        if any(one.why != Why.CLOSES for one in life.guard.left.values()):
            return False, None  # a process has ended without `close`
        return life.devices_have_ended(), self.told_by_closed(self.farewell(None, closes=True))

    def _warn(self, error: GpucollError) -> None:
        """Say why not all ranks come to `close`.

        No error: a rank may leave on purpose, and the others may go on without it by `shrink`.
        """
        blaming = [(rank, one) for rank, one in self._life.guard.left.items() if self._rank in one.culprits]
        why = f"but {named(blaming)}" if blaming else f"without the other ranks: {error}"
        log.warning("rank %d %s, %s", self._rank, self.farewell(None, closes=True).words, why)

    def told_by_closed(self, mine: Farewell) -> GpucollError | None:
        """Return the error of `close` if a rank has closed after fewer or more calls than this rank."""
        others = [(rank, one) for rank, one in self._life.guard.left.items()
                  if one.why == Why.CLOSES and not (one.has_made(mine) and mine.has_made(one))]
        return MismatchError(f"close: this rank {mine.words}, but {named(others)}", code="GC-COLLECTIVE",
                             ranks=tuple(sorted(rank for rank, _ in others))) if others else None


def close_together(lives: Sequence[Lifecycle]) -> None:
    """Close communicators with the same ranks, all of them in any case; raise the first error.

    The other ranks are told of all ends before this rank waits for any, and a failure in one ends the wait in another.
    """
    errors, well = list[GpucollError](), [life for life in lives if life.waits.failure is None]
    for life in lives:
        # A failure from before was raised then, and ends nothing here.
        life.waits.hooks += [other.check_others for other in well if other is not life]
        life.leaving.announce()
    for life in lives:
        try:
            life.close()
        except GpucollError as error:
            errors.append(error)
    if errors:
        raise errors[0]


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
