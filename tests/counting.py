"""Count what a schedule really costs: the figures that an algorithm's formulas promise.

A round ends for a rank one message after the later of both ends began it; messages of one
round from one rank to another share their link, all others have one of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from gpucoll.algorithms import schedule
from gpucoll.analysis.replay import replay
from gpucoll.schedule import Recv, RecvReduce, Reduce, Round, Send


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
    schedules = [schedule(collective, algorithm, rank=rank, size=size, root=root, segments=segments, nodes=nodes)
                 for rank in range(size)]
    ledger = _Ledger(size)
    replay(schedules, ledger)
    share = Fraction(1, schedules[0].chunks)
    totals = [max(column) for column in zip(*ledger.moved, strict=True)]
    return Counts(max(ledger.depth), max(ledger.length) * share, *(total * share for total in totals))


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
