"""OSU's layout, `--style osu` and `--overlap`: the same columns, widths and units as the OSU micro-benchmarks.

With several algorithms each line ends with the algorithm's name.

OSU's size is what one rank contributes: a block, where the others have blocks too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cases import TESTS
from .overlap import Overlap

FIRST, WIDTH, COUNT = 10, 20, 12
LATENCY = ("Avg Latency(us)", "Min Latency(us)", "Max Latency(us)")
OVERLAP = ("Overall(us)", "Compute(us)", "Pure Comm.(us)", "Overlap(%)")


def latency_titles(test: str, name: str) -> list[str]:
    """Return the lines over a test's latencies by one algorithm or peer."""
    columns = "".join(f"{title:>{WIDTH}}" for title in LATENCY)
    return ["", f"# gpucoll {test} Latency Test ({name})", f"{'# Size':<{FIRST}}{columns}{'Iterations':>{COUNT}}"]


def latency_line(result: Mapping[str, Any], name: str = "") -> str:
    """Return a line of latencies: out of place, over ranks and repetitions the mean, and over ranks the extremes."""
    rows = result["out_of_place_per_iter"]["per_process_max_times_us"]
    means = [sum(row) / len(row) for row in rows]
    columns = "".join(f"{value:>{WIDTH}.2f}" for value in (sum(means) / len(means), min(means), max(means)))
    return f"{contribution(result):<{FIRST}}{columns}{len(rows[0]):>{COUNT}}" + (f"  {name}" if name else "")


def contribution(result: Mapping[str, Any]) -> int:
    """Return the bytes of a rank's contribution."""
    count, size = result["count"], result["size"]
    blocks = size // result["ranks"] if TESTS[result["collective"]].blocks else size
    return blocks if count else 0


def overlap_titles(test: str, name: str) -> list[str]:
    """Return the lines over a test's overlap by one algorithm."""
    return ["", f"# gpucoll {test} Overlap Test ({name})", "# Overall = start, compute, wait; Pure Comm. = start, wait",
            f"{'# Size':<{FIRST}}" + "".join(f"{title:>{WIDTH}}" for title in OVERLAP)]


def overlap_line(size: int, found: Overlap, name: str = "") -> str:
    """Return a line of overlap."""
    figures = (found.overall * 1e6, found.compute * 1e6, found.pure * 1e6, found.percent)
    return f"{size:<{FIRST}}" + "".join(f"{value:>{WIDTH}.2f}" for value in figures) + (f"  {name}" if name else "")
