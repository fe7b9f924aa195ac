"""The contents of a tuning table: curves of all algorithms, and the constants of the links, fitted to probes.

A probe is a whole collective on all ranks at once: the constants then include the executor's overhead and shared cores
and memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll import internal
from gpucoll.algorithms import algorithms, find, registry
from gpucoll.calibration.measure import ranks_of, samples
from gpucoll.communicator import Communicator
from gpucoll.core.collectives import COLLECTIVES, Side
from gpucoll.transport.rendezvous import wait_for_all
from gpucoll.tuner.choice import ONE_PASS, moved, scheduled
from gpucoll.tuner.table import Curve, LinkCost


def call_of(comm: Communicator, collective: str, nbytes: int, device: str = "cpu") -> Callable[[str], Any]:
    """Return a function of an algorithm's name that calls `collective` on float32 arrays.

    The larger of input and output has about `nbytes` bytes per rank.
    """
    row, method = COLLECTIVES[collective], getattr(comm, collective)
    xp = importlib.import_module("cupy" if device == "cuda" else "numpy")
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
    """Make a call and return whether the library accepts the arguments, a decision equal on all ranks."""
    # ArgumentError is a ValueError.
    with contextlib.suppress(ValueError):
        call()
        return True
    return False


# ---------------------------------------------------------------- every algorithm on every executor

SIZES = tuple(1 << power for power in (3, 10, 12, 14, 16, 18, 20, 22, 24, 26))  # bytes
NATIVE_SIZES = (8, 1 << 12, 1 << 16, 1 << 20, 1 << 24)  # bytes, without --sweep
SWEEP_SECONDS = 0.25  # for each algorithm at each size
# An algorithm slower than the fastest by this factor at two sizes in a row is not measured at larger sizes.
HOPELESS = 3.0
# Smallest share of a rank in bytes for this rule. At smaller shares an algorithm with many rounds is slow, but the same
# algorithm may be the fastest at large sizes.
BULK = 1 << 14
Contender = tuple[str, str]  # executor and algorithm


def contenders(comms: dict[str, Communicator], collective: str) -> list[Contender]:
    """Return all pairs of executor and algorithm for `collective`; `comms` has a communicator for each executor."""
    some = next(iter(comms.values()))
    names = scheduled(collective, some.size, some.nodes)
    return [(executor, name) for executor in comms for name in (["native"] if executor == "native" else names)]


def sweep(comms: dict[str, Communicator], collective: str, sizes: Sequence[int], device: str,
          say: Callable[[str], None]) -> list[Curve]:
    """Measure the curves of `collective` for all executors and algorithms; report by `say`. A collective call."""
    some = next(iter(comms.values()))
    left, slow = contenders(comms, collective), dict[Contender, int]()
    curves: dict[Contender, list[tuple[int, float]]] = defaultdict(list)
    for nbytes in (0,) if collective == "barrier" else sizes:
        made = {name: call_of(comms[name], collective, nbytes, device) for name in {executor for executor, _ in left}}
        calls = {way: functools.partial(made[way[0]], way[1]) for way in left}
        calls = {way: call for way, call in calls.items() if runs(call)}
        if not calls:
            break
        taken = samples(ranks_of(some), [*calls.values()], SWEEP_SECONDS * len(calls), device)
        medians = dict(zip(calls, map(statistics.median, taken), strict=True))
        for way, seconds in medians.items():
            curves[way].append((nbytes, seconds))
        left = hopeful(medians, slow, nbytes // some.size)
        best = min(medians, key=medians.__getitem__)
        say(f"{collective:16} {nbytes:10} bytes  {1e6 * medians[best]:12.1f} us  {best[1]} on {best[0]}")
    return [Curve(collective, *way, *zip(*points, strict=True)) for way, points in curves.items()]


def hopeful(seconds: Mapping[Contender, float], slow: dict[Contender, int], share: int) -> list[Contender]:
    """Return the pairs of executor and algorithm worth measuring at a larger size.

    `seconds` are the durations at `share` bytes per rank. `slow` counts the successive sizes at which a pair was
    hopeless, and is updated.

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
IDLE_INTERVAL = 1e-3  # seconds between two polls of an idle rank
PROBE_BLOCK, LONG_BLOCK = 1 << 16, 1 << 20  # bytes


def rows_to_measure(*, one_pass: bool) -> list[tuple[str, str, int]]:
    """Return the probes: collective, algorithm, and bytes of a rank's block (of the whole array without blocks).

    With `one_pass`, return the probes of the algorithms reading the peers' inputs directly.
    """
    if one_pass:
        return [(row.collective, row.name, nbytes) for row in registry().values()
                if row.traits.barriers and row.collective in ("all_reduce", "all_gather")
                for nbytes in (8, PROBE_BLOCK, LONG_BLOCK)]
    return [(row.collective, row.name, nbytes) for row in registry().values() for nbytes in row.traits.probes]


def links(comm: Communicator, executor: str, device: str) -> list[LinkCost]:
    """Return the constants of `executor` for the links within a node and for the links across nodes.

    A collective call with the same result on every rank. The node with the largest alpha represents all nodes.
    """
    costs = []
    for name, color in (("node", comm.node), ("network", 0 if comm.local_rank == 0 else None)):
        part = comm.split(color)
        constants: list[dict[str, float]] = []
        if part is not None:
            with part:
                constants = _measured(part, executor, device) if part.size > 1 else []
        # No deadline: the measuring may take long, and its own calls have deadlines.
        wait_for_all(ranks_of(comm), math.inf, IDLE_INTERVAL)
        everyone = [one for one in ranks_of(comm).allgather(constants) if one]
        for kind, rows in zip((executor, ONE_PASS), zip(*everyone, strict=True), strict=False):
            costs.append(LinkCost(kind, name, **max(rows, key=lambda one: one["alpha"])))
    return costs


def _measured(part: Communicator, executor: str, device: str) -> list[dict[str, float]]:
    """Return the constants of an executor; for `shared`, also the constants of algorithms that read peers' inputs."""
    gpu = part.device if device == "cuda" else None
    options = part.options._replace(executor=executor, device=gpu)
    with Communicator(internal.link_of(part).part(executor, range(part.size)), options) as comm:
        kinds = (False, True) if (executor, device) == ("shared", "cpu") else (False,)
        return [fit([*_probes(comm, device, rows_to_measure(one_pass=kind))]) for kind in kinds]


def _probes(comm: Communicator, device: str, rows: Sequence[tuple[str, str, int]]) -> Iterator[Probe]:
    for collective, algorithm, block in rows:
        nbytes = block * (comm.size if collective in ("all_gather", "reduce_scatter") else 1)
        call = functools.partial(call_of(comm, collective, nbytes, device), algorithm)
        seconds = statistics.median(samples(ranks_of(comm), [call], PROBE_SECONDS, device)[0])
        cost = find(collective, algorithm).price(comm.size, nbytes)
        yield Probe(cost["rounds"], moved(cost, str(comm.executor)), cost["reduced"], cost["gaps"], seconds)


def serves(comm: Communicator, device: str) -> bool:
    """Return whether the executor of `comm` accepts an all-reduce of the ranks on `device`.

    The call names an algorithm, because GPUCOLL_ALGO must not influence the result.
    """
    algorithm = "native" if comm.executor == "native" else algorithms("all_reduce", size=comm.size)[0]
    return runs(functools.partial(call_of(comm, "all_reduce", 8, device), algorithm))


CONSTANTS = ("alpha", "beta", "gamma", "gap")


class Probe(NamedTuple):
    """A measured duration and the factors of the constants alpha, beta, gamma and gap."""

    rounds: float
    moved: float  # bytes
    reduced: float  # bytes
    further: float  # messages beyond the first message of each round
    seconds: float


def fit(probes: Sequence[Probe]) -> dict[str, float]:
    """Return the nonnegative constants that fit `probes` best, by least squares of the relative errors."""
    seconds = numpy.array([probe.seconds for probe in probes])
    matrix = numpy.array([probe[:-1] for probe in probes], float) / seconds[:, None]
    used = [column for column in range(len(CONSTANTS)) if matrix[:, column].any()]
    values = numpy.zeros(len(CONSTANTS))
    while used:
        scale = matrix[:, used].max(0)
        constants = numpy.linalg.lstsq(matrix[:, used] / scale, numpy.ones(len(probes)), rcond=None)[0] / scale
        # A negative constant has no meaning: set the smallest constant to 0 and fit the others again.
        if (constants >= 0).all():
            values[used] = constants
            break
        used.pop(int(constants.argmin()))
    return dict(zip(CONSTANTS, map(float, values), strict=True))
