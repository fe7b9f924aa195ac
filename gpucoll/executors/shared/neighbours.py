"""The ranks of one node: their marks, what each shows of its buffers, and ways into their memory.

Every rank has a control segment, mapped by all: its mark, two boards that say where its buffers are, and room for the
buffers of small calls. Calls take the two boards and rooms in turn.
"""

from __future__ import annotations

import array
import errno
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.segments import Copier, Segment, attach
from gpucoll.errors import BackendError
from gpucoll.executors import Layouts
from gpucoll.waits import keep_for_ever
from gpucoll.work import Operation

TINY = 1 << 19  # bytes of a buffer up to which calls work in the control segments
SMALL = 1 << 22  # the same for arrays that are not symmetric: to copy them all is quicker than the system's copies
BUFFERS = ("input", "output", "scratch")
MEETING_TAG = 2  # of messages that come before those of any call
HERE = -1  # in place of a segment's key: what follows is an address
KEPT = 1024  # stamps

# 64-bit words of the control segment, as kernels/engine.h has them; the mark is the first
_TOKEN, SLEEPERS, FAILURE, CALLS, _BOARDS, _BOARD = 1, 2, 3, 4, 8, 8
SIGNATURE = _BOARD - 1  # the last word of a board
BOARDS = 8 * _BOARDS  # the byte where boards begin
_PAGE = 4096


class Spot(NamedTuple):
    """Where a buffer is: for the others the key of a segment and an offset in it, or HERE and its address."""

    key: int
    offset: int
    address: int
    nbytes: int


NOWHERE = Spot(HERE, 0, 0, 0)


class Control:
    """A control segment, this rank's or another's; `size` is how many ranks there are."""

    def __init__(self, row: Array, size: int) -> None:
        self.row = row
        self.words = memoryview(row[:head_bytes(size)]).cast("q")  # type: ignore[arg-type] # an array is a buffer
        self._blocks = size + 1

    def board(self, half: int) -> memoryview:
        """Return the words of one board: stamp, key and offset of each buffer, and the signature of the call."""
        first = _BOARDS + half * _BOARD
        return self.words[first:first + _BOARD]

    def starts(self, half: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where the blocks of input and output start, in elements, where they are not alike."""
        first = self._starts(half)
        words = self.words[first:first + 2 * self._blocks].tolist()
        return tuple(words[:self._blocks]), tuple(words[self._blocks:])

    def show_starts(self, half: int, layouts: Layouts) -> None:
        """Show that."""
        first = self._starts(half)
        for layout in layouts:
            starts = layout.starts  # type: ignore[union-attr] # blocks are not alike
            self.words[first:first + len(starts)] = memoryview(array.array("q", starts))
            first += self._blocks

    def _starts(self, half: int) -> int:
        return _BOARDS + 2 * _BOARD + half * 2 * self._blocks


def head_bytes(size: int) -> int:
    """Return how much of a control segment is words."""
    words = _BOARDS + 2 * _BOARD + 4 * (size + 1)
    return -(-8 * words // _PAGE) * _PAGE


class Boards:
    """What this rank shows of its buffers; a stamp stands for each content, so that others know one that they saw."""

    def __init__(self, control: Control) -> None:
        self._boards = [control.board(half) for half in (0, 1)]
        self._stamps: dict[tuple[int, ...], int] = {}
        self._made = 0
        self.show_starts = control.show_starts

    def show(self, half: int, spots: Sequence[Spot], signature: int) -> None:
        """Show which call this is, and where the buffers are."""
        board, words = self._boards[half], self.words(spots)
        board[SIGNATURE] = signature
        if board[0] != words[0]:
            board[:SIGNATURE] = memoryview(array.array("q", words))

    def words(self, spots: Sequence[Spot]) -> tuple[int, ...]:
        """Return what a board shows of buffers: a stamp, which no other content ever has, and where they are."""
        content = tuple(word for spot in spots for word in spot[:2])
        stamp = self._stamps.get(content)
        if stamp is None:
            if len(self._stamps) == KEPT:
                self._stamps.clear()
            self._made += 1
            stamp = self._stamps[content] = self._made
        return stamp, *content


class Neighbours:
    """The ranks of this node, and their memory; `place` is this rank's.

    Each control segment has `extra` bytes for something else, of which all learn whether all are `able`.
    """

    def __init__(self, place: Any, extra: int, able: bool) -> None:
        self.rank, self.size, self._able = place.rank, place.size, able
        self.all = frozenset(rank for rank, node in enumerate(place.nodes) if node == place.nodes[place.rank])
        self._others = sorted(self.all - {self.rank})
        self._extra = head_bytes(self.size) + 2 * len(BUFFERS) * SMALL
        self._refused = 0  # why the system gives this rank no memory, as an error number
        try:
            self._segment = Segment(self._extra + extra)
        except OSError as error:  # which the others learn when they meet
            self._segment, self._refused = Segment.private(head_bytes(self.size)), error.errno or errno.ENOMEM
        self.key = self._segment.key
        self.mine = Control(self._segment.row, self.size)
        self.controls: dict[int, Control] = {self.rank: self.mine}
        self._processes: dict[int, int] = {}
        self._attached: dict[tuple[int, int], Array] = {}
        self.copier = Copier()
        self.maps = self.copies = False  # whether all can map, and copy, each other's memory
        self.all_able = False

    def meet(self, wire: Any) -> Operation:
        """Find ways into the memory of all the others; all of them come to know which ways all of them have.

        Raises BackendError, on all of them, where the system gives a rank no memory that others could map.
        """
        token = numpy.array([secrets.randbits(62)], numpy.int64)
        self.mine.words[_TOKEN] = int(token[0])
        told = yield from self._exchange(wire, [os.getpid(), self.key, int(token[0]), address(token), self._refused])
        refused = {self.rank: self._refused, **{other: words.pop() for other, words in told.items()}}
        _raise_refusals(refused)
        able = [self._try(other, *words) for other, words in told.items()]
        mine = [*([int(all(column)) for column in zip(*able, strict=True)] or [1, 1]), int(self._able)]
        everyone = yield from self._exchange(wire, mine)
        self.maps, self.copies, self.all_able = (all(column) for column in zip(mine, *everyone.values(), strict=True))

    def _exchange(self, wire: Any, words: list[int]) -> Any:
        """Return what the others tell by as many words."""
        sent = numpy.array(words, numpy.int64)
        rooms = {other: numpy.empty_like(sent) for other in self._others}
        requests = [wire.Irecv([room.view(numpy.uint8), "B"], other, MEETING_TAG) for other, room in rooms.items()]
        requests += [wire.Isend([sent.view(numpy.uint8), "B"], other, MEETING_TAG) for other in self._others]
        try:
            for request in requests:
                while not request.Test():
                    yield request.Test
        except BaseException:
            keep_for_ever((sent, rooms, requests))
            raise
        return {other: room.tolist() for other, room in rooms.items()}

    def _try(self, other: int, process: int, key: int, token: int, place: int) -> tuple[bool, bool]:
        """Return whether this rank can map, and whether it can copy, the memory of another one."""
        self._processes[other] = process
        found = numpy.zeros(1, numpy.int64)
        try:
            row = self._attached[other, key] = attach(process, key)
            self.controls[other] = Control(row, self.size)
        except (OSError, ValueError):
            return False, False
        maps = self.controls[other].words[_TOKEN] == token
        try:
            self.copier.read(process, place, address(found), found.nbytes)
        except OSError:
            return maps, False
        return maps, bool(found[0] == token)

    def mark(self, rank: int) -> memoryview:
        """Return the words that show the mark of a rank and, from `FAILURE` on, why it goes no further, or 0."""
        return self.controls[rank].words[:FAILURE + 1]

    def process(self, rank: int) -> int:
        """Return the process of another rank."""
        return self._processes[rank]

    def attached(self, rank: int, key: int) -> Array:
        """Return a segment of another rank, which is mapped once."""
        if (rank, key) not in self._attached:
            self._attached[rank, key] = attach(self._processes[rank], key)
        return self._attached[rank, key]

    def spots(self, half: int, sizes: Sequence[int]) -> list[Spot]:
        """Return where buffers of these sizes are in the control segment, in the rooms of `half`."""
        first = head_bytes(self.size) + half * len(BUFFERS) * SMALL
        return [Spot(self.key, first + index * SMALL, self._segment.start + first + index * SMALL, nbytes)
                for index, nbytes in enumerate(sizes)]

    def beginnings(self) -> list[int]:
        """Return the addresses of the control segments of all ranks of the node."""
        return [address(self.controls[rank].row) for rank in sorted(self.all)]

    def extras(self) -> list[int]:
        """Return the addresses of what is extra in the control segments of all ranks of the node."""
        return [start + self._extra for start in self.beginnings()]

    def close(self) -> None:
        """Let go of everybody's memory."""
        self._segment.close()
        self._attached.clear()


def _raise_refusals(numbers: dict[int, int]) -> None:
    ranks = tuple(sorted(rank for rank, number in numbers.items() if number))
    if ranks:
        raise BackendError(f"init: the system gives ranks {', '.join(map(str, ranks))} of this node no shared memory: "
                           f"{os.strerror(numbers[ranks[0]])}", code="GC-MEMORY", ranks=ranks)


def make_fence(threads: bool) -> Callable[[], None] | None:
    """Return what orders this processor's accesses to shared memory, None where they are in order.

    x86 shows stores in their order. Threads hand Python's lock to each other, which orders theirs.
    """
    if threads or platform.machine() in ("x86_64", "AMD64", "i686"):
        return None
    from mpi4py import MPI

    window = MPI.Win.Allocate(8, comm=MPI.COMM_SELF)
    window.Lock_all()
    return window.Sync
