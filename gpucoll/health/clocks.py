"""The clocks of several hosts: by how much this process' clock differs from the clock of rank 0, by exchanged stamps.

A rank asks rank 0 for the time. Rank 0 answers between the question's departure and the answer's arrival, so the middle
of both is wrong by at most half the time in between. Of several questions the shortest counts. Source: F. Cristian,
"Probabilistic clock synchronization", 1989.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.progress.operations import Operation, keep_for_ever
from gpucoll.transport.tags import BYTES, Tag

QUESTIONS = 10


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
        # Without an offset of rank 0 all hosts begin anew, relative to rank 0. The first rank of each host asks for all
        # its ranks.
        origin, first = known[0] or ONE_CLOCK, nodes.index(nodes[rank])
        found = [origin]
        if rank == 0:
            run(_answers(wire, sorted({nodes.index(node) for node in nodes} - {0}), origin.nanoseconds), "clocks")
        elif rank == first:
            run(_questions(wire, found), "clocks")
        measured = ClockOffset(*mpi.allgather(found[0])[first])
        _own = measured._replace(error=measured.error + origin.error) if first else origin
    return _own or ONE_CLOCK


def _answers(wire: Any, ranks: Sequence[int], offset: int) -> Operation:
    stamp = numpy.zeros(1, numpy.int64)
    for rank in ranks:
        for _ in range(QUESTIONS):
            yield from _moved(wire.Irecv, stamp, rank)
            stamp[0] = now() + offset
            yield from _moved(wire.Isend, stamp, rank)


def _questions(wire: Any, found: list[ClockOffset]) -> Operation:
    """Ask rank 0; put the offset by the shortest question into `found`."""
    stamp = numpy.zeros(1, numpy.int64)
    offsets = []
    for _ in range(QUESTIONS):
        before = now()
        yield from _moved(wire.Isend, stamp, 0)
        yield from _moved(wire.Irecv, stamp, 0)
        after = now()
        offsets.append(ClockOffset(int(stamp[0]) - (before + after) // 2, (after - before + 1) // 2))
    found[0] = min(offsets, key=lambda one: one.error)


def _moved(move: Callable[[Any, int, int], Any], stamp: numpy.ndarray, rank: int) -> Operation:
    request = move([stamp.view(numpy.uint8), BYTES], rank, Tag.HANDSHAKE)
    try:
        while not request.Test():
            yield request.Test
    except BaseException:
        keep_for_ever((stamp, request))  # MPI may still read or write the stamp
        raise
