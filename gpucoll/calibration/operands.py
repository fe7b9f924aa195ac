"""The arrays of a collective for so many bytes, and the call on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.collectives import COLLECTIVES
from gpucoll.communicator import Communicator

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
