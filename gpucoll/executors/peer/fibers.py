"""Peer memory of the emulated device: slabs that processes of a host map, and kernels that wait as fibers.

A kernel that waits for another rank gives way to whatever else the process has to do, and goes on later.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.segments import Segment, attach
from gpucoll.arrays.symmetric import Block, on_host
from gpucoll.device.emulated import EmulatedStream, compiled
from gpucoll.device.launch import Arguments, Launch
from gpucoll.device.peer import CONTROL
from gpucoll.device.sources import Instance
from gpucoll.errors import BackendError

THREADS, CHANNELS = 64, 2  # every CUDA thread is a fiber: few of them show all that many would
PROCESS = secrets.randbits(62)  # beside the number of a process: containers have the same ones, and forks this


class FiberSlab(Segment):
    """Memory of this process that kernels of other ranks read and write."""

    def told(self) -> list[int]:
        """Return what another rank needs to reach it."""
        _slabs[self.start] = self
        return [PROCESS, os.getpid(), self.key, self.start]


_slabs: weakref.WeakValueDictionary[int, FiberSlab] = weakref.WeakValueDictionary()  # of this process, by address


class FiberMemory:
    """A rank's slab, and ways to the others'; `check` is called when a kernel has ended, and may raise."""

    threads = THREADS

    def __init__(self, nbytes: int, check: Callable[[], None]) -> None:
        self.slab = self.new_slab(nbytes)
        self._attached: list[Array] = []
        self._pointed_to: list[FiberSlab] = []
        self._check = check
        self.control = numpy.zeros((), CONTROL)

    def new_slab(self, nbytes: int) -> FiberSlab:
        """Return more such memory, all zeros; raise OSError where there is none to be had."""
        return FiberSlab(nbytes)

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Array:
        """Return an array on a block of a slab."""
        return on_host(block, shape, dtype)

    def reach(self, told: list[int]) -> int:
        """Return the address of another rank's slab in this process; raise OSError where the system forbids it."""
        process, number, key, start = told[:4]
        if (process, number) == (PROCESS, os.getpid()):
            self._pointed_to.append(_slabs[start])  # whose rank, a thread, may let go of it sooner
            return start
        self._attached.append(attach(number, key))
        return address(self._attached[-1])

    def upload(self, row: Array) -> Array:
        """Return the bytes where kernels can read them."""
        return row

    def load(self, instance: Instance) -> Launch:
        """Return the kernel; its launches are enqueued."""
        library = _library(compiled(instance))

        def launch(blocks: int, threads: int, arguments: Arguments, stream: EmulatedStream) -> None:
            stream.enqueue_action(lambda: _Running(library, instance.entry, blocks, threads, arguments, self._check))

        return launch

    def close(self) -> None:
        """Let go of all slabs."""
        self.slab.close()
        self._attached.clear()
        self._pointed_to.clear()

    def free(self) -> None:
        """The slab goes with the last who maps it."""


def _library(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.gc_world.restype, library.gc_complaint.restype = ctypes.c_void_p, ctypes.c_char_p
    return library


class _Running:
    """A kernel in a stream's queue: begun when its turn has come, gone on with until it has ended."""

    def __init__(self, library: ctypes.CDLL, entry: str, blocks: int, threads: int, arguments: Arguments,
                 check: Callable[[], None]) -> None:
        self._library, self._entry, self._grid, self._arguments = library, entry, (blocks, threads), arguments
        self._check = check
        self._world: Any = None

    def __call__(self) -> bool:
        if self._world is None:
            self._begin()
        if self._library.gc_advance(self._world, 0):
            return False
        complaint = self._library.gc_complaint(self._world)
        if complaint is not None:
            raise BackendError(f"kernel {self._entry}: {complaint.decode()}", code="GC-KERNEL")
        self.cancel()
        self._check()
        return True

    def _begin(self) -> None:
        blocks = self._grid[0]
        self._world = ctypes.c_void_p(self._library.gc_world(ctypes.c_uint64(0), blocks, 0))
        self._library.gc_launch(self._world, 0, getattr(self._library, f"{self._entry}_thread"),
                                ctypes.c_void_p(self._arguments.ctypes.data), *self._grid)

    def cancel(self) -> None:
        """Let go of the fibers, wherever they are."""
        if self._world is not None:
            self._library.gc_end(self._world)
            self._world = None
