"""The page's figures, by plotly: bandwidth and time over sizes, how runs differ, every pair of ranks.

Colours are the page's variables, which its script fills in: one figure serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from gpucoll.analysis.document import LINES
from gpucoll.analysis.sizes import byte_text

from .compare import Change
from .curves import Panel, Row, bound_time, figure, time_text
from .records import PLACEMENTS

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star", "cross", "x")  # as many as colours
SIZE_TICKS = 5  # so few have room on a phone
AXIS = {"gridcolor": "var(--grid)", "linecolor": "var(--axis)", "zeroline": False, "automargin": True}


def bandwidth(panel: Panel, numbers: Mapping[str, int], letters: Sequence[str], placement: str) -> go.Figure:
    """Return bus bandwidth over size: a line for each algorithm and peer, what the machine allows dashed."""
    chart = _chart(panel, "bus bandwidth (GB/s)")
    for (file, name), rows in panel.lines.items():
        shown = [(row, row.sides[placement].busbw) for row in rows if placement in row.sides]
        _line(chart, _label(name, letters[file]), shown, numbers[name], file < len(letters) - 1,
              [f"{figure(value)} GB/s" for _, value in shown])
    return _bounded(chart, {row.size: row.bound for row in panel.rows if row.bound}, " GB/s")


def duration(panel: Panel, numbers: Mapping[str, int], letters: Sequence[str], placement: str) -> go.Figure:
    """Return time over size, likewise."""
    chart = _chart(panel, "time per operation")
    chart.update_yaxes(tickformat="~s", ticksuffix="s")
    for (file, name), rows in panel.lines.items():
        shown = [(row, row.sides[placement].time) for row in rows if placement in row.sides]
        _line(chart, _label(name, letters[file]), [(row, time / 1e6) for row, time in shown], numbers[name],
              file < len(letters) - 1, [time_text(time) for _, time in shown])
    return _bounded(chart, {row.size: time / 1e6 for row in panel.rows if (time := bound_time(row))}, "s")


def _chart(panel: Panel, title: str) -> go.Figure:
    """Return axes over the panel's sizes, both logarithmic."""
    sizes = sorted({row.size for row in panel.rows if row.size > 0})
    first, last = (size.bit_length() - 1 for size in (sizes[0], sizes[-1]))
    ticks = [1 << power for power in range(first, last + 1, -(-(last - first + 1) // SIZE_TICKS))]
    return go.Figure(layout={
        "template": "none", "title": {"text": title, "x": 0, "xref": "paper", "font_size": 14}, "height": 400,
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--muted)"}, "hovermode": "x unified",
        "title_font_color": "var(--ink)", "paper_bgcolor": "var(--paper)", "plot_bgcolor": "var(--paper)",
        "hoverlabel": {"bgcolor": "var(--tint)", "bordercolor": "var(--border)", "font_color": "var(--ink)"},
        "legend": {"orientation": "h", "x": 0, "y": -0.2, "yref": "paper", "font_color": "var(--ink)"},
        "margin": {"l": 8, "r": 12, "t": 44, "b": 8}, "uirevision": True,
        "modebar": {"color": "var(--axis)", "activecolor": "var(--ink)", "bgcolor": "rgba(0,0,0,0)"},
        "xaxis": {**AXIS, "type": "log", "tickvals": ticks, "ticktext": [*map(byte_text, ticks)], "showgrid": False,
                  "ticks": "outside", "tickcolor": "var(--axis)", "showline": True, "hoverformat": ",d",
                  "unifiedhovertitle_text": "%{x} bytes"},
        "yaxis": {**AXIS, "type": "log", "tickformat": "~g"}})


def _label(name: str, letter: str) -> str:
    """Return the name of a line; plotly reads names as HTML."""
    return escape(f"{name} {letter}" if letter else name, quote=False)


def _line(chart: go.Figure, name: str, points: Sequence[tuple[Row, float]], number: int, early: bool,
          words: Sequence[str]) -> None:
    """Add a line; peers are grey and hollow, all files but the last thin and hollow."""
    if not points:
        return
    peer = points[0][0].peer
    # Where the colours begin anew the symbols do not: the ninth algorithm has a look of its own.
    symbol = SYMBOLS[(number + number // len(LINES)) % len(SYMBOLS)]
    colour = "var(--peer)" if peer else f"var(--line-{number % len(LINES)})"
    chart.add_scatter(
        name=name, x=[row.size for row, _ in points], y=[value for _, value in points], mode="lines+markers",
        line={"color": colour, "width": 1.2 if early else 2.2},
        marker={"symbol": symbol + "-open" * (peer or early), "size": 7, "color": colour},
        customdata=words, hovertemplate="%{customdata}")


def _bounded(chart: go.Figure, bounds: Mapping[int, float], unit: str) -> go.Figure:
    """Add what the machine's copy bandwidth allows; it may lie outside of the axes, which are the lines' own."""
    values = [value for line in chart.data for value in line.y if value > 0] or [1.0]
    near = [bound for bound in bounds.values() if bound < 3 * max(values)]
    low, high = math.log10(min(values)), math.log10(max([*values, *near]))
    chart.update_yaxes(range=[low - 0.1, high + 0.15], dtick="D2" if high - low < 2 else 1)
    if bounds:
        sizes = sorted(bounds)
        chart.add_scatter(name="copy bound", x=sizes, y=[bounds[size] for size in sizes], mode="lines",
                          line={"color": "var(--bound)", "width": 1.4, "dash": "dash"},
                          hovertemplate=f"%{{y:.3~s}}{unit}")
    return chart


def speedups(panel: Panel, found: Mapping[str, Mapping[int, Change]], numbers: Mapping[str, int]) -> go.Figure:
    """Return how many times as fast each line became, over size, with the intervals."""
    chart = _chart(panel, "times as fast as before")
    for name, changes in found.items():
        rows = {row.size: row for row in panel.rows if row.name == name}
        spans = [(rows[size], 1 / one.interval.ratio, 1 / one.interval.high, 1 / one.interval.low)
                 for size, one in sorted(changes.items())]
        _line(chart, _label(name, ""), [(row, ratio) for row, ratio, *_ in spans], numbers[name], False,
              [f"{ratio:.3f}" for _, ratio, *_ in spans])
        chart.data[-1].error_y = {"array": [high - ratio for _, ratio, _, high in spans], "thickness": 1, "width": 3,
                                  "arrayminus": [ratio - low for _, ratio, low, _ in spans]}
    chart.add_hline(y=1, line={"color": "var(--bound)", "width": 1.4})
    return chart


def pair_map(nbytes: int, pairs: Iterable[Mapping[str, Any]]) -> go.Figure:
    """Return a square for every pair of ranks: who sends down, who receives across; slow links are framed."""
    bandwidths = {(pair["source"], pair["target"]): pair["bandwidth"] for pair in pairs}
    ranks = [*range(1 + max(max(link) for link in bandwidths))]
    grid = [[bandwidths.get((source, target)) for target in ranks] for source in ranks]
    chart = go.Figure(go.Heatmap(
        x=ranks, y=ranks, z=grid, zmin=0, zmax=max(bandwidths.values()), colorscale="Viridis", colorbar={"title": "GB/s", "outlinewidth": 0},
        text=[["" if value is None else figure(value) for value in row] for row in grid], xgap=1, ygap=1,
        texttemplate="%{text}" if len(ranks) <= 16 else None,
        hovertemplate="rank %{y} to rank %{x}: %{z:.3~g} GB/s<extra></extra>", hoverongaps=False))
    for pair in pairs:
        if pair.get("slow"):
            x, y = pair["target"], pair["source"]
            chart.add_shape(x0=x - .5, x1=x + .5, y0=y - .5, y1=y + .5, line={"color": "var(--bad)", "width": 3})
    return chart.update_layout({
        "template": "none", "height": 480, "margin": {"l": 8, "r": 8, "t": 44, "b": 8}, "paper_bgcolor": "var(--paper)",
        "plot_bgcolor": "var(--paper)", "font": {"family": "system-ui, sans-serif", "color": "var(--muted)"},
        "title": {"text": f"bandwidth, {byte_text(nbytes)}", "x": 0, "xref": "paper", "font_size": 14,
                  "font_color": "var(--ink)"},
        "xaxis": {**AXIS, "title": "to rank", "dtick": 1 if len(ranks) <= 16 else None, "showgrid": False},
        "yaxis": {**AXIS, "title": "from rank", "dtick": 1 if len(ranks) <= 16 else None, "showgrid": False,
                  "autorange": "reversed"}})


def of_panel(panel: Panel, numbers: Mapping[str, int], letters: Sequence[str]) -> dict[str, list[go.Figure]]:
    """Return the figures of each placement; none where a single size was measured, which the table says better."""
    if len({row.size for row in panel.rows if row.size > 0}) < 2:
        return {}
    return {placement: [chart(panel, numbers, letters, placement) for chart in (bandwidth, duration)]
            for placement in PLACEMENTS if placement in panel.placements}
