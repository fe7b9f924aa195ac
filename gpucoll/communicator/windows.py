"""Symmetric memory for NCCL: slabs registered together by all ranks, as windows.

NCCL 2.27 and newer uses symmetric kernels for a collective on arrays in windows, and NVLS without a copy. NCCL does not
compare the ranks' arguments. If one rank passes an array in a window, all ranks must pass arrays at the same place in
the window: otherwise NCCL reads other elements, or waits for ever. Windows therefore exist only if the program promises
this by ``nccl={"windows": True}``. Source: NCCL's documentation, "User Buffer Registration".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gpucoll.arrays.segments import Slab
from gpucoll.device.launch import StreamOrder
from gpucoll.device.nccl import WINDOWS_SINCE, Nccl, allocate, free, version
from gpucoll.errors import BackendError


class Windows:
    """One rank's symmetric memory; each slab becomes a window of the communicator `nccl`."""

    def __init__(self, device: Any, nccl: Nccl, order: StreamOrder) -> None:
        if version() < WINDOWS_SINCE:
            raise BackendError(f"nccl: windows: NCCL {version()} has none, NCCL {WINDOWS_SINCE} has", code="GC-NCCL")
        self._nccl = nccl
        self.heap: Any = device.new_heap(nccl.size, order, functools.partial(
            device.new_slab, malloc=allocate, free=free))

    def export(self, slab: Slab) -> list[int]:
        """Return the key of a new slab; `reach` makes the slab a window once every rank has one."""
        return [slab.key]

    def reach(self, slab: Slab, everybody: Sequence[list[int]]) -> None:
        """Register the new slab as a window; a collective call."""
        self._nccl.register(slab.start, slab.nbytes)
