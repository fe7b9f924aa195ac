"""The clock: contestants in turn within one run, so that whatever disturbs the machine disturbs them all.

A repetition calls each contestant once, each time after a barrier, in an order that rotates
from repetition to repetition. It took as long as it did on the slowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from gpucoll import Communicator

from .arguments import Options
from .cases import Contestant, turns
from .data import Array, Data

ITERATIONS = 20  # nccl-tests' default of -n
FEWEST = 5
SECONDS = 2.0  # that the repetitions of one size may take where -n does not say how many there are


class Measured(NamedTuple):
    """One contestant at one size: seconds of each timed repetition, and the wrong elements, None where not checked."""

    seconds: Array
    wrong: int | None

    @property
    def median(self) -> float:
        """The median time in seconds."""
        return float(numpy.median(self.seconds))


def measure(comm: Communicator, contestants: Sequence[Contestant], data: Data, options: Options) -> list[Measured]:
    """Warm up, time and check each contestant on `data`; return the same on every rank. A collective call."""
    timed = options.warmups + _iterations(comm, contestants, data, options)
    seconds = _timed(comm, contestants, data, range(options.warmups, timed))
    wrong = _checked(comm, contestants, data, range(timed, timed + options.checks))
    return [Measured(row, int(count) if options.checks else None) for row, count in zip(seconds, wrong, strict=True)]


def _iterations(comm: Communicator, contestants: Sequence[Contestant], data: Data, options: Options) -> int:
    """Warm up; return -n, or as many repetitions as there is time for, by the last one that warmed up."""
    elapsed = SECONDS
    for repetition in range(max(options.warmups, options.iterations is None)):
        started = time.perf_counter()
        _timed(comm, contestants, data, [repetition])
        elapsed = time.perf_counter() - started
    affordable = int(SECONDS / comm.mpi.bcast(elapsed))
    return options.iterations or max(FEWEST, min(ITERATIONS, affordable))


def _timed(comm: Communicator, contestants: Sequence[Contestant], data: Data, repetitions: Sequence[int]) -> Array:
    """Return the seconds of the slowest rank, shape (contestants, repetitions)."""
    seconds = numpy.zeros((len(contestants), len(repetitions)))
    for column, repetition in enumerate(repetitions):
        arguments = data.arguments(repetition)
        for row in turns(len(contestants), repetition):
            seconds[row, column] = _time(comm, contestants[row], arguments)
    comm.mpi.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    return seconds


def _time(comm: Communicator, contestant: Contestant, arguments: tuple[Any, ...]) -> float:
    comm.mpi.Barrier()
    started = time.perf_counter()
    contestant.call(*arguments)
    return time.perf_counter() - started


def _checked(comm: Communicator, contestants: Sequence[Contestant], data: Data, repetitions: Sequence[int]) -> Array:
    """Return how many elements were wrong, over all ranks and repetitions, shape (contestants,)."""
    wrong = numpy.zeros(len(contestants), numpy.int64)
    for repetition in repetitions:
        arguments, expected = data.arguments(repetition), data.expected(repetition)
        for row, contestant in enumerate(contestants):
            data.spoil(expected)
            contestant.call(*arguments)
            wrong[row] += data.wrong(expected)
    comm.mpi.Allreduce(MPI.IN_PLACE, wrong, MPI.SUM)
    return wrong
