"""Peer memory of a GPU: slabs that CUDA lets other processes of the host map, and that threads just point to."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import cupy
import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.symmetric import Block
from gpucoll.device.cuda import CudaDevice
from gpucoll.device.launch import Launch
from gpucoll.device.peer import CONTROL
from gpucoll.device.sources import Instance
from gpucoll.executors.peer.fibers import PROCESS

THREADS = 512  # as the kernels are compiled for
MOST_CHANNELS = 16
WORDS = 8  # of one of CUDA's handles
_HANDLE = struct.Struct(f"={WORDS}q")
_SERIALS = itertools.count(1)


class CudaSlab:
    """Memory of a GPU, all zeros, that other processes can map."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.nbytes, self.key = nbytes, next(_SERIALS)
        with device.current, _as_os_error():
            self.start = cupy.cuda.runtime.malloc(nbytes)
            self.free = weakref.finalize(self, _free, device, self.start)
            self.free.atexit = False  # CUDA may have ended by then
            cupy.cuda.runtime.memset(self.start, 0, nbytes)
            cupy.cuda.runtime.deviceSynchronize()

    def told(self) -> list[int]:
        """Return what another rank needs to reach it; raise OSError where CUDA refuses."""
        with _as_os_error():
            handle = cupy.cuda.runtime.ipcGetMemHandle(self.start)
        _slabs[self.start] = self
        return [PROCESS, os.getpid(), self.start, *_HANDLE.unpack(handle)]

    def close(self) -> None:
        """It is freed with the last array on it."""


_slabs: weakref.WeakValueDictionary[int, CudaSlab] = weakref.WeakValueDictionary()  # of this process, by address


def array_on(device: CudaDevice, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
    """Return a CuPy array on a block; as from CuPy's pool, it may be used on streams that follow its last use."""
    memory = cupy.cuda.UnownedMemory(block.address, block.nbytes, block, device.ordinal)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _free(device: CudaDevice, pointer: int) -> None:
    with device.current:
        cupy.cuda.runtime.free(pointer)


class IpcMemory:
    """A rank's slab on `device`, and ways to the others'."""

    threads = THREADS

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device = device
        self.slab = self.new_slab(nbytes)
        self._opened: list[int] = []
        self._pointed_to: list[CudaSlab] = []
        self._uploads = device.new_stream()  # one, so that what is uploaded takes memory of CuPy's pool
        # The host must be able to write it while a kernel runs, hence it is the host's, which the GPU reaches too.
        with device.current:
            self._pinned = cupy.cuda.alloc_pinned_memory(CONTROL.itemsize)
        self.control = numpy.frombuffer(self._pinned, CONTROL, 1).reshape(())
        self.control[...] = numpy.zeros((), CONTROL)

    def new_slab(self, nbytes: int) -> CudaSlab:
        """Return more such memory; raise OSError where there is none to be had."""
        return CudaSlab(self._device, nbytes)

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        """Return an array on a block of a slab."""
        return array_on(self._device, block, shape, dtype)

    def reach(self, told: list[int]) -> int:
        """Return the address of another rank's slab here; raise OSError where CUDA refuses."""
        process, number, pointer, *handle = told[:3 + WORDS]
        if (process, number) == (PROCESS, os.getpid()):  # CUDA opens no handle in the process that it comes from
            self._pointed_to.append(_slabs[pointer])  # whose rank, a thread, may let go of it sooner
            return pointer
        with self._device.current, _as_os_error():
            self._opened.append(cupy.cuda.runtime.ipcOpenMemHandle(_HANDLE.pack(*handle)))
        return self._opened[-1]

    def upload(self, row: Array) -> Any:
        """Return the bytes on the GPU, when they are there."""
        with self._device.current, self._uploads:
            there = cupy.asarray(row)
            self._uploads.synchronize()
        return there

    def load(self, instance: Instance) -> Launch:
        """Return the kernel."""
        return self._device.kernels.launcher(instance)

    def close(self) -> None:
        """Let go of the others' slabs: before any of them is freed."""
        with self._device.current:
            for pointer in self._opened:
                cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._opened.clear()
        self._pointed_to.clear()

    def free(self) -> None:
        """Free the slab, once no other rank maps it any more."""
        self.slab.free()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """What CUDA refuses here is no fault of the program's: the ranks do without."""
    try:
        yield
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise OSError(str(error)) from error


def channels_of(device: CudaDevice, size: int) -> int:
    """Return how many blocks of each of `size` ranks a GPU has room for at a time, should all of them be on one."""
    processors = cupy.cuda.Device(device.ordinal).attributes["MultiProcessorCount"]
    return max(1, min(MOST_CHANNELS, processors // size))
