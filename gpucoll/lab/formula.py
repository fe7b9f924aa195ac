"""The time of an algorithm by the model of alpha, beta and gamma, with the numbers put in; the bytes sent in total."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy

from gpucoll.errors import ArgumentError
from gpucoll.internal import Prediction, Send, Topology, all_ranks, find, schedule

MOST_COUNTED = 1024  # ranks whose schedules are counted for a total
FORMULA = "T = rounds a + max(path, sent, received) b + reduced g + gaps c"


def total_sent(collective: str, algorithm: str, size: int, segments: int = 1,
               nodes: Sequence[int] | None = None) -> Fraction | None:
    """Return the bytes sent by all ranks together, in units of the larger of input and output.

    None for more than `MOST_COUNTED` ranks.

    >>> print(*(total_sent("all_reduce", name, 4) for name in ("star", "ring", "tree")))
    6 6 6
    """
    if size > MOST_COUNTED:
        return None
    together = all_ranks(collective, algorithm, size=size, segments=segments) if nodes is None else None
    everyone = [together] if together is not None else [
        schedule(collective, algorithm, rank=rank, size=size, segments=segments, nodes=nodes) for rank in range(size)]
    ranks = size if together is not None else 1  # of whom each schedule tells
    sent = sum(int(numpy.broadcast_to(step.src.count, ranks).sum()) for one in everyone for steps in one
               for step in steps if isinstance(step, Send))
    return Fraction(sent, everyone[0].chunks)


def constants(topology: Topology) -> str:
    """Return the formula, and the constants of a switch of equal links; raise ArgumentError for other links."""
    if not topology.is_uniform:
        raise ArgumentError(f"the formula is for one switch of equal links, and {topology.name} has others: "
                            "`gpucoll simulate` replays the messages on any links", code="GC-TOPOLOGY")
    level = topology.levels[0]
    return (f"{FORMULA}; a = {1e6 * level.alpha:g} us, b = {1e9 * level.beta:g} ns and g = {1e9 * level.gamma:g} ns "
            f"for a byte, c = {1e6 * level.gap:g} us")


def by_formula(row: Prediction, topology: Topology) -> str:
    """Return the formula of a predicted time on one switch with the numbers put in: bytes, then microseconds.

    Ranks with unequal work may end later than by the formula: then the predicted time is added.

    >>> from gpucoll.simulator import shipped, simulate
    >>> by_formula(simulate("all_reduce", "ring", 8, 1 << 20), shipped("switch"))
    '14 a + 1835008 b + 917504 g = 28.00 + 183.50 + 18.35 = 229.85 us'
    """
    cost, level = find(row.collective, row.algorithm).price(row.ranks, row.nbytes, row.segments), topology.levels[0]
    moved = max(cost["path"], cost["sent"], cost["received"])
    terms = [(float(count), name, 1e6 * float(count) * each) for count, name, each in (
        (cost["rounds"], "a", level.alpha), (moved, "b", level.beta), (cost["reduced"], "g", level.gamma),
        (cost["gaps"], "c", level.gap)) if count or name == "a"]
    whole = sum(part for _, _, part in terms)
    later = "" if abs(1e6 * row.seconds - whole) < 0.01 else f", at least: replayed {1e6 * row.seconds:.2f}"
    return (f"{' + '.join(f'{count:.10g} {name}' for count, name, _ in terms)} = "
            f"{' + '.join(f'{part:.2f}' for _, _, part in terms)} = {whole:.2f} us{later}")
