"""Memory that other processes of the host can map, and symmetric memory: blocks at the same place on all ranks.

Segments have no name, so that nothing is left of them when their processes end. Every rank makes the same calls of its
`Heap` in the same order, so that all of them place a block alike without asking. A block is used again once every rank
has dropped its array.
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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.arrays.accept import Array, address

SLAB = 1 << 26  # bytes; pages that are not used yet cost nothing
LINE = 64
AT_A_TIME = 32  # dropped blocks
_SERIALS = itertools.count(1)
_FILES = 1 << 20  # more than a process may have open
_WRITABLE = 0x200  # PyBUF_WRITE
_OWN: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()  # of this process, by key
_NOTHING = numpy.empty(0, numpy.uint8)

_Vector = ctypes.c_size_t * 2  # the C library's struct iovec: base and length
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Segment:
    """Memory of this process. `key` tells others of it: its file here, and a number that no later one has.

    Nobody else can map one that is not `shared`.
    """

    def __init__(self, nbytes: int, *, shared: bool = True) -> None:
        self.key = 0
        # Where the system has no such files the memory is this process' own, and `attach` raises.
        self._file = os.memfd_create("gpucoll") if shared and hasattr(os, "memfd_create") else -1
        if self._file >= 0:  # also where the segment is dropped: nothing else would close the file then
            self._finalize = weakref.finalize(self, os.close, self._file)
            self._finalize.atexit = False
        try:
            # The system promises more than this machine has, and ends whoever takes it.
            if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than this machine has")
            if self._file >= 0:
                os.ftruncate(self._file, nbytes)
            self.row = _mapped(self._file, nbytes)
        except BaseException:
            self.close()
            raise
        self.key = next(_SERIALS) * _FILES + max(0, self._file)
        self.start, self.nbytes = address(self.row), nbytes
        _OWN[self.key] = self

    def close(self) -> None:
        """Let nobody map it any more; it lives until the last array on it has gone."""
        _OWN.pop(self.key, None)
        if self._file >= 0:
            self._finalize()
            self._file = -1


def attach(process: int, key: int) -> Array:
    """Return the bytes of the segment `key` of `process`; raise OSError where the system forbids it."""
    own = _OWN.get(key) if process == os.getpid() else None
    if own is not None:
        return own.row
    file = os.open(f"/proc/{process}/fd/{key % _FILES}", os.O_RDWR)
    try:
        return _mapped(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def _mapped(file: int, nbytes: int) -> Array:
    return numpy.frombuffer(mmap.mmap(file, nbytes), numpy.uint8)


def at(place: int, nbytes: int) -> Array:
    """Return the bytes at an address of this process, which they do not keep alive."""
    return numpy.frombuffer(_view(place, nbytes, _WRITABLE), numpy.uint8) if nbytes else _NOTHING


class Copier:
    """Reads another process' memory by the system. Raises OSError where that forbids it, or the process is gone."""

    def __init__(self) -> None:
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        if self._call is not None:
            self._call.restype = ctypes.c_ssize_t
            self._call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
                                   ctypes.c_ulong)

    def read(self, process: int, there: int, here: int, nbytes: int) -> None:
        """Copy from address `there` of `process` to `here`, all at once."""
        if self._call is None:
            raise OSError("this system has no process_vm_readv")
        mine, theirs = (_Vector(start, nbytes) for start in (here, there))
        if self._call(process, mine, 1, theirs, 1, 0) != nbytes:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


Slab: TypeAlias = Any  # a Segment, or a GPU's with its start, nbytes, key and close()


class Extent(NamedTuple):
    """A block: number of the slab, first byte, bytes."""

    slab: int
    start: int
    nbytes: int


class Block:
    """What the arrays on a block hold on to, slices and reshapes of them too; the host's NumPy asks for its memory."""

    def __init__(self, slab: Slab, place: Extent) -> None:
        self.slab, self.address, self.nbytes = slab, slab.start + place.start, place.nbytes
        self.__array_interface__ = {"version": 3, "shape": (self.nbytes,), "typestr": "|u1",
                                    "data": (self.address, False)}


def on_host(block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Array:
    return numpy.asarray(block)[:math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


class Heap:
    """One rank's symmetric memory; `size` is how many ranks there are.

    `make` gives a slab of so many bytes, or raises OSError, and `view` an array on a block of it.
    """

    def __init__(self, size: int, make: Callable[[int], Slab] = Segment,
                 view: Callable[[Block, tuple[int, ...], numpy.dtype], Array] = on_host) -> None:
        self._size, self._make, self._view = size, make, view
        self._slabs: list[Slab] = []
        self._free: list[Extent] = []
        self._used: dict[int, Extent] = {}  # by number of the block
        self._made = 0
        self._dropped: collections.deque[int] = collections.deque()  # by this rank
        self._drops: collections.Counter[int] = collections.Counter()

    def dropped(self) -> list[int]:
        """Return blocks that this rank has dropped, which all ranks shall know."""
        return [self._dropped.popleft() for _ in range(min(AT_A_TIME, len(self._dropped)))]

    def reclaim(self, dropped: Iterable[int]) -> None:
        """Note what all ranks have `dropped`: the blocks that every one of them has dropped can be used again."""
        for block in dropped:
            self._drops[block] += 1
            if self._drops[block] == self._size:
                del self._drops[block]
                self._give_back(self._used.pop(block))

    def allocate(self, shape: tuple[int, ...], dtype: numpy.dtype) -> Array:
        """Return an array on a new block; raise OSError where the system has no memory."""
        place = self._take(_lines(shape, dtype))
        number, self._made = self._made, self._made + 1
        self._used[number] = place
        block = Block(self._slabs[place.slab], place)
        weakref.finalize(block, self._dropped.append, number).atexit = False
        return self._view(block, shape, dtype)

    def grow(self, shape: tuple[int, ...], dtype: numpy.dtype) -> Slab:
        """Make room for such an array, and return the new slab; raise OSError where the system has no memory."""
        nbytes = max(SLAB, _lines(shape, dtype))
        self._slabs.append(self._make(nbytes))
        self._give_back(Extent(len(self._slabs) - 1, 0, nbytes))
        return self._slabs[-1]

    def shrink(self) -> None:
        """Undo `grow`, before anything was allocated: another rank could not grow."""
        self._slabs.pop().close()
        self._free = [place for place in self._free if place.slab < len(self._slabs)]

    def must_grow(self, shape: tuple[int, ...], dtype: numpy.dtype) -> bool:
        """Return whether an array needs new memory of the system; the same on all ranks."""
        return self._free_place(_lines(shape, dtype)) is None

    def find(self, start: int, nbytes: int) -> tuple[int, int] | None:
        """Return the key of the slab that holds all of these bytes, and where in it; None where none does."""
        for slab in self._slabs:
            offset = start - slab.start
            if offset >= 0 and offset + nbytes <= slab.nbytes:
                return slab.key, offset
        return None

    def close(self) -> None:
        """Give the memory back: each slab goes with the last array on it."""
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()

    def _free_place(self, wanted: int) -> Extent | None:
        return next((place for place in self._free if place.nbytes >= wanted), None)

    def _take(self, wanted: int) -> Extent:
        """Return the first free place for so many bytes; in a new slab where there is none."""
        place = self._free_place(wanted)
        if place is None:
            self.grow((wanted,), numpy.dtype("u1"))
            place = self._free[-1]
        self._free.remove(place)
        if place.nbytes > wanted:
            self._give_back(place._replace(start=place.start + wanted, nbytes=place.nbytes - wanted))
        return place._replace(nbytes=wanted)

    def _give_back(self, place: Extent) -> None:
        """Join the place with free ones before and after it."""
        joined: list[Extent] = []
        for one in sorted([*self._free, place]):
            last = joined[-1] if joined else None
            if last is not None and last.slab == one.slab and last.start + last.nbytes == one.start:
                joined[-1] = last._replace(nbytes=last.nbytes + one.nbytes)
            else:
                joined.append(one)
        self._free = joined


def _lines(shape: tuple[int, ...], dtype: numpy.dtype) -> int:
    return max(1, -(-math.prod(shape) * dtype.itemsize // LINE)) * LINE
