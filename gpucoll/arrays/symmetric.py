"""Symmetric memory: blocks that lie at the same place in the segments of all ranks, which map each other's.

Every rank makes the same calls of its `Heap` in the same order, so that all of them place a block alike without
asking. A block is used again once every rank has dropped its array.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import numpy

from gpucoll.arrays.memory import Array
from gpucoll.arrays.segments import Segment

SLAB = 1 << 26  # bytes; pages that are not used yet cost nothing
LINE = 64
TOLD = 32  # dropped blocks told at a time


class Place(NamedTuple):
    """A block: number of the segment, first byte, bytes."""

    slab: int
    start: int
    nbytes: int


class _Block:
    """What the arrays on a block hold on to, slices and reshapes of them too."""

    def __init__(self, segment: Segment, place: Place) -> None:
        self.segment = segment
        self.__array_interface__ = {"version": 3, "shape": (place.nbytes,), "typestr": "|u1",
                                    "data": (segment.start + place.start, False)}


class Heap:
    """One rank's symmetric memory; `size` is how many ranks there are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._slabs: list[Segment] = []
        self._free: list[Place] = []
        self._used: dict[int, Place] = {}  # by number of the block
        self._made = 0
        self._dropped: collections.deque[int] = collections.deque()  # by this rank
        self._drops: collections.Counter[int] = collections.Counter()

    def news(self) -> list[int]:
        """Return blocks that this rank has dropped, to be told to all."""
        return [self._dropped.popleft() for _ in range(min(TOLD, len(self._dropped)))]

    def reclaim(self, dropped: Iterable[int]) -> None:
        """Note what all ranks have told by `news`: the blocks that every one of them has dropped can be used again."""
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
        block = _Block(self._slabs[place.slab], place)
        weakref.finalize(block, self._dropped.append, number).atexit = False
        return numpy.asarray(block)[:math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def must_grow(self, shape: tuple[int, ...], dtype: numpy.dtype) -> bool:
        """Return whether an array needs new memory of the system; the same on all ranks."""
        return self._free_place(_lines(shape, dtype)) is None

    def find(self, start: int, nbytes: int) -> tuple[int, int] | None:
        """Return the key of the segment that holds all of these bytes, and where in it; None where none does."""
        for segment in self._slabs:
            offset = start - segment.start
            if offset >= 0 and offset + nbytes <= segment.row.nbytes:
                return segment.key, offset
        return None

    def close(self) -> None:
        """Give the memory back: each segment goes with the last array on it."""
        for segment in self._slabs:
            segment.close()
        self._slabs.clear()

    def _free_place(self, wanted: int) -> Place | None:
        return next((place for place in self._free if place.nbytes >= wanted), None)

    def _take(self, wanted: int) -> Place:
        """Return the first free place for so many bytes; a new slab where there is none."""
        place = self._free_place(wanted)
        if place is None:
            self._slabs.append(Segment(max(SLAB, wanted)))
            place = Place(len(self._slabs) - 1, 0, max(SLAB, wanted))
        else:
            self._free.remove(place)
        if place.nbytes > wanted:
            self._give_back(place._replace(start=place.start + wanted, nbytes=place.nbytes - wanted))
        return place._replace(nbytes=wanted)

    def _give_back(self, place: Place) -> None:
        """Join the place with free ones before and after it."""
        joined: list[Place] = []
        for one in sorted([*self._free, place]):
            last = joined[-1] if joined else None
            if last is not None and last.slab == one.slab and last.start + last.nbytes == one.start:
                joined[-1] = last._replace(nbytes=last.nbytes + one.nbytes)
            else:
                joined.append(one)
        self._free = joined


def _lines(shape: tuple[int, ...], dtype: numpy.dtype) -> int:
    """Return the bytes of an array, in whole lines, at least one."""
    return max(1, -(-math.prod(shape) * dtype.itemsize // LINE)) * LINE
