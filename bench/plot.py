"""`--plot F.svg` and `--plot F.png`: the lines of a run over size, by matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, UsageError, nearest
from gpucoll.lab.document import LIGHT, LINES
from gpucoll.lab.sizes import byte_text

from .curves import Panel, Record, numbers, panels

ENDINGS = (".svg", ".png")
MARKERS = "osD^v*PX"  # as many markers as colours
PEER_GREY, BOUND_GREY = "#6a737c", "#3c4650"
# The same record gives the same file: no date, no random names; names are text, never formulas.
PLOT_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "gpucoll", "text.parse_math": False, "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": LIGHT["grid"]}


def check(path: str) -> None:
    """Raise ArgumentError or UsageError if the file could not be made; called before measuring."""
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ArgumentError(f"--plot: {path} does not end in a kind of picture{nearest(ending, ENDINGS)}",
                            code="GC-DRAW")
    try:
        import matplotlib.figure  # noqa: F401 (whether it is there)
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib ({error}): pip install gpucoll[plot]", code="GC-DRAW") from None


def draw(record: Record, path: str) -> None:
    """Write the pictures of `record` to `path`, replacing an existing file.

    Raises as `check` does, and ArgumentError if there are no results or the file cannot be written.
    """
    check(path)
    import matplotlib.figure

    found = panels([[record]])
    if not found:
        raise ArgumentError("--plot: nothing was measured, so there is nothing to draw", code="GC-DRAW")
    with matplotlib.rc_context(PLOT_SETTINGS):
        whole = matplotlib.figure.Figure(figsize=(12, 4.2 * len(found)), layout="constrained")
        for part, panel in zip(whole.subfigures(len(found), 1, squeeze=False)[:, 0], found, strict=True):
            _lines(part, panel, numbers(found))
        save(whole, path)


def save(figure: Any, path: str) -> None:
    """Write a figure to `path`, with PLOT_SETTINGS active; raise ArgumentError if impossible."""
    metadata = {"Date": None, "Creator": None} if path.lower().endswith(".svg") else {"Software": None}
    try:
        figure.savefig(path, dpi=120, metadata=metadata)
    except OSError as error:
        raise ArgumentError(f"--plot: cannot write {path}: {error.strerror}", code="GC-FILE") from None


def _lines(part: Any, panel: Panel, styles: Mapping[str, int]) -> None:
    """Draw bandwidth beside time over size, both logarithmic; the machine's bound is dashed, peers are grey."""
    from matplotlib.ticker import EngFormatter

    part.suptitle(panel.title, x=0.01, horizontalalignment="left", fontweight="bold")
    placement, sizes = (*panel.placements, "")[0], sorted({row.size for row in panel.rows if row.size})
    thinned = sizes[::-(-len(sizes) // 7)] if sizes else []  # about seven labels are readable
    for axes, title, is_time in zip(part.subplots(1, 2), ("bus bandwidth (GB/s)", "time per operation"), (False, True),
                                    strict=True):
        axes.set(xscale="log", yscale="log")
        for (_, name), rows in panel.lines.items():
            sides = [(row.size, row.sides[placement]) for row in rows if placement in row.sides and row.size]
            points = [(size, side.time / 1e6 if is_time else side.busbw) for size, side in sides]
            number, peer = styles[name], rows[0].peer
            axes.plot(*_columns(points), color=PEER_GREY if peer else LINES[number % len(LINES)], label=name,
                      marker=MARKERS[(number + number // len(LINES)) % len(MARKERS)], markersize=4,
                      markerfacecolor="white" if peer else None, gid=f"line {name}")
        low, high = axes.get_ylim()
        bounds = sorted({row.size: row.bound_time / 1e6 if is_time else row.bound
                         for row in panel.rows if row.bound and row.size}.items())
        if bounds:
            axes.plot(*_columns(bounds), "--", color=BOUND_GREY, linewidth=1, label="copy bound", gid="line copy bound")
        axes.set_ylim(low, max([high, *(1.3 * value for _, value in bounds if value < 3 * high)]))
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_xticks(thinned, [byte_text(size) for size in thinned])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter(EngFormatter("s") if is_time else "{x:g}")
        axes.grid(axis="y")
    part.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)


def _columns(points: Sequence[tuple[float, Any]]) -> list[list[float]]:
    """Return the points with positive values as two columns: logarithmic axes show no others."""
    return [[point[axis] for point in points if point[1] > 0] for axis in (0, 1)]
