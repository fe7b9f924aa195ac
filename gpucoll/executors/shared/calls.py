"""Where the buffers of a call are, for its own rank and for the others, and the programs made for calls like it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy

from gpucoll.arrays import Array, address, combiner
from gpucoll.arrays.segments import Segment, at
from gpucoll.arrays.symmetric import Heap
from gpucoll.chunks import Ragged
from gpucoll.executors import Layouts, Plan, Task
from gpucoll.executors.shared.engine import make_walk
from gpucoll.executors.shared.neighbours import BUFFERS, HERE, NOWHERE, SMALL, TINY, Boards, Neighbours, Spot
from gpucoll.executors.shared.order import Arranger, Order, Wait
from gpucoll.executors.shared.program import Away, Binder, Bindings, Memory, Program, copy_blocks
from gpucoll.executors.shared.slots import kinds_of

T = TypeVar("T")

KEPT = 256
LEAST = 1 << 16  # bytes of a room
COPIED = 1 << 26  # bytes of an input that is copied to mapped memory, since others read it more than once
ONE_PASS = ("all_reduce", "two_shot")


class Laid(NamedTuple):
    """Where the buffers of a call are; input goes to `source` and output comes from `result`, unless None."""

    spots: tuple[Spot, ...]
    source: Array | None
    result: Array | None
    number: int  # tells it from others: that of the half, or from 2 on


class Call:
    """A kind of call: those with the same plan, op and dtype."""

    def __init__(self, task: Task, order: Order, near: Neighbours, is_small: bool) -> None:
        assert task.plan is not None
        self.plan: Plan = task.plan
        self.op, self.order, self.is_small = task.op, order, is_small
        self.signature = signature_of(task)
        self.sources = [near.mark(peer) for peer in order.sources]
        self.boards = [[near.controls[peer].board(half) for peer in order.sources] for half in (0, 1)]
        self.readers: dict[int, int] = {}  # the mark of each when it has read all that it reads here
        for readers in order.readers.values():
            self.readers |= {peer: max(mark, self.readers.get(peer, 0)) for peer, mark in readers.items()}
        self.small: list[Laid | None] = [None, None]  # by half
        self.large: dict[Any, Laid] = {}  # by the addresses of the arrays
        self.programs: dict[Any, Program] = {}
        self.walk: Any = None  # the engine's, once it is asked for
        self.may_walk = is_small and task.nbytes <= TINY and task.lengths is None


def signature_of(task: Task) -> int:
    """Return a number that is the same where ranks make the same call."""
    op = "" if task.op is None else f"{task.op.name} {task.op.expression}"
    text = f"{task.collective} {task.algorithm} {op} {task.dtype.name} {task.root} {task.nbytes}"
    return zlib.crc32(text.encode()) << 16


class Calls:
    """The calls of one communicator."""

    def __init__(self, near: Neighbours, heap: Heap) -> None:
        self._near, self._heap = near, heap
        self._boards = Boards(near.mine)
        self._kept: dict[Any, Call] = {}
        self._rooms: dict[str, Segment] = {}
        self._private: dict[str, Array] = {}
        self._laid = 0
        self.refusals = 0  # how many calls this rank has refused

    def of(self, task: Task) -> Call:
        """Return what is kept of calls like `task`."""
        small = task.nbytes <= TINY or (task.nbytes <= SMALL and not self._is_symmetric(task))
        alias = task.in_place and not small and not self._moves(task)
        # A plan of unlike blocks knows this rank's lengths only, and not how long the longest one's are.
        key = (id(task.plan), id(task.op), task.dtype.name, task.nbytes, alias, small)
        call = self._kept.get(key)
        if call is None:
            # It holds plan and op, so that no others are found under their numbers.
            call = _keep(self._kept, key, Call(task, self._order(task, alias), self._near, small))
        return call

    def walk(self, task: Task) -> Any:
        """Return the engine's plan for calls like `task`, None where there is none."""
        call, kinds = self.of(task), kinds_of(task)
        if call.walk is None and call.may_walk and kinds is not None and self._scratch(task) <= SMALL:
            assert task.plan is not None
            assert task.plan.layouts is not None
            laid = [self._lay_small(task, half) for half in (0, 1)]
            boards = [self._boards.words(one.spots) for one in laid]
            places = [(address(one.source), address(one.result)) for one in laid]
            call.walk = make_walk(self._near, task, call.order, task.plan.layouts, call.signature, kinds, boards,
                                  [one.spots for one in laid], places, call.readers)
        return call.walk

    def _order(self, task: Task, alias: bool) -> Order:
        plan = task.plan
        assert plan is not None
        assert plan.schedules is not None
        arranger = Arranger(self._near.rank, plan.schedules, self._near.all, alias)
        one_pass = (task.collective, task.algorithm) == ONE_PASS and len(self._near.all) == self._near.size
        return arranger.fused() if one_pass else arranger.order()

    def _moves(self, task: Task) -> bool:
        """Return whether an in-place call works elsewhere, so that input and output are apart."""
        assert task.plan is not None
        return task.plan.copy_input or not (self._near.copies or self._is_symmetric(task))

    def _is_symmetric(self, task: Task) -> bool:
        """Return whether all of this rank's arrays are in symmetric memory."""
        return all(row is None or self._heap.find(address(row), row.nbytes) for row in (task.input, task.output))

    def lay(self, task: Task, call: Call, half: int) -> Laid:
        """Return where the buffers of `task` are; the input is there."""
        if call.is_small:
            laid = call.small[half]
            if laid is None:
                laid = call.small[half] = self._lay_small(task, half)
        else:
            key = (None if task.input is None else address(task.input),
                   None if task.output is None else address(task.output))
            laid = call.large.get(key)
            if laid is None:
                laid = _keep(call.large, key, self._lay_large(task, call))
        if laid.source is not None:
            copy_blocks(laid.source, task.input)
        return laid

    def _lay_small(self, task: Task, half: int) -> Laid:
        """All is in the control segment, but for a scratch that is too large."""
        sizes = [0 if row is None else row.nbytes for row in (task.input, task.output)]
        sizes.append(self._scratch(task))
        spots = self._near.spots(half, sizes)
        if sizes[2] > SMALL:
            spots[2] = self._room("scratch", sizes[2])
        source, result = (None if row is None else at(spot.address, spot.nbytes).view(row.dtype)
                          for row, spot in zip((task.input, task.output), spots, strict=False))
        kept = task.in_place and task.collective == "broadcast"  # the root's array, which may be read-only
        return Laid(tuple(spots), source, None if kept else result, half)

    def _lay_large(self, task: Task, call: Call) -> Laid:
        assert task.plan is not None
        source = result = None
        spots = [self._spot(task.input), self._spot(task.output)]
        if task.input is not None and (spots[0] is NOWHERE or task.plan.copy_input or (
                spots[0].key == HERE and "input" in call.order.shared and task.input.nbytes <= COPIED)):
            spots[0] = self._room("input", task.input.nbytes)
            source = at(spots[0].address, task.input.nbytes).view(task.input.dtype)
        if task.output is not None and spots[1] is NOWHERE:
            spots[1] = self._room("output", task.output.nbytes)
            result = at(spots[1].address, task.output.nbytes).view(task.output.dtype)
        spots.append(self._room("scratch", self._scratch(task)))
        self._laid += 1
        return Laid(tuple(spots), source, result, 1 + self._laid)

    def _spot(self, row: Array | None) -> Spot:
        """Return where an array is; NOWHERE for one that is out of the others' reach, and for None."""
        if row is None:
            return NOWHERE
        start = address(row)
        found = self._heap.find(start, row.nbytes)
        if found is None:
            return Spot(HERE, start, start, row.nbytes) if self._near.copies else NOWHERE
        return Spot(*found, start, row.nbytes)

    def _scratch(self, task: Task) -> int:
        assert task.plan is not None
        return task.plan.scratch * task.dtype.itemsize

    def _room(self, name: str, nbytes: int) -> Spot:
        """Return where memory is that is kept from call to call, for all to map."""
        if not nbytes:
            return NOWHERE
        room = self._rooms.get(name)
        if room is None or room.row.nbytes < nbytes:
            if room is not None:
                room.close()
                self._kept.clear()  # what was laid out there
            room = self._rooms[name] = Segment(max(LEAST, 1 << (nbytes - 1).bit_length()))
        return Spot(room.key, 0, room.start, nbytes)

    def _own_room(self, name: str, nbytes: int) -> Array:
        """Return memory that is kept from call to call, for this rank alone."""
        room = self._private.get(name)
        if room is None or room.nbytes < nbytes:
            room = self._private[name] = numpy.empty(max(LEAST, 1 << (nbytes - 1).bit_length()), numpy.uint8)
        return room[:nbytes]

    def show(self, task: Task, call: Call, laid: Laid, half: int) -> None:
        """Show the others which call this is, where the buffers are, and how they are cut where blocks are not alike.
        """
        self._boards.show(half, laid.spots, call.signature + self.refusals)
        if task.lengths is not None:
            assert task.plan is not None
            assert task.plan.layouts is not None
            self._boards.show_starts(half, task.plan.layouts)

    def program(self, task: Task, call: Call, laid: Laid, half: int) -> Program:
        """Return the program of `task`, all whose memory it reads having shown where that is."""
        key = (laid.number, *[board[0] for board in call.boards[half]])
        found = call.programs.get(key)
        if found is None:
            found = self._bind(task, call, laid, half)
            if task.lengths is None:
                _keep(call.programs, key, found)
        return found

    def _bind(self, task: Task, call: Call, laid: Laid, half: int) -> Program:
        own = {name: at(spot.address, spot.nbytes) for name, spot in zip(BUFFERS, laid.spots, strict=True)}
        some = task.output if task.output is not None else task.input
        combine = None if task.op is None else combiner(task.op, task.dtype)
        binder = Binder(Bindings(own, lambda peer, buffer: self._theirs(peer, buffer, half),
                                 self._layouts(task, call.plan, half), self._near.rank,
                                 numpy.dtype(numpy.uint8) if some is None else some.dtype, combine,
                                 task.dtype.wide is not None, self._near.mark, self._own_room))
        return binder.program((*call.order.instructions, *self._ends(call.order, laid)))

    def _ends(self, order: Order, laid: Laid) -> list[Wait]:
        """Return the waits at the end: until all have read what the next call, or the caller, may overwrite."""
        return [Wait(peer, mark) for name, spot in zip(BUFFERS, laid.spots, strict=True)
                if spot.key != self._near.key for peer, mark in order.readers.get(name, {}).items()]

    def _layouts(self, task: Task, plan: Plan, half: int) -> Callable[[int], Layouts]:
        layouts = plan.layouts
        assert layouts is not None
        if task.lengths is None:
            return lambda rank: layouts
        return lambda rank: layouts if rank == self._near.rank else Layouts(
            *(Ragged(starts) for starts in self._near.controls[rank].starts(half)))

    def _theirs(self, peer: int, buffer: str, half: int) -> Memory:
        """Return a buffer of another rank, from its first byte on."""
        index = 1 + 2 * BUFFERS.index(buffer)
        key, offset = self._near.controls[peer].board(half)[index:index + 2]
        if key == HERE:
            return Away(self._near.copier, self._near.process(peer), offset)
        return self._near.attached(peer, key)[offset:]

    def close(self) -> None:
        """Let go of the memory."""
        for room in self._rooms.values():
            room.close()
        self._rooms.clear()
        self._private.clear()
        self._kept.clear()


def _keep(kept: dict[Any, T], key: Any, value: T) -> T:
    """Keep a value; where there are too many, forget the others."""
    if len(kept) == KEPT:
        kept.clear()
    kept[key] = value
    return value
