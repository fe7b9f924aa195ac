"""The figure of docs/guide/time.md: predicted times of algorithms by size, and the quickest for each size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

from gpucoll.lab.document import LINES
from gpucoll.lab.draw.still import number, picture, words
from gpucoll.lab.sizes import byte_text
from gpucoll.simulator import simulate
from gpucoll.tuner import segments

RANKS, ALGORITHMS = 16, ("star", "tree", "ring", "recursive_doubling", "halving_doubling")
SIZES = [1 << power for power in range(3, 31)]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760.0, 480.0, 76.0, 150.0, 64.0, 84.0
DECADES = (5e-6, 2.0)  # seconds at the lower and at the upper edge


def times() -> dict[str, list[float]]:
    """Return the seconds of an all-reduce by each algorithm, for each of the sizes, on one switch."""
    return {name: [simulate("all_reduce", name, RANKS, nbytes,
                            segments=segments("all_reduce", name, nbytes, RANKS)).seconds for nbytes in SIZES]
            for name in ALGORITHMS}


def across(place: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * place / (len(SIZES) - 1)


def down(seconds: float) -> float:
    low, high = map(math.log, DECADES)
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log(seconds) - low) / (high - low)


def grid() -> Iterator[str]:
    for power, text in enumerate(("10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s"), -5):
        y = down(10.0 ** power)
        yield f'<path d="M{number(LEFT)} {number(y)}H{number(WIDTH - RIGHT)}" class="s-grid"/>'
        yield words(LEFT - 8, y + 4, text, "muted", size=12, anchor="end")
    for place in range(0, len(SIZES), 7):
        yield words(across(place), HEIGHT - BOTTOM + 18, byte_text(SIZES[place]), "muted", size=12, anchor="middle")
    yield words(across(len(SIZES) - 1), HEIGHT - BOTTOM + 18, byte_text(SIZES[-1]), "muted", size=12, anchor="middle")


def figure() -> str:
    """Return the figure as an SVG file."""
    found, shapes = times(), [
        words(24, 30, f"all_reduce on {RANKS} ranks of one switch: predicted time by size", "ink", size=17), *grid()]
    ends: list[float] = []
    for turn, (name, row) in sorted(enumerate(found.items()), key=lambda one: -one[1][1][-1]):
        line = "L".join(f"{number(across(place))} {number(down(seconds))}" for place, seconds in enumerate(row))
        y = max(down(row[-1]), ends[-1] + 16 if ends else 0.0)
        ends.append(y)
        shapes += [f'<path d="M{line}" class="c{turn}"/>', words(WIDTH - RIGHT + 8, y + 4, name, f"t{turn}", size=13)]
    best = [min(found, key=lambda name: found[name][place]) for place in range(len(SIZES))]
    y, step = HEIGHT - 44, across(1) - across(0)
    shapes.append(words(LEFT - 8, y + 14, "quickest", "muted", size=12, anchor="end"))
    for name, places in itertools.groupby(range(len(SIZES)), key=best.__getitem__):
        first, *rest = places
        x = max(across(first) - step / 2, LEFT)
        width = min(across(first + len(rest)) + step / 2, WIDTH - RIGHT) - x
        turn = ALGORITHMS.index(name)
        shapes += [f'<rect x="{number(x)}" y="{number(y)}" width="{number(width - 2)}" height="20" rx="3" '
                   f'class="t{turn}"/>', words(x + width / 2, y + 14, name, "paper", size=12, anchor="middle")]
    style = "".join(f".c{turn}{{fill:none;stroke:{colour};stroke-width:2.4}}.t{turn}{{fill:{colour}}}"
                    for turn, colour in enumerate(LINES[:len(ALGORITHMS)]))
    return picture("Where each algorithm wins", WIDTH, HEIGHT, style, shapes)


def generate(app: object, config: object) -> None:
    """Write the figure, after the gallery has emptied its folder."""
    path = Path(__file__).parents[1] / "_drawings" / "guide" / "where.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(figure(), encoding="utf-8")


def setup(app: object) -> dict[str, bool]:
    """Register the generator with Sphinx."""
    app.connect("config-inited", generate, priority=110)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
