"""Orders as the engine carries them out: what a call does, in bytes of the ranks' buffers, wherever those are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpucoll.arrays import address, combiner
from gpucoll.arrays.segments import Segment, at
from gpucoll.arrays.symmetric import Heap
from gpucoll.collectives import COLLECTIVES
from gpucoll.dtypes import DTYPES, Dtype
from gpucoll.executors import Task
from gpucoll.executors.shared.neighbours import BUFFERS, MEDIUM, SMALL, TINY, Neighbours
from gpucoll.executors.shared.order import Arranger, Form, Instruction, Land, Message, Post, Source, Tell, Wait
from gpucoll.ops import LOGICAL, OPS, Op
from gpucoll.plan import Layouts
from gpucoll.schedule import Slice

KEPT = 256
LEAST, MOST_ROUNDED = 1 << 16, 1 << 28  # bytes of a room: the least, and where it is no longer rounded up
LINE = 64
ONE_PASS = ("all_reduce", "two_shot")
AWAIT, SIGNAL, FORM, CALL = range(4)  # as kernels/engine.h has them
ASIDE = len(BUFFERS)
TEXT = 192  # bytes for the words of a call
KINDS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
         "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2")  # as combine.h has them
PLACES = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor")
NOTHING = -1  # in place of an op

Part = tuple[int, int, int]
Row = tuple[int, int, int, Part | None, int, tuple[Part, ...], tuple[Part, ...]]


class Messages:
    """What a plan asks of message number i, across nodes: to begin it on memory at an address, and whether it has come.
    """

    def __init__(self, begin: Callable[[int, bool, int, int, int], None], has_come: Callable[[int], bool],
                 idle: Callable[[], None]) -> None:
        self.begin, self.has_come, self.idle = begin, has_come, idle


class Plans:
    """The plans of one communicator's engine."""

    def __init__(self, near: Neighbours, heap: Heap, engine: Any, messages: Messages) -> None:
        self._near, self._heap, self._engine, self._messages = near, heap, engine, messages
        self._kept: dict[Any, tuple[Any, Any, Any]] = {}
        self._rooms: dict[int, Segment] = {}
        self._outgrown: list[Segment] = []  # a call that is under way may still use them

    def of(self, task: Task) -> Any:
        """Return the engine's plan for calls like `task`."""
        small = task.nbytes <= TINY or (task.nbytes <= MEDIUM and not self._is_symmetric(task))
        alias = task.in_place and not small and not self._moves(task)
        # A plan of unlike blocks knows this rank's lengths only, and not how long the longest one's are.
        key = (id(task.plan), id(task.op), task.dtype.name, task.nbytes, alias, small, task.in_place, task.detail)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == KEPT:
                self._kept.clear()
            # With them plan and op, so that no others are found under their numbers.
            found = self._kept[key] = (self._made(task, alias, small), task.plan, task.op)
        return found[0]

    def _made(self, task: Task, alias: bool, small: bool) -> Any:
        plan, near = task.plan, self._near
        assert plan is not None
        assert plan.schedules is not None
        assert plan.layouts is not None
        arranger = Arranger(near.rank, plan.schedules, near.all, alias)
        by_engine = task.op is None or not task.op.expression
        one_pass = (task.collective, task.algorithm) == ONE_PASS and len(near.all) == near.size > 1 and by_engine
        order = arranger.fused() if one_pass else arranger.order()
        rows = [task.input, task.output]
        sizes = [0 if row is None else row.nbytes for row in rows] + [plan.workspace["scratch"] * task.dtype.itemsize]
        for buffer, wanted in enumerate((plan.copy_input or not near.copies, not near.copies, True)):
            if wanted and sizes[buffer] > (SMALL if small else 0):
                self._make_room(buffer, sizes[buffer])
        writer = _Writer(task, near.rank, plan.layouts, self._messages)
        instructions = (*writer.rows(order.instructions),)
        readers = [(BUFFERS.index(name), peer, mark) for name, ends in order.readers.items()
                   for peer, mark in ends.items()]
        announced = task.detail != "" and COLLECTIVES[task.collective].rooted and len(near.all) == near.size
        if announced and near.rank == task.root:  # all others read what it shows of the call
            readers += [(0, peer, 0) for peer in near.all - {near.rank}]
        starts = () if task.lengths is None else tuple(
            start for layout in plan.layouts for start in _padded(layout, near.size + 1))
        # Alike on all ranks, unlike their scratch: the engine refuses what is too long for a workspace.
        in_control = small and task.nbytes <= TINY and task.lengths is None and len(near.all) == near.size
        text = words_of(task)
        place = NOTHING if task.op is None or task.op.expression else PLACES.index(
            "sum" if task.op.factor is not None else task.op.name)
        flags = (in_control, small, plan.copy_input,
                 task.in_place and task.collective == "broadcast", task.collective == "broadcast", announced)
        shown = text.encode()[:TEXT - 1].decode(errors="ignore")
        return self._engine.plan(shown, signature_of(text), (*sizes, writer.aside, task.dtype.itemsize),
                                 (KINDS.index(task.dtype.name), place, self._finish(task)), flags, task.root,
                                 order.sources, tuple(readers), starts, instructions, (*writer.calls,))

    def _finish(self, task: Task) -> int:
        """Return of how many contributions the engine forms the mean, or the truth value; 0 where it does neither."""
        if task.op is None or task.output is None or task.collective == "exscan":
            return 0
        contributions = self._near.rank + 1 if task.collective == "scan" else self._near.size
        alone = task.op.name in LOGICAL and contributions == 1
        return contributions if task.op.name == "avg" or alone else 0

    def _moves(self, task: Task) -> bool:
        """Return whether an in-place call works elsewhere, so that input and output are apart."""
        assert task.plan is not None
        return task.plan.copy_input or not (self._near.copies or self._is_symmetric(task))

    def _is_symmetric(self, task: Task) -> bool:
        """Return whether all of this rank's arrays are in symmetric memory."""
        return all(row is None or self._heap.find(address(row), row.nbytes) for row in (task.input, task.output))

    def _make_room(self, buffer: int, nbytes: int) -> None:
        """Have memory for a buffer that others could not read where it is, kept from call to call."""
        room = self._rooms.get(buffer)
        if room is not None and room.nbytes >= nbytes:
            return
        if room is not None:
            self._outgrown.append(room)
        rounded = 1 << (nbytes - 1).bit_length() if nbytes < MOST_ROUNDED else nbytes
        room = self._rooms[buffer] = Segment(max(LEAST, rounded))
        self._engine.room(buffer, room.key, room.start, room.nbytes)

    def close(self) -> None:
        """Let go of the memory."""
        for room in (*self._rooms.values(), *self._outgrown):
            room.close()
        self._rooms.clear()
        self._outgrown.clear()
        self._kept.clear()


def words_of(task: Task) -> str:
    """Return in words what is alike where ranks make the same call."""
    op = "" if task.op is None else f", op {task.op.expression or task.op.name}"
    return (f"{task.collective} by {task.algorithm}, {task.nbytes} bytes of {task.dtype.name}{op}, "
            f"root {task.root}{task.detail}")


def signature_of(text: str) -> int:
    """Return a number that is the same for the same words."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") << 4


def _padded(layout: Any, length: int) -> Sequence[int]:
    """Return where so many blocks start; those that a buffer has not are empty."""
    return (*layout.starts, *[layout.starts[-1]] * (length - len(layout.starts)))


class _Writer:
    """Writes the instructions of one order for the engine."""

    def __init__(self, task: Task, rank: int, layouts: Layouts, messages: Messages) -> None:
        self._rank, self._layouts, self._messages = rank, layouts, messages
        self._width = task.dtype.itemsize
        self._ragged = task.lengths is not None
        self._task = task
        self._where: dict[Any, Part] = {}  # what is aside: results, messages
        self._used = self.aside = 0
        self.calls: list[Callable[..., Any]] = []  # those of Python's, the first while the engine waits

    def rows(self, instructions: Sequence[Instruction]) -> Iterator[Row]:
        """Yield the instructions; what would move nothing is left out."""
        for one in instructions:
            match one:
                case Tell(mark):
                    if not mark % 2:
                        self._used = 0
                    yield SIGNAL, 0, mark, None, 0, (), ()
                case Wait(peer, mark) if peer >= 0:
                    yield AWAIT, peer, mark, None, 0, (), ()
                case Wait(message):
                    yield self._called(lambda number=-1 - message: self._messages.has_come(number))
                case Form(dst, operands, aside, copies) if self._bytes(dst):
                    yield from self._formed(dst, operands, aside, copies)
                case Land(dst) if self._bytes(dst):
                    yield FORM, 0, 0, self._own(dst), self._bytes(dst), (self._where[dst],), ()
                case Post(number, peer, part, sends):
                    yield self._posted(number, peer, part, sends)

    def _formed(self, dst: Slice, operands: Sequence[Slice | Source | Message], aside: bool,
                copies: Sequence[Source]) -> Iterator[Row]:
        nbytes, op = self._bytes(dst), self._task.op
        where = self._put_aside(dst, nbytes) if aside else self._own(dst)
        sources = tuple(map(self._operand, operands))
        if op is None or not op.expression or len(sources) == 1:
            yield FORM, 0, 0, where, nbytes, sources, tuple(map(self._operand, copies))
            return
        here = []
        for index, source in enumerate(sources):  # Python's functions read what is mapped
            if source[0] != self._rank:
                here.append(self._put_aside(("fetched", dst, index), nbytes))
                yield FORM, 0, 0, here[-1], nbytes, (source,), ()
            else:
                here.append(source)
        yield self._called(_combining(op, self._task.dtype, self._numpy(), nbytes), where, nbytes, tuple(here))
        for copy in copies:
            raise AssertionError(f"{copy}: orders in one pass are for the engine's own ops")

    def _numpy(self) -> Any:
        some = self._task.output if self._task.output is not None else self._task.input
        return some.dtype

    def _posted(self, number: int, peer: int, part: Slice, sends: bool) -> Row:
        nbytes = self._bytes(part)
        where = self._own(part) if sends else self._put_aside(Message(number), nbytes)
        return self._called(lambda place: self._messages.begin(number, sends, peer, place, nbytes), where, nbytes)

    def _called(self, function: Callable[..., Any], to: Part | None = None, nbytes: int = 0,
                sources: tuple[Part, ...] = ()) -> Row:
        if not self.calls:
            self.calls.append(self._messages.idle)
        self.calls.append(function if to is not None else lambda _: function())
        return CALL, 0, len(self.calls) - 1, to, nbytes, sources, ()

    def _bytes(self, part: Slice) -> int:
        start, stop = self._layouts.span(part)
        return (stop - start) * self._width

    def _own(self, part: Slice) -> Part:
        return self._rank, BUFFERS.index(part.buffer), self._layouts.span(part)[0] * self._width

    def _put_aside(self, name: Any, nbytes: int) -> Part:
        self._where[name] = part = self._rank, ASIDE, self._used
        self._used += -(-nbytes // LINE) * LINE
        self.aside = max(self.aside, self._used)
        return part

    def _operand(self, part: Slice | Source | Message) -> Part:
        if isinstance(part, Slice):
            return self._own(part)
        if isinstance(part, Message):
            return self._where[part]
        first = part.part.first if self._ragged else self._layouts.span(part.part)[0] * self._width
        return part.peer, BUFFERS.index(part.part.buffer), first


def _combining(op: Op, dtype: Dtype, kind: Any, nbytes: int) -> Callable[..., None]:
    """Return what combines rows at addresses by an op of the user's own."""
    combine = combiner(op, dtype)

    def combined(to: int, *sources: int) -> None:
        first, *others = (at(source, nbytes).view(kind) for source in sources)
        combine(at(to, nbytes).view(kind), first, others)

    return combined


assert set(KINDS) == set(DTYPES)
assert set(PLACES) == set(OPS)
