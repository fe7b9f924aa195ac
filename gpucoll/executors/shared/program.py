"""An order bound to memory: a list of steps that only have to be done.

Parts of arrays are made here, once; a call like one before runs what was made for that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.combine import Combine
from gpucoll.executors import Layouts
from gpucoll.executors.shared.order import Form, Instruction, Land, Message, Post, Source, Tell, Wait
from gpucoll.schedule import Slice

BLOCK = 1 << 19  # bytes of an operand that are combined at a time, so that what comes of them is still in a cache
LINE = 64


# What a step does: call `what`; wait until `what` shows `number`; show `number`; begin or end a message; form `what`,
# an array, of `number`, its operands and its copies.
CALL, WAIT, TELL, SEND, RECEIVE, END, FORM = range(7)

Program: TypeAlias = list[tuple[int, Any, Any]]


class Away(NamedTuple):
    """Memory of another process that is not mapped: who copies from and to there, process and address."""

    copier: Any
    process: int
    start: int


Memory: TypeAlias = Array | Away


class Bindings(NamedTuple):
    """What an order is bound to: memory in bytes, by buffer (`own`) and by peer and buffer (`theirs`); how it is cut.

    `mark` returns what shows the mark of a rank, `room` memory of this rank's own, by name and length. `together` is
    how many operands must be combined at a time, where results are rounded.
    """

    own: dict[str, Array]
    theirs: Callable[[int, str], Memory]
    layouts: Callable[[int], Layouts]
    rank: int
    dtype: numpy.dtype
    combine: Combine | None
    together: bool
    mark: Callable[[int], Any]
    room: Callable[[str, int], Array]


class Binder:
    """Binds the instructions of one order."""

    def __init__(self, to: Bindings) -> None:
        self._to = to
        self._cut = to.layouts(to.rank)
        self._room = to.own["scratch"][:0]
        self._used = 0
        self._aside: dict[Slice | Message, Array] = {}

    def program(self, instructions: Sequence[Instruction]) -> Program:
        """Return the program for Python, which calls."""
        return [(CALL, self._formed(what, *number), None) if do == FORM else (do, what, number)
                for do, what, number in self.steps(instructions)]

    def steps(self, instructions: Sequence[Instruction]) -> Program:
        """Return the program for the engine, which forms; what would move nothing is left out."""
        self._room = self._to.room("aside", self._aside_bytes(instructions))
        return [step for one in instructions for step in self._steps(one)]

    def _aside_bytes(self, instructions: Sequence[Instruction]) -> int:
        """Return how much a round forms and receives aside, at most."""
        most = now = 0
        for one in instructions:
            if isinstance(one, Tell) and not one.mark % 2:
                now = 0
            elif (isinstance(one, Form) and one.aside) or (isinstance(one, Post) and not one.sends):
                start, stop = self._span(one.dst if isinstance(one, Form) else one.part)
                now += -(start - stop) // LINE * LINE + LINE
                most = max(most, now)
        return most

    def _steps(self, one: Instruction) -> Iterator[tuple[int, Any, Any]]:
        match one:
            case Tell(mark):
                if not mark % 2:
                    self._used = 0
                yield TELL, None, mark
            case Wait(peer, mark):
                yield (WAIT, self._to.mark(peer), mark) if peer >= 0 else (END, None, -1 - peer)
            case Form(dst, operands, aside, copies) if self._is_something(dst):
                row = self._put_aside(dst, dst) if aside else self._own(dst)
                yield FORM, row, ([self._operand(part) for part in operands], [self._operand(part) for part in copies])
            case Land(dst) if self._is_something(dst):
                yield FORM, self._own(dst), ([self._aside[dst]], [])
            case Post(number, peer, part, sends):
                row = self._own(part) if sends else self._put_aside(Message(number), part)
                yield SEND if sends else RECEIVE, row.view(numpy.uint8), peer

    def _is_something(self, part: Slice) -> bool:
        start, stop = self._span(part)
        return stop > start

    def _span(self, part: Slice) -> tuple[int, int]:
        """Return the bytes of a part of this rank's buffers."""
        start, stop = self._cut.span(part)
        return start * self._to.dtype.itemsize, stop * self._to.dtype.itemsize

    def _own(self, part: Slice) -> Array:
        start, stop = self._span(part)
        return self._to.own[part.buffer][start:stop].view(self._to.dtype)

    def _put_aside(self, name: Slice | Message, like: Slice) -> Array:
        start, stop = self._span(like)
        row = self._room[self._used:self._used + stop - start].view(self._to.dtype)
        self._used += -(start - stop) // LINE * LINE + LINE
        self._aside[name] = row
        return row

    def _operand(self, part: Slice | Source | Message) -> Memory:
        if isinstance(part, Slice):
            return self._own(part)
        return self._aside[part] if isinstance(part, Message) else self._theirs(part)

    def _theirs(self, source: Source) -> Memory:
        memory, width = self._to.theirs(source.peer, source.part.buffer), self._to.dtype.itemsize
        start, stop = (end * width for end in self._to.layouts(source.peer).span(source.part))
        if isinstance(memory, Away):
            return memory._replace(start=memory.start + start)
        return memory[start:stop].view(self._to.dtype)

    def _formed(self, dst: Array, operands: list[Memory], copies: list[Memory]) -> Callable[[], None]:
        """Return what forms `dst`, and its copies; a part that is not mapped is fetched block by block."""
        base, *others = operands
        if not others and not copies:
            return _fetching(base, dst) if isinstance(base, Away) else functools.partial(copy_blocks, dst, base)
        combine, mapped = self._to.combine, [one for one in operands if not isinstance(one, Away)]
        assert combine is not None
        if len(mapped) == len(operands) and not copies and dst.nbytes <= BLOCK:
            return functools.partial(combine, dst, mapped[0], mapped[1:])
        groups = [others] if len(mapped) == len(operands) or self._to.together else [[one] for one in others]
        rooms = 1 + (0 if len(mapped) == len(operands) else 1 + len(groups[0]))
        room = self._to.room("fetched", rooms * BLOCK)
        total, *fetched = [room[index * BLOCK:(index + 1) * BLOCK].view(dst.dtype) for index in range(rooms)]
        late = any(not isinstance(one, Away) and address(one) == address(dst) for one in others)
        return functools.partial(_blockwise, combine, dst, base, groups, copies, fetched, total if late else None)


def copy_blocks(dst: Array, source: Array) -> None:
    """Copy block by block: NumPy writes longer rows past the caches, which are quicker."""
    if dst.nbytes <= BLOCK:
        numpy.copyto(dst, source)
        return
    step = BLOCK // dst.itemsize
    for start in range(0, len(dst), step):
        numpy.copyto(dst[start:start + step], source[start:start + step])


def _fetching(source: Away, dst: Array) -> Callable[[], None]:
    return functools.partial(source.copier.read, source.process, source.start, address(dst), dst.nbytes)


def _blockwise(combine: Combine, dst: Array, base: Memory, groups: list[list[Memory]], copies: list[Memory],
               rooms: list[Array], aside: Array | None) -> None:
    """Form `dst` block by block, `aside` where it is an operand beside the first, and write each to the `copies`."""
    per_block = BLOCK // dst.itemsize
    for start in range(0, len(dst), per_block):
        block = slice(start, min(start + per_block, len(dst)))
        total = _piece(base, block, dst.itemsize, rooms, 0)
        piece = dst[block] if aside is None else aside[:block.stop - block.start]
        for group in groups:
            combine(piece, total, [_piece(one, block, dst.itemsize, rooms, index + 1)
                                   for index, one in enumerate(group)])
            total = piece
        if aside is not None:
            numpy.copyto(dst[block], piece)
        for copy in copies:
            if isinstance(copy, Away):
                copy.copier.write(copy.process, copy.start + start * dst.itemsize, address(piece), piece.nbytes)
            else:
                numpy.copyto(copy[block], piece)


def _piece(part: Memory, block: slice, width: int, rooms: list[Array], index: int) -> Array:
    """Return one block of an operand, fetched into the room of its index where it is not mapped."""
    if not isinstance(part, Away):
        return part[block]
    room = rooms[index][:block.stop - block.start]
    part.copier.read(part.process, part.start + block.start * width, address(room), room.nbytes)
    return room
