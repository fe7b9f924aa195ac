"""A square for every pair of ranks: which links are slow is seen at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from gpucoll.analysis.sizes import byte_text

from .axes import WIDE, figure
from .canvas import Area, Path, Picture, Words
from .curves import Pair

# From little to much, lightness growing steadily: it reads in grey and for the colour-blind (matplotlib's viridis).
HEAT = ((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141), (39, 173, 129), (92, 200, 99),
        (170, 220, 50), (253, 231, 37))
SWITCH = 0.44  # of the way, from where on black is easier to read than white


def heat(share: float) -> str:
    """Return the colour of a share from 0 to 1, as #rrggbb."""
    place = min(max(share, 0.0), 1.0) * (len(HEAT) - 1)
    first = min(int(place), len(HEAT) - 2)
    channels = zip(HEAT[first], HEAT[first + 1], strict=True)
    return "#" + "".join(f"{round(low + (high - low) * (place - first)):02x}" for low, high in channels)


def pair_map(nbytes: int, found: Sequence[Pair], *, size: tuple[float, float] = WIDE) -> Picture:
    """Return a square for every pair of ranks: who sends down, who receives across; slow ones are framed."""
    ranks = max(max(pair.source, pair.target) for pair in found) + 1
    most = max(pair.bandwidth for pair in found) or 1.0
    left, top = 62.0, 56.0
    side = min((size[0] - left - 14) / ranks, 44.0) if size[0] < WIDE[0] else min(460.0 / ranks, 56.0)
    height = top + side * ranks + 74
    shapes: list[Any] = [Words(10, 18, f"bandwidth (GB/s), {byte_text(nbytes)}", "ink", 13, bold=True),
                         *_rank_numbers(ranks, side, left, top)]
    for pair in sorted(found, key=lambda pair: pair.slow):
        shapes += _cell(pair, most, (left + pair.target * side, top + pair.source * side), side)
    shapes += _heat_key(most, left, top + side * ranks + 30, any(pair.slow for pair in found))
    slow = [f"{pair.source} to {pair.target}" for pair in found if pair.slow]
    described = f"{ranks} ranks, at most {figure(most)} GB/s; slow: {', '.join(slow) or 'none'}"
    return Picture(size[0], height, f"sendrecv between pairs of ranks, {byte_text(nbytes)}", described, shapes)


def _rank_numbers(ranks: int, side: float, left: float, top: float) -> Iterable[Any]:
    every = max(1, math.ceil(22 / side))
    yield Words(left + ranks * side / 2, top - 22, "to rank", "muted", 12, "middle")
    yield Words(10, top + 11, "from", "muted", 12)
    yield Words(10, top + 25, "rank", "muted", 12)
    for rank in range(0, ranks, every):
        yield Words(left + (rank + 0.5) * side, top - 6, str(rank), "ink", 12, "middle")
        yield Words(left - 7, top + (rank + 0.5) * side + 4, str(rank), "ink", 12, "end")


def _cell(pair: Pair, most: float, corner: tuple[float, float], side: float) -> Iterable[Any]:
    x, y = corner
    share, gap = pair.bandwidth / most, min(1.0, side / 12)
    yield Area(_square(x + gap, y + gap, side - 2 * gap), heat(share))
    if side >= 30:
        ink = "#ffffff" if share < SWITCH else "#000000"
        yield Words(x + side / 2, y + side / 2 + 4, figure(pair.bandwidth), ink, 12 if side >= 40 else 10, "middle")
    if pair.slow:
        corners = _square(x + 1.5, y + 1.5, side - 3)
        yield Path((*corners, corners[0]), "bad", 3.0)


def _square(x: float, y: float, side: float) -> list[tuple[float, float]]:
    return [(x, y), (x + side, y), (x + side, y + side), (x, y + side)]


def _heat_key(most: float, left: float, top: float, slow: bool) -> Iterable[Any]:
    steps, width = 40, 4.0
    for step in range(steps):
        x = left + step * width
        yield Area([(x, top), (x + width + 0.5, top), (x + width + 0.5, top + 10), (x, top + 10)], heat(step / steps))
    yield Words(left, top + 25, "0", "muted", 12)
    yield Words(left + steps * width, top + 25, figure(most), "muted", 12, "end")
    if slow:
        corners = _square(left + steps * width + 20, top - 2, 13)
        yield Path((*corners, corners[0]), "bad", 3.0)
        yield Words(left + steps * width + 39, top + 9, "slow link", "ink", 12)
