"""`--plot F.svg`: time against ranks and time against size, a line per algorithm, with the crossovers.

Drawn by matplotlib, of the extra `plot`, which is imported when something is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

from gpucoll.analysis.document import LIGHT, LINES
from gpucoll.analysis.simulate import Prediction
from gpucoll.analysis.simulate.sweep import Crossover
from gpucoll.analysis.sizes import byte_text
from gpucoll.errors import UsageError

DASHES = ("solid", "dashed", "dotted")  # the second and the third time round the colours
# The same rows make the same file; a name is text, never a formula.
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "gpucoll", "text.parse_math": False, "font.size": 9,
    "axes.edgecolor": LIGHT["axis"], "grid.color": LIGHT["grid"], "text.color": LIGHT["ink"],
    "axes.spines.top": False, "axes.spines.right": False}


def svg(title: str, rows: Iterable[Prediction], by_size: Iterable[Prediction], crossings: Sequence[Crossover]) -> str:
    """Return the picture: `rows`, of one size, against ranks; `by_size`, of one number of ranks, against bytes.

    The same rows make the same file. Raises UsageError where matplotlib is missing.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib ({error}): pip install gpucoll[plot]", code="GC-PLOT") from None
    rows, by_size = [*rows], [*by_size]
    size = f", {byte_text(rows[0].nbytes)}" if rows else ""
    ranks = f", {by_size[0].ranks} ranks" if by_size else ""
    names = sorted({row.algorithm for row in (*rows, *by_size)})
    with matplotlib.rc_context(SETTINGS):
        figure = matplotlib.figure.Figure(figsize=(11, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        figure.suptitle(title, x=0.01, horizontalalignment="left")
        _panel(left, f"time against ranks{size}", rows, names, lambda row: row.ranks, lambda value: f"{value:,}",
               [(ranks, f"{ranks:,}: {name}") for ranks, name in _changes(rows)])
        _panel(right, f"time against size{ranks}", by_size, names, lambda row: row.nbytes, byte_text,
               [(one.nbytes, f"{byte_text(round(one.nbytes))}: {one.then}") for one in crossings])
        lines = {line.get_label(): line for axes in (left, right) for line in axes.lines if line.get_gid()}
        if lines:
            figure.legend([lines[name] for name in sorted(lines)], sorted(lines), loc="outside right upper",
                          frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _panel(axes: Any, title: str, rows: Sequence[Prediction], names: Sequence[str], across: Callable[[Prediction], int],
           words: Callable[[int], str], marks: Sequence[tuple[float, str]]) -> None:
    """Draw a line for each algorithm on logarithmic axes, where a time of 0 has no place, and where another is best."""
    from matplotlib.ticker import EngFormatter

    shown = sorted((row for row in rows if row.seconds > 0 and across(row) > 0),
                   key=lambda row: (row.algorithm, across(row)))
    axes.set_title(title, loc="left", fontsize="medium")
    if not shown:
        axes.text(0.5, 0.5, "nothing to draw", horizontalalignment="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    for name, group in groupby(shown, lambda row: row.algorithm):
        points, (again, number) = [*group], divmod(names.index(name), len(LINES))
        axes.plot([across(row) for row in points], [row.seconds for row in points], marker="o", markersize=3,
                  color=LINES[number], linestyle=DASHES[again % len(DASHES)], label=name, gid=f"line {name}")
    values = sorted({across(row) for row in shown})
    thinned = values[::-(-len(values) // 7)]  # about seven of them can be read
    axes.set(xscale="log", yscale="log", xlim=(values[0] / 1.1, values[-1] * 1.1))
    axes.set_xticks(thinned, [words(value) for value in thinned])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    axes.grid(axis="y")
    for number, (value, text) in enumerate(marks):
        axes.axvline(value, color=LIGHT["muted"], linestyle=":", linewidth=1)
        axes.annotate(text, (value, 1), (3, -10 - 11 * number), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize="small")


def _changes(rows: Sequence[Prediction]) -> list[tuple[int, str]]:
    """Return the numbers of ranks where another algorithm is the quickest than for the number before, and which."""
    best = [next(group) for _, group in groupby(sorted(rows, key=lambda row: (row.ranks, row.seconds)),
                                                lambda row: row.ranks)]
    return [(after.ranks, after.algorithm) for before, after in pairwise(best) if before.algorithm != after.algorithm]
