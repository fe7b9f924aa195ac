"""What runs a schedule: one file for each transport, all behind one small protocol.

A `Task` is a collective with everything resolved. `Executor.run` is an operation in the
sense of `gpucoll.waits`: a generator that yields a predicate whenever it must wait. A device
executor enqueues on the task's stream and yields nothing.

`resolve` turns a schedule into spans of elements, and decides once what every transport
needs to know of a round: what may be received in place, and what must wait for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from gpucoll.chunks import Layout, Ragged
from gpucoll.dtypes import Dtype
from gpucoll.ops import Op
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Round, Schedule, Send, Slice, Step
from gpucoll.work import Operation

PIECE = 1 << 26  # elements of at most 16 bytes


@dataclass
class Task:
    """One collective on one rank: flat buffers (None where this rank has none) and what to do with them.

    `nbytes` are those of the larger of input and output over all ranks; `in_place`: both are the same memory here.
    `lengths` are those of the blocks of input and output, in elements, where blocks are not alike. `device` is where
    the buffers are, `stream` what the task is enqueued on. A `repeated` one was made before on
    the same arrays, all given by the user, and may be again. `announced` is what only the root knew before: a scatter's
    shape, or "".
    """

    collective: str
    algorithm: str
    plan: Plan | None
    input: Any
    output: Any
    dtype: Dtype
    op: Op | None = None
    root: int = 0
    nbytes: int = 0
    in_place: bool = False
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    device: str = "cpu"
    stream: Any = None
    repeated: bool = False
    announced: str = ""

    def again(self, source: Any, target: Any) -> Task:
        """Return the same task from `source` to `target`."""
        task = Task.__new__(Task)
        task.__dict__.update(self.__dict__)
        task.input, task.output = source, target
        return task


class Executor(Protocol):
    """Runs tasks; made for a communicator, closed with it.

    One on a GPU may have `launcher`, too: what enqueues calls like a task, on the same memory, and never waits.
    """

    name: str

    def serves(self, task: Task) -> str | None:
        """Return None where it can run `task`, else the reason why not.

        Asked before there is a plan, and once more when there is one: then it gets ready, alike on every rank.
        """

    def run(self, task: Task) -> Operation:
        """Carry out `task`; yield a predicate whenever it must wait."""

    def close(self) -> None:
        """Give back what it holds; idempotent."""


Launcher: TypeAlias = Callable[[Any], None]  # enqueues a call on a stream


class Span(NamedTuple):
    """Elements `start` to `stop` of a buffer: "input", "output", "scratch" or "staging" (received)."""

    buffer: str
    start: int
    stop: int


class Message(NamedTuple):
    """Elements to send to or receive from `peer`."""

    peer: int
    span: Span


class Write(NamedTuple):
    """dst = op(...op(base, operands[0])...); `needs` is how many receives must have come."""

    dst: Span
    base: Span
    operands: tuple[Span, ...]
    needs: int


class PlannedRound(NamedTuple):
    """A round: what moves, what is kept aside first, what is written after.

    `hold`: some write falls on what is being sent, so that all sends come first.
    """

    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    snapshots: tuple[tuple[Span, Span], ...]
    writes: tuple[Write, ...]
    hold: bool


class Plan(NamedTuple):
    """A schedule for given lengths; `copy_input`: in place it would read what it has overwritten.

    What it was made of: how the buffers are cut, and what tells the schedule of any rank.
    """

    rounds: tuple[PlannedRound, ...]
    scratch: int
    staging: int
    copy_input: bool
    layouts: Layouts | None = None
    schedules: Callable[[int], Schedule] | None = None


class Layouts(NamedTuple):
    """How the buffers are cut; scratch is cut like `input` where blocks are alike, and not used where they are not."""

    input: Layout | Ragged
    output: Layout | Ragged

    def span(self, part: Slice) -> tuple[int, int]:
        """Return the range of elements of `part`."""
        layout = self.output if part.buffer == "output" else self.input
        return layout.span(part.first, part.count)


def resolve(schedule: Schedule, layouts: Layouts, *, in_place: bool,
            schedules: Callable[[int], Schedule] | None = None) -> Plan:
    """Return the plan of `schedule` on buffers cut by `layouts`; input is output where `in_place`."""
    rounds = list(schedule)
    copy_input = in_place and _reads_overwritten(rounds)
    alias = in_place and not copy_input
    planned = tuple(_Planner(layouts, alias).plan(steps) for steps in rounds)
    scratch = max((layouts.span(s)[1] for steps in rounds for s in _slices(steps) if s.buffer == "scratch"), default=0)
    staging = max((m.stop for r in planned for m in _staged(r)), default=0)
    return Plan(planned, scratch, staging, copy_input, layouts, schedules)


def _slices(steps: Round) -> Iterator[Slice]:
    for step in steps:
        yield from (field for field in step if isinstance(field, Slice))


def _staged(planned: PlannedRound) -> Iterator[Span]:
    for span in (*(m.span for m in planned.receives), *(kept for _, kept in planned.snapshots)):
        if span.buffer == "staging":
            yield span


def _reads_overwritten(rounds: Iterable[Round]) -> bool:
    """Return whether a round reads a chunk of input that an earlier one wrote in output."""
    written: set[int] = set()
    for steps in rounds:
        for step in steps:
            if isinstance(step, Send | Copy | Reduce) and step.src.buffer == "input" \
                    and not written.isdisjoint(range(step.src.first, step.src.first + step.src.count)):
                return True
        for step in steps:
            if not isinstance(step, Send) and step.dst.buffer == "output":
                written.update(range(step.dst.first, step.dst.first + step.dst.count))
    return False


class _Planner:
    """Plans one round."""

    def __init__(self, layouts: Layouts, alias: bool) -> None:
        self._layouts = layouts
        self._alias = alias
        self._staging = 0
        self._receives: list[Message] = []
        self._snapshots: list[tuple[Span, Span]] = []
        self._writes: dict[Span, Write] = {}

    def plan(self, steps: Round) -> PlannedRound:
        """Return the planned round; the steps of one destination become one write."""
        sends = tuple(Message(step.peer, piece) for step in steps if isinstance(step, Send)
                      for piece in _pieces(self._span(step.src)))
        targets = [self._span(step.dst) for step in steps if not isinstance(step, Send) and not self._is_nothing(step)]
        sources = [self._span(step.src) for step in steps if isinstance(step, Send | Copy | Reduce)]
        for step in steps:
            if not isinstance(step, Send) and not self._is_nothing(step):
                self._add(step, targets, sources)
        hold = any(_meet(message.span, target) for message in sends for target in targets)
        writes = tuple(write for write in self._writes.values() if write.operands or write.base != write.dst)
        return PlannedRound(tuple(self._receives), sends, tuple(self._snapshots), writes, hold)

    def _add(self, step: Step, targets: list[Span], sources: list[Span]) -> None:
        dst = self._span(step.dst)  # type: ignore[union-attr]
        read_too = any(_meet(dst, source) for source in sources)
        match step:
            case Recv(_, peer):
                came = self._receive(peer, dst, direct=not read_too)
                self._writes[dst] = Write(dst, came, (), len(self._receives))
            case RecvReduce(_, peer):
                self._combine(dst, self._receive(peer, dst, direct=False))
            case Copy(src, _):
                self._writes[dst] = Write(dst, self._local(src, dst, targets), (), 0)
            case Reduce(src, _):
                self._combine(dst, self._local(src, dst, targets))

    def _receive(self, peer: int, dst: Span, *, direct: bool) -> Span:
        span = dst if direct else self._stage(dst)
        self._receives += [Message(peer, piece) for piece in _pieces(span)]
        return span

    def _local(self, src: Slice, dst: Span, targets: list[Span]) -> Span:
        """Return where `src` can be read until the round ends: itself, or a snapshot where a write falls on it."""
        span = self._span(src)
        steps_there = sum(_meet(span, target) for target in targets)
        if steps_there > (span == dst):  # another step than this one writes there, or this one does in part
            self._snapshots.append((span, self._stage(span)))
            return self._snapshots[-1][1]
        return span

    def _combine(self, dst: Span, operand: Span) -> None:
        write = self._writes.get(dst, Write(dst, dst, (), 0))
        self._writes[dst] = Write(dst, write.base, (*write.operands, operand), len(self._receives))

    def _stage(self, like: Span) -> Span:
        start, self._staging = self._staging, self._staging + like.stop - like.start
        return Span("staging", start, self._staging)

    def _span(self, part: Slice) -> Span:
        buffer = "output" if self._alias and part.buffer == "input" else part.buffer
        return Span(buffer, *self._layouts.span(part))

    def _is_nothing(self, step: Step) -> bool:
        return isinstance(step, Copy) and self._span(step.src) == self._span(step.dst)


def _pieces(span: Span) -> list[Span]:
    """Return `span` in pieces of at most PIECE elements: MPI counts bytes in 31 bits. An empty span is one piece."""
    starts = range(span.start, span.stop, PIECE) or [span.start]
    return [Span(span.buffer, start, min(start + PIECE, span.stop)) for start in starts]


def _meet(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop
