"""Arrays at the same place in memory of all ranks of a node, which the kernels of all ranks read; `ipc` has the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from gpucoll.arrays.segments import Heap, Slab
from gpucoll.device.peer import NOWHERE, Places
from gpucoll.device.streams import StreamOrder
from gpucoll.progress.operations import Pending

if TYPE_CHECKING:
    from gpucoll.executors.peer.ipc import PeerMemory

# Exchange words: return the words of every rank, in rank order.
Exchange: TypeAlias = Callable[[Sequence[int]], Generator[Pending, None, list[list[int]]]]

_OFFSETS = 48  # bits of a mark for the offset in a slab; the slab's number is above


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
