"""The figures of the page, by plotly: bandwidth and time over sizes.

Colours are CSS variables filled in by the page's script, so one figure serves light and dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from gpucoll.lab.document import LINES
from gpucoll.lab.sizes import byte_text

from .curves import Panel, figure, time_text

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star", "cross", "x")  # as many as colours
SIZE_TICKS = 5  # few enough for a phone
AXIS: dict[str, Any] = {"gridcolor": "var(--grid)", "linecolor": "var(--axis)", "zeroline": False, "automargin": True}


def _layout(title: str, height: int, **others: Any) -> dict[str, Any]:
    """Return the common layout of all figures."""
    return {"template": "none", "title": {"text": title, "x": 0, "xref": "paper", "font_size": 14}, "height": height,
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--muted)"},
            "title_font_color": "var(--ink)", "paper_bgcolor": "var(--paper)", "plot_bgcolor": "var(--paper)",
            "hoverlabel": {"bgcolor": "var(--tint)", "bordercolor": "var(--border)", "font_color": "var(--ink)"},
            "modebar": {"color": "var(--axis)", "activecolor": "var(--ink)", "bgcolor": "rgba(0,0,0,0)"},
            "margin": {"l": 8, "r": 12, "t": 44, "b": 8}, "uirevision": True, **others}


def over_sizes(panel: Panel, numbers: Mapping[str, int], letters: Sequence[str], placement: str, *,
               time: bool = False) -> go.Figure:
    """Return bus bandwidth or time over size: a line for each algorithm and peer; the machine's bound is dashed.

    Peers are grey and hollow. Lines of all files but the last are thin and hollow; `letters` name the files.
    """
    sizes = sorted({row.size for row in panel.rows if row.size > 0})
    first, last = (size.bit_length() - 1 for size in (sizes[0], sizes[-1]))
    ticks = [1 << power for power in range(first, last + 1, -(-(last - first + 1) // SIZE_TICKS))]
    chart = go.Figure(layout=_layout(
        "time per operation" if time else "bus bandwidth (GB/s)", 400, hovermode="x unified",
        legend={"orientation": "h", "x": 0, "y": -0.2, "yref": "paper", "font_color": "var(--ink)"},
        xaxis={**AXIS, "type": "log", "tickvals": ticks, "ticktext": [*map(byte_text, ticks)], "showgrid": False,
               "ticks": "outside", "tickcolor": "var(--axis)", "showline": True, "hoverformat": ",d",
               "unifiedhovertitle_text": "%{x} bytes"},
        yaxis={**AXIS, "type": "log", "tickformat": "~s" if time else "~g", "ticksuffix": "s" if time else ""}))
    for (file, name), rows in panel.lines.items():
        sides = [(row.size, row.sides[placement]) for row in rows if placement in row.sides]
        if not sides:
            continue
        number, peer, early = numbers[name], rows[0].peer, file < len(letters) - 1
        colour = "var(--peer)" if peer else f"var(--line-{number % len(LINES)})"
        # Colours repeat, symbols are shifted then: the ninth algorithm still has its own look.
        symbol = SYMBOLS[(number + number // len(LINES)) % len(SYMBOLS)] + "-open" * (peer or early)
        chart.add_scatter(
            name=escape(f"{name} {letters[file]}".strip(), quote=False),  # plotly reads names as HTML
            x=[size for size, _ in sides], y=[side.time / 1e6 if time else side.busbw for _, side in sides],
            customdata=[time_text(side.time) if time else f"{figure(side.busbw)} GB/s" for _, side in sides],
            hovertemplate="%{customdata}", mode="lines+markers", line={"color": colour, "width": 1.2 if early else 2.2},
            marker={"symbol": symbol, "size": 7, "color": colour})
    bounds = {row.size: row.bound_time / 1e6 if time else row.bound for row in panel.rows if row.bound}
    # The range of the axis follows the measured lines; the bound may lie outside.
    values = [value for line in chart.data for value in line.y if value > 0] or [1.0]
    low, high = (math.log10(end) for end in (min(values), max(
        [*values, *(bound for bound in bounds.values() if bound < 3 * max(values))])))
    chart.update_yaxes(range=[low - 0.1, high + 0.15], dtick="D2" if high - low < 2 else 1)
    if bounds:
        chart.add_scatter(name="copy bound", x=sorted(bounds), y=[bounds[size] for size in sorted(bounds)],
                          mode="lines", line={"color": "var(--bound)", "width": 1.4, "dash": "dash"},
                          hovertemplate="%{y:.3~s}s" if time else "%{y:.3~g} GB/s")
    return chart
