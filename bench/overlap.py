"""`--overlap`: the share of a collective hidden behind computing; the four figures of OSU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy

from .cases import Contestant
from .data import Data, Turn
from .measure import ITERATIONS, Bench

SIDE = 48  # of the multiplied matrices: some ten us per product
SECONDS = 1.0  # limit for a figure


def measure_overlap(bench: Bench, contestant: Contestant, data: Data) -> dict[str, Any]:
    """Return the JSON entry of an overlap measurement, the same on every rank; a collective call.

    Pure is the time of the collective alone, started and immediately awaited. Compute is about the same time of
    computing. Overall is the time of both together. The overlap is the hidden share of the pure time. Each figure is
    the mean over ranks of their medians.
    """
    def mean(call: Callable[[tuple[Any, ...]], Any]) -> float:
        return float(bench.comm.mpi.allreduce(_median(bench, data, call))) / bench.comm.size

    def together(given: tuple[Any, ...]) -> None:
        work = contestant.call(*given, async_op=True)
        compute()
        work.wait()

    pure = mean(lambda given: contestant.call(*given, async_op=True).wait())
    compute = computing(pure)
    alone, overall = mean(lambda given: compute()), mean(together)
    return {"collective": data.case.test, "algorithm": contestant.name, "size": data.case.nbytes(data.count),
            "overall_us": overall * 1e6, "compute_us": alone * 1e6, "pure_us": pure * 1e6,
            "overlap_pct": percent(overall, alone, pure)}


def percent(overall: float, compute: float, pure: float) -> float:
    """Return OSU's overlap: between 0 and 100."""
    return min(100.0, max(0.0, 100 - 100 * (overall - compute) / pure if pure else 0.0))


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


def computing(seconds: float) -> Callable[[], None]:
    """Return work for the processor of about `seconds` on this rank: products of small matrices."""
    factor = numpy.full((SIDE, SIDE), 1 / SIDE)
    product, result = numpy.ones((SIDE, SIDE)), numpy.empty((SIDE, SIDE))
    times = 50

    def compute() -> None:
        for _ in range(times):
            numpy.matmul(factor, product, out=result)

    started = time.perf_counter()
    compute()
    times = max(1, round(seconds * times / (time.perf_counter() - started)))
    return compute
