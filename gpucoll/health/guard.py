"""The guard of a wait: raises an error soon after an awaited rank dies or aborts, and names ranks at the deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

from gpucoll.core.signature import described
from gpucoll.errors import BackendError, CollectiveTimeout, RankFailedError
from gpucoll.health.processes import WAITS, Processes
from gpucoll.health.remote import REPORT_INTERVAL

# Reasons of an abort, sent as one integer: the process ENDS, the rank has FAILED, its wait was LATE. FAILED_BY + r says
# that rank r's failure was the reason. Numbers below 0 name the rank awaited in vain: see `late_for`.
ENDS, FAILED, LATE, FAILED_BY = range(4)
# Seconds between two checks: each check polls process descriptors and receives abort messages, too dear for every poll.
LOOK = 0.05
# Seconds for which a dead or aborted rank is still awaited: its last messages may be on their way. LONG_GRACE applies
# if the executor does not know which ranks are awaited, because the dead rank may not matter to this call.
GRACE, LONG_GRACE = 0.1, 0.5
# The kernel frees a dying process' memory before it reports the end of the process. A failed access to a peer's memory
# therefore waits this many seconds, at most, for the report.
LEAVES = 1.0
SLOW = 10.0  # seconds of a wait before a warning names the awaited ranks, and between two warnings

log = logging.getLogger("gpucoll")


def late_for(rank: int) -> int:
    """Return the abort reason, below 0, of a rank that awaited `rank` until its deadline; also the inverse mapping."""
    return -1 - rank


class Guard:
    """The guard of one communicator. Its `check` is a hook, called between the polls of every wait.

    `awaited` returns the ranks awaited by the current call, or None if the executor cannot tell. `progress` returns the
    number and the description of each rank's last call, as far as known. `aborted` returns the ranks that will take
    part in no further call without having closed the communicator, each with the reason (see ENDS). `since` returns
    the start time of the current wait.
    """

    def __init__(self, rank: int, processes: Processes, awaited: Callable[[], Collection[int] | None],
                 progress: Callable[[], Mapping[int, tuple[int, str]]], aborted: Callable[[], Mapping[int, int]],
                 since: Callable[[], float]) -> None:
        self._rank, self._processes = rank, processes
        self._awaited, self._progress, self._aborted, self._since = awaited, progress, aborted, since
        self._gone: dict[int, int] = {}  # the aborted ranks, and the reasons
        self._missed: dict[int, float] = {}  # dead or aborted ranks that are awaited, and since when
        self._last = self._began = self._warned = 0.0

    def check(self) -> None:
        """Raise RankFailedError if an awaited rank has died or aborted, CollectiveTimeout if another rank timed out."""
        now = time.monotonic()
        if now < self._last + LOOK:
            return
        self._last = now
        began = self._since()
        if began != self._began:  # a new wait has begun: the grace periods start again
            self._missed.clear()
            self._began = self._warned = began
        # Report long waits to rank 0. At a deadline, the ranks without a report are the culprits.
        watch = self._processes.watch
        if watch is not None and now > began + REPORT_INTERVAL:
            watch.report(self._mine())
        ended = self._processes.ended()
        try:
            self._gone.update(self._aborted())
        except BackendError as error:
            # The store of the messages can be gone before the end of its process is visible.
            found = self.cause()
            if found is None:
                raise
            raise found from error
        if not ended and not self._gone:
            self._warn(now)
            return
        # A rank that has ended matters only if this call awaits the rank; if the awaited ranks are unknown, every dead
        # process matters. A rank that failed or timed out always matters: its failure revokes the communicator for all.
        awaited = self._awaited()
        missed = set(ended) if awaited is None else (self._gone.keys() | set(ended)) & set(awaited)
        missed |= {rank for rank, why in self._gone.items() if why != ENDS}
        self._missed = {rank: self._missed.get(rank, now) for rank in missed}
        late = sorted(rank for rank, since in self._missed.items()
                      if now - since > (LONG_GRACE if awaited is None else GRACE))
        if late:
            # A timeout on another rank is reported as a timeout here, with the ranks named by that rank. Otherwise name
            # the ranks whose failure made the late ranks abort (FAILED_BY), or else the late ranks themselves.
            reasons = {self._gone.get(rank, ENDS) for rank in late}
            if any(why == LATE or why < 0 for why in reasons):
                stories = "; ".join(map(self.describe, late))
                raise CollectiveTimeout(f"ranks {late} have waited until their deadlines: {stories}",
                                        ranks=tuple(sorted(late_for(why) for why in reasons if why < 0))
                                        or self.blame()[1])
            raise self._failed({max(self._gone.get(rank, 0) - FAILED_BY, -1) for rank in late} - {-1} or late)

    def _failed(self, ranks: Collection[int]) -> RankFailedError:
        stories = "; ".join(map(self.describe, sorted(ranks)))
        return RankFailedError(f"{stories}; close this communicator", ranks=tuple(sorted(ranks)))

    def cause(self) -> RankFailedError | None:
        """Return the error to raise instead of a transport error if processes have died without an abort message.

        Waits up to LEAVES seconds: the memory of a dying process is out of reach before its end is visible.
        """
        ended = set(self._processes.ended(LEAVES)) - self._gone.keys()
        return self._failed(ended) if ended else None

    def _warn(self, now: float) -> None:
        if now > self._warned + SLOW:
            self._warned = now
            reasons, _ = self.blame()
            log.warning("rank %d has waited for %.0f s%s", self._rank, now - self._began,
                        f": {reasons}" if reasons else "")

    def _mine(self) -> int:
        """Return the number of this rank's last call, 0 before the first."""
        return self._progress().get(self._rank, (0, ""))[0]

    def describe(self, rank: int) -> str:
        """Return a description of a rank for error messages: process, state and last call, as far as known."""
        state, last = self._processes.state(rank), self._progress().get(rank)
        process = self._processes.numbers.get(rank)
        parts = [f"rank {rank}"]
        if process is not None:
            parts.append(f"(process {process})")
        unknown = "has left" if rank in self._gone else "is silent" if process is None else "runs"
        parts.append({"dead": "has ended", "": unknown}.get(state, f"is {state}"))
        if last is not None:
            number, description = last
            parts.append(f"in its call {number}, {described(description)}" if number else "before its first call")
        return " ".join(parts)

    def blame(self) -> tuple[str, tuple[int, ...]]:
        """Return the ranks to blame for a late wait: a sentence, and the numbers of the ranks.

        These are the ranks that have made fewer calls than this rank, or else the awaited ranks. Stopped processes are
        always blamed. For ranks on several hosts, ranks that report no wait to rank 0 count as behind.
        """
        mine, watch = self._mine(), self._processes.watch
        behind = None if watch is None else watch.silent(mine)
        if behind is None:
            behind = {rank for rank, (number, _) in self._progress().items() if number < mine}
        ranks = behind or set(self._awaited() or ()) - {self._rank}
        ranks |= {rank for rank in self._processes.numbers
                  if rank != self._rank and self._processes.state(rank) not in ("", WAITS)}
        return "; ".join(map(self.describe, sorted(ranks))), tuple(sorted(ranks))


