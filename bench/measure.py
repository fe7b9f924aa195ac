"""The clock: contestants in turn within one run, so that whatever disturbs the machine disturbs them all.

A repetition lets every contestant do the test out of place and in place, each time after a barrier, in an order that
rotates from repetition to repetition. Short calls are made in bursts, one after the other, as programs make them, of
which the first is not timed: what one takes alone and after something else is mostly the processor's caches. Before a
burst each call gets fresh data in arrays of its own and an output that is wrong everywhere, after it every result is
checked; the clock runs between the two only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from gpucoll import Communicator

from .arguments import Options
from .cases import Contestant, turns
from .data import Data, Turn
from .devices import Device, Timed
from .records import PLACEMENTS
from .summary import Array

ITERATIONS = 20  # nccl-tests' default of -n
FEWEST = 5
SECONDS = 2.0  # that the repetitions of one size may take where -n does not say how many there are
BURST, BURST_BYTES = 16, 1 << 22  # timed calls in a row, at most, and what they move
WAIT_EACH, BARRIER_EACH, WAIT_LAST = 2, 1, 3  # nccl-tests' -z


class Bench(NamedTuple):
    """Who measures, what was asked for, and where the arrays lie."""

    comm: Communicator
    options: Options
    device: Device

    @property
    def checks(self) -> int:
        """How many repetitions are made for the check alone; at 0 nothing is checked."""
        return int(self.options.flags.check)


class Measured(NamedTuple):
    """One contestant at one size: seconds, shape (placements, ranks, repetitions), and wrong elements or None."""

    seconds: Array
    wrong: tuple[int | None, ...]


def burst(options: Options, device: str, nbytes: int) -> int:
    """Return how many calls, or groups of them (-m), are made in a row; of several the first is not timed."""
    timed = min(BURST, BURST_BYTES // max(1, nbytes * options.flags.agg_iters))
    if timed < 2 or options.launches or options.flags.overlap or device == "emulated":  # whose calls take long
        return 1
    return 1 + timed


def measure(bench: Bench, contestants: Sequence[Contestant], data: Data) -> list[Measured]:
    """Warm up, time and check each contestant on `data`; return the same on every rank. A collective call."""
    warmups = bench.options.flags.warmup_iters
    timed = warmups + _iterations(bench, contestants, data)
    seconds, wrong = _repeat(bench, contestants, data, range(warmups, timed))
    wrong += _repeat(bench, contestants, data, range(timed, timed + bench.checks))[1]
    everyone = numpy.stack(bench.comm.mpi.allgather(seconds), axis=2)
    bench.comm.mpi.Allreduce(MPI.IN_PLACE, wrong, MPI.SUM)
    checked = [tuple(int(count) if bench.checks else None for count in row) for row in wrong]
    return [Measured(row, counts) for row, counts in zip(everyone, checked, strict=True)]


def _iterations(bench: Bench, contestants: Sequence[Contestant], data: Data) -> int:
    """Warm up; return -n, or as many repetitions as there is time for, by the last one that warmed up."""
    elapsed, asked = SECONDS, bench.options.iterations
    for repetition in range(max(bench.options.flags.warmup_iters, asked is None)):
        started = time.perf_counter()
        _repeat(bench, contestants, data, [repetition])
        elapsed = time.perf_counter() - started
    affordable = int(SECONDS / bench.comm.mpi.bcast(elapsed))
    return asked or max(FEWEST, min(ITERATIONS, affordable))


def _repeat(bench: Bench, contestants: Sequence[Contestant], data: Data,
            repetitions: Sequence[int]) -> tuple[Array, Array]:
    """Return this rank's seconds, shape (contestants, placements, repetitions), and its wrong elements of each."""
    seconds = numpy.zeros((len(contestants), len(PLACEMENTS), len(repetitions)))
    wrong = numpy.zeros((len(contestants), len(PLACEMENTS)), numpy.int64)
    for column, repetition in enumerate(repetitions):
        expected = [data.expected(Turn(repetition, call)) for call in range(data.calls)] if bench.checks else None
        for placement in range(len(PLACEMENTS)):
            calls = [Turn(repetition, call, placement == 1) for call in range(data.calls)]
            for row in turns(len(contestants), repetition):
                trial = Trial(bench, contestants[row], data, calls, expected)
                seconds[row, placement, column] = trial.time()
                wrong[row, placement] += trial.wrong()
    return seconds, wrong


class Trial:
    """One contestant's calls of one repetition, from fresh data to the check."""

    def __init__(self, bench: Bench, contestant: Contestant, data: Data, calls: Sequence[Turn],
                 expected: Sequence[Sequence[Array]] | None) -> None:
        self.bench, self.contestant, self.data, self.calls = bench, contestant, data, calls
        self.expected = expected
        self.found: list[Any] = []

    def time(self) -> float:
        """Return the seconds of one call; the ranks begin together."""
        self.prepare()
        arguments = [self.data.arguments(turn) for turn in self.calls]
        together = self.bench.options.flags.agg_iters
        untimed = together if len(arguments) > together else 0
        first = self._work(arguments[:untimed])()
        if self.bench.options.flags.report_cputime or self.bench.options.flags.blocking:
            self.bench.device.synchronize()  # the host's clock would see the end of it
        call, divisor = self._work(arguments[untimed:]), len(arguments) - untimed
        if self.bench.options.launches:
            call = self.bench.device.captured(call, self.bench.options.launches)
            divisor *= self.bench.options.launches
        seconds, found = self._timed(call)
        self.found = [*first, *found]
        return seconds / divisor

    def prepare(self) -> None:
        """Give each call its data, and wait until every rank has them."""
        for number, turn in enumerate(self.calls):
            self.data.prepare(turn, self.expected[number] if self.expected else [])
        self.bench.device.synchronize()
        self.bench.comm.mpi.Barrier()

    def _timed(self, call: Callable[[], Any]) -> Timed:
        device, flags = self.bench.device, self.bench.options.flags
        if flags.report_cputime:
            return device.host_timed(call)
        if flags.blocking:
            return device.host_timed(functools.partial(_completed, device, call))
        return device.timed(call)

    def _work(self, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Return the calls with those arguments, one after the other."""
        call, blocking = self.contestant.call, self.bench.options.flags.blocking
        if blocking in (BARRIER_EACH, WAIT_EACH):
            return functools.partial(_one_by_one, self.bench, call, arguments, blocking)
        if self.bench.options.flags.agg_iters > 1 and not self.contestant.peer:
            return functools.partial(_grouped, self.bench, call, arguments)
        return lambda: [call(*given) for given in arguments]

    def wrong(self) -> int:
        """Return how many elements of the results are wrong on this rank; untimed."""
        if self.expected is None or (self.contestant.peer and self._undefined()):
            return 0
        if self.bench.options.launches > 1:  # in place, the replays have worked on their own results
            self.prepare()
            self.found = self._work([self.data.arguments(turn) for turn in self.calls])()
        self.bench.device.synchronize()
        return sum(self.data.wrong(turn, found, expected)
                   for turn, found, expected in zip(self.calls, self.found, self.expected, strict=True))

    def _undefined(self) -> bool:
        """MPI leaves open what exscan gives to rank 0; gpucoll does not."""
        return self.data.case.test == "exscan" and self.bench.comm.rank == 0


def _completed(device: Device, call: Callable[[], Any]) -> Any:
    found = call()
    device.synchronize()
    return found


def _one_by_one(bench: Bench, call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]],
                blocking: int) -> list[Any]:
    found = []
    for given in arguments:
        found.append(call(*given))
        bench.device.synchronize()
        if blocking == BARRIER_EACH:
            bench.comm.mpi.Barrier()
    return found


def _grouped(bench: Bench, call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    found: list[Any] = []
    together = bench.options.flags.agg_iters
    for first in range(0, len(arguments), together):
        with bench.comm.group():
            found += [call(*given) for given in arguments[first:first + together]]
    return found
