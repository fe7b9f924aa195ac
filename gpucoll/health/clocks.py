"""The clocks of several hosts: by how much this process' clock differs from the clock of rank 0, by exchanged times.

A rank and rank 0 exchange their times again and again. Rank 0 reads a time between the departure of one message of the
rank and the arrival of the next message there, so the middle of both is wrong by at most half the time in between. The
shortest counts. Source: F. Cristian, "Probabilistic clock synchronization", 1989.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gpucoll.progress.operations import Operation
from gpucoll.transport.control import exchange

EXCHANGES = 11


class ClockOffset(NamedTuple):
    """Nanoseconds to add to this process' clock for the time of rank 0, and the largest error of the sum."""

    nanoseconds: int = 0
    error: int = 0


ONE_CLOCK = ClockOffset()
_own: ClockOffset | None = None  # measured by the first communicator on several hosts; later communicators keep it


def now() -> int:
    """Return this host's time in nanoseconds since 1970."""
    return time.time_ns()


def align(link: Any, run: Callable[[Operation, str], None]) -> ClockOffset:
    """Return this process' offset to rank 0 of `link`; `run` waits for an operation with a deadline.

    A collective call; without messages if the ranks are threads, or all on one host.
    """
    global _own
    rank, nodes, mpi, wire = link.place.rank, link.place.nodes, link.mpi, link.wire
    if mpi is None or max(nodes) == 0:
        return _own or ONE_CLOCK
    # A store gathers plain lists.
    known = [offset and ClockOffset(*offset) for offset in mpi.allgather(_own)]
    if not all(known):
        # Without an offset of rank 0 all hosts begin anew, relative to rank 0. The first rank of each host measures for
        # all its ranks, one host after the other.
        origin, first = known[0] or ONE_CLOCK, nodes.index(nodes[rank])
        found = [origin]
        for other in sorted({*map(nodes.index, nodes)} - {0}):
            if rank in (0, other):
                run(_compared(wire, rank, other, 0 if rank else origin.nanoseconds, found), "clocks")
        measured = ClockOffset(*mpi.allgather(found[0])[first])
        _own = measured._replace(error=measured.error + origin.error) if first else origin
    return _own or ONE_CLOCK


def _compared(wire: Any, rank: int, other: int, offset: int, found: list[ClockOffset]) -> Operation:
    """Exchange times between rank 0, whose clock has this `offset`, and another; put the other rank's into `found`."""
    times = []
    for _ in range(EXCHANGES):
        before = now()
        (there, *_), _ = yield from exchange(wire, rank, (0, other), [before + offset])
        times.append((before, there, now()))
    # Rank 0 sends a time once the message before has come: after the departure of that one here.
    offsets = [ClockOffset(there - (before + after) // 2, (after - before + 1) // 2)
               for (before, *_), (_, there, after) in itertools.pairwise(times)]
    if rank:
        found[0] = min(offsets, key=lambda one: one.error)
