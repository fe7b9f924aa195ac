"""The guard of a wait: raises an error soon after a rank leaves, dies or fails, and names ranks at the deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from gpucoll.core.signature import LastCall
from gpucoll.errors import BackendError, CollectiveTimeout, GpucollError, RankFailedError
from gpucoll.health.farewell import Farewell, Why, named
from gpucoll.health.processes import DEVICE_WAIT, LOOK_INTERVAL, Processes
from gpucoll.health.remote import REPORT_INTERVAL

# Seconds for which a rank that has left is still awaited: its last messages may be on their way. DEAD_TIME applies to
# a dead rank if this call is not known to await it: the rank may have made the call before its death.
LEFT_TIME, DEAD_TIME = 0.1, 0.5
# The kernel frees a dying process' memory before it reports the end of the process. A failed access to a peer's memory
# therefore waits this many seconds, at most, for the report.
REPORT_TIMEOUT = 1.0
# Seconds for which a rank that sees another rank's failure waits for the farewell with the cause. The failed rank may
# itself have to find out whether a third rank has died.
TOLD = 3.0
SLOW = 10.0  # seconds of a wait before a warning names the awaited ranks, and between two warnings
# Seconds between two checks from which this process has been stopped, and not just waited for a core.
FROZEN = 5.0

log: logging.Logger = logging.getLogger("gpucoll")


class Guard:
    """The guard of one communicator. Its `check` is a hook, called between the polls of every wait.

    `awaited` returns the ranks awaited by the current call, or None if the executor cannot tell. `progress` returns the
    last call of each rank, counted like the calls of this rank, and `last` the last call of one rank, however counted.
    `farewells` returns the ranks that have left, `position` the numbers of calls made by this rank, as in a farewell.
    `since` returns the start time of the current wait, `needs_all` whether it is in a call of all ranks. `messages`
    returns in words the messages that a rank is known to wait for, `shown` the rank blamed by a rank in shared memory.
    """

    def __init__(self, rank: int, processes: Processes, awaited: Callable[[], Collection[int] | None],
                 progress: Callable[[], Mapping[int, LastCall]], farewells: Callable[[], Mapping[int, Farewell]],
                 since: Callable[[], float], *, position: Callable[[], tuple[int, int]] = lambda: (0, 0),
                 last: Callable[[int], LastCall | None] = lambda rank: None,
                 needs_all: Callable[[], bool] = lambda: True, messages: Callable[[int], str] = lambda rank: "",
                 shown: Callable[[int], int | None] = lambda rank: None) -> None:
        self._rank, self._processes = rank, processes
        self._awaited, self._progress, self._farewells, self._since = awaited, progress, farewells, since
        self._position, self._last, self._messages = position, last, messages
        self._needs_all, self._shown = needs_all, shown
        self.left: dict[int, Farewell] = {}  # the farewells heard so far
        # Ranks that wait elsewhere for this rank, in `close` of a larger communicator or in `from_mpi`; `is_away`
        # returns whether this rank has yet to come there.
        self._away: dict[int, Farewell] = {}
        self.is_away: Callable[[Farewell], bool] = lambda farewell: False
        self.is_closing: Callable[[], bool] = lambda: False  # whether this rank waits in `close`
        self._missed: dict[int, float] = {}  # ranks that have left or died and are awaited, and since when
        self._looked = self._began = self._warned = 0.0
        self._frozen = 0.0  # seconds for which this process was stopped in the current wait

    def check(self, *, meets: bool = False) -> None:
        """Raise RankFailedError if an awaited rank has left or failed, CollectiveTimeout if another rank timed out.

        With `meets` the wait is for all other ranks, outside of calls.
        """
        now = time.monotonic()
        if now < self._looked + LOOK_INTERVAL:
            return
        began = self._since()
        if began != self._began:  # a new wait has begun: the grace periods start again
            self._missed.clear()
            self._began = self._warned = began
            self._frozen = 0.0
            if now < began + LOOK_INTERVAL and not meets:  # most waits are over before the first look
                self._looked = now
                return
        elif self._looked and now > self._looked + FROZEN:
            self._frozen = now - self._looked
        self._looked = now
        # Report long waits to rank 0. At a deadline, the ranks without a report are the culprits.
        watch = self._processes.watch
        if watch is not None and began and now > began + REPORT_INTERVAL:
            watch.report(self._mine())
        ended = self._processes.ended()
        try:
            self.hear()
        except BackendError as error:
            # The store of the messages can be gone before the end of its process is visible.
            found = self.cause()
            if found is None:
                raise
            raise found from error
        # A rank that waits elsewhere until this rank comes makes no call of this communicator.
        away = [rank for rank, one in self._away.items()
                if rank not in self.left and self.lacks(one) and self.is_away(one)]
        if away:
            raise self._failed(away)
        if ended or self.left:
            self._judge(now, ended, {*ended, *self.left} if meets else self._awaited())
        self._warn(now)

    def hear(self) -> None:
        """Take the farewells that have arrived."""
        for rank, farewell in [*self._farewells().items()]:  # another thread may look too
            (self._away if farewell.why == Why.AWAY else self.left)[rank] = farewell

    def _judge(self, now: float, ended: Collection[int], awaited: Collection[int] | None) -> None:
        """Raise the error of a wait that cannot end, because of the ranks that have `ended` or said farewell."""
        for rank, farewell in self.left.items():
            if farewell.why >= Why.FAILED:  # the failure revokes the communicator for all
                self._missed.setdefault(rank, now)
            # In `close` unlike numbers of calls are judged once all ranks have come.
            elif self.lacks(farewell) and not self.is_closing():
                raise self._failed([one for one in self.left if self.lacks(self.left[one])])
        for rank in {*ended, *self.left}:
            # A rank that has closed, or ended in order, has made this call, and matters only where this rank awaits it,
            # as in a message. Of a rank that died and told nothing the last call is unknown: its death matters in any
            # call of all ranks.
            if awaited is not None and rank in awaited:
                self._missed.setdefault(rank, now)
            elif rank not in self.left and self._needs_all() and not self._has_made_this_call(rank):
                self._missed.setdefault(rank, now + DEAD_TIME - LEFT_TIME)
        late = sorted(rank for rank, since in self._missed.items() if now - since > LEFT_TIME)
        if late:
            raise self._error_of(late)

    def lacks(self, farewell: Farewell) -> bool:
        """Return whether a rank has left without a call that this rank has begun."""
        calls, device_calls = self._position()
        return farewell.calls < calls or farewell.device_calls < device_calls

    def _has_made_this_call(self, rank: int) -> bool:
        """Return whether a rank is known to have ended the call that this rank is in."""
        last = self._progress().get(rank)
        return last is not None and last.has_ended is True and last.number >= self._mine()

    def _error_of(self, late: Collection[int]) -> GpucollError:
        """Return the error for ranks that have failed, died, or left with a message to this rank unsent.

        A timeout on another rank is a timeout here, with the ranks named by that rank. Otherwise the error names the
        ranks blamed by the late ranks, or else the late ranks themselves.
        """
        told = {rank: one for rank, one in self.left.items() if rank in late}
        blamed = [rank for one in told.values() if one.why >= Why.FAILED for rank in one.culprits]
        blamed += [one for one in map(self._shown, sorted({*late} - told.keys())) if one is not None]
        # A process that was stopped believes no rank that has ended meanwhile, unless the rank had a reason of its own.
        fails_alone = any(one.culprits == (rank,) for rank, one in told.items())
        if self._rank in blamed or (self._frozen and not fails_alone):
            return self._own_fault(told)
        timeouts = [(rank, one) for rank, one in told.items() if one.why == Why.LATE]
        if timeouts:
            return CollectiveTimeout(f"another rank has waited until its deadline: {named(timeouts)}",
                                     ranks=tuple(sorted({*blamed})) or self.blame()[1])
        return self._failed(self._first(late, blamed), told)

    def _own_fault(self, told: Mapping[int, Farewell]) -> GpucollError:
        """Return the error on a rank that the other ranks have given up."""
        why = f"did not run for {self._frozen:.0f} s: its process or its host was stopped" if self._frozen \
            else "is blamed by other ranks"
        says = f"; {named(sorted(told.items()))}" if told else ""
        return RankFailedError(f"this rank, {self._rank}, {why}{says}; close this communicator", ranks=(self._rank,))

    def _first(self, late: Collection[int], blamed: Sequence[int]) -> Sequence[int]:
        """Return the late ranks to be named: of several deaths the first, because the others may follow from it."""
        dead = [rank for rank in self._processes.ended()
                if rank in blamed or (rank in self._missed and rank not in self.left)]
        return dead[:1] or blamed[:1] or sorted(late)

    def _failed(self, ranks: Collection[int], told: Mapping[int, Farewell] | None = None) -> RankFailedError:
        stories = [self.describe(rank) for rank in sorted(ranks)]
        # The words of a rank that blames another rank: they have what the blamed rank cannot tell.
        stories += [f"rank {rank} {one.words}" for rank, one in (told or {}).items() if rank not in ranks and one.words]
        return RankFailedError(f"{'; '.join(stories)}; close this communicator", ranks=tuple(sorted(ranks)))

    def told(self, rank: int) -> GpucollError | None:
        """Return the error for the failure that `rank` has shown; wait at most TOLD seconds for its farewell.

        None without a farewell. Runs while a call ends, so no hook may run here.
        """
        deadline = time.monotonic() + TOLD
        while True:
            is_over = rank in self._processes.ended() or time.monotonic() > deadline
            self.hear()
            farewell = self.left.get(rank)
            if farewell is not None and farewell.why != Why.CLOSES:
                return self._error_of([rank])
            if is_over:
                return None
            time.sleep(1e-3)

    def cause(self) -> RankFailedError | None:
        """Return the error to raise instead of a transport error if processes have died without a farewell.

        Waits up to REPORT_TIMEOUT seconds: the memory of a dying process is out of reach before its end is visible.
        """
        ended = [rank for rank in self._processes.ended(REPORT_TIMEOUT) if rank not in self.left]
        return self._failed(ended[:1]) if ended else None

    def _warn(self, now: float) -> None:
        if self._began and now > self._warned + SLOW:
            self._warned = now
            reasons, _ = self.blame()
            log.warning("rank %d has waited for %.0f s%s", self._rank, now - self._began,
                        f": {reasons}" if reasons else "")

    def _mine(self) -> int:
        """Return the number of this rank's last call, 0 before the first."""
        return self._progress().get(self._rank, LastCall()).number

    def describe(self, rank: int) -> str:
        """Return a description of a rank for error messages: process, state and last call, as far as known."""
        farewell, process, last = self.left.get(rank), self._processes.numbers.get(rank), self._last(rank)
        if farewell is None and rank in self._away and self.is_away(self._away[rank]):
            farewell = self._away[rank]
        name = f"rank {rank}" if process is None else f"rank {rank} (process {process})"
        if farewell is not None and farewell.words:
            return f"{name} {farewell.words}"
        state = self._processes.state(rank)
        messages = "" if state else self._messages(rank)
        return f"{name} {messages or _doing({'dead': 'has ended'}.get(state, f'is {state}' if state else ''), last)}"

    def blame(self) -> tuple[str, tuple[int, ...]]:
        """Return the ranks to blame for a late wait: a sentence, and the numbers of the ranks.

        These are the ranks that have made fewer calls than this rank, or else the awaited ranks. Ranks that wait in an
        earlier call are not blamed beside ranks that wait in none. Stopped processes are always blamed. For ranks on
        several hosts, ranks that report no wait to rank 0 count as behind.
        """
        mine, watch = self._mine(), self._processes.watch
        silent = None if watch is None else watch.silent(mine)
        fewer = {rank: last.has_ended is False for rank, last in self._progress().items() if last.number < mine}
        behind = {rank for rank, waits in fewer.items() if not waits} or {*fewer} if silent is None else silent
        here = {rank for rank, last in self._progress().items() if mine and last.number >= mine} | {self._rank}
        awaited = set(self._awaited() or ())
        ranks = behind or awaited - here or awaited - {self._rank}
        # A death ends a wait long before its deadline: a rank that is dead now has ended after its own deadline, if
        # another rank is to blame.
        innocent = ("", DEVICE_WAIT, "dead") if ranks else ("", DEVICE_WAIT)
        ranks |= {rank for rank in self._processes.numbers
                  if rank != self._rank and self._processes.state(rank) not in innocent}
        # A rank that has ended after a failure has shown which rank is to blame, where its farewell has not come.
        shown = {rank: self._shown(rank) for rank in self._processes.ended() if rank in ranks}
        ranks = {one for rank in ranks if (one := rank if shown.get(rank) is None else shown[rank]) is not None}
        return "; ".join(map(self.describe, sorted(ranks))), tuple(sorted(ranks))


def _doing(state: str, last: LastCall | None) -> str:
    """Return in words what a rank does; `state` is what the system says of its process, "" if the process runs.

    >>> _doing("", LastCall(3, has_ended=True)), _doing("", LastCall(3, has_ended=False)), _doing("has ended", None)
    ('computes since its call 3', 'is in its call 3', 'has ended')
    """
    if last is None:
        return state or "is silent"
    if last.number == 0:
        return f"{state} before its first call" if state else "has made no call"
    seconds = time.monotonic() - last.when
    ago = f", {seconds:.0f} s ago" if last.when and seconds >= 1 else ""
    if last.has_ended is None:
        return f"{state} after its {last.describe()}" if state else f"has made no call since its {last.describe()}{ago}"
    if last.has_ended:
        return f"{state} after its {last.describe()}" if state else f"computes since its {last.describe()}{ago}"
    return f"{state or 'is'} in its {last.describe()}"
