"""`--plot F.svg`: time against ranks and time against size, a line per algorithm, with the crossovers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple, TypeAlias

from gpucoll.analysis.document import LIGHT, LINES, picture_file
from gpucoll.analysis.simulate import Prediction
from gpucoll.analysis.simulate.sweep import Crossover
from gpucoll.analysis.sizes import byte_text

Points: TypeAlias = list[tuple[float, float]]

DASHES = ("none", "7 3", "2 3")  # the second and the third time round the colours
INK, MUTED, GRID = (LIGHT[role] for role in ("ink", "muted", "grid"))
WIDTH, HEIGHT = 1080, 446
PANEL_WIDTH, TOP, BOTTOM = 380, 64, 410
LEFTS = (64, 520)
LEGEND = 924


class Panel(NamedTuple):
    """One pair of axes, both logarithmic: a line per name, ticks and marked places across."""

    title: str
    left: float
    lines: dict[str, Points]
    ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]


class Scale(NamedTuple):
    """Maps values from `low` to `high` to pixels from `first` to `last`, by their logarithms."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.first + share * (self.last - self.first)


def svg(title: str, rows: Iterable[Prediction], by_size: Iterable[Prediction], crossings: Sequence[Crossover]) -> str:
    """Return the picture: `rows`, of one size, against ranks; `by_size`, of one number of ranks, against bytes."""
    panels = [_against_ranks([*rows]), _against_size([*by_size], crossings)]
    names = sorted({name for panel in panels for name in panel.lines})
    parts = [part for panel in panels for part in _panel(panel, names)]
    inside = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{LIGHT["paper"]}"/>',
              _words(LEFTS[0], 26, title, size=15), *parts, *_legend(names), ""]
    return picture_file(WIDTH, HEIGHT, title, "\n".join(inside))


def _against_ranks(rows: Sequence[Prediction]) -> Panel:
    ranks = sorted({row.ranks for row in rows})
    ticks = [(float(rank), f"{rank:,}") for rank in _thinned(ranks)]
    size = rows[0].nbytes if rows else 0
    marks = [(float(rank), f"{rank:,}: {name}") for rank, name in _changes(rows)]
    return Panel(f"time against ranks, {byte_text(size)}", LEFTS[0], _lines(rows, lambda row: row.ranks), ticks, marks)


def _changes(rows: Sequence[Prediction]) -> list[tuple[int, str]]:
    """Return the numbers of ranks where another algorithm is the quickest than for the number before, and which."""
    best = [next(group) for _, group in groupby(sorted(rows, key=lambda row: (row.ranks, row.seconds)),
                                                lambda row: row.ranks)]
    return [(after.ranks, after.algorithm) for before, after in pairwise(best) if before.algorithm != after.algorithm]


def _against_size(rows: Sequence[Prediction], crossings: Sequence[Crossover]) -> Panel:
    sizes = sorted({row.nbytes for row in rows})
    ticks = [(float(size), byte_text(size)) for size in _thinned(sizes)]
    marks = [(one.nbytes, f"{byte_text(round(one.nbytes))}: {one.then}") for one in crossings]
    ranks = rows[0].ranks if rows else 0
    return Panel(f"time against size, {ranks} ranks", LEFTS[1], _lines(rows, lambda row: row.nbytes), ticks, marks)


def _lines(rows: Sequence[Prediction], across: Callable[[Prediction], int]) -> dict[str, Points]:
    """Return the points of each algorithm; a time of 0 has no place on a logarithmic axis."""
    shown = sorted((row for row in rows if row.seconds > 0 and across(row) > 0),
                   key=lambda row: (row.algorithm, across(row)))
    return {name: [(across(row), row.seconds) for row in group]
            for name, group in groupby(shown, lambda row: row.algorithm)}


def _thinned(values: Sequence[int], most: int = 7) -> Sequence[int]:
    """Return at most about `most` of the values, evenly."""
    return values[::-(-len(values) // most)] if values else ()


def in_seconds(seconds: float) -> str:
    """Return a time in words.

    >>> in_seconds(1e-5), in_seconds(0.5)
    ('10 us', '500 ms')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def _panel(panel: Panel, names: Sequence[str]) -> Iterator[str]:
    places = [place for line in panel.lines.values() for place in line]
    right = panel.left + PANEL_WIDTH
    yield _words(panel.left, 50, panel.title)
    if not places:
        yield _words(panel.left, 80, "nothing to draw", MUTED)
        return
    across, times = [place[0] for place in places], [place[1] for place in places]
    x = Scale(min(across) / 1.1, max(across) * 1.1, panel.left, right)
    y = Scale(10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times) * 1.001)), BOTTOM, TOP)
    yield from _axes(panel, x, y)
    yield from _marks(panel, x, y)
    for name, line in panel.lines.items():
        yield _line(name, names, [(x(value), y(seconds)) for value, seconds in line])


def _axes(panel: Panel, x: Scale, y: Scale) -> Iterator[str]:
    decades = round(math.log10(y.high / y.low))
    for decade in range(decades + 1):
        seconds = y.low * 10 ** decade
        yield _stroke(x.first, y(seconds), x.last, y(seconds), GRID)
        yield _words(x.first - 6, y(seconds) + 4, in_seconds(seconds), MUTED, anchor="end")
    for value, text in panel.ticks:
        yield _stroke(x(value), y.first, x(value), y.first + 5, MUTED)
        yield _words(x(value), y.first + 19, text, MUTED, anchor="middle")


def _marks(panel: Panel, x: Scale, y: Scale) -> Iterator[str]:
    """Yield a line where another algorithm becomes the quickest, and its name."""
    for number, (value, text) in enumerate(panel.marks):
        yield _stroke(x(value), y.last, x(value), y.first, MUTED, "3 3")
        end = x(value) > (x.first + x.last) / 2
        yield _words(x(value) + (-4 if end else 4), y.last + 12 + 15 * number, text, INK, "end" if end else "start", 11)


def _legend(names: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        top = TOP + 20 * number
        yield _line(name, names, [(LEGEND, top), (LEGEND + 26, top)])
        yield _words(LEGEND + 33, top + 4, name)


def _line(name: str, names: Sequence[str], places: Points) -> str:
    again, number = divmod(names.index(name), len(LINES))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
    return (f'<g fill="{LINES[number]}"><title>{escape(name)}</title><polyline points="{points}" fill="none" '
            f'stroke="{LINES[number]}" stroke-width="2" stroke-dasharray="{DASHES[again % len(DASHES)]}"/>{dots}</g>')


def _stroke(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "none") -> str:
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
            f'stroke-dasharray="{dash}"/>')


def _words(x: float, y: float, text: str, colour: str = INK, anchor: str = "start", size: int = 12) -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
