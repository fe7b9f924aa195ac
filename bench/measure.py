"""The clock: contestants in turn within one run, so that whatever disturbs the machine disturbs them all.

A repetition lets every contestant do the test out of place and in place, each time after a barrier, in an order that
rotates from repetition to repetition. Short calls are made in bursts, one after the other, as programs make them, of
which the first is not timed: what one takes alone and after something else is mostly the processor's caches. Before a
burst each call gets fresh data in arrays of its own and an output that is wrong everywhere, after it every result is
checked; the clock runs between the two only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from gpucoll import Communicator

from .arguments import Options
from .cases import Contestant, turns
from .data import Data, Turn
from .devices import Device
from .records import PLACEMENTS
from .summary import Array

ITERATIONS = 20  # nccl-tests' default of -n
FEWEST = 5
SECONDS = 2.0  # that the repetitions of one size may take where -n does not say how many there are
BURST, BURST_BYTES = 16, 1 << 22  # timed calls in a row, at most, and what they move
WAIT_EACH, BARRIER_EACH = 2, 1  # nccl-tests' -z; 3 waits after each repetition


class Bench(NamedTuple):
    """Who measures, what was asked for, and where the arrays lie."""

    comm: Communicator
    options: Options
    device: Device


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
    flags, asked, elapsed = bench.options.flags, bench.options.iterations, SECONDS
    for repetition in range(max(flags.warmup_iters, asked is None)):
        started = time.perf_counter()
        _repeat(bench, contestants, data, [repetition])
        elapsed = time.perf_counter() - started
    affordable = int(SECONDS / bench.comm.mpi.bcast(elapsed))  # by the last one that warmed up
    timed = flags.warmup_iters + (asked or max(FEWEST, min(ITERATIONS, affordable)))
    seconds, wrong = _repeat(bench, contestants, data, range(flags.warmup_iters, timed))
    wrong += _repeat(bench, contestants, data, range(timed, timed + flags.check))[1]
    everyone = numpy.stack(bench.comm.mpi.allgather(seconds), axis=2)
    bench.comm.mpi.Allreduce(MPI.IN_PLACE, wrong, MPI.SUM)
    checked = [tuple(int(count) if flags.check else None for count in row) for row in wrong]
    return [Measured(row, counts) for row, counts in zip(everyone, checked, strict=True)]


def _repeat(bench: Bench, contestants: Sequence[Contestant], data: Data,
            repetitions: Sequence[int]) -> tuple[Array, Array]:
    """Return this rank's seconds, shape (contestants, placements, repetitions), and its wrong elements of each."""
    seconds = numpy.zeros((len(contestants), len(PLACEMENTS), len(repetitions)))
    wrong = numpy.zeros((len(contestants), len(PLACEMENTS)), numpy.int64)
    for column, repetition in enumerate(repetitions):
        expected = ([data.expected(Turn(repetition, call)) for call in range(data.calls)]
                    if bench.options.flags.check else None)
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
        self.returned: list[Any] = []

    def time(self) -> float:
        """Return the seconds of one call; the ranks begin together."""
        self.prepare()
        flags, launches, device = self.bench.options.flags, self.bench.options.launches, self.bench.device
        arguments = [self.data.arguments(turn) for turn in self.calls]
        untimed = flags.agg_iters if len(arguments) > flags.agg_iters else 0
        first = self._work(arguments[:untimed])()
        if flags.report_cputime or flags.blocking:
            device.synchronize()  # the host's clock would see the end of it
        call, divisor = self._work(arguments[untimed:]), len(arguments) - untimed
        if launches:
            call, divisor = device.captured(call, launches), divisor * launches

        if flags.report_cputime:
            seconds, returned = device.host_timed(call)
        elif flags.blocking:
            seconds, (returned, _) = device.host_timed(lambda: (call(), device.synchronize()))
        else:
            seconds, returned = device.timed(call)
        self.returned = [*first, *returned]
        return float(seconds) / divisor

    def prepare(self) -> None:
        """Give each call its data, and wait until every rank has them."""
        for number, turn in enumerate(self.calls):
            self.data.prepare(turn, self.expected[number] if self.expected else [])
        self.bench.device.synchronize()
        self.bench.comm.mpi.Barrier()

    def _work(self, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Return the calls with those arguments, one after the other, in groups where -m and our library have them."""
        flags, call = self.bench.options.flags, self.contestant.call

        waits = flags.blocking in (BARRIER_EACH, WAIT_EACH)
        together = 1 if self.contestant.peer or waits else flags.agg_iters

        def work() -> list[Any]:
            returned: list[Any] = []
            for first in range(0, len(arguments), together):
                with self.bench.comm.group() if together > 1 else contextlib.nullcontext():
                    returned += [call(*given) for given in arguments[first:first + together]]
                if waits:
                    self.bench.device.synchronize()
                if flags.blocking == BARRIER_EACH:
                    self.bench.comm.mpi.Barrier()
            return returned

        return work

    def wrong(self) -> int:
        """Return how many elements of the results are wrong on this rank; untimed."""
        # MPI leaves open what exscan gives to rank 0; gpucoll does not.
        is_undefined = self.contestant.peer and self.data.case.test == "exscan" and self.bench.comm.rank == 0
        if self.expected is None or is_undefined:
            return 0
        if self.bench.options.launches > 1:  # in place, the replays have worked on their own results
            self.prepare()
            self.returned = self._work([self.data.arguments(turn) for turn in self.calls])()
        self.bench.device.synchronize()
        return sum(self.data.wrong(turn, returned, expected)
                   for turn, returned, expected in zip(self.calls, self.returned, self.expected, strict=True))
