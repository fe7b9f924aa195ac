"""The contents of records, sorted for pictures and tables: panels of comparable rows, and pairs of ranks.

A value missing in a record (nccl-tests' own files lack some) is None here, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from .records import PLACEMENTS

Record: TypeAlias = Mapping[str, Any]
TIMES = (("s", 1e6), ("ms", 1e3), ("µs", 1.0), ("ns", 1e-3))


class CurveSide(NamedTuple):
    """One placement of a row: us, GB/s, wrong elements (None: not checked), and the us of each repetition."""

    time: float
    algbw: float
    busbw: float
    wrong: float | None
    p99: float | None
    times: tuple[float, ...]


class CurveRow(NamedTuple):
    """One size of an algorithm or a peer in file number `file`; `sides` by placement.

    `bound` is a bus bandwidth in GB/s. `ratios` are the peers' times divided by our time. `skew` is the time in us
    between the fastest rank and the rank `late`.
    """

    file: int
    name: str
    peer: bool
    size: int
    elements: int
    sides: dict[str, CurveSide]
    bound: float | None = None
    ratios: Mapping[str, float] = {}
    skew: float | None = None
    late: int | None = None

    @property
    def bound_time(self) -> float:
        """The time in us at the bound; 0 without a bound."""
        side = self.sides.get(PLACEMENTS[0])
        return side.time * side.busbw / self.bound if side and self.bound else 0.0


class Panel(NamedTuple):
    """Comparable rows: one collective, dtype, op and root on the same number of ranks and kind of device."""

    title: str
    rows: list[CurveRow]

    @property
    def placements(self) -> list[str]:
        """The measured placements."""
        return [placement for placement in PLACEMENTS if any(placement in row.sides for row in self.rows)]

    @property
    def lines(self) -> dict[tuple[int, str], list[CurveRow]]:
        """The rows of each algorithm and peer of each file, by size; our algorithms before the peers."""
        lines: dict[tuple[int, str], list[CurveRow]] = {}
        for row in sorted(self.rows, key=lambda row: (row.file, row.peer)):
            lines.setdefault((row.file, row.name), []).append(row)
        return {key: sorted(rows, key=lambda row: row.size) for key, rows in lines.items()}


def panels(files: Sequence[Sequence[Record]]) -> list[Panel]:
    """Return all panels, in the order of first occurrence."""
    rows: dict[str, list[CurveRow]] = {}
    for number, records in enumerate(files):
        for record in records:
            for result in record["results"]:
                panel = rows.setdefault(title_of(record, result), [])
                known = {(row.file, row.name, row.size) for row in panel}
                panel += [row for row in _rows(number, result) if (row.file, row.name, row.size) not in known]
    return [Panel(title, found) for title, found in rows.items()]


def title_of(record: Record, result: Record) -> str:
    """Return the title of a result. nccl-tests names the collective by the program, and has one rank per device."""
    program = str(next(iter(record.get("args", [])), "")).rpartition("/")[2].removesuffix("_perf")
    ranks, root = int(result.get("ranks") or len(devices(record))), int(result["root"])
    details = [str(result.get("collective") or program), result["type"], result["redop"].replace("none", ""),
               f"root {root}" if root >= 0 else "", f"{ranks} ranks", str(result.get("device") or "cuda")]
    return " · ".join(filter(None, details))


def devices(record: Record) -> list[dict[str, Any]]:
    """Return the device table of a record: a row for each rank."""
    return (record.get("config") or {}).get("devices") or []


def _rows(file: int, result: Record) -> list[CurveRow]:
    """Return the row of an algorithm, and a row for each peer measured beside."""
    name = str(result.get("algorithm") or result.get("experiment_name") or "nccl-tests")
    memory = ", symmetric" if result.get("memory") == "symmetric" else ""
    against, size, count = result.get("against") or {}, int(result["size"]), int(result["count"])
    ratios = {peer: found["ratio"]["out_of_place"] for peer, found in against.items()}
    return [CurveRow(file, name + memory, False, size, count, _sides(result), result.get("bound"), ratios,
                     result.get("skew_us"), result.get("late_rank")),
            *(CurveRow(file, peer + memory, True, size, count, _sides(found)) for peer, found in against.items())]


def _sides(measured: Record) -> dict[str, CurveSide]:
    sides = {}
    for placement in PLACEMENTS:
        body, repetitions = measured.get(placement), measured.get(f"{placement}_per_iter") or {}
        if body:
            times = tuple(repetitions.get("times_us") or ())[repetitions.get("skipped_iterations", 0):]
            sides[placement] = CurveSide(float(body.get("time", body.get("cpu_time"))), float(body["alg_bw"]),
                                         float(body["bus_bw"]), body.get("nwrong"), repetitions.get("p99_us"), times)
    return sides


def numbers(found: Sequence[Panel]) -> dict[str, int]:
    """Return a number for each algorithm and, counted separately, each peer: colour and symbol in all pictures."""
    known: tuple[dict[str, int], dict[str, int]] = {}, {}
    for panel in found:
        for row in panel.rows:
            known[row.peer].setdefault(row.name, len(known[row.peer]))
    return known[1] | known[0]


def figure(value: float) -> str:
    """Return a number with at least three significant digits and without trailing zeros.

    >>> figure(1234.5), figure(0.012345), figure(8.0)
    ('1234', '0.0123', '8')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def time_text(microseconds: float) -> str:
    """Return a time in a suitable unit.

    >>> time_text(0.5), time_text(20.0), time_text(1500.0)
    ('500 ns', '20 µs', '1.5 ms')
    """
    name, unit = next(((name, unit) for name, unit in TIMES if microseconds >= unit), TIMES[-1])
    return f"{figure(microseconds / unit)} {name}"
