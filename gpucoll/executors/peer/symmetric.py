"""Arrays that lie at the same place in slabs of all ranks, where the kernels of all of them read them."""

from __future__ import annotations

from collections.abc import Sequence

from gpucoll.arrays.symmetric import Heap
from gpucoll.device.peer import NOWHERE, Places
from gpucoll.executors.peer.meeting import Memory

_OFFSETS = 48  # bits of a mark


class SymmetricMemory:
    """One rank's `heap`, and where the others' slabs of it are; `size` is how many ranks there are."""

    def __init__(self, size: int, memory: Memory) -> None:
        self._memory = memory
        self._starts: dict[int, tuple[int, list[int]]] = {}  # by key of a slab: its number, and where the ranks' are
        self._slabs = 0
        self.heap = Heap(size, memory.new_slab, memory.array)

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

    def close(self) -> None:
        """Give the memory back, once no other rank maps it any more."""
        self.heap.close()
