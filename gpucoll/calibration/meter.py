"""Seconds of several calls, taken in turn, so that whatever disturbs the machine disturbs them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from gpucoll.communicator import Communicator

FEWEST, MOST = 5, 25  # repetitions
SHORT = 1e-3  # seconds: calls that take less are made several times between two looks at the clock
SEVERAL = 8


class Meter:
    """Times calls of one communicator's ranks; `settle` waits on the host for what a call has enqueued."""

    def __init__(self, comm: Communicator, device: str = "cpu") -> None:
        self._comm = comm
        self._settle = _settle_of(device)

    def samples(self, calls: Sequence[Callable[[], Any]], seconds: float) -> list[list[float]]:
        """Return of each call the seconds that it took the slowest rank, again and again for about `seconds` in all.

        A collective call; every rank gets the same. Each call is made twice before.
        """
        for call in (*calls, *calls):
            first = self._one(call, 1)
        several, spent = [], 0.0
        for call in calls:
            first = self._slowest(self._one(call, 1))
            several.append(SEVERAL if first < SHORT else 1)
            spent += first * several[-1]
        repeats = max(FEWEST, min(MOST, int(seconds / max(spent, 1e-9))))
        mine = numpy.array([[self._one(calls[row], several[row]) for row in _rotated(len(calls), turn)]
                            for turn in range(repeats)])
        for turn in range(repeats):
            mine[turn] = mine[turn][numpy.argsort(_rotated(len(calls), turn))]
        everyone = numpy.array(self._comm.mpi.allgather(mine))
        return [[float(value) for value in column] for column in everyone.max(0).T]

    def _one(self, call: Callable[[], Any], several: int) -> float:
        self._comm.mpi.Barrier()
        started = time.perf_counter()
        for _ in range(several):
            call()
        self._settle()
        return (time.perf_counter() - started) / several

    def _slowest(self, seconds: float) -> float:
        return max(self._comm.mpi.allgather(seconds))


def _rotated(count: int, turn: int) -> list[int]:
    return [(row + turn) % count for row in range(count)]


def _settle_of(device: str) -> Callable[[], Any]:
    if device != "cuda":
        return lambda: None
    import cupy

    return lambda: cupy.cuda.get_current_stream().synchronize()
