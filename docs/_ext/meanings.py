"""The pictures of docs/guide/arrays.md: what the ranks have before and after each collective, by their table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpucoll.core.collectives import COLLECTIVES
from gpucoll.lab.draw.still import number, picture, rank_colour, ranks, rect, words

RANKS, ROOT = 4, 0
SHOWN = ("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce", "reduce_scatter", "all_to_all", "scan")
BOX, WIDE, HIGH, ROW, TOP, GAP = 30.0, 104.0, 26.0, 36.0, 70.0, 40.0
LETTERS = "abcd"


def contents(collective: str) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
    """Return, before and after, for each rank its blocks: each the names of the parts that add up in the block.

    >>> contents("scatter")[0][0], contents("scatter")[1][2]
    ([['a0'], ['a1'], ['a2'], ['a3']], [['a2']])
    """
    row, size = COLLECTIVES[collective], range(RANKS)

    def name(rank: int, chunk: int) -> str:
        return f"{LETTERS[rank]}{chunk}" if row.input.blocks else LETTERS[rank]

    before = [[[name(rank, chunk)] for chunk in range(RANKS if row.input.blocks else 1)]
              if row.input.exists(rank, ROOT) else [] for rank in size]
    after = [[[name(one, piece.chunk) for one in sorted(piece.ranks)] for piece in (
        row.result(rank, RANKS, ROOT, 1, index) for index in range(RANKS if row.output.blocks else 1))]
        if row.output.exists(rank, ROOT) else [] for rank in size]
    return before, after


def _box(x: float, y: float, width: float, parts: Sequence[str]) -> list[str]:
    """Return a block: as many stripes as parts, in the colours of the ranks that the parts come from."""
    each = width / len(parts)
    shapes = [rect(x + place * each, y, each, HIGH, f"r{LETTERS.index(part[0])}") for place, part in enumerate(parts)]
    return [*shapes, f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(HIGH)}" rx="3" '
            'class="s-axis"/>', words(x + width / 2, y + 17.5, "+".join(parts), "disc", size=12, anchor="middle")]


def figure(collective: str) -> str:
    """Return the picture of a collective as an SVG file."""
    sides = contents(collective)
    wide = [max(len(blocks) for blocks in side) * (BOX if max(len(one) for blocks in side for one in blocks) == 1
                                                   else WIDE) for side in sides]
    left, right = 60.0, 60.0 + wide[0] + GAP + 20
    shapes = [words(16, 26, collective + (f", root {ROOT}" if COLLECTIVES[collective].rooted else ""), "ink", size=15),
              words(left, 54, "before", "muted", size=12), words(right, 54, "after", "muted", size=12)]
    for rank in range(RANKS):
        y = TOP + rank * ROW
        shapes += [f'<circle cx="30" cy="{number(y + HIGH / 2)}" r="11" fill="{rank_colour(rank, RANKS)}"/>',
                   words(30, y + 17.5, rank, "disc", anchor="middle")]
        for side, x, width in zip(sides, (left, right), wide, strict=True):
            each = width / max(len(blocks) for blocks in side)
            for place, parts in enumerate(side[rank]):
                shapes += _box(x + place * each, y, each - 2, parts)
    middle, x = TOP + (RANKS - 1) * ROW / 2 + HIGH / 2, left + wide[0] + 12
    shapes.append(f'<path d="M{number(x)} {number(middle)}h{number(GAP - 12)}m-7 -6l8 6l-8 6" class="s-muted"/>')
    return picture(f"{collective}: what four ranks have before and after", max(right + wide[1] + 16, 250),
                   TOP + RANKS * ROW, ranks(RANKS), shapes)


def generate(app: object, config: object) -> None:
    """Write the pictures, after the gallery has emptied its folder."""
    folder = Path(__file__).parents[1] / "_drawings" / "guide"
    folder.mkdir(parents=True, exist_ok=True)
    for collective in SHOWN:
        (folder / f"before-and-after-{collective}.svg").write_text(figure(collective), encoding="utf-8")


def setup(app: object) -> dict[str, bool]:
    """Register the generator with Sphinx."""
    app.connect("config-inited", generate, priority=110)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
