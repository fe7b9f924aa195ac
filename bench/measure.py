"""The timing: contestants in turn within one run, so that disturbances of the machine affect all contestants alike.

In a repetition every contestant does the test out of place and in place, each after a barrier. The order rotates from
repetition to repetition. Short calls are made in bursts, as in programs, and the first call of a burst is not timed:
the time of a single call is dominated by cold caches. Before a burst each call gets fresh data in its own arrays, and
an output with all elements wrong; after the burst every result is checked. Only the burst itself is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll import Communicator
from gpucoll.calibration.measure import ranks_of, repeats, turns

from .arguments import Settings
from .cases import Contestant
from .data import BenchTurn, Data
from .devices import BenchDevice
from .records import PLACEMENTS
from .summary import Array

ITERATIONS = 20  # nccl-tests' default of -n
SECONDS = 2.0  # for the repetitions of one size, if -n gives no number
BURST, BURST_BYTES = 16, 1 << 22  # the most timed calls in a row, and the most bytes moved by a burst
WAIT_EACH, BARRIER_EACH = 2, 1  # nccl-tests' -z; 3 waits after each repetition


class Bench(NamedTuple):
    """The communicator, the options and the device of a measurement."""

    comm: Communicator
    options: Settings
    device: BenchDevice


class Measured(NamedTuple):
    """One contestant at one size: seconds, shape (placements, ranks, repetitions), and wrong elements or None."""

    seconds: Array
    wrong: tuple[int | None, ...]


def burst(options: Settings, device: str, nbytes: int) -> int:
    """Return the number of calls, or groups of calls (-m), in a row; the first of several is not timed."""
    timed = min(BURST, BURST_BYTES // max(1, nbytes * options.flags.agg_iters))
    if timed < 2 or options.launches or device == "emulated":  # calls of these modes take long
        return 1
    return 1 + timed


def measure(bench: Bench, contestants: Sequence[Contestant], data: Data) -> list[Measured]:
    """Warm up, time and check each contestant on `data`; collective, the same result on every rank."""
    flags, asked, elapsed = bench.options.flags, bench.options.iterations, SECONDS
    for repetition in range(max(flags.warmup_iters, asked is None)):
        started = time.perf_counter()
        _repeat(bench, contestants, data, [repetition])
        elapsed = time.perf_counter() - started
    affordable = repeats(SECONDS, ranks_of(bench.comm).bcast(elapsed), ITERATIONS)  # judged by the last warm-up
    timed = flags.warmup_iters + (asked or affordable)
    seconds, wrong = _repeat(bench, contestants, data, range(flags.warmup_iters, timed))
    wrong += _repeat(bench, contestants, data, range(timed, timed + flags.check))[1]
    everyone = numpy.stack(ranks_of(bench.comm).allgather(seconds), axis=2)
    wrong = sum(ranks_of(bench.comm).allgather(wrong))
    checked = [tuple(int(count) if flags.check else None for count in row) for row in wrong]
    return [Measured(row, counts) for row, counts in zip(everyone, checked, strict=True)]


def _repeat(bench: Bench, contestants: Sequence[Contestant], data: Data,
            repetitions: Sequence[int]) -> tuple[Array, Array]:
    """Return this rank's seconds, shape (contestants, placements, repetitions), and the number of wrong elements."""
    seconds = numpy.zeros((len(contestants), len(PLACEMENTS), len(repetitions)))
    wrong = numpy.zeros((len(contestants), len(PLACEMENTS)), numpy.int64)
    for column, repetition in enumerate(repetitions):
        expected = ([data.expected(BenchTurn(repetition, call)) for call in range(data.calls)]
                    if bench.options.flags.check else None)
        for placement in range(len(PLACEMENTS)):
            calls = [BenchTurn(repetition, call, placement == 1) for call in range(data.calls)]
            for row in turns(len(contestants), repetition):
                trial = TimedTrial(bench, contestants[row], data, calls, expected)
                seconds[row, placement, column] = trial.time()
                wrong[row, placement] += trial.wrong()
    return seconds, wrong


class TimedTrial:
    """The calls of one contestant in one repetition, from fresh data to the check."""

    def __init__(self, bench: Bench, contestant: Contestant, data: Data, calls: Sequence[BenchTurn],
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
            device.synchronize()  # otherwise the host's clock would include the untimed calls
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
        """Prepare the data of each call, and wait for all ranks."""
        for number, turn in enumerate(self.calls):
            self.data.prepare(turn, self.expected[number] if self.expected else [])
        self.bench.device.synchronize()
        ranks_of(self.bench.comm).Barrier()

    def _work(self, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], list[Any]]:
        """Return a function making the calls one after the other; our own library groups calls if -m is given."""
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
                    ranks_of(self.bench.comm).Barrier()
            return returned

        return work

    def wrong(self) -> int:
        """Return the number of wrong elements in the results of this rank; not timed."""
        # MPI leaves exscan's result on rank 0 undefined; gpucoll defines the result.
        is_undefined = self.contestant.peer and self.data.case.test == "exscan" and self.bench.comm.rank == 0
        if self.expected is None or is_undefined:
            return 0
        if self.bench.options.launches > 1:  # in place, the replays have worked on their own results
            self.prepare()
            self.returned = self._work([self.data.arguments(turn) for turn in self.calls])()
        self.bench.device.synchronize()
        return sum(self.data.wrong(turn, returned, expected)
                   for turn, returned, expected in zip(self.calls, self.returned, self.expected, strict=True))
