"""Count the real costs of a schedule: the figures promised by an algorithm's formulas."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from gpucoll.algorithms import schedule
from gpucoll.verify.symbolic import replay
from gpucoll.verify.user import Ledger


class Counts(NamedTuple):
    """The counted fields of `gpucoll.algorithms.Cost`; bytes are shares of the larger of input and output."""

    rounds: Fraction
    path: Fraction
    sent: Fraction
    received: Fraction
    reduced: Fraction


def count(collective: str, algorithm: str, size: int, *, root: int = 0, segments: int = 1,
          nodes: Sequence[int] | None = None) -> Counts:
    """Return the counted costs of a schedule with chunks of equal length.

    >>> counts = count("all_reduce", "ring", 4)
    >>> str(counts.rounds), str(counts.sent)
    ('6', '3/2')
    """
    schedules = [schedule(collective, algorithm, rank=rank, size=size, root=root, segments=segments, nodes=nodes)
                 for rank in range(size)]
    ledger = Ledger(size)
    replay(schedules, ledger)
    costs = ledger.costs(schedules[0].chunks)
    return Counts(*(costs[field] for field in Counts._fields))
