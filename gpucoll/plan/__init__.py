"""One rank's schedule on buffers of given lengths: messages, results to be formed, and what waits for what.

A `Plan` decides, once for every executor, what may be received where it belongs, what is formed aside since its place
is still read, where that lies, and which earlier steps each step follows. Spans overlap where they share a chunk.

From a near peer nothing is received: results have its part, where it is, among their sources, and what is sent there is
a message that ends when the peer has read it.

Pure: it knows spans, not memory.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from gpucoll.core.chunks import Layout, Ragged
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Round, Schedule, Send, Slice

HALVES = ("even", "odd")  # of what is aside: rounds take them in turn, so that one may begin before the last has ended
NEAR = "near"  # of rank `start`: part `like` of its buffers, there to be read once it has entered its round `stop`
LINE = 64  # elements: what is aside begins at a multiple
Chunk: TypeAlias = tuple[str, int]


class Span(NamedTuple):
    """Elements `start` to `stop` of "input", "output", or a part of the workspace; cut into chunks as `like` is.

    Of `NEAR`, which only results read, they are other numbers.
    """

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
    """Step `number`, after those of the numbers in `after`: send `span` to `peer`, or receive it from there.

    A near peer reads it, by its own name for it, in its round `there`.
    """

    number: int
    after: frozenset[int]
    peer: int
    span: Span
    sends: bool
    there: int | None = None


class Form(NamedTuple):
    """Step `number`, after others: dst = op(...op(sources[0], sources[1])...), a copy of a single source."""

    number: int
    after: frozenset[int]
    dst: Span
    sources: tuple[Span, ...]


Step: TypeAlias = Message | Form
_Ends: TypeAlias = tuple[Iterator[Span], Iterator[int]]


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


class Plan:
    """What a rank does by `schedule` on buffers cut by `layouts`; resolved when that is first asked for.

    `near` are ranks that read each other's memory: theirs are among the `schedules`, which tell that of any rank. Input
    is output where `in_place`, or this rank's block of it where only output has blocks, unless it would read what it
    has overwritten: then it must `copy_input`.
    """

    def __init__(self, schedule: Schedule, layouts: Layouts, *, in_place: bool,
                 schedules: Callable[[int], Schedule] | None = None, near: Collection[int] = ()) -> None:
        self.layouts, self.schedules, self.digest = layouts, schedules, schedule.digest
        row = COLLECTIVES[schedule.collective]
        is_block = row.output.blocks and not row.input.blocks
        first = schedule.rank * (schedule.chunks // schedule.size) if is_block else 0
        self.copy_input = in_place and _reads_overwritten(schedule, first)
        self._made_of = schedule, first if in_place and not self.copy_input else None, near

    @functools.cached_property
    def shares_input(self) -> bool:
        """Whether several ranks are sent the same part of the input."""
        sent = collections.Counter(chunk for steps in self._made_of[0] for step in steps
                                   if isinstance(step, Send) and step.src.buffer == "input"
                                   for chunk in range(step.src.first, step.src.first + step.src.count))
        return max(sent.values(), default=0) > 1

    @functools.cached_property
    def rounds(self) -> tuple[tuple[Step, ...], ...]:
        """Each of receives, sends, and results in an order in which none overwrites what a later one reads.

        The first ones, and those that are formed aside, follow no send of their round.
        """
        return self._resolved[0]

    @functools.cached_property
    def workspace(self) -> dict[str, int]:
        """How many elements each part of it has."""
        return self._resolved[1]

    @functools.cached_property
    def _resolved(self) -> tuple[tuple[tuple[Step, ...], ...], dict[str, int]]:
        schedule, alias, near = self._made_of
        rounds, ends = list(schedule), None
        if near and self.schedules:
            peers = {step.peer for steps in rounds for step in steps if not isinstance(step, Copy | Reduce)}
            ends = {peer: _ends(peer, schedule.rank, self.schedules(peer)) for peer in sorted(peers.intersection(near))}
            ends = ends or None
        resolver = _Resolver(self.layouts, alias, ends)
        return (*map(resolver.round, itertools.cycle(HALVES), rounds),), resolver.workspace


def _ends(peer: int, rank: int, theirs: Iterable[Round]) -> _Ends:
    """Return the parts that a near peer has for `rank`, and in which rounds it reads what that one has for it."""
    parts, reads = list[Span](), list[int]()
    for number, steps in enumerate(theirs):
        for step in steps:
            if isinstance(step, Send) and step.peer == rank:
                parts.append(Span(NEAR, peer, number, step.src))
            elif isinstance(step, Recv | RecvReduce) and step.peer == rank:
                reads.append(number)
    return iter(parts), iter(reads)


def _reads_overwritten(rounds: Iterable[Round], offset: int) -> bool:
    """Return whether a round reads a chunk of input that an earlier one wrote, from chunk `offset` of output on."""
    written: set[int] = set()  # as chunks of input
    for steps in rounds:
        for step in steps:
            if isinstance(step, Send | Copy | Reduce) and step.src.buffer == "input" \
                    and not written.isdisjoint(range(step.src.first, step.src.first + step.src.count)):
                return True
        for step in steps:
            if not isinstance(step, Send) and step.dst.buffer == "output" \
                    and not (isinstance(step, Copy) and step.src == ("input", step.dst.first - offset, step.dst.count)):
                written.update(range(step.dst.first - offset, step.dst.first - offset + step.dst.count))
    return False


class _Resolver:
    """Resolves rounds one after the other; input is output from chunk `alias` on. Where some are near all receives go
    aside."""

    def __init__(self, layouts: Layouts, alias: int | None, ends: dict[int, _Ends] | None) -> None:
        self._layouts, self._alias, self._is_direct, self._ends = layouts, alias, ends is None, ends or {}
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
        sends = [step for step in steps if isinstance(step, Send)]
        sent, read = ({chunk for step in some for chunk in self._span(step.src).chunks}
                      for some in (sends, [step for step in moves if isinstance(step, Copy | Reduce)]))
        receives, results = list[tuple[int, Span]](), dict[Span, list[Span]]()
        for step in moves:
            dst = self._span(step.dst)
            if isinstance(step, Copy | Reduce):
                operand = self._span(step.src)
            elif step.peer in self._ends:
                operand = next(self._ends[step.peer][0])
            else:
                is_direct = self._is_direct and isinstance(step, Recv) and sent.union(read).isdisjoint(dst.chunks)
                operand = dst if is_direct else self._aside(dst)
                receives.append((step.peer, operand))
            results[dst] = [*results.get(dst, [dst]), operand] if isinstance(step, RecvReduce | Reduce) else [operand]
        forms = list[tuple[int, Span, list[Span]]]()  # those with the least number first
        for dst, sources in results.items():
            is_sent, buffers = not sent.isdisjoint(dst.chunks), [source.buffer for source in sources]
            if not read.isdisjoint(dst.chunks) or (is_sent and NEAR in buffers):  # who reads there may wait for this
                if len(sources) > 1 or buffers[0] not in HALVES:
                    forms.append((0, self._aside(dst), sources))
                    sources = [forms[-1][1]]
                forms.append((2, dst, sources))
            elif sources != [dst]:
                forms.append((is_sent, dst, sources))
        return (*(self._receive(peer, span) for peer, span in receives), *map(self._send, sends),
                *(self._form(dst, tuple(sources)) for _, dst, sources in sorted(forms, key=operator.itemgetter(0))))

    def _span(self, part: Slice) -> Span:
        span = self._spans.get(part)
        if span is None:
            real = part
            if self._alias is not None and part.buffer == "input":
                real = Slice("output", self._alias + part.first, part.count)
            span = self._spans[part] = Span(real.buffer, *self._layouts.span(real), real)
            if part.buffer == "scratch":
                self.workspace["scratch"] = max(self.workspace["scratch"], span.stop)
        return span

    def _aside(self, span: Span) -> Span:
        start, stop = self._used, self._used + span.stop - span.start
        self._used = -(-stop // LINE) * LINE
        self.workspace[self._half] = max(self.workspace[self._half], self._used)
        return Span(self._half, start, stop, span.like)

    def _receive(self, peer: int, span: Span) -> Message:
        after = self._follow([], [span])
        return Message(self._number, after, peer, span, sends=False)

    def _send(self, step: Send) -> Message:
        span, peer, there = self._span(step.src), step.peer, None
        after = self._follow([span], [])
        if peer in self._ends:
            span, there = span._replace(buffer=step.src.buffer), next(self._ends[peer][1])
        return Message(self._number, after, peer, span, sends=True, there=there)

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
