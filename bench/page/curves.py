"""What a record says, sorted for drawing and for tables: panels of curves, and pairs of ranks.

A panel is what can be compared: one collective, dtype, op and root on as many ranks of one kind of device, in one or
several runs. What a record lacks, such as nccl-tests' own files, is absent here too: `None`, never a guess.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ..summary import ratio

Record: TypeAlias = Mapping[str, Any]

PLACEMENTS = ("out_of_place", "in_place")
FEWEST = 5  # repetitions on both sides, for an interval


class Point(NamedTuple):
    """One measurement: bytes, elements, us, GB/s; `times` are those of the single repetitions, where there are any."""

    size: int
    elements: int
    time: float
    algbw: float
    busbw: float
    wrong: float | None
    p99: float | None
    times: tuple[float, ...]


class Curve(NamedTuple):
    """The sizes of one algorithm in one run, by placement; a peer is what others are compared with."""

    name: str
    run: int
    peer: bool
    points: dict[str, list[Point]]


class Kind(NamedTuple):
    """What must be alike for two lines to be compared; redop and root are "none" and -1 where there are none."""

    collective: str
    type: str
    redop: str
    root: int
    ranks: int
    device: str


class Panel(NamedTuple):
    """Curves that may be compared.

    `bounds` are GB/s of bus bandwidth by run and size; `ratios` the peer's time / ours, and `skews` the us that the
    slowest rank took longer than the fastest and which one that was, both by run, algorithm and size.
    """

    kind: Kind
    curves: list[Curve]
    bounds: dict[int, dict[int, float]]
    ratios: dict[tuple[int, str, int], dict[str, float]]
    skews: dict[tuple[int, str, int], tuple[float, int | None]]

    @property
    def title(self) -> str:
        """The collective and what there is to say about it."""
        kind = self.kind
        details = [kind.collective, kind.type, kind.redop if kind.redop != "none" else "",
                   f"root {kind.root}" if kind.root >= 0 else "", f"{kind.ranks} ranks", kind.device]
        return " · ".join(filter(None, details))

    @property
    def runs(self) -> list[int]:
        """The runs that measured this."""
        return sorted({curve.run for curve in self.curves})

    @property
    def placements(self) -> list[str]:
        """The placements that were measured."""
        return [placement for placement in PLACEMENTS if any(curve.points[placement] for curve in self.curves)]

    @property
    def factor(self) -> float:
        """busbw / algbw, from the data themselves."""
        points = [point for curve in self.curves for found in curve.points.values() for point in found if point.algbw]
        return points[-1].busbw / points[-1].algbw if points else 0.0


def panels(records: Sequence[Record]) -> list[Panel]:
    """Return a panel for all that has been measured, in the order in which it first occurs."""
    found: dict[Kind, Panel] = {}
    for run, record in enumerate(records):
        for result in record["results"]:
            kind = kind_of(record, result)
            _add(found.setdefault(kind, Panel(kind, [], {}, {}, {})), run, result)
    for panel in found.values():
        panel.curves.sort(key=lambda curve: (curve.run, curve.peer))
    return list(found.values())


def kind_of(record: Record, result: Record) -> Kind:
    """Return what was measured; nccl-tests itself names the collective by its program, and has a rank per device.

    >>> kind_of({"args": ["./build/all_reduce_perf"], "config": {"devices": [{}, {}]}},
    ...         {"type": "float", "redop": "sum", "root": "    -1"})
    Kind(collective='all_reduce', type='float', redop='sum', root=-1, ranks=2, device='cuda')
    """
    program = str(next(iter(record.get("args", [])), "")).rpartition("/")[2].removesuffix("_perf")
    return Kind(str(result.get("collective") or program), result["type"], result["redop"], int(result["root"]),
                int(result.get("ranks") or len(devices(record))), str(result.get("device") or "cuda"))


def devices(record: Record) -> list[dict[str, Any]]:
    """Return the row of each rank: who runs where."""
    return (record.get("config") or {}).get("devices") or []


def _add(panel: Panel, run: int, result: Record) -> None:
    name = str(result.get("algorithm") or result.get("experiment_name") or "nccl-tests")
    size, against = int(result["size"]), result.get("against") or {}
    _put(panel, name, run, False, result, result)
    for peer, measured in against.items():
        _put(panel, peer, run, True, result, measured)
    if result.get("bound"):
        panel.bounds.setdefault(run, {})[size] = float(result["bound"])
    if against:
        panel.ratios[run, name, size] = {peer: found["ratio"]["out_of_place"] for peer, found in against.items()
                                         if (found.get("ratio") or {}).get("out_of_place")}
    if result.get("skew_us") is not None:
        panel.skews[run, name, size] = float(result["skew_us"]), result.get("late_rank")


def _put(panel: Panel, name: str, run: int, peer: bool, result: Record, measured: Record) -> None:
    """Add one measurement to its curve; a peer that stands beside several algorithms is taken the first time."""
    curve = next((curve for curve in panel.curves if (curve.name, curve.run, curve.peer) == (name, run, peer)), None)
    if curve is None:
        curve = Curve(name, run, peer, {placement: [] for placement in PLACEMENTS})
        panel.curves.append(curve)
    for placement in PLACEMENTS:
        point, points = _point(result, measured, placement), curve.points[placement]
        if point is not None and not (peer and any(point.size == other.size for other in points)):
            points.append(point)


def _point(result: Record, measured: Record, placement: str) -> Point | None:
    body, repetitions = measured.get(placement), measured.get(f"{placement}_per_iter") or {}
    if not body:
        return None
    return Point(int(result["size"]), int(result["count"]), float(body.get("time", body.get("cpu_time"))),
                 float(body["alg_bw"]), float(body["bus_bw"]), body.get("nwrong"), repetitions.get("p99_us"),
                 tuple(repetitions.get("times_us") or ())[repetitions.get("skipped_iterations", 0):])


class Pair(NamedTuple):
    """A link: from a rank to a rank, GB/s, us; `slow` by the verdict of the run."""

    source: int
    target: int
    bandwidth: float
    time: float
    slow: bool


def pairs(record: Record) -> dict[int, list[Pair]]:
    """Return by message size what was measured between two ranks at a time."""
    found: dict[int, list[Pair]] = {}
    for row in (record.get("gpucoll") or {}).get("pairs") or []:
        pair = Pair(int(row["source"]), int(row["target"]), float(row["bandwidth"]), float(row["time_us"]),
                    bool(row.get("slow")))
        found.setdefault(int(row["size"]), []).append(pair)
    return found


def names(panels: Sequence[Panel]) -> dict[str, int]:
    """Return a number for each algorithm and, counted apart, for each peer: its colour and sign on every picture."""
    found: dict[str, int] = {}
    counts = {False: 0, True: 0}
    for curve in (curve for panel in panels for curve in panel.curves):
        if curve.name not in found:
            found[curve.name] = counts[curve.peer]
            counts[curve.peer] += 1
    return found


class Change(NamedTuple):
    """How many times as fast one run was as another at one size, and the interval that holds this with 95%.

    Before and after are us, of the median repetition on its slowest rank, or what a file without repetitions says.
    """

    size: int
    before: float
    after: float
    ratio: float
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """How an algorithm or a peer differs between two runs; `curve` is the later one's."""

    curve: Curve
    changes: list[Change]


def differences(panel: Panel, first: int, run: int) -> list[Difference]:
    """Return how one run differs from another in all that both measured at one size at least."""
    old = {(curve.name, curve.peer): curve for curve in panel.curves if curve.run == first}
    found = [Difference(curve, changes(old[curve.name, curve.peer], curve)) for curve in panel.curves
             if curve.run == run and (curve.name, curve.peer) in old]
    return [difference for difference in found if difference.changes]


def changes(before: Curve, after: Curve) -> list[Change]:
    """Return the changes of all sizes that both have, out of place."""
    old = {point.size: point for point in before.points[PLACEMENTS[0]]}
    return [_change(old[point.size], point) for point in after.points[PLACEMENTS[0]] if point.size in old]


def _change(before: Point, after: Point) -> Change:
    if min(len(before.times), len(after.times)) < FEWEST:
        return Change(after.size, before.time, after.time, before.time / after.time, None, None)
    medians = statistics.median(before.times), statistics.median(after.times)
    return Change(after.size, *medians, *ratio(before.times, after.times))
