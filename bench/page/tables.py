"""Tables of a page: every measurement, how runs differ, overlap; each cell text that has been made safe."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from gpucoll.analysis.sizes import byte_text

from .axes import BY, NOTHING, digits, figure
from .canvas import element, variables
from .charts import mark
from .curves import PLACEMENTS, Change, Curve, Difference, Panel, Point, Record

VERDICTS = {1: '<b class="good">faster</b>', -1: '<b class="bad">slower</b>', 0: "no clear difference"}


class Column(NamedTuple):
    """A column: its title, its unit, what stands above several of them, the cell of a row, as HTML, and whether
    that is text and no number."""

    title: str
    unit: str
    above: str
    cell: Callable[[Any], str]
    text: bool = False


class Row(NamedTuple):
    """One size of one curve."""

    panel: Panel
    curve: Curve
    size: int
    sides: dict[str, Point]

    @property
    def key(self) -> tuple[int, str, int]:
        """Where the panel keeps what belongs to this row."""
        return self.curve.run, self.curve.name, self.size


def table(caption: str, columns: Sequence[Column], rows: Sequence[Any], groups: Sequence[object]) -> str:
    """Return a table that scrolls within the page; a row with another group than the one above begins a new part."""
    body, above = [], object()
    for row, group in zip(rows, groups, strict=True):
        cells = "".join(_cell(column, row, head=not place) for place, column in enumerate(columns))
        body.append(f"<tr{' class=first' if group != above else ''}>{cells}</tr>")
        above = group
    name = escape(caption)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><caption>{name}</caption>'
            f"<thead>{_heads(columns)}</thead><tbody>{''.join(body)}</tbody></table></div>\n")


def _cell(column: Column, row: Any, *, head: bool) -> str:
    tag, end = ('th scope="row"', "th") if head else ("td", "td")
    return f"<{tag}{_class(column)}>{column.cell(row)}</{end}>"


def _class(column: Column) -> str:
    return ' class="text"' if column.text else ""


def _heads(columns: Sequence[Column]) -> str:
    """Return the titles, below what several of them have in common."""
    titles = "".join(f'<th scope="col"{_class(column)}>{escape(column.title)}{_unit(column.unit)}</th>'
                     for column in columns)
    if not any(column.above for column in columns):
        return f"<tr>{titles}</tr>"
    above: list[tuple[str, int]] = []
    for column in columns:
        if above and above[-1][0] == column.above:
            above[-1] = column.above, above[-1][1] + 1
        else:
            above.append((column.above, 1))
    spans = "".join(f'<th scope="colgroup" colspan="{count}">{escape(text)}</th>' if text else f'<td colspan="{count}">'
                    "</td>" for text, count in above)
    return f'<tr class="above">{spans}</tr><tr>{titles}</tr>'


def _unit(unit: str) -> str:
    return f" <small>{escape(unit)}</small>" if unit else ""


def results(panel: Panel, styles: Mapping[str, int], letters: Sequence[str]) -> str:
    """Return the table of a panel: a row for every size of every curve."""
    rows = _rows(panel)
    return table(f"Every measurement: {panel.title}", _columns(panel, rows, letters, styles), rows,
                 [row.size for row in rows])


def _rows(panel: Panel) -> list[Row]:
    found: dict[tuple[int, int], Row] = {}
    for place, curve in enumerate(panel.curves):
        for placement, points in curve.points.items():
            for point in points:
                found.setdefault((point.size, place), Row(panel, curve, point.size, {})).sides[placement] = point
    return [found[key] for key in sorted(found)]


def _columns(panel: Panel, rows: Sequence[Row], letters: Sequence[str], styles: Mapping[str, int]) -> list[Column]:
    best = _best(rows)
    columns = [Column("size", "", "", lambda row: byte_text(row.size)),
               Column("count", "", "", lambda row: f"{_any(row).elements:,}"),
               Column("algorithm", "", "", lambda row: name(panel, row.curve, styles, letters), text=True)]
    for placement in panel.placements:
        columns += _side(placement, best, detailed=any(_p99(row, placement) for row in rows))
        columns += _own(panel) if placement == PLACEMENTS[0] else []
    return columns


def _any(row: Row) -> Point:
    return next(iter(row.sides.values()))


def _p99(row: Row, placement: str) -> float | None:
    return row.sides[placement].p99 if placement in row.sides else None


def _best(rows: Sequence[Row]) -> dict[tuple[int, str], float]:
    """Return the shortest time for each size and placement."""
    best: dict[tuple[int, str], float] = {}
    for row in rows:
        for placement, point in row.sides.items():
            best[row.size, placement] = min(point.time, best.get((row.size, placement), math.inf))
    return best


def name(panel: Panel, curve: Curve, styles: Mapping[str, int], letters: Sequence[str]) -> str:
    """Return the name of a curve beside its sign, and the letter of its run where there are several."""
    sign = element(mark(curve, styles, panel.runs[-1]), variables)
    return (f'<svg class="sign" viewBox="-6 -6 12 12" aria-hidden="true">{sign}</svg>{escape(curve.name)}'
            f"{run_letter(letters[curve.run])}")


def run_letter(letter: str) -> str:
    """Return the sign of a run, where there are several."""
    return f' <b class="run">{escape(letter)}</b>' if letter else ""


def _side(placement: str, best: Mapping[tuple[int, str], float], *, detailed: bool) -> list[Column]:
    """Return the columns of one placement; a bar behind the bandwidth says how near to the best of its size it is."""
    def of(show: Callable[[Row, Point], str]) -> Callable[[Row], str]:
        return lambda row: show(row, row.sides[placement]) if placement in row.sides else NOTHING

    def share(row: Row, point: Point) -> str:
        part = best[row.size, placement] / point.time if point.time else 0
        strong = ("<b>", "</b>") if part == 1 else ("", "")
        return f'<span class="bar" style="--part:{100 * part:.0f}%">{strong[0]}{digits(point.busbw)}{strong[1]}</span>'

    above = placement.replace("_", " ")
    tail = [Column("p99", "µs", above, of(lambda row, point: microseconds(point.p99)))] if detailed else []
    return [Column("time", "µs", above, of(lambda row, point: microseconds(point.time))), *tail,
            Column("algbw", "GB/s", above, of(lambda row, point: digits(point.algbw))),
            Column("busbw", "GB/s", above, of(share)),
            Column("#wrong", "", above, of(lambda row, point: _wrong(point.wrong)))]


def microseconds(time: float | None) -> str:
    """Return a time in us, to a hundredth where it is short.

    >>> microseconds(3.14159), microseconds(12345.6)
    ('3.14', '12,346')
    """
    return NOTHING if time is None else f"{time:,.{2 if time < 100 else 1 if time < 1000 else 0}f}"


def _wrong(count: float | None) -> str:
    if count is None:
        return "N/A"
    return f'<b class="bad">{count:g}</b>' if count else "0"


def _own(panel: Panel) -> list[Column]:
    """Return the columns that nccl-tests does not have, where there is something to put into them."""
    columns, above = [], PLACEMENTS[0].replace("_", " ")
    if panel.bounds:
        columns.append(Column("of bound", "%", above, lambda row: _share(row)))
    for peer in dict.fromkeys(peer for found in panel.ratios.values() for peer in found):
        columns.append(Column(f"{peer} / ours", BY, above, functools.partial(_ratio, peer)))
    if panel.skews:
        columns.append(Column("skew", "µs", above, lambda row: microseconds(panel.skews.get(row.key, (None,))[0])))
        columns.append(Column("slowest rank", "", above, lambda row: _late(panel.skews.get(row.key))))
    return columns


def _share(row: Row) -> str:
    bound, point = row.panel.bounds.get(row.curve.run, {}).get(row.size), row.sides.get(PLACEMENTS[0])
    return digits(100 * point.busbw / bound) if bound and point else NOTHING


def _late(skew: tuple[float, int | None] | None) -> str:
    return NOTHING if skew is None or skew[1] is None else escape(str(skew[1]))


def _ratio(peer: str, row: Row) -> str:
    value = row.panel.ratios.get(row.key, {}).get(peer)
    return NOTHING if value is None else f"{value:.2f}"


def differences(caption: str, found: Sequence[Difference]) -> str:
    """Return a table of how two runs differ: a verdict only where the interval leaves no doubt."""
    rows = sorted(((curve.name, change) for curve, row in found for change in row), key=lambda row: row[1].size)
    columns = [Column("size", "", "", lambda row: byte_text(row[1].size)),
               Column("algorithm", "", "", lambda row: escape(row[0]), text=True),
               Column("before", "µs", "", lambda row: microseconds(row[1].before)),
               Column("after", "µs", "", lambda row: microseconds(row[1].after)),
               Column("times as fast", BY, "", lambda row: f"{row[1].ratio:.3f}"),
               Column("95% interval", BY, "", lambda row: _interval(row[1])),
               Column("verdict", "", "", lambda row: _verdict(row[1]), text=True)]
    return table(caption, columns, rows, [change.size for _, change in rows])


def _interval(change: Change) -> str:
    return NOTHING if change.low is None else f"{change.low:.3f} … {change.high:.3f}"


def direction(change: Change) -> int:
    """Return 1 for clearly faster, -1 for clearly slower, 0 for neither or where nothing can be said."""
    if change.low is None or change.high is None:
        return 0
    return (change.low > 1) - (change.high < 1)


def _verdict(change: Change) -> str:
    if change.low is None:
        return "too few repetitions"
    return VERDICTS[direction(change)]


def overlap(rows: Sequence[Record]) -> str:
    """Return the four columns of OSU's benchmarks: what of the communication is hidden behind computing."""
    columns = [Column("size", "", "", lambda row: byte_text(int(row["size"]))),
               Column("collective", "", "", lambda row: escape(str(row["collective"])), text=True),
               Column("algorithm", "", "", lambda row: escape(str(row["algorithm"])), text=True),
               Column("overall", "µs", "", lambda row: microseconds(row["overall_us"])),
               Column("compute", "µs", "", lambda row: microseconds(row["compute_us"])),
               Column("pure comm.", "µs", "", lambda row: microseconds(row["pure_us"])),
               Column("overlap", "%", "", lambda row: figure(row["overlap_pct"]))]
    return table("Communication hidden behind computing", columns, rows, [row["size"] for row in rows])


def pairs(nbytes: int, rows: Iterable[Any]) -> str:
    """Return the links between ranks, the slowest first."""
    ordered = sorted(rows, key=lambda pair: pair.bandwidth)
    typical = statistics.median(pair.bandwidth for pair in ordered)
    columns = [Column("from rank", "", "", lambda pair: str(pair.source)),
               Column("to rank", "", "", lambda pair: str(pair.target)),
               Column("time", "µs", "", lambda pair: microseconds(pair.time)),
               Column("bandwidth", "GB/s", "", lambda pair: digits(pair.bandwidth)),
               Column("of the median", "%", "", lambda pair: f"{100 * pair.bandwidth / typical:.0f}"),
               Column("verdict", "", "", lambda pair: '<b class="bad">slow</b>' if pair.slow else "", text=True)]
    return table(f"Every pair of ranks, {byte_text(nbytes)}, the slowest first", columns, ordered, [0] * len(ordered))
