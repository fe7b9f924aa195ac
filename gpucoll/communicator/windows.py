"""Symmetric memory for NCCL: slabs that all ranks register together, as windows.

NCCL 2.27 and newer takes its symmetric kernels for a collective on arrays in windows, and NVLS without a copy. It does
not compare what the ranks pass. Where a rank passes an array in a window, all must pass arrays at the same place in it:
otherwise NCCL reads other elements, or waits for ever. So there are windows only where the program promises that, by
GPUCOLL_NCCL_WINDOWS=1. After NCCL's documentation, "User Buffer Registration".
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from gpucoll.arrays.segments import Heap, Slab
from gpucoll.device.nccl import WINDOWS_SINCE, Nccl, allocate, free, version
from gpucoll.errors import BackendError
from gpucoll.executors.peer.ipc import CudaSlab, array_on


class Windows:
    """One rank's symmetric memory, of which each slab becomes a window of the communicator `nccl`."""

    def __init__(self, device: Any, nccl: Nccl) -> None:
        self._nccl = nccl
        self._slab: Slab = None  # that is not yet a window
        make = functools.partial(CudaSlab, device, malloc=allocate, free=free)
        self.heap = Heap(nccl.size, make, functools.partial(array_on, device))

    @classmethod
    def promised(cls, device: Any, nccl: Nccl) -> Windows | None:
        """Return the memory where the program promises to use it alike on all ranks; BackendError by an older NCCL."""
        if os.environ.get("GPUCOLL_NCCL_WINDOWS") != "1":
            return None
        if version() < WINDOWS_SINCE:
            raise BackendError(f"GPUCOLL_NCCL_WINDOWS=1: NCCL {version()} has no windows, {WINDOWS_SINCE} has",
                               code="GC-NCCL")
        return cls(device, nccl)

    def told(self, slab: Slab) -> list[int]:
        """Return the key of a new slab, which `reach` makes a window when every rank has one."""
        self._slab = slab
        return [slab.key]

    def reach(self, key: int, everybody: Sequence[list[int]]) -> None:
        """Make the new slab a window; a collective call."""
        self._nccl.register(self._slab.start, self._slab.nbytes)
