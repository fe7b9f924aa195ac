"""Peer memory of a GPU: slabs that CUDA lets other processes of the host map, and that threads just point to."""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy
import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.segments import Block
from gpucoll.device.cuda import CudaDevice
from gpucoll.device.peer import CONTROL
from gpucoll.errors import BackendError
from gpucoll.executors.peer.memory import PeerMemory

WORDS = 8  # of one of CUDA's handles
_HANDLE = struct.Struct(f"={WORDS}q")
_SERIALS = itertools.count(1)


class CudaSlab:
    """Memory of a GPU, all zeros, that other processes can map: CUDA's, or that of another pair of functions."""

    def __init__(self, device: CudaDevice, nbytes: int, malloc: Callable[[int], int] | None = None,
                 free: Callable[[int], object] | None = None) -> None:
        self.nbytes, self.key = nbytes, next(_SERIALS)
        runtime = cupy.cuda.runtime
        with device.current, _as_os_error():
            self.start = (malloc or runtime.malloc)(nbytes)
            self.free = weakref.finalize(self, _free, device, self.start, free or runtime.free)
            self.free.atexit = False  # CUDA may have ended by then
            cupy.cuda.runtime.memset(self.start, 0, nbytes)
            cupy.cuda.runtime.deviceSynchronize()

    def close(self) -> None:
        """It is freed with the last array on it."""


def array_on(device: CudaDevice, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
    """Return a CuPy array on a block; as from CuPy's pool, it may be used on streams that follow its last use."""
    memory = cupy.cuda.UnownedMemory(block.address, block.nbytes, block, device.ordinal)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _free(device: CudaDevice, pointer: int, free: Callable[[int], object]) -> None:
    with device.current:
        free(pointer)


class IpcMemory(PeerMemory):
    """Such memory of a GPU."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        super().__init__()
        self._device = device
        self.slab = self.new_slab(nbytes)
        self._opened: list[int] = []
        self._uploads = device.new_stream()  # one, so that what is uploaded takes memory of CuPy's pool
        # The host must be able to write it while a kernel runs, hence it is the host's, which the GPU reaches too.
        with device.current:
            self._pinned = cupy.cuda.alloc_pinned_memory(CONTROL.itemsize)
        self.control = numpy.frombuffer(self._pinned, CONTROL, 1).reshape(())
        self.control[...] = numpy.zeros((), CONTROL)

    def new_slab(self, nbytes: int) -> CudaSlab:
        return CudaSlab(self._device, nbytes)

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        return array_on(self._device, block, shape, dtype)

    def _handle(self, slab: CudaSlab) -> Sequence[int]:
        with _as_os_error():
            return _HANDLE.unpack(cupy.cuda.runtime.ipcGetMemHandle(slab.start))

    def _map(self, process: int, handle: Sequence[int]) -> int:
        with self._device.current, _as_os_error():
            self._opened.append(cupy.cuda.runtime.ipcOpenMemHandle(_HANDLE.pack(*handle[:WORDS])))
        return self._opened[-1]

    def upload(self, row: Array) -> Any:
        with self._device.current, self._uploads:
            there = cupy.asarray(row)
            self._uploads.synchronize()
        return there

    def download(self, row: Any) -> Array:
        with self._device.current, self._uploads:
            found: Array = row.get()
        return found

    def close(self) -> None:
        super().close()
        with self._device.current:
            for pointer in self._opened:
                cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._opened.clear()

    def free(self) -> None:
        self.slab.free()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """What CUDA refuses here is no fault of the program's: the ranks do without."""
    try:
        yield
    except (cupy.cuda.runtime.CUDARuntimeError, BackendError) as error:
        raise OSError(str(error)) from error
