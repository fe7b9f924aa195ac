"""`--plot F.svg` and `--plot F.png`: the pictures of one run in one file.

They are those of the page (`gpucoll.bench.page`). SVG needs nothing; PNG is drawn by matplotlib, of the extra
`plot`, which is imported here and nowhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import singledispatch
from pathlib import Path as File
from typing import Any

from gpucoll.errors import ArgumentError, UsageError, nearest

from .page.canvas import LIGHT, Area, Group, Mark, Path, Picture, Words, alone, fixed, flat, outline
from .page.charts import BANDWIDTH, LATENCY, lines
from .page.curves import PLACEMENTS, Record, names, pairs, panels
from .page.heatmap import pair_map

DPI = 120  # of a PNG; a picture's pixel is 1/96 inch, as in a browser
INCH = 96
GAP = 16.0
HEADING = 34.0


def draw(record: Record, path: str) -> None:
    """Write the pictures of `record` to `path`, replacing what is there.

    Raises ArgumentError for another ending than .svg and .png, for a record without data and where the file cannot be
    written; UsageError where matplotlib is missing.
    """
    write = writer(path)
    parts = list(_parts(record))
    if not parts:
        raise ArgumentError("--plot: nothing was measured, so there is nothing to draw", code="GC-PLOT")
    try:
        write(_together(parts), path)
    except OSError as error:
        raise ArgumentError(f"--plot: cannot write {path}: {error.strerror}", code="GC-FILE") from None


def writer(path: str) -> Callable[[Picture, str], None]:
    """Return what writes such a file, so that a run knows before it measures; raise as `draw` does."""
    ending = File(path).suffix.lower()
    if ending not in WRITERS:
        raise ArgumentError(f"--plot: {path} does not end in a kind of picture{nearest(ending, WRITERS)}",
                            code="GC-PLOT")
    if ending == ".png":
        _matplotlib()
    return WRITERS[ending]


def _matplotlib() -> Any:
    """Return matplotlib, without a window and without its global state; raise UsageError where it is missing."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise UsageError(f"--plot F.png needs matplotlib ({error}): pip install gpucoll[plot]; F.svg needs nothing",
                         code="GC-PLOT") from None
    return matplotlib


def _parts(record: Record) -> Iterator[list[Picture]]:
    """Return the rows of the whole: bandwidth beside time for what was measured, then every pair of ranks."""
    found = panels([record])
    for panel in found:
        placement = (*panel.placements, PLACEMENTS[0])[0]
        yield [lines(panel, quantity, names(found), placement=placement) for quantity in (BANDWIDTH, LATENCY)]
    maps = [pair_map(size, row) for size, row in pairs(record).items()]
    yield from (maps[first:first + 2] for first in range(0, len(maps), 2))


def _together(rows: Sequence[Sequence[Picture]]) -> Picture:
    """Return one picture of rows of pictures, each below its heading."""
    width = max(GAP + sum(picture.width + GAP for picture in row) for row in rows)
    tops = list(itertools.accumulate((HEADING + max(picture.height for picture in row) for row in rows), initial=8.0))
    shapes = [shape for top, row in zip(tops, rows, strict=False) for shape in _row(row, top)]
    title = "; ".join(dict.fromkeys(_heading(row[0]) for row in rows))
    return Picture(width, tops[-1] + 8, title, "size against bus bandwidth and against time", shapes)


def _heading(picture: Picture) -> str:
    return picture.title.partition(":")[0]


def _row(row: Sequence[Picture], top: float) -> Iterator[Any]:
    yield Words(GAP + 10, top + 22, _heading(row[0]), "ink", 15, bold=True)
    left = GAP
    for picture in row:
        yield from (moved(shape, left, top + HEADING) for shape in picture.shapes)
        left += picture.width + GAP


@singledispatch
def moved(shape: Any, dx: float, dy: float) -> Any:
    """Return the shape elsewhere; those of one place by their x and y, the others point by point."""
    return shape._replace(x=shape.x + dx, y=shape.y + dy)


@moved.register(Path)
@moved.register(Area)
def _(shape: Path | Area, dx: float, dy: float) -> Any:
    return shape._replace(points=[(x + dx, y + dy) for x, y in shape.points])


@moved.register
def _(shape: Group, dx: float, dy: float) -> Any:
    return shape._replace(shapes=[moved(one, dx, dy) for one in shape.shapes])


def _write_svg(picture: Picture, path: str) -> None:
    File(path).write_text(alone(picture, fixed(LIGHT)), encoding="utf-8")


def _write_png(picture: Picture, path: str) -> None:
    """Draw the same shapes on a canvas of the same size; the file says nothing of when and by what it was made."""
    figure = _matplotlib().figure.Figure(figsize=(picture.width / INCH, picture.height / INCH), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.set_axis_off()
    figure.set_facecolor(LIGHT["paper"])
    for order, shape in enumerate(flat(picture.shapes)):
        artist(shape, axes, order)
    figure.savefig(path, format="png", metadata={"Software": None})


WRITERS: dict[str, Callable[[Picture, str], None]] = {".svg": _write_svg, ".png": _write_png}


def _points(pixels: float) -> float:
    """Return pixels of 1/96 inch in points of 1/72."""
    return pixels * 72 / INCH


@singledispatch
def artist(shape: Any, axes: Any, order: int) -> None:
    """Draw one shape with matplotlib, above those of a lower order."""
    raise TypeError(f"{type(shape).__name__} is no shape")


@artist.register
def _(shape: Path, axes: Any, order: int) -> None:
    width = _points(shape.width)
    dash = (0, [length / shape.width for length in shape.dash]) if shape.dash else "-"
    axes.plot(*_columns(shape.points), color=fixed(LIGHT)(shape.role), linewidth=width, linestyle=dash, zorder=order,
              solid_joinstyle="round")


def _columns(places: Iterable[tuple[float, float]]) -> Iterable[Sequence[float]]:
    return zip(*places, strict=True)


@artist.register
def _(shape: Area, axes: Any, order: int) -> None:
    axes.fill(*_columns(shape.points), color=fixed(LIGHT)(shape.role), alpha=shape.opacity, linewidth=0, zorder=order)


@artist.register
def _(shape: Mark, axes: Any, order: int) -> None:
    colour = LIGHT[shape.role]
    axes.fill(*_columns(outline(shape)), facecolor=LIGHT["paper"] if shape.hollow else colour, edgecolor=colour,
              linewidth=_points(1.5), zorder=order)


@artist.register
def _(shape: Words, axes: Any, order: int) -> None:
    anchor = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
    axes.text(shape.x, shape.y, shape.text, fontsize=_points(shape.size), color=fixed(LIGHT)(shape.role), ha=anchor,
              va="baseline", fontweight="bold" if shape.bold else "normal", parse_math=False, zorder=order)
