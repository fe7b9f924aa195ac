"""The ranks of one node, and access to their memory.

Every rank has a control segment, memory mapped by all ranks of the node. The segment holds the rank's progress
counter, two descriptors for its latest calls (words, and places of buffers), slots for the inputs of eager calls,
workspaces for the buffers of small calls, and mailboxes for messages. Calls use descriptors, slots and workspaces in
turn, so that a rank may begin a call while peers still read from the call before.
"""

from __future__ import annotations

import errno
import os
import secrets
import zlib
from typing import Any

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.segments import Copier, Segment, attach, is_strict
from gpucoll.errors import BackendError
from gpucoll.executors import LengthsDiffer, lack_lengths
from gpucoll.executors.engine.tables import CACHE_LINE, COUNTER, HEAD, PAGE, ROUNDS, SLOT_BYTES, SLOTS, TOKEN
from gpucoll.progress.operations import Operation
from gpucoll.transport.control import exchange

# Bytes of a buffer up to which all ranks work in the control segments, wherever their arrays are.
TINY = 1 << 19
# Bytes of a workspace. Up to this size a copy to the workspace is quicker than process_vm_readv, and used for arrays
# that are not symmetric. Larger than TINY, since scratch may be several times as long as a buffer.
SMALL = 1 << 22
BUFFERS = ("input", "output", "scratch")


def head_bytes(size: int) -> int:
    """Return the size of a control segment up to the workspaces."""
    starts = -(-4 * (size + 1) * 8 // CACHE_LINE) * CACHE_LINE
    return -(-(HEAD + starts + SLOTS * SLOT_BYTES) // PAGE) * PAGE


class NodeRanks:
    """The ranks of this node, and access to their memory; `place` is this rank's place among the nodes.

    `box` is the size of the mailbox for one other rank.
    """

    def __init__(self, place: Any, box: int) -> None:
        self.rank: int = place.rank
        self.size: Any = place.size
        self.all: frozenset[int] = frozenset(
            rank for rank, node in enumerate(place.nodes) if node == place.nodes[place.rank])
        self.first: int = head_bytes(self.size)  # the place of the workspaces
        # The place of the mailboxes. Each workspace has a spare page: the engine shifts the starts (see `Node.offset`).
        self.boxes: int = self.first + 2 * len(BUFFERS) * (SMALL + PAGE)
        self._held = [0] * len(BUFFERS)  # the reserved bytes of the workspaces
        self._refused = 0  # the error number if the system gives this rank no memory
        try:
            self._segment = Segment(self.boxes + self.size * box, shared=len(self.all) > 1)
            # Elsewhere no touch is refused, and most mailboxes and slots of many ranks are never used.
            if is_strict():
                self._segment.reserve(0, self.first)
                self._segment.reserve(self.boxes, self._segment.nbytes)
            # Calls of at most a page then ask for no more.
            for buffer in range(len(BUFFERS)):
                self.reserve(buffer, PAGE)
        # Do not raise here, while the other ranks wait for this rank: `meet` raises on all ranks.
        except OSError as error:
            self._segment, self._refused = Segment(self.first, shared=False), error.errno or errno.ENOMEM
        self.keys: dict[int, int] = {self.rank: self._segment.key}
        self.controls: dict[int, Array] = {self.rank: self._segment.row}
        self.words: dict[int, memoryview[int]] = {self.rank: _words(self._segment.row)}
        self.processes: dict[int, int] = {self.rank: os.getpid()}
        self._attached: dict[tuple[int, int], Array] = {}
        self._copier = Copier()
        self.maps: bool = False  # whether all pairs can map memory
        self.copies: bool = False  # whether all pairs can copy it
        self.has_core: bool = False  # whether no other rank needs this rank's core

    def reserve(self, buffer: int, nbytes: int) -> None:
        """Reserve memory for `nbytes` in both workspaces of a buffer; raise OSError if the system has none."""
        nbytes = -(-nbytes // PAGE) * PAGE
        if nbytes > self._held[buffer]:
            for which in (buffer, len(BUFFERS) + buffer):
                start = self.first + which * (SMALL + PAGE)
                self._segment.reserve(start, start + PAGE + nbytes)
            self._held[buffer] = nbytes

    def check_lengths(self, engine: Any, number: int) -> None:
        """Cancel call `number` and raise LengthsDiffer if it is a v-variant with the lengths of different calls.

        All ranks have come to the call, see the same descriptions, and do the same.
        """
        # A rank in the next call still shows this description: it is overwritten two calls later, after a wait for all.
        if lack_lengths([engine.description(rank, number) for rank in self.all]):
            engine.settle()
            raise LengthsDiffer("the lengths of blocks have changed")

    def unlike_calls(self, engine: Any, number: int) -> dict[int, str]:
        """Return the ranks' descriptions of call `number`, or of one of the two calls before.

        A mismatch can be found one or two calls late, by ranks that did not meet in the differing call itself. The
        first call whose descriptions differ is taken.
        """
        shown: dict[int, str] = {}
        for earlier in range(3):
            shown = {rank: engine.description(rank, number - earlier).partition("\n")[0] for rank in sorted(self.all)
                     if engine.is_eager(rank, number - earlier)
                     or number - earlier <= self.words[rank][COUNTER] >> ROUNDS <= number - earlier + 1}
            if len(set(shown.values())) > 1:
                break
        return shown

    def meet(self, wire: Any) -> Operation:
        """Gain access to the memory of all other ranks, and agree on the ways open to all pairs of ranks.

        Raises BackendError, on all ranks, if the system gives some rank no mappable memory.
        """
        # A random token shows that a mapping, or a copy, is from the right process: in another container the same
        # process number may mean another process.
        token = numpy.array([secrets.randbits(62)], numpy.int64)
        self.words[self.rank][TOKEN] = int(token[0])
        ranks = sorted(self.all)
        cores = os.sched_getaffinity(0)
        facts = yield from exchange(wire, self.rank, ranks, [
            os.getpid(), self.keys[self.rank], int(token[0]), address(token), self._refused, len(cores),
            zlib.crc32(str(sorted(cores)).encode())])
        refused = {rank: row[4] for rank, row in zip(ranks, facts, strict=True)}
        _raise_refusals(refused)
        # Bound ranks have the same processors, or none in common; nothing is known if they exceed the host's.
        sharing = [row[5:7] for row in facts]
        is_apart = sum({which: count for count, which in sharing}.values()) <= (os.cpu_count() or 1)
        self.has_core = (sharing.count(sharing[ranks.index(self.rank)]) if is_apart else len(ranks)) <= len(cores)
        able = [self._try(other, *row[:4]) for other, row in zip(ranks, facts, strict=True) if other != self.rank]
        mine = [int(all(column)) for column in zip(*able, strict=True)] or [1, 1]
        rows = yield from exchange(wire, self.rank, ranks, mine)
        self.maps = all(row[0] for row in rows)
        self.copies = all(row[1] for row in rows)

    def _try(self, other: int, process: int, key: int, token: int, place: int) -> tuple[bool, bool]:
        """Return whether this rank can map, and whether this rank can copy, the memory of another rank."""
        self.processes[other], self.keys[other] = process, key
        found = numpy.zeros(1, numpy.int64)
        try:
            row = self._attached[other, key] = self.controls[other] = attach(process, key)
        except (OSError, ValueError):
            return False, False
        self.words[other] = _words(row)
        maps = self.words[other][TOKEN] == token
        try:
            self._copier.read(process, place, address(found), found.nbytes)
        except OSError:
            return maps, False
        return maps, bool(found[0] == token)

    def attached(self, rank: int, key: int) -> Array:
        """Return a segment of another rank, mapped at most once."""
        if (rank, key) not in self._attached:
            self._attached[rank, key] = attach(self.processes[rank], key)
        return self._attached[rank, key]

    def close(self) -> None:
        """Release all mappings and this rank's segment."""
        self._segment.close()
        self._attached.clear()


def _raise_refusals(numbers: dict[int, int]) -> None:
    ranks = tuple(sorted(rank for rank, number in numbers.items() if number))
    if ranks:
        raise BackendError(f"init: the system refuses shared memory to ranks {', '.join(map(str, ranks))} of this "
                           f"node: {os.strerror(numbers[ranks[0]])}", code="GC-MEMORY", ranks=ranks)


def _words(row: Array) -> memoryview:
    return memoryview(row[:HEAD]).cast("q")  # type: ignore[arg-type] # an array is a buffer
