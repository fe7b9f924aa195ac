"""What is no collective alone: `--overlap`, OSU's four figures, and `sendrecv --pairs`, each pair of ranks."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.rendezvous import wait_for_all

from .cases import Case, Contestant
from .data import Data, Turn
from .measure import ITERATIONS, Bench
from .operands import random_bytes

SIDE = 48  # of the matrices that are multiplied: some ten us a piece
SECONDS = 1.0  # that one figure may take
ROUNDS = 3
REPETITIONS = 5  # of a pair in a round
NAP = 5e-4  # seconds: whoever has to wait leaves the processors to the pair


def measure_overlap(bench: Bench, contestant: Contestant, data: Data) -> dict[str, Any]:
    """Return what JSON keeps of how much hides behind computing, the same on every rank; a collective call.

    Pure is the collective alone, started and waited for at once. Then the same amount of time is computed while it is
    under way; overall is the whole of that, and the overlap is the share of the pure time that did not show. Each is
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
    """Return work for the processor that takes about so many seconds on this rank: products of small matrices."""
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


def measure_pairs(bench: Bench, case: Case, nbytes: int) -> list[dict[str, Any]]:
    """Return what JSON keeps of each pair of ranks, each direction by itself, the same everywhere; a collective call.

    Every pair has its turn in each of several rounds, all others being quiet, so that what disturbs the machine for a
    while is not taken for one slow link.
    """
    mpi, size = bench.comm.mpi, case.nbytes(case.count(nbytes))
    links = list(itertools.permutations(range(bench.comm.size), 2))
    seconds: dict[tuple[int, int], list[float]] = {link: [] for link in links}
    wrong = dict.fromkeys(links, 0)
    for source, target in links * ROUNDS:
        wait_for_all(mpi, math.inf, NAP)
        own = _exchange(bench, size, source, target) if bench.comm.rank in (source, target) else ([], 0)
        wait_for_all(mpi, math.inf, NAP)
        seconds[source, target] += mpi.bcast(own[0], source)
        wrong[source, target] += mpi.bcast(own[1], target)
    middles = {link: statistics.median(taken) for link, taken in seconds.items()}
    return [{"size": size, "source": link[0], "target": link[1], "time_us": middles[link] * 1e6,
             "least_us": min(seconds[link]) * 1e6, "bandwidth": size / middles[link] / 1e9,
             "nwrong": wrong[link] if bench.options.flags.check else None, "slow": False} for link in links]


def _exchange(bench: Bench, size: int, source: int, target: int) -> tuple[list[float], int]:
    """Send and answer as often as asked for, each time other data; return seconds, and wrong bytes at the target.

    The target answers with one byte: the time is that of the message plus one small latency, by the source's clock.
    """
    comm, device = bench.comm, bench.device
    message, answer = device.empty((size,), "uint8"), device.empty((1,), "uint8")
    device.write(answer, numpy.zeros(1, numpy.uint8))
    seconds, wrong = [], 0
    for repetition in range(1 + (bench.options.iterations or REPETITIONS)):  # the first one warms up
        content = random_bytes(size, seed=repetition)
        device.write(message, content if comm.rank == source else content ^ 1)
        started = time.perf_counter()
        if comm.rank == source:
            comm.send(message, target)
            comm.recv(answer, target)
        else:
            comm.recv(message, source)
            comm.send(answer, source)
        device.synchronize()
        seconds.append(time.perf_counter() - started)
        wrong += int(numpy.count_nonzero(device.read(message, "uint8") != content))
    return seconds[1:], wrong
