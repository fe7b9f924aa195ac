"""Memory read and written by the kernels of all ranks of a node: slabs, access to other ranks' slabs, arrays on slabs.

`ipc` has a GPU's slabs.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.segments import Block, Heap, Slab, Uses
from gpucoll.device.peer import CONTROL, NOWHERE, Multicast, Places, Room
from gpucoll.device.streams import StreamOrder
from gpucoll.progress.operations import Pending

# Exchange words: return the words of every rank, in rank order.
Exchange: TypeAlias = Callable[[Sequence[int]], Generator[Pending, None, list[list[int]]]]

# With the process number, identifies this process: containers may repeat process numbers, a fork repeats this number.
PROCESS = secrets.randbits(62)
_OFFSETS = 48  # bits of a mark for the offset in a slab; the slab's number is above
_slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()  # of this process, by address


class PeerMemory:
    """A rank's slab, and access to the others' slabs; `control` is a record written by a kernel that gives up.

    This base class is the memory of a rank that shares none.
    """

    slab: Any

    def __init__(self) -> None:
        self.control: Array = numpy.zeros((), CONTROL)  # writable by the host at any time
        self._pointed_to: list[Slab] = []

    def new_slab(self, nbytes: int) -> Any:
        """Return another slab of zeros; raise OSError if there is no memory."""

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        """Return an array on a block of a slab."""

    def uses(self, order: StreamOrder) -> Uses:
        """Return the work on arrays in slabs, with the calls in `order`; None if no work is left after a call."""
        return None

    def upload(self, row: Array) -> Any:
        """Return a copy of the bytes in memory readable by kernels."""
        return row

    def download(self, row: Any) -> Array:
        """Return the bytes in memory readable by the host; no enqueued kernel may still write them."""
        return numpy.asarray(row)

    def export(self, slab: Any) -> list[int]:
        """Return the words that `reach` needs on another rank; raise OSError if the system forbids access."""
        _slabs[slab.start] = slab
        return [PROCESS, os.getpid(), slab.start, *self._handle(slab)]

    def reach(self, exported: Sequence[int]) -> int:
        """Return the address of another rank's slab, given the result of `export`; raise OSError if out of reach."""
        process, number, start, *handle = exported
        # A rank of this process: a thread. CUDA does not open a handle in the process of its origin; the address is
        # valid as it is. Keep a reference, since the other rank may release its slab sooner.
        if (process, number) == (PROCESS, os.getpid()):
            self._pointed_to.append(_slabs[start])
            return start
        return self._map(number, handle)

    def _handle(self, slab: Any) -> Sequence[int]:
        return ()

    def _map(self, process: int, handle: Sequence[int]) -> int:
        raise OSError("no such memory exists")

    def multicast(self, rank: int, slabs: Sequence[int], room: Room,
                  exchange: Exchange) -> Generator[Pending, None, Multicast | None]:
        """Return memory reduced and written for all ranks by one access; None if some rank has none. A collective call.
        """
        return None
        yield from ()

    def drop_multicast(self) -> None:
        """Give up the memory of `multicast`, on all ranks, after a meeting of all ranks."""

    def close(self) -> None:
        """Unmap the others' slabs; before any slab is freed."""
        self._pointed_to.clear()

    def free(self) -> None:
        """Free the slab, once no other rank maps the slab."""


class SymmetricMemory:
    """Arrays at the same place in the slabs of all ranks, readable by all ranks' kernels.

    `heap` allocates on this rank; the addresses of the other ranks' slabs are kept, too. `size` is the number of
    ranks.
    """

    def __init__(self, size: int, memory: PeerMemory, order: StreamOrder) -> None:
        self._memory = memory
        self._starts: dict[int, tuple[int, list[int]]] = {}  # by slab key: number, and the ranks' addresses
        self._slabs = 0
        self.heap = Heap(size, memory.new_slab, memory.array, memory.uses(order))

    def export(self, slab: Slab) -> list[int]:
        """Return the words that `reach` needs on the other ranks; no words if the system forbids access."""
        try:
            return self._memory.export(slab)
        except OSError:
            return []

    def reach(self, key: int, everybody: Sequence[list[int]]) -> None:
        """Gain access to the new slabs of all ranks, given each rank's result of `export`; `key`: the key of this slab.

        If this rank fails, its arrays on the slab get no mark (see `places`), and no rank reads the others' arrays in
        place.
        """
        self._slabs += 1
        # Some rank's slab cannot be reached. All ranks see this, and use none of the new slabs in place.
        if not all(everybody):
            return
        try:
            self._starts[key] = self._slabs, [self._memory.reach(exported) for exported in everybody]
        except OSError:
            return

    def places(self, start: int, nbytes: int) -> Places:
        """Return the addresses of these bytes on all ranks, with a mark equal on all ranks for equal places."""
        slab, offset = self.heap.find(start, nbytes) or (0, 0)
        if slab not in self._starts:
            return NOWHERE
        number, starts = self._starts[slab]
        return Places(number << _OFFSETS | offset, [there + offset for there in starts])
