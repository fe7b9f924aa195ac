"""The call of a collective for a number of bytes; seconds of several calls, taken in turn.

Whatever disturbs the machine then disturbs them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from gpucoll.collectives import COLLECTIVES
from gpucoll.communicator import Communicator

FEWEST, MOST = 5, 25  # repetitions
SHORT = 1e-3  # seconds: calls that take less are made several times between two looks at the clock
SEVERAL = 8


class Meter:
    """Times calls of one communicator's ranks."""

    def __init__(self, comm: Communicator, device: str = "cpu") -> None:
        self._comm = comm
        self._module = _module(device)

    def samples(self, calls: Sequence[Callable[[], Any]], seconds: float) -> list[list[float]]:
        """Return of each call the seconds that it took the slowest rank, again and again for about `seconds` in all.

        A collective call; every rank gets the same. Each call is made twice before.
        """
        for call in (*calls, *calls):
            first = self._one(call, 1)
        several, spent = [], 0.0
        for call in calls:
            first = max(self._comm.mpi.allgather(self._one(call, 1)))
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
        if self._module is not numpy:  # the call has only been enqueued
            self._module.cuda.get_current_stream().synchronize()
        return (time.perf_counter() - started) / several


def _rotated(count: int, turn: int) -> list[int]:
    return [(row + turn) % count for row in range(count)]


SWEPT = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "scan",
         "exscan", "barrier", "all_gather_v", "gather_v", "scatter_v", "all_to_all_v", "reduce_scatter_v")
Call = Callable[[str], Any]  # of an algorithm's name


def call_of(comm: Communicator, collective: str, nbytes: int, device: str = "cpu") -> Call:
    """Return the call of `collective` on float32 arrays whose larger side has about `nbytes` bytes on a rank."""
    if collective == "barrier":
        return lambda algorithm: comm.barrier(algorithm=algorithm)
    method = getattr(comm, collective)
    given = _arguments(comm, collective, max(1, nbytes // 4), _module(device))
    return lambda algorithm: method(**given, algorithm=algorithm)


def _module(device: str) -> Any:
    if device != "cuda":
        return numpy
    import cupy

    return cupy


def _arguments(comm: Communicator, collective: str, count: int, xp: Any) -> dict[str, Any]:
    row, block = COLLECTIVES[collective], max(1, count // comm.size)
    if collective.endswith("_v"):
        return _ragged(comm, collective, block, xp)

    def array(side: Any) -> Any:
        if not side.exists(comm.rank, 0):
            return None
        return xp.ones((comm.size, block) if side.blocks else (block if row.blocks else count), xp.float32)

    x = array(row.input) if collective != "broadcast" else xp.ones(count, xp.float32)
    return {"x": x} if collective == "broadcast" else {"x": x, "out": array(row.output)}


def _ragged(comm: Communicator, collective: str, block: int, xp: Any) -> dict[str, Any]:
    blocks = [xp.ones(block, xp.float32) for _ in range(comm.size)]
    if collective in ("scatter_v", "all_to_all_v"):
        return {"xs": blocks if collective == "all_to_all_v" or comm.rank == 0 else None}
    if collective == "reduce_scatter_v":
        return {"x": xp.ones(block * comm.size, xp.float32), "counts": [block] * comm.size}
    return {"x": blocks[0]}
