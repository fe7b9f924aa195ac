"""What is measured for a fit: a barrier, exchanges without and with a reduction, many messages at once; and the fit.

The messages are those of schedules, on all ranks at once: what an executor really does, and what ranks that share
cores and memory really get of them.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from gpucoll.algorithms import find
from gpucoll.calibration.meter import call_of, runs, samples
from gpucoll.communicator import Communicator
from gpucoll.rendezvous import wait_for_all
from gpucoll.tuner.model import MEETINGS, ONE_PASS, moved
from gpucoll.tuner.table import LinkCost

SECONDS = 0.15  # for each size
NAP = 1e-3  # seconds between two looks of ranks that have nothing to do
BLOCK, LONG_BLOCK = 1 << 16, 1 << 20  # bytes
# Collective, algorithm, and bytes for each rank of a block, or of the whole.
PROBES = (("barrier", "dissemination", 0), ("all_reduce", "recursive_doubling", 8), ("all_gather", "direct", 8),
          ("all_gather", "ring", BLOCK), ("all_gather", "ring", LONG_BLOCK), ("reduce_scatter", "ring", BLOCK),
          ("reduce_scatter", "ring", LONG_BLOCK), ("all_reduce", "circulant", BLOCK),
          ("all_reduce", "recursive_doubling", LONG_BLOCK))
ONE_PASS_PROBES = tuple((*way, nbytes) for way in MEETINGS if way[0] in ("all_reduce", "all_gather")
                        for nbytes in (8, BLOCK, LONG_BLOCK))


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
    with Communicator.from_mpi(part.mpi, executor=executor) as comm:
        kinds = (PROBES, ONE_PASS_PROBES) if (executor, device) == ("shared", "cpu") else (PROBES,)
        return [fit([*_probes(comm, device, kind)]) for kind in kinds]


def _probes(comm: Communicator, device: str, rows: Sequence[tuple[str, str, int]]) -> Iterator[Probe]:
    for collective, algorithm, block in rows:
        nbytes = block * (comm.size if collective in ("all_gather", "reduce_scatter") else 1)
        call = functools.partial(call_of(comm, collective, nbytes, device), algorithm)
        seconds = statistics.median(samples(comm, [call], SECONDS, device)[0])
        cost = find(collective, algorithm).price(comm.size, nbytes)
        yield Probe(cost["rounds"], moved(cost, str(comm.executor)), cost["reduced"], cost["beside"], seconds)


def serves(comm: Communicator, device: str) -> bool:
    """Return whether the executor that a communicator was made with serves its ranks and arrays.

    An algorithm is named, so that GPUCOLL_ALGO has no say.
    """
    algorithm = "native" if comm.executor == "native" else "ring"
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
