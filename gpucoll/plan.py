"""One rank's schedule on buffers of given lengths: messages, results to be formed, and what waits for what.

`resolve` decides, once for every executor, what may be received where it belongs, what is kept aside before something
falls on it, where that lies, and which earlier steps each step follows. Spans overlap where they share a chunk.

Pure: it knows spans, not memory.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from gpucoll.chunks import Layout, Ragged
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Round, Schedule, Send, Slice

HALVES = ("even", "odd")  # of what is aside: rounds take them in turn, so that one may begin before the last has ended
Chunk: TypeAlias = tuple[str, int]


class Span(NamedTuple):
    """Elements `start` to `stop` of "input", "output", or a part of the workspace; cut into chunks as `like` is."""

    buffer: str
    start: int
    stop: int
    like: Slice

    @property
    def chunks(self) -> list[Chunk]:
        """What it overlaps by: what is aside has no part in common with anything else of its round."""
        if self.buffer in HALVES:
            return [(self.buffer, self.start)]
        return [(self.buffer, self.like.first + index) for index in range(self.like.count)]


class Message(NamedTuple):
    """Step `number`, after those of the numbers in `after`: send `span` to `peer`, or receive it from there."""

    number: int
    after: frozenset[int]
    peer: int
    span: Span
    sends: bool


class Form(NamedTuple):
    """Step `number`, after others: dst = op(...op(sources[0], sources[1])...), a copy of a single source."""

    number: int
    after: frozenset[int]
    dst: Span
    sources: tuple[Span, ...]


Step: TypeAlias = Message | Form


class Plan(NamedTuple):
    """Rounds, each of what is kept aside, receives, sends, results; and how many elements a workspace has.

    `copy_input`: in place it would read what it has overwritten. What it was made of: how the buffers are cut, and what
    tells the schedule of any rank.
    """

    rounds: tuple[tuple[Step, ...], ...]
    workspace: dict[str, int]
    copy_input: bool
    layouts: Layouts
    schedules: Callable[[int], Schedule] | None = None


class Layouts(NamedTuple):
    """How the buffers are cut; scratch is cut like `input` where blocks are alike, and not used where they are not."""

    input: Layout | Ragged
    output: Layout | Ragged

    def span(self, part: Slice) -> tuple[int, int]:
        """Return the range of elements of `part`."""
        return self._of(part).span(part.first, part.count)

    def starts(self, part: Slice) -> list[int]:
        """Return where its chunks start, and where it ends."""
        layout = self._of(part)
        return [layout.start(part.first + index) for index in range(part.count + 1)]

    def _of(self, part: Slice) -> Layout | Ragged:
        return self.output if part.buffer == "output" else self.input


def resolve(schedule: Schedule, layouts: Layouts, *, in_place: bool,
            schedules: Callable[[int], Schedule] | None = None) -> Plan:
    """Return the plan of `schedule` on buffers cut by `layouts`; input is output where `in_place`."""
    rounds = list(schedule)
    copy_input = in_place and _reads_overwritten(rounds)
    resolver = _Resolver(layouts, in_place and not copy_input)
    resolved = tuple(resolver.round(HALVES[number % 2], steps) for number, steps in enumerate(rounds))
    return Plan(resolved, resolver.workspace, copy_input, layouts, schedules)


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


class _Resolver:
    """Resolves rounds one after the other; `alias`: input is output."""

    def __init__(self, layouts: Layouts, alias: bool) -> None:
        self._layouts, self._alias = layouts, alias
        self.workspace = dict.fromkeys(("scratch", *HALVES), 0)
        self._number = self._used = 0  # of steps, and of the elements of `half`
        self._half = HALVES[0]
        self._spans: dict[Slice, Span] = {}
        self._writer: dict[Chunk, int] = {}
        self._readers: dict[Chunk, set[int]] = collections.defaultdict(set)  # since then
        self._users: dict[str, set[int]] = {half: set() for half in HALVES}  # who reads what is aside
        self._before: set[int] = set()  # those of the round before in the same half

    def round(self, half: str, steps: Round) -> tuple[Step, ...]:
        """Return the steps of the next round; those of one destination become one result."""
        self._half, self._used = half, 0
        self._before, self._users[half] = self._users[half], set()
        moves = [step for step in steps if not isinstance(step, Send)
                 and not (isinstance(step, Copy) and self._span(step.src) == self._span(step.dst))]
        read = {chunk for step in steps if isinstance(step, Send | Copy | Reduce)
                for chunk in self._span(step.src).chunks}
        written = collections.Counter(chunk for step in moves for chunk in self._span(step.dst).chunks)
        kept, receives, results = list[tuple[Span, Span]](), list[tuple[int, Span]](), dict[Span, list[Span]]()
        for step in moves:
            dst = self._span(step.dst)
            if isinstance(step, Recv | RecvReduce):
                is_direct = isinstance(step, Recv) and read.isdisjoint(dst.chunks)
                operand = dst if is_direct else self._aside(dst)
                receives.append((step.peer, operand))
            else:
                operand = self._span(step.src)
                if any(written[chunk] > (operand == dst) for chunk in operand.chunks):  # by another step than this one
                    kept.append((self._aside(operand), operand))
                    operand = kept[-1][0]
            results[dst] = [*results.get(dst, [dst]), operand] if isinstance(step, RecvReduce | Reduce) else [operand]
        return (*(self._form(there, (source,)) for there, source in kept),
                *(self._message(peer, span, sends=False) for peer, span in receives),
                *(self._message(step.peer, self._span(step.src), sends=True) for step in steps
                  if isinstance(step, Send)),
                *(self._form(dst, tuple(sources)) for dst, sources in results.items() if sources != [dst]))

    def _span(self, part: Slice) -> Span:
        span = self._spans.get(part)
        if span is None:
            real = part._replace(buffer="output") if self._alias and part.buffer == "input" else part
            span = self._spans[part] = Span(real.buffer, *self._layouts.span(real), real)
            if part.buffer == "scratch":
                self.workspace["scratch"] = max(self.workspace["scratch"], span.stop)
        return span

    def _aside(self, span: Span) -> Span:
        start, self._used = self._used, self._used + span.stop - span.start
        self.workspace[self._half] = max(self.workspace[self._half], self._used)
        return Span(self._half, start, self._used, span.like)

    def _message(self, peer: int, span: Span, *, sends: bool) -> Message:
        after = self._follow([span], []) if sends else self._follow([], [span])
        return Message(self._number, after, peer, span, sends)

    def _form(self, dst: Span, sources: tuple[Span, ...]) -> Form:
        after = self._follow(sources, [dst])
        return Form(self._number, after, dst, sources)

    def _follow(self, reads: Iterable[Span], writes: Iterable[Span]) -> frozenset[int]:
        """Number the next step; return the earlier ones that write what it touches, or read what it writes."""
        self._number += 1
        after = set[int]()
        for span in reads:
            after.update(self._writer[chunk] for chunk in span.chunks if chunk in self._writer)
            for chunk in span.chunks:
                self._readers[chunk].add(self._number)
            self._users.get(span.buffer, set()).add(self._number)
        for span in writes:
            after.update(self._before if span.buffer in HALVES else ())
            for chunk in span.chunks:
                after.update(self._readers.pop(chunk, ()), (self._writer.get(chunk, self._number),))
                self._writer[chunk] = self._number
        return frozenset(after - {self._number})
