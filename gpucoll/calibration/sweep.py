"""Every algorithm on every executor at many sizes: what a table's curves are made of."""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpucoll.calibration.meter import Meter, call_of
from gpucoll.calibration.probes import runs
from gpucoll.communicator import Communicator
from gpucoll.tuner.choice import scheduled
from gpucoll.tuner.table import Curve

SIZES = tuple(1 << power for power in (3, 10, 12, 14, 16, 18, 20, 22, 24, 26))  # bytes
NATIVE_SIZES = (8, 1 << 12, 1 << 16, 1 << 20, 1 << 24)  # where nothing else is measured
SECONDS = 0.25  # for each algorithm at each size
HOPELESS = 3.0  # so many times as slow as the quickest, at two sizes in a row: not measured at larger ones
BULK = 1 << 14  # bytes of a rank's share; below, who has many rounds is slow, and may be the quickest far above
Way = tuple[str, str]  # executor and algorithm


def ways(comms: dict[str, Communicator], collective: str) -> list[Way]:
    """Return the executors and algorithms that can be measured; `comms` has a communicator for each executor."""
    some = next(iter(comms.values()))
    names = scheduled(collective, some.size, some.nodes)
    return [(executor, name) for executor in comms
            for name in (["native"] if executor == "native" else names)]


def sweep(comms: dict[str, Communicator], collective: str, sizes: Sequence[int], device: str,
          say: Callable[[str], None]) -> list[Curve]:
    """Return the curves of all ways to do `collective`; `say` is told what was measured. A collective call."""
    some = next(iter(comms.values()))
    left, slow = ways(comms, collective), dict[Way, int]()
    curves: dict[Way, list[tuple[int, float]]] = defaultdict(list)
    for nbytes in (0,) if collective == "barrier" else sizes:
        calls = _calls(comms, collective, nbytes, device, left)
        if not calls:
            break
        samples = Meter(some, device).samples([*calls.values()], SECONDS * len(calls))
        medians = dict(zip(calls, map(statistics.median, samples), strict=True))
        for way, seconds in medians.items():
            curves[way].append((nbytes, seconds))
        left = hopeful(medians, slow, nbytes // some.size)
        best = min(medians, key=medians.__getitem__)
        say(f"{collective:16} {nbytes:10} bytes  {1e6 * medians[best]:12.1f} us  {best[1]} on {best[0]}")
    return [Curve(collective, *way, *zip(*points, strict=True)) for way, points in curves.items()]


def hopeful(seconds: Mapping[Way, float], slow: dict[Way, int], share: int) -> list[Way]:
    """Return the ways that are worth measuring at a larger size, after they took `seconds` for `share` bytes a rank.

    `slow` counts at how many sizes in a row each was hopeless.

    >>> slow, seconds = {}, {("mpi", "ring"): 1.0, ("mpi", "star"): 9.0}
    >>> [len(hopeful(seconds, slow, share)) for share in (8, 8, 8, 1 << 16, 1 << 18)]
    [2, 2, 2, 2, 1]
    """
    limit = HOPELESS * min(seconds.values())
    for way, taken in seconds.items():
        slow[way] = slow.get(way, 0) + 1 if share >= BULK and taken > limit else 0
    return [way for way in seconds if slow[way] < 2]


def _calls(comms: dict[str, Communicator], collective: str, nbytes: int, device: str,
           left: Sequence[Way]) -> dict[Way, Callable[[], Any]]:
    """Return the calls of those ways that are not refused; those of one executor share their arrays."""
    made = {executor: call_of(comms[executor], collective, nbytes, device) for executor in {way[0] for way in left}}
    calls = {way: functools.partial(made[way[0]], way[1]) for way in left}
    return {way: call for way, call in calls.items() if runs(call)}
