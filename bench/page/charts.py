"""The pictures over sizes: bandwidth or time, both axes logarithmic, and how many times as fast one run is as another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.analysis.sizes import byte_text

from .axes import (
    WIDE,
    Axis,
    Frame,
    apart,
    figure,
    rounded,
    shorten,
    size_ticks,
    ticks,
    time_text,
)
from .canvas import LINES, Area, Group, Mark, Path, Picture, Words
from .curves import PLACEMENTS, Change, Curve, Difference, Panel, Point

LABELS = 122.0  # room for the names at the right, where the picture is wide
LINE_HEIGHT = 15.0
PAD = 8.0  # from where the lines below begin to the first sign
WORDS = {"out_of_place": "out of place", "in_place": "in place"}



class Quantity(NamedTuple):
    """What is drawn: its name, how an axis writes it, what a point has of it, and a bound from busbw, size, factor."""

    name: str
    text: Callable[[float], str]
    of: Callable[[Point], float]
    bound: Callable[[float, int, float], float]


BANDWIDTH = Quantity("bus bandwidth (GB/s)", figure, lambda point: point.busbw, lambda busbw, size, factor: busbw)
LATENCY = Quantity("time per operation", time_text, lambda point: point.time,
                   lambda busbw, size, factor: size * factor / busbw / 1e3)
SPEEDUP = Quantity("times as fast as before", figure, lambda point: 0.0, lambda busbw, size, factor: 0.0)


def lines(panel: Panel, quantity: Quantity, styles: Mapping[str, int], runs: Sequence[str] = ("",), *,
          placement: str = PLACEMENTS[0], size: tuple[float, float] = WIDE) -> Picture:
    """Return size against `quantity`: a line for each curve, what the machine allows dashed, the names at the ends."""
    title = f"{panel.title}: {quantity.name}, {WORDS[placement]}"
    drawn = [(curve, values(curve, quantity, placement)) for curve in panel.curves]
    drawn = [(curve, places) for curve, places in drawn if places]
    if not drawn:
        return _nothing(title, size)
    limits = {run: _bound(panel, run, quantity) for run in panel.bounds}
    frame = _frame([place for _, places in drawn for place in places], [y for row in limits.values() for _, y in row],
                   size)
    shapes = [*_grid(frame, quantity, "message size", size)]
    shapes += [_limit(frame, row, run) for run, row in limits.items() if row]
    shapes += [_line(frame, curve, places, styles, panel.runs[-1]) for curve, places in drawn]
    if size[0] >= WIDE[0]:
        shapes += _labels(frame, _ends(frame, drawn, limits, styles, runs if len(panel.runs) > 1 else ()))
    columns = sorted({x for _, places in drawn for x, _ in places})
    described = f"{len(drawn)} lines over {byte_text(int(columns[0]))} to {byte_text(int(columns[-1]))}"
    return Picture(*size, title, described, shapes, [frame.x.at(x) for x in columns])


def values(curve: Curve, quantity: Quantity, placement: str) -> list[tuple[float, float]]:
    """Return what a logarithmic axis can show of a curve."""
    points = ((point.size, quantity.of(point)) for point in curve.points[placement])
    return sorted((size, value) for size, value in points if size > 0 and value > 0 and math.isfinite(value))


def _bound(panel: Panel, run: int, quantity: Quantity) -> list[tuple[float, float]]:
    places = [(size, quantity.bound(busbw, size, panel.factor)) for size, busbw in panel.bounds[run].items()]
    return sorted((size, value) for size, value in places if size > 0 and value > 0)


def _nothing(title: str, size: tuple[float, float]) -> Picture:
    return Picture(*size, title, "nothing to draw", [
        Words(size[0] / 2, size[1] / 2, "No bandwidth: nothing crosses a link here.", "muted", 14, "middle")])


def _frame(places: Sequence[tuple[float, float]], limits: Sequence[float], size: tuple[float, float]) -> Frame:
    """Return axes that hold all places; limits are followed upwards, for two decades."""
    x_low, x_high = min(x for x, _ in places), max(x for x, _ in places)
    lowest, highest = min(y for _, y in places), max(y for _, y in places)
    limits = [limit for limit in limits if lowest / 3 <= limit <= highest * 100]
    y_low, y_high = rounded(min([lowest, *limits]), max([highest * 1.05, *limits]))
    wide = size[0] >= WIDE[0]
    left, right = (66 if wide else 58) + PAD, size[0] - (LABELS if wide else 14)
    if x_low == x_high:
        x_low, x_high = x_low / 2, x_high * 2
    return Frame(Axis(x_low, x_high, left, right), Axis(y_low, y_high, size[1] - 50, 34))


def _grid(frame: Frame, quantity: Quantity, across: str, size: tuple[float, float]) -> Iterable[Any]:
    left, right, bottom = frame.x.start - PAD, frame.x.end, frame.y.start
    yield Words(10, 18, quantity.name, "ink", 13, bold=True)
    for tick in ticks(frame.y.low, frame.y.high):
        y = frame.y.at(tick)
        yield Path(((left, y), (right, y)), "grid")
        yield Words(left - 8, y + 4, quantity.text(tick), "muted", 12, "end")
    for nbytes in size_ticks(frame.x.low, frame.x.high, 9 if size[0] >= WIDE[0] else 5):
        x = frame.x.at(nbytes)
        yield Path(((x, bottom), (x, bottom + 5)), "axis")
        yield Words(x, bottom + 20, byte_text(nbytes), "muted", 12, "middle")
    yield Path(((left, bottom), (right, bottom)), "axis")
    yield Words((left + right) / 2, bottom + 40, across, "muted", 12, "middle")


def role(curve: Curve, styles: Mapping[str, int]) -> str:
    """Return the colour of a curve: peers have none."""
    return "peer" if curve.peer else f"line-{styles[curve.name] % LINES}"


def mark(curve: Curve, styles: Mapping[str, int], last: int) -> Mark:
    """Return the sign of a curve; hollow ones are those of peers and of all runs but the last.

    Where the colours begin anew, the shapes do not: the ninth algorithm has a sign of its own.
    """
    style = styles[curve.name]
    return Mark(0, 0, style + style // LINES, role(curve, styles), curve.peer or curve.run < last)


def _line(frame: Frame, curve: Curve, places: Sequence[tuple[float, float]], styles: Mapping[str, int],
          last: int) -> Group:
    """Return a line with its signs; a thin one where a later run, up to `last`, is drawn as well."""
    pixels, early = frame.through(places), curve.run < last
    shapes: list[Any] = [Path(pixels, role(curve, styles), 1.2 if early else 2.0)] if len(pixels) > 1 else []
    shapes += [mark(curve, styles, last)._replace(x=x, y=y) for x, y in pixels]
    return Group(f"{curve.run}:{curve.name}", shapes)


def _limit(frame: Frame, row: Sequence[tuple[float, float]], run: int) -> Group:
    """Return the dashed line of what the machine's memory allows, where it lies inside of the picture."""
    inside = [(x, y) for x, y in row if frame.y.low * 0.999 <= y <= frame.y.high * 1.001]
    if len(inside) == 1:
        inside = [(frame.x.low, inside[0][1]), (frame.x.high, inside[0][1])]
    return Group(f"{run}:bound", [Path(frame.through(inside), "bound", 1.5, (6, 5))] if inside else [])


def _name(text: str, run: str) -> str:
    return f"{shorten(text, 11)} {run}" if run else text


def _ends(frame: Frame, drawn: Sequence[tuple[Curve, list[tuple[float, float]]]],
          limits: Mapping[int, list[tuple[float, float]]], styles: Mapping[str, int],
          runs: Sequence[str]) -> list[tuple[float, float, str, str]]:
    """Return for each line where it ends, its name and its colour."""
    ends = [(*frame.through(places[-1:])[0], _name(curve.name, runs[curve.run] if runs else ""),
             role(curve, styles)) for curve, places in drawn]
    bounds = []
    for run, row in limits.items():
        inside = [(x, y) for x, y in row if frame.y.low * 0.999 <= y <= frame.y.high * 1.001]
        if inside:
            bounds.append((frame.x.end, frame.y.at(inside[-1][1]), _name("copy bound", runs[run] if runs else ""),
                           "bound"))
    heights = [y for _, y, _, _ in bounds]
    if heights and max(heights) - min(heights) < LINE_HEIGHT / 2:  # alike: named once
        bounds = [(frame.x.end, heights[0], "copy bound", "bound")]
    return ends + bounds


def _labels(frame: Frame, ends: Sequence[tuple[float, float, str, str]]) -> Iterable[Any]:
    """Return the names beside the ends, moved apart where they would cover each other."""
    ordered = sorted(ends, key=lambda end: end[1])
    heights = apart([y for _, y, _, _ in ordered], LINE_HEIGHT, frame.y.end - 6, frame.y.start + 6)
    for (x, y, text, colour), height in zip(ordered, heights, strict=True):
        yield Path(((x + 5, y), (frame.x.end + 12, height), (frame.x.end + 17, height)), colour, 0.7)
        yield Words(frame.x.end + 20, height + 4, shorten(text, 15), colour, 12, bold=True)


def speedups(title: str, found: Sequence[Difference], styles: Mapping[str, int], *,
             size: tuple[float, float] = WIDE) -> Picture:
    """Return how many times as fast each line became, over size, with the intervals where there are any."""
    drawn = [(curve, [change for change in row if change.size > 0]) for curve, row in found]
    drawn = [(curve, row) for curve, row in drawn if row]
    every = [change for _, row in drawn for change in row]
    if not every:
        return _nothing(title, size)
    ends = [value for change in every for value in (change.ratio, change.low, change.high) if value]
    reach = min(*ends, 0.85), max(*ends, 1.15)
    frame = _frame([(change.size, value) for change in every for value in reach], [], size)
    shapes = [*_grid(frame, SPEEDUP, "message size", size),
              Path(frame.through([(frame.x.low, 1), (frame.x.high, 1)]), "bound", 1.5)]
    shapes += [Group(curve.name, [*_changes(frame, row, mark(curve, styles, curve.run))]) for curve, row in drawn]
    if size[0] >= WIDE[0]:
        shapes += _labels(frame, [(*frame.through([(row[-1].size, row[-1].ratio)])[0], curve.name, role(curve, styles))
                                  for curve, row in drawn])
    return Picture(*size, title, f"{len(drawn)} lines; above 1 is faster", shapes)


def _changes(frame: Frame, row: Sequence[Change], sign: Mark) -> Iterable[Any]:
    known = [(change.size, change.low, change.high) for change in row if change.low and change.high]
    if len(known) > 1:
        edge = [*((nbytes, high) for nbytes, _, high in known), *((nbytes, low) for nbytes, low, _ in reversed(known))]
        yield Area(frame.through(edge), sign.role, 0.13)
    pixels = frame.through([(change.size, change.ratio) for change in row])
    if len(pixels) > 1:
        yield Path(pixels, sign.role, 2.0)
    yield from (sign._replace(x=x, y=y) for x, y in pixels)
