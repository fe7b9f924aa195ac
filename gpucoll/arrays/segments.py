"""Memory for other processes of the host to map, and symmetric memory: blocks at the same place on all ranks.

Segments have no name, so nothing is left when the processes end. Every rank makes the same calls of its `Heap` in the
same order. All ranks therefore choose the same place for a block, without communication. A block is reused after every
rank has dropped its array; on a GPU the new array then waits for the work on the old array.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.arrays import Array, address

# Bytes of the first slab, and of later slabs at least: slabs of growing size bound what is reserved and never used.
FIRST_SLAB, SLAB = 1 << 22, 1 << 26
RESERVED_AT_ONCE = 1 << 26  # bytes reserved by one call of the system: a signal lets a call begin anew
BLOCK_ALIGNMENT = 64  # bytes of a cache line: blocks begin on a line, so two blocks never share a line
AT_A_TIME = 32  # dropped blocks announced per call: bounds the exchanged message
_SERIALS = itertools.count(1)
_FILES = 1 << 20  # above every file descriptor: a key is serial * _FILES + descriptor
_OWN: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()  # segments of this process, by key

_Vector = ctypes.c_size_t * 2  # the C library's struct iovec: base and length


class Segment:
    """Memory of this process. `key` identifies the segment for other processes: file descriptor and serial number.

    The serial number is never used again in this process. Only a `shared` segment can be mapped by other processes.
    """

    def __init__(self, nbytes: int, *, shared: bool = True) -> None:
        self.key: int = 0
        self._held = 0  # the bytes reserved from the start
        # Without memfd_create the memory is private: `attach` by another process raises OSError.
        self._file = os.memfd_create("gpucoll") if shared and hasattr(os, "memfd_create") else -1
        # A segment dropped without `close` must not leak its file descriptor. No run at exit: the system closes files.
        if self._file >= 0:
            self._finalize = weakref.finalize(self, os.close, self._file)
            self._finalize.atexit = False
        try:
            # Linux overcommits, and kills a process touching more memory than present: refuse in advance.
            if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than this machine has")
            if self._file >= 0:
                os.ftruncate(self._file, nbytes)
            self.row: Array = _mapped(self._file, nbytes)
        except BaseException:
            self.close()
            raise
        self.key = next(_SERIALS) * _FILES + max(0, self._file)
        self.start: int = address(self.row)
        self.nbytes: int = nbytes
        _OWN[self.key] = self

    def reserve(self, start: int, stop: int) -> None:
        """Let the system give memory to these bytes now; raise OSError if it refuses.

        A refusal at the first touch would end the process by SIGBUS (see `is_strict`). A memory cgroup refuses nothing:
        it kills, here or at the first touch.
        """
        for here in range(max(start, self._held), stop, RESERVED_AT_ONCE) if self._file >= 0 else ():
            os.posix_fallocate(self._file, here, min(RESERVED_AT_ONCE, stop - here))
        if start <= self._held < stop:
            self._held = stop

    def close(self) -> None:
        """Stop further mapping by other processes; the memory lives until the last array on the segment is gone."""
        _OWN.pop(self.key, None)
        if self._file >= 0:
            self._finalize()
            self._file = -1


def reserved(nbytes: int, *, shared: bool = True) -> Segment:
    """Return a segment with all its memory; raise OSError if the system refuses."""
    segment = Segment(nbytes, shared=shared)
    segment.reserve(0, nbytes)
    return segment


def is_strict() -> bool:
    """Return whether the system refuses memory beyond a limit even at a touch (vm.overcommit_memory=2)."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def attach(process: int, key: int) -> Array:
    """Return the bytes of segment `key` of `process`; raise OSError where the system refuses."""
    own = _OWN.get(key) if process == os.getpid() else None
    if own is not None:
        return own.row
    file = os.open(f"/proc/{process}/fd/{key % _FILES}", os.O_RDWR)
    try:
        return _mapped(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def _mapped(file: int, nbytes: int) -> Array:
    # Without a file, after a fork each process has memory of its own.
    flags = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return numpy.frombuffer(mmap.mmap(file, nbytes, flags), numpy.uint8)


class Copier:
    """A reader of other processes' memory by ``process_vm_readv``."""

    def __init__(self) -> None:
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        if self._call is not None:
            self._call.restype = ctypes.c_ssize_t
            self._call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
                                   ctypes.c_ulong)

    def read(self, process: int, there: int, here: int, nbytes: int) -> None:
        """Copy from address `there` of `process` to address `here` in a single system call.

        Raises OSError where the system refuses, the process is gone, or the copy is incomplete.
        """
        if self._call is None:
            raise OSError("this system has no process_vm_readv")
        mine, theirs = (_Vector(start, nbytes) for start in (here, there))
        if self._call(process, mine, 1, theirs, 1, 0) != nbytes:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


Slab: TypeAlias = Any  # a Segment, or GPU memory with the same start, nbytes, key and close()
Uses: TypeAlias = Any  # see `gpucoll.device.cuda.StreamUses`; None on the host


class Extent(NamedTuple):
    """The place of a block: number of the slab, first byte, bytes."""

    slab: int
    start: int
    nbytes: int

    def meets(self, other: Extent) -> bool:
        """Return whether two places have a common byte."""
        return self.slab == other.slab and -other.nbytes < other.start - self.start < self.nbytes


class Block:
    """The owner of a block's memory, kept alive by all arrays on the block, their slices and reshapes included.

    NumPy reads the memory of a host block by ``__array_interface__``.
    """

    def __init__(self, slab: Slab, place: Extent) -> None:
        self.slab: Slab = slab
        self.address: Any = slab.start + place.start
        self.nbytes: int = place.nbytes
        self.__array_interface__: dict[str, Any] = {"version": 3, "shape": (self.nbytes,), "typestr": "|u1",
                                    "data": (self.address, False)}


def on_host(block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Array:
    return numpy.asarray(block)[:math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


class Heap:
    """The symmetric memory of a rank; `size` is the number of ranks.

    `make` returns a slab of the given number of bytes, or raises OSError. `view` returns an array on a block. `uses`
    knows this rank's work on arrays that continues after the last array has gone; None if there is no such work. The
    work of other ranks needs no notes: other ranks touch an array in collectives alone, and no rank's own part of a
    collective ends before the other ranks have finished with the rank's arrays.
    """

    def __init__(self, size: int, make: Callable[[int], Slab] = reserved,
                 view: Callable[[Block, tuple[int, ...], numpy.dtype], Array] = on_host,
                 uses: Uses = None) -> None:
        self._size, self._make, self._view, self._uses = size, make, view, uses
        self._places: dict[int, list[Any]] = {}  # of the work on each block, by number
        self._late: list[tuple[Extent, list[Any]]] = []  # free blocks, and the events at the end of their use
        self.slabs: list[Slab] = []
        self._free: list[Extent] = []
        self._used: dict[int, Extent] = {}  # by number of the block, equal on all ranks
        self._slab_count = 0
        # Finalizers append at any time and in any thread, so drops are only queued here, and announced by a later call.
        self._dropped: collections.deque[int] = collections.deque()
        self._drops: collections.Counter[int] = collections.Counter()

    def dropped(self) -> list[int]:
        """Return blocks dropped by this rank, at most `AT_A_TIME`, to be announced to all ranks before `reclaim`."""
        return [self._dropped[place] for place in range(min(AT_A_TIME, len(self._dropped)))]

    def reclaim(self, dropped: Sequence[int], everyone: Iterable[int]) -> None:
        """Count the announced drops of all ranks, and of this rank: a block dropped by every rank is free again.

        The drops of a refused call, without `reclaim`, are announced again by the next call.
        """
        for _ in dropped:
            self._dropped.popleft()
        for block in everyone:
            self._drops[block] += 1
            if self._drops[block] == self._size:
                del self._drops[block]
                self._give_back(self._used[block])
                if self._uses is not None:
                    self._late.append((self._used[block], self._uses.ends(self._places.pop(block))))
                del self._used[block]

    def allocate(self, shape: tuple[int, ...], dtype: numpy.dtype) -> Array:
        """Return an array on a new block; raise OSError where the system has no memory."""
        place = self._take(_lines(shape, dtype))
        number, self._slab_count = self._slab_count, self._slab_count + 1
        self._used[number] = place
        block = Block(self.slabs[place.slab], place)
        if self._uses is not None:
            self._places[number] = [self._uses.here()]
            self._late = [one for one in self._late if not all(event.done for event in one[1])]
            self._uses.follow([event for late, events in self._late if late.meets(place) for event in events])
        weakref.finalize(block, _drop, self._dropped, number, self._places.get(number), self._uses).atexit = False
        return self._view(block, shape, dtype)

    def grow(self, shape: tuple[int, ...], dtype: numpy.dtype) -> Slab:
        """Make room for an array of this shape and return the new slab; raise OSError for lack of memory."""
        held = sum(slab.nbytes for slab in self.slabs)
        nbytes = max(FIRST_SLAB, min(3 * held, SLAB), _lines(shape, dtype))
        self.slabs.append(self._make(nbytes))
        self._give_back(Extent(len(self.slabs) - 1, 0, nbytes))
        return self.slabs[-1]

    def shrink(self) -> None:
        """Undo `grow` before any allocation, because another rank could not grow."""
        self.slabs.pop().close()
        self._free = [place for place in self._free if place.slab < len(self.slabs)]

    def must_grow(self, shape: tuple[int, ...], dtype: numpy.dtype) -> bool:
        """Return whether an array needs new memory of the system; the answer is the same on all ranks."""
        return self._free_place(_lines(shape, dtype)) is None

    def find(self, start: int, nbytes: int) -> tuple[int, int] | None:
        """Return the key of the slab holding all of these bytes, and the offset within the slab, or None."""
        for slab in self.slabs:
            offset = start - slab.start
            if offset >= 0 and offset + nbytes <= slab.nbytes:
                return slab.key, offset
        return None

    def close(self) -> None:
        """Close all slabs; each slab's memory is freed with the last array on the slab."""
        for slab in self.slabs:
            slab.close()
        self.slabs.clear()

    def _free_place(self, wanted: int) -> Extent | None:
        return next((place for place in self._free if place.nbytes >= wanted), None)

    def _take(self, wanted: int) -> Extent:
        """Return the first free place for this number of bytes, in a new slab where none is free."""
        place = self._free_place(wanted)
        if place is None:
            self.grow((wanted,), numpy.dtype("u1"))
            place = self._free[-1]
        self._free.remove(place)
        if place.nbytes > wanted:
            self._give_back(place._replace(start=place.start + wanted, nbytes=place.nbytes - wanted))
        return place._replace(nbytes=wanted)

    def _give_back(self, place: Extent) -> None:
        """Free the place, merged with free neighbours before and after."""
        joined: list[Extent] = []
        for one in sorted([*self._free, place]):
            last = joined[-1] if joined else None
            if last is not None and last.slab == one.slab and last.start + last.nbytes == one.start:
                joined[-1] = last._replace(nbytes=last.nbytes + one.nbytes)
            else:
                joined.append(one)
        self._free = joined


def _drop(dropped: collections.deque[int], number: int, places: list[Any] | None, uses: Uses) -> None:
    if places is not None:
        places.append(uses.here())
    dropped.append(number)


def _lines(shape: tuple[int, ...], dtype: numpy.dtype) -> int:
    return max(1, -(-math.prod(shape) * dtype.itemsize // BLOCK_ALIGNMENT)) * BLOCK_ALIGNMENT
