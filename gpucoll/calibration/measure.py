"""What is measured for a table: the seconds of calls; those of every algorithm, for its curves; probes, for its links.

Calls are taken in turn: whatever disturbs the machine then disturbs them all. The messages of the probes are those of
schedules, on all ranks at once: what an executor really does, and what ranks that share cores and memory really get.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.algorithms import algorithms, find, registry
from gpucoll.communicator import Communicator
from gpucoll.core.collectives import COLLECTIVES, Side
from gpucoll.transport.rendezvous import wait_for_all
from gpucoll.tuner.choice import scheduled
from gpucoll.tuner.model import ONE_PASS, moved
from gpucoll.tuner.table import Curve, LinkCost

FEWEST, MOST = 5, 25  # repetitions
SHORT = 1e-3  # seconds: calls that take less are made several times between two looks at the clock
SEVERAL = 8


def samples(comm: Communicator, calls: Sequence[Callable[[], Any]], seconds: float,
            device: str = "cpu") -> list[list[float]]:
    """Return of each call the seconds that it took the slowest rank, again and again for about `seconds` in all.

    A collective call; every rank gets the same. Each call is made twice before.
    """
    for call in (*calls, *calls):
        _time(comm, call, 1, device)
    several, spent = [], 0.0
    for call in calls:
        first = max(comm.mpi.allgather(_time(comm, call, 1, device)))
        several.append(SEVERAL if first < SHORT else 1)
        spent += first * several[-1]
    mine = numpy.zeros((max(FEWEST, min(MOST, int(seconds / max(spent, 1e-9)))), len(calls)))
    for turn, row in enumerate(mine):
        for column in numpy.roll(range(len(calls)), -turn):
            row[column] = _time(comm, calls[column], several[column], device)
    slowest: list[list[float]] = numpy.array(comm.mpi.allgather(mine)).max(0).T.tolist()
    return slowest


def _time(comm: Communicator, call: Callable[[], Any], several: int, device: str) -> float:
    comm.mpi.Barrier()
    started = time.perf_counter()
    for _ in range(several):
        call()
    if device == "cuda":  # the call has only been enqueued
        _module(device).cuda.get_current_stream().synchronize()
    return (time.perf_counter() - started) / several


def _module(device: str) -> Any:
    if device != "cuda":
        return numpy
    import cupy

    return cupy


def call_of(comm: Communicator, collective: str, nbytes: int, device: str = "cpu") -> Callable[[str], Any]:
    """Return the call of `collective`, which takes an algorithm's name.

    It is on float32 arrays whose larger side has about `nbytes` bytes on a rank.
    """
    row, method, xp = COLLECTIVES[collective], getattr(comm, collective), _module(device)
    block = max(1, nbytes // 4 // comm.size) if row.blocks else max(1, nbytes // 4)

    def array(side: Side) -> Any:
        return xp.ones((comm.size, block) if side.blocks else block, "float32") if side.exists(comm.rank, 0) else None

    if collective == "barrier":
        return lambda algorithm: method(algorithm=algorithm)
    x, options = array(row.output if collective == "broadcast" else row.input), dict[str, Any]()
    if collective == "reduce_scatter_v":
        x, options = x.reshape(-1), {"counts": [block] * comm.size}
    elif row.ragged:
        x = [*x] if row.input.blocks and x is not None else x
    elif collective != "broadcast":
        options = {"out": array(row.output)}
    return lambda algorithm: method(x, **options, algorithm=algorithm)


def runs(call: Callable[[], Any]) -> bool:
    """Return whether a call is not refused; that is decided alike on every rank, before data move."""
    with contextlib.suppress(ValueError):  # an ArgumentError
        call()
        return True
    return False


# ---------------------------------------------------------------- every algorithm on every executor

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
        made = {name: call_of(comms[name], collective, nbytes, device) for name in {executor for executor, _ in left}}
        calls = {way: functools.partial(made[way[0]], way[1]) for way in left}
        calls = {way: call for way, call in calls.items() if runs(call)}
        if not calls:
            break
        taken = samples(some, [*calls.values()], SECONDS * len(calls), device)
        medians = dict(zip(calls, map(statistics.median, taken), strict=True))
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


# ---------------------------------------------------------------- probes, and the fit

PROBE_SECONDS = 0.15  # for each size
NAP = 1e-3  # seconds between two looks of ranks that have nothing to do
BLOCK, LONG_BLOCK = 1 << 16, 1 << 20  # bytes


def rows_to_measure(*, one_pass: bool) -> list[tuple[str, str, int]]:
    """Return collective, algorithm, and the bytes of a rank's block, or of the whole, of the calls that are measured.

    With `one_pass`, of the algorithms that read memory at the source.
    """
    if one_pass:
        return [(row.collective, row.name, nbytes) for row in registry().values()
                if row.traits.barriers and row.collective in ("all_reduce", "all_gather")
                for nbytes in (8, BLOCK, LONG_BLOCK)]
    return [(row.collective, row.name, nbytes) for row in registry().values() for nbytes in row.traits.probes]


def links(comm: Communicator, executor: str, device: str) -> list[LinkCost]:
    """Return the constants of `executor` within a node and across nodes, as far as there are such links.

    A collective call; the same on every rank. On several nodes the slowest node counts.
    """
    costs = []
    for name, color in (("node", comm.node), ("network", 0 if comm.local_rank == 0 else None)):
        part = comm.split(color)
        constants: list[dict[str, float]] = []
        if part is not None:
            with part:
                constants = _measured(part, executor, device) if part.size > 1 else []
        wait_for_all(comm.mpi, math.inf, NAP)  # who has nothing to do sleeps until the others have
        everyone = [one for one in comm.mpi.allgather(constants) if one]
        for kind, rows in zip((executor, ONE_PASS), zip(*everyone, strict=True), strict=False):
            costs.append(LinkCost(kind, name, **max(rows, key=lambda one: one["alpha"])))
    return costs


def _measured(part: Communicator, executor: str, device: str) -> list[dict[str, float]]:
    """Return the constants of an executor, and for `shared` those of what it does in one pass."""
    gpu = part.device if device == "cuda" else None
    with Communicator.from_mpi(part.mpi, executor=executor, device=gpu) as comm:
        kinds = (False, True) if (executor, device) == ("shared", "cpu") else (False,)
        return [fit([*_probes(comm, device, rows_to_measure(one_pass=kind))]) for kind in kinds]


def _probes(comm: Communicator, device: str, rows: Sequence[tuple[str, str, int]]) -> Iterator[Probe]:
    for collective, algorithm, block in rows:
        nbytes = block * (comm.size if collective in ("all_gather", "reduce_scatter") else 1)
        call = functools.partial(call_of(comm, collective, nbytes, device), algorithm)
        seconds = statistics.median(samples(comm, [call], PROBE_SECONDS, device)[0])
        cost = find(collective, algorithm).price(comm.size, nbytes)
        yield Probe(cost["rounds"], moved(cost, str(comm.executor)), cost["reduced"], cost["beside"], seconds)


def serves(comm: Communicator, device: str) -> bool:
    """Return whether the executor that a communicator was made with serves its ranks and arrays.

    An algorithm is named, so that GPUCOLL_ALGO has no say.
    """
    algorithm = "native" if comm.executor == "native" else algorithms("all_reduce", size=comm.size)[0]
    return runs(functools.partial(call_of(comm, "all_reduce", 8, device), algorithm))


CONSTANTS = ("alpha", "beta", "gamma", "gap")


class Probe(NamedTuple):
    """A measured time, and how often each constant is in it: rounds, bytes moved, bytes combined, further messages."""

    rounds: float
    moved: float
    reduced: float
    further: float
    seconds: float


def fit(probes: Sequence[Probe]) -> dict[str, float]:
    """Return the constants that explain `probes` best; none is below 0."""
    seconds = numpy.array([probe.seconds for probe in probes])
    matrix = numpy.array([probe[:-1] for probe in probes], float) / seconds[:, None]
    used = [column for column in range(len(CONSTANTS)) if matrix[:, column].any()]
    values = numpy.zeros(len(CONSTANTS))
    while used:
        scale = matrix[:, used].max(0)
        constants = numpy.linalg.lstsq(matrix[:, used] / scale, numpy.ones(len(probes)), rcond=None)[0] / scale
        if (constants >= 0).all():
            values[used] = constants
            break
        used.pop(int(constants.argmin()))
    return dict(zip(CONSTANTS, map(float, values), strict=True))
