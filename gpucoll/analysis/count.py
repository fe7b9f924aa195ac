"""Count what a schedule really costs: the figures that an algorithm's formulas promise.

A round ends for a rank one message after the later of both ends began it; messages of one
round from one rank to another share their link, all others have one of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy

from gpucoll.algorithms import all_ranks, schedule
from gpucoll.analysis.replay import replay
from gpucoll.collectives import collective as collective_row
from gpucoll.schedule import Recv, RecvReduce, Reduce, Round, Send

FEW = 16  # ranks up to which every rank's own schedule is counted


class Counts(NamedTuple):
    """The fields of `gpucoll.algorithms.Cost`, counted; bytes are shares of the larger of input and output."""

    rounds: int
    path: Fraction
    sent: Fraction
    received: Fraction
    reduced: Fraction


def count(collective: str, algorithm: str, size: int, *, root: int = 0, segments: int = 1,
          nodes: Sequence[int] | None = None) -> Counts:
    """Return the counted costs of a schedule whose chunks are all equally long.

    >>> counts = count("all_reduce", "ring", 4)
    >>> counts.rounds, str(counts.sent)
    (6, '3/2')
    """
    collective_row(collective)
    together = all_ranks(collective, algorithm, size=size, segments=segments) if size > FEW and nodes is None else None
    if together is not None:
        return _count_at_once(together, size, Fraction(1, together.chunks))
    schedules = [schedule(collective, algorithm, rank=rank, size=size, root=root, segments=segments, nodes=nodes)
                 for rank in range(size)]
    ledger = _Ledger(size)
    replay(schedules, ledger)
    share = Fraction(1, schedules[0].chunks)
    totals = [max(column) for column in zip(*ledger.moved, strict=True)]
    return Counts(max(ledger.depth), max(ledger.length) * share, *(total * share for total in totals))


def _count_at_once(rounds: Iterable[Round], size: int, share: Fraction) -> Counts:
    """Count what all ranks do, made at once: they take their rounds in step."""
    depth, length, ranks = numpy.zeros(size, int), numpy.zeros(size, int), numpy.arange(size)
    moved = numpy.zeros((3, size), int)  # sent, received, reduced
    for steps in rounds:
        chunks = numpy.full(size * size, -1)  # by sender and receiver; -1 where no message is
        for step in steps:
            if isinstance(step, Send):
                count, pairs = numpy.broadcast_to(step.src.count, size), ranks * size + step.peer
                there = (count > 0) | (numpy.ndim(step.src.count) == 0)
                chunks[pairs[there]] = numpy.maximum(chunks[pairs[there]], 0) + count[there]
                moved[0] += count
            moved[1] += step.dst.count if isinstance(step, Recv | RecvReduce) else 0
            moved[2] += step.dst.count if isinstance(step, Reduce | RecvReduce) else 0
        sender, receiver = numpy.divmod(numpy.flatnonzero(chunks >= 0), size)
        ends = [(depth, 1), (length, chunks[chunks >= 0])]
        depth, length = (_later(before, sender, receiver, more) for before, more in ends)
    totals = (int(row.max()) * share for row in moved)
    return Counts(int(depth.max()), int(length.max()) * share, *totals)


def _later(before: Any, sender: Any, receiver: Any, more: Any) -> Any:
    """Return how far every rank is after its messages, each `more` after the later of its ends began."""
    after, ends = before.copy(), numpy.maximum(before[sender], before[receiver]) + more
    numpy.maximum.at(after, sender, ends)
    numpy.maximum.at(after, receiver, ends)
    return after


class _Ledger:
    """Adds up, in chunks, where ranks take their rounds as they come."""

    def __init__(self, size: int) -> None:
        self.depth, self.length = [0] * size, [0] * size
        self.moved = [[0, 0, 0] for _ in range(size)]  # sent, received, reduced
        self._ends: list[tuple[int, int]] = [(0, 0)] * size
        self._steps: list[Round] = [()] * size

    def begin(self, rank: int, steps: Round) -> None:
        self._steps[rank], self._ends[rank] = steps, (self.depth[rank], self.length[rank])
        for step in steps:
            self.moved[rank][0] += step.src.count if isinstance(step, Send) else 0
            self.moved[rank][1] += step.dst.count if isinstance(step, Recv | RecvReduce) else 0
            self.moved[rank][2] += step.dst.count if isinstance(step, Reduce | RecvReduce) else 0

    def meet(self, sender: int, sent: int, receiver: int, received: int) -> None:
        chunks = self._chunks_between(sender, receiver)
        depth = max(self.depth[sender], self.depth[receiver]) + 1
        length = max(self.length[sender], self.length[receiver]) + chunks
        for rank in (sender, receiver):
            self._ends[rank] = (max(self._ends[rank][0], depth), max(self._ends[rank][1], length))

    def _chunks_between(self, sender: int, receiver: int) -> int:
        """The messages of a round from one rank to another share their link."""
        return sum(step.src.count for step in self._steps[sender] if isinstance(step, Send) and step.peer == receiver)

    def finish(self, rank: int) -> None:
        self.depth[rank], self.length[rank] = self._ends[rank]
