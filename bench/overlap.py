"""`--overlap`: how much of a collective hides behind computing; OSU's four figures.

Pure is the collective alone, started and waited for at once. Then the same amount of time is computed while it is
under way; overall is the whole of that, and the overlap is the share of the pure time that did not show.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from .cases import Contestant
from .data import Data, Turn
from .measure import ITERATIONS, Bench

SIDE = 48  # of the matrices that are multiplied: some ten us a piece
SECONDS = 1.0  # that one figure may take


class Overlap(NamedTuple):
    """Seconds, each the mean over ranks of their medians."""

    overall: float
    compute: float
    pure: float

    @property
    def percent(self) -> float:
        """OSU's overlap: between 0 and 100.

        >>> Overlap(overall=3.0, compute=2.0, pure=2.0).percent
        50.0
        """
        hidden = 100 - 100 * (self.overall - self.compute) / self.pure if self.pure else 0.0
        return min(100.0, max(0.0, hidden))


def measure_overlap(bench: Bench, contestant: Contestant, data: Data) -> Overlap:
    """Return the four figures, the same on every rank; a collective call."""
    compute = Compute()
    pure = _median(bench, data, lambda given: contestant.call(*given, async_op=True).wait())
    compute.calibrate(bench.comm.mpi.allreduce(pure) / bench.comm.size)
    alone = _median(bench, data, lambda given: compute())
    overall = _median(bench, data, functools.partial(_together, contestant, compute))
    mean = [bench.comm.mpi.allreduce(seconds) / bench.comm.size for seconds in (overall, alone, pure)]
    return Overlap(*mean)


def _together(contestant: Contestant, compute: Callable[[], None], given: tuple[Any, ...]) -> None:
    work = contestant.call(*given, async_op=True)
    compute()
    work.wait()


def _median(bench: Bench, data: Data, call: Callable[[tuple[Any, ...]], Any]) -> float:
    """Return the median seconds of `call`, the ranks beginning together; the first repetition warms up."""
    count, seconds = bench.options.iterations or ITERATIONS, []
    for repetition in range(count + 1):
        arguments = data.arguments(Turn(repetition))
        bench.device.synchronize()
        bench.comm.mpi.Barrier()
        started = time.perf_counter()
        call(arguments)
        bench.device.synchronize()
        seconds.append(time.perf_counter() - started)
        if bench.comm.mpi.bcast(sum(seconds) > SECONDS) and repetition > 0:
            break
    return statistics.median(seconds[1:])


class Compute:
    """Work for the processor that takes a given time: products of small matrices."""

    def __init__(self) -> None:
        self._factor = numpy.full((SIDE, SIDE), 1 / SIDE)
        self._product, self._result = numpy.ones((SIDE, SIDE)), numpy.empty((SIDE, SIDE))
        self.times = 1

    def __call__(self) -> None:
        for _ in range(self.times):
            numpy.matmul(self._factor, self._product, out=self._result)

    def calibrate(self, seconds: float) -> None:
        """Make a call take about so many seconds on this rank."""
        self.times = 50
        started = time.perf_counter()
        self()
        self.times = max(1, round(seconds * self.times / (time.perf_counter() - started)))
