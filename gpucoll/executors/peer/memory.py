"""Memory that kernels of all ranks of a node read and write: slabs, ways to the others', arrays on them.

Here are those of the emulated device, which processes of a host map; `ipc` has a GPU's.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.segments import Block, Heap, Segment, Slab, attach, on_host
from gpucoll.device.peer import CONTROL, NOWHERE, Places

PROCESS = secrets.randbits(62)  # beside the number of a process: containers have the same ones, and forks this
_OFFSETS = 48  # bits of a mark
_slabs: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()  # of this process, by address


class PeerMemory:
    """A rank's slab, and ways to the others'; `control` is what a kernel leaves when it gives up.

    Here it is that of a rank which shares none.
    """

    slab: Any

    def __init__(self) -> None:
        self.control: Array = numpy.zeros((), CONTROL)  # the host may write it at any time
        self._pointed_to: list[Slab] = []

    def new_slab(self, nbytes: int) -> Any:
        """Return another slab, all zeros; raise OSError where there is no memory."""

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        """Return an array on a block of such a slab."""

    def upload(self, row: Array) -> Any:
        """Return the bytes where kernels can read them."""
        return row

    def download(self, row: Any) -> Array:
        """Return the bytes where the host can read them; nothing that is enqueued may still write them."""
        return numpy.asarray(row)

    def told(self, slab: Any) -> list[int]:
        """Return what another rank needs to reach a slab; raise OSError where it cannot be reached."""
        _slabs[slab.start] = slab
        return [PROCESS, os.getpid(), slab.start, *self._handle(slab)]

    def reach(self, told: Sequence[int]) -> int:
        """Return the address of another rank's slab; raise OSError where there is no way."""
        process, number, start, *handle = told
        if (process, number) == (PROCESS, os.getpid()):  # CUDA opens no handle in the process that it comes from
            self._pointed_to.append(_slabs[start])  # whose rank, a thread, may let go of it sooner
            return start
        return self._map(number, handle)

    def _handle(self, slab: Any) -> Sequence[int]:
        return ()

    def _map(self, process: int, handle: Sequence[int]) -> int:
        raise OSError("there is none")

    def close(self) -> None:
        """Let go of the others' slabs: before any of them is freed."""
        self._pointed_to.clear()

    def free(self) -> None:
        """Free the slab, once no other rank maps it any more."""


class HostMemory(PeerMemory):
    """Such memory of the emulated device; a slab goes with the last who maps it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.slab = self.new_slab(nbytes)
        self._attached: list[Array] = []

    def new_slab(self, nbytes: int) -> Segment:
        return Segment(nbytes)

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Array:
        return on_host(block, shape, dtype)

    def _handle(self, slab: Segment) -> Sequence[int]:
        return [slab.key]

    def _map(self, process: int, handle: Sequence[int]) -> int:
        self._attached.append(attach(process, handle[0]))
        return address(self._attached[-1])

    def close(self) -> None:
        super().close()
        self.slab.close()
        self._attached.clear()


class SymmetricMemory:
    """Arrays that lie at the same place in slabs of all ranks, where the kernels of all of them read them.

    It is one rank's `heap`, and where the others' slabs of it are; `size` is how many ranks there are.
    """

    def __init__(self, size: int, memory: PeerMemory) -> None:
        self._memory = memory
        self._starts: dict[int, tuple[int, list[int]]] = {}  # by key of a slab: its number, and where the ranks' are
        self._slabs = 0
        self.heap = Heap(size, memory.new_slab, memory.array)

    def told(self, slab: Slab) -> list[int]:
        """Return what other ranks need to reach a slab; nothing where the system lets nobody reach it."""
        try:
            return self._memory.told(slab)
        except OSError:
            return []

    def reach(self, key: int, everybody: Sequence[list[int]]) -> None:
        """Find ways to what all ranks have told of their new slabs; `key` is this rank's one.

        Where this rank finds none it marks no array there, and then nobody reads the others' where they lie.
        """
        self._slabs += 1
        if not all(everybody):
            return
        try:
            self._starts[key] = self._slabs, [self._memory.reach(told) for told in everybody]
        except OSError:
            return

    def places(self, start: int, nbytes: int) -> Places:
        """Return where the ranks' parts of these bytes are, should all of them mean the same."""
        slab, offset = self.heap.find(start, nbytes) or (0, 0)
        if slab not in self._starts:
            return NOWHERE
        number, starts = self._starts[slab]
        return Places(number << _OFFSETS | offset, [there + offset for there in starts])
