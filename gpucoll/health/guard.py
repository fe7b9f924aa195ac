"""Looks after the other ranks while this one waits: who has died or aborted is told at once, who is late in the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

from gpucoll.core.signature import described
from gpucoll.errors import CollectiveTimeout, RankFailedError
from gpucoll.health.processes import WAITS, Processes
from gpucoll.health.remote import TELL

ENDS, FAILED, LATE, FAILED_BY = range(4)  # why a rank has aborted; FAILED_BY and the rank for another one's failure
LOOK = 0.05  # seconds between two looks
# Seconds for which one is still waited for that is gone: what it had sent may be on its way. Longer where nobody knows
# which ranks are waited for.
GRACE, LONG_GRACE = 0.1, 0.5
LEAVES = 1.0  # seconds between the end of a process' memory and its own, at most
SLOW = 10.0  # seconds of a wait after which a warning names whom it is for, and between two of them

log = logging.getLogger("gpucoll")


def late_for(rank: int) -> int:
    """Return the number below 0 that stands for a wait for `rank` until the deadline; of such a number, the rank."""
    return -1 - rank


class Guard:
    """One communicator's. `check` is a hook of its waits.

    `awaited` tells the ranks that are waited for, None where nobody knows; `progress` the number and the words of what
    each rank that shows its calls called last; `aborted` which go no further, not having closed, and why: they
    END, have FAILED, by themselves or FAILED_BY another one, or waited until their deadlines: LATE, or `late_for` the
    awaited rank. `since` tells when the wait began.
    """

    def __init__(self, rank: int, processes: Processes, awaited: Callable[[], Collection[int] | None],
                 progress: Callable[[], Mapping[int, tuple[int, str]]], aborted: Callable[[], Mapping[int, int]],
                 since: Callable[[], float]) -> None:
        self._rank, self._processes = rank, processes
        self._awaited, self._progress, self._aborted, self._since = awaited, progress, aborted, since
        self._gone: dict[int, int] = {}
        self._missed: dict[int, float] = {}  # since when ranks that are gone are waited for
        self._last = self._began = self._warned = 0.0

    def check(self) -> None:
        """Raise RankFailedError where a rank is waited for that has ended or aborted."""
        now = time.monotonic()
        if now < self._last + LOOK:
            return
        self._last = now
        began = self._since()
        if began != self._began:  # another wait
            self._missed.clear()
            self._began = self._warned = began
        watch = self._processes.watch
        if watch is not None and now > began + TELL:
            watch.tell(self._mine())
        ended = self._processes.ended()
        self._gone.update(self._aborted())
        if not ended and not self._gone:
            self._warn(now)
            return
        awaited = self._awaited()
        missed = set(ended) if awaited is None else (self._gone.keys() | set(ended)) & set(awaited)
        missed |= {rank for rank, why in self._gone.items() if why != ENDS}
        self._missed = {rank: self._missed.get(rank, now) for rank in missed}
        late = sorted(rank for rank, since in self._missed.items()
                      if now - since > (LONG_GRACE if awaited is None else GRACE))
        if late:
            reasons = {self._gone.get(rank, ENDS) for rank in late}
            if any(why == LATE or why < 0 for why in reasons):
                words = "; ".join(map(self.describe, late))
                raise CollectiveTimeout(f"ranks {late} have waited until their deadlines: {words}",
                                        ranks=tuple(sorted(late_for(why) for why in reasons if why < 0))
                                        or self.blame()[1])
            raise self._failed({max(self._gone.get(rank, 0) - FAILED_BY, -1) for rank in late} - {-1} or late)

    def _failed(self, ranks: Collection[int]) -> RankFailedError:
        words = "; ".join(map(self.describe, sorted(ranks)))
        return RankFailedError(f"{words}; close this communicator", ranks=tuple(sorted(ranks)))

    def cause(self) -> RankFailedError | None:
        """Return what is behind an error of the transport where processes have ended that had not told so.

        Their memory is out of reach some time before they have ended.
        """
        ended = set(self._processes.ended(LEAVES)) - self._gone.keys()
        return self._failed(ended) if ended else None

    def _warn(self, now: float) -> None:
        if now > self._warned + SLOW:
            self._warned = now
            words, _ = self.blame()
            log.warning("rank %d has waited for %.0f s%s", self._rank, now - self._began, f": {words}" if words else "")

    def _mine(self) -> int:
        """Return the number of this rank's last call."""
        return self._progress().get(self._rank, (0, ""))[0]

    def describe(self, rank: int) -> str:
        """Return in words what is known of a rank."""
        state, last = self._processes.state(rank), self._progress().get(rank)
        process = self._processes.numbers.get(rank)
        parts = [f"rank {rank}"]
        if process is not None:
            parts.append(f"(process {process})")
        unknown = "has left" if rank in self._gone else "is silent" if process is None else "runs"
        parts.append({"dead": "has ended", "": unknown}.get(state, f"is {state}"))
        if last is not None:
            number, words = last
            parts.append(f"in its call {number}, {described(words)}" if number else "before its first call")
        return " ".join(parts)

    def blame(self) -> tuple[str, tuple[int, ...]]:
        """Return in words who is waited for, and their ranks: those that have come less far, or else are waited for."""
        mine, watch = self._mine(), self._processes.watch
        behind = None if watch is None else watch.silent(mine)
        if behind is None:
            behind = {rank for rank, (number, _) in self._progress().items() if number < mine}
        ranks = behind or set(self._awaited() or ()) - {self._rank}
        ranks |= {rank for rank in self._processes.numbers
                  if rank != self._rank and self._processes.state(rank) not in ("", WAITS)}
        return "; ".join(map(self.describe, sorted(ranks))), tuple(sorted(ranks))


