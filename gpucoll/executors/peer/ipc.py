"""Peer memory of a GPU: slabs opened by other processes through CUDA's IPC handles, and by threads as pointers."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import struct
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.segments import Block, Slab
from gpucoll.device.cuda import CudaDevice, CudaEvent
from gpucoll.device.packages import cupy
from gpucoll.device.peer import CONTROL, Multicast, Room
from gpucoll.device.streams import StreamOrder
from gpucoll.errors import BackendError
from gpucoll.executors.peer.memory import Exchange
from gpucoll.executors.peer.multicast import MulticastMemory
from gpucoll.progress.operations import Pending

WORDS = 8  # 64-bit words of a CUDA IPC handle
_HANDLE = struct.Struct(f"={WORDS}q")
_SERIALS = itertools.count(1)
# With the process number, identifies this process: containers may repeat process numbers, a fork repeats this number.
PROCESS = secrets.randbits(62)
_slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()  # of this process, by address


class CudaSlab:
    """GPU memory of zeros, from CUDA or another pair of functions, that other processes can open."""

    def __init__(self, device: CudaDevice, nbytes: int, malloc: Callable[[int], int] | None = None,
                 free: Callable[[int], object] | None = None) -> None:
        self.nbytes, self.key = nbytes, next(_SERIALS)
        with device.current, _as_os_error():
            self.start = (malloc or cupy.cuda.runtime.malloc)(nbytes)
            self.free = weakref.finalize(self, _free, device, self.start, free or cupy.cuda.runtime.free)
            self.free.atexit = False  # at exit CUDA may have ended already
            # Another rank of this GPU may already wait, in a kernel, for this rank: only the own work may be awaited.
            stream = device.new_stream()
            cupy.cuda.runtime.memsetAsync(self.start, 0, nbytes, stream.ptr)
            stream.synchronize()

    def close(self) -> None:
        """Do nothing: the last array on the slab frees the memory."""


class StreamUses:
    """The work of a communicator's calls, and of the program, on arrays in blocks of a GPU's memory.

    The program's own work is known on three streams: those current for the new and the dropped array, and that of the
    last call.
    """

    def __init__(self, device: CudaDevice, order: StreamOrder) -> None:
        self._device, self._order = device, order

    def here(self) -> Any:
        """Return the current stream; an event in place of a foreign stream, which may be destroyed at any time."""
        stream = cupy.cuda.get_current_stream(self._device.ordinal)
        if self._device.lasts(stream):
            return stream
        return None if stream.is_capturing() else self._device.mark(stream)

    def ends(self, places: Sequence[Any]) -> list[Any]:
        """Return events at the end of all calls so far, and of all present work at `places`, results of `here`."""
        known = [one for one in places if isinstance(one, CudaEvent)]
        with self._device.current:
            return self._order.awaited() + known + [
                self._device.mark(one) for one in places if not isinstance(one, CudaEvent | None)
                and not one.is_capturing()]

    def follow(self, events: Sequence[Any]) -> None:
        """Let the current stream wait for the events."""
        stream = cupy.cuda.get_current_stream(self._device.ordinal)
        with self._device.current:
            # The program is responsible for the order of a CUDA graph.
            for event in () if stream.is_capturing() else events:
                stream.wait_event(event)


def _free(device: CudaDevice, pointer: int, free: Callable[[int], object]) -> None:
    # A garbage collection may drop the slab while the program captures a graph, with this thread or another one.
    with device.relaxed:
        free(pointer)


class PeerMemory:
    """A rank's slab, and access to the others' slabs; `control` is a record written by a kernel that gives up."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device = device
        self.slab = self.new_slab(nbytes)
        self._opened: list[int] = []
        self._pointed_to: list[Slab] = []
        self._multicast: MulticastMemory | None = None
        self._uploads = device.new_stream()  # one stream, so that uploads reuse memory of CuPy's pool
        # The host must be able to set `aborted` while a kernel runs: so the record is in pinned host memory.
        with device.current:
            self._pinned = cupy.cuda.alloc_pinned_memory(CONTROL.itemsize)
        self.control = numpy.frombuffer(self._pinned, CONTROL, 1).reshape(())
        self.control[...] = numpy.zeros((), CONTROL)

    def new_slab(self, nbytes: int) -> CudaSlab:
        """Return another slab of zeros; raise OSError if there is no memory."""
        return CudaSlab(self._device, nbytes)

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        """Return an array on a block of a slab."""
        return self._device.array_on(block, shape, dtype)

    def uses(self, order: StreamOrder) -> StreamUses | None:
        """Return the work on arrays in slabs, with the calls in `order`; None if no work is left after a call."""
        return StreamUses(self._device, order) if self._device.asynchronous else None

    def export(self, slab: CudaSlab) -> list[int]:
        """Return the words that `reach` needs on another rank; raise OSError if the system forbids access."""
        _slabs[slab.start] = slab
        with _as_os_error():
            return [PROCESS, os.getpid(), slab.start, *_HANDLE.unpack(cupy.cuda.runtime.ipcGetMemHandle(slab.start))]

    def reach(self, exported: Sequence[int]) -> int:
        """Return the address of another rank's slab, given the result of `export`; raise OSError if out of reach."""
        process, number, start, *handle = exported
        # A rank of this process: a thread. CUDA does not open a handle in the process of its origin; the address is
        # valid as it is. Keep a reference, since the other rank may release its slab sooner.
        if (process, number) == (PROCESS, os.getpid()):
            self._pointed_to.append(_slabs[start])
            return start
        with self._device.current, _as_os_error():
            self._opened.append(cupy.cuda.runtime.ipcOpenMemHandle(_HANDLE.pack(*handle[:WORDS])))
        return self._opened[-1]

    def multicast(self, rank: int, room: Room, exchange: Exchange) -> Generator[Pending, None, Multicast | None]:
        """Return memory reduced and written for all ranks by one access; None if some rank has none. A collective call.
        """
        self._multicast = MulticastMemory(self._device, rank, room.ranks, 2 * room.staging)
        return (yield from self._multicast.join(exchange))

    def drop_multicast(self) -> None:
        """Give up the memory of `multicast`, on all ranks, after a meeting of all ranks."""
        assert self._multicast is not None
        self._multicast.release()

    def upload(self, row: Array) -> Any:
        """Return a copy of the bytes in memory readable by kernels."""
        with self._device.current, self._uploads:
            there = cupy.asarray(row)
            self._uploads.synchronize()
        return there

    def download(self, row: Any) -> Array:
        """Return the bytes in memory readable by the host; no enqueued kernel may still write them."""
        with self._device.current, self._uploads:
            found: Array = cupy.asnumpy(row)
        return found

    def close(self) -> None:
        """Unmap the others' slabs; before any slab is freed."""
        self._pointed_to.clear()
        if self._multicast is not None:
            self._multicast.close()
        with self._device.current:
            for pointer in self._opened:
                cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._opened.clear()

    def free(self) -> None:
        """Free the slab, once no other rank maps the slab."""
        if self._multicast is not None:
            self._multicast.free()
        self.slab.free()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn a refusal by CUDA into OSError: not a fault of the program, the ranks do without peer memory."""
    try:
        yield
    except (cupy.cuda.runtime.CUDARuntimeError, BackendError) as error:
        raise OSError(str(error)) from error
