"""A rank's schedule on buffers of given lengths: messages, local results, and the order among them.

A `Plan` lowers a schedule of chunks to steps on spans (ranges of elements), for all executors. A receive goes directly
to its destination, or to the workspace if the data must be combined or if a step of the round still reads the
destination. The plan also has the earlier steps that each step must follow: two spans conflict if they share a chunk.

With `same_node`, as in the `shared` executor, the ranks of a node read each other's memory. A receive from a same-node
peer then moves no data: the sender's memory is a source of the result. A send to a same-node peer moves no data either:
the step stands for the peer's read, and ends when the peer has read the span.

A layout cuts a buffer into chunks; uneven and empty chunks are allowed. The first ``elements % chunks`` chunks are 1
element longer than the rest. The lengths of two chunks therefore never differ by more than 1 element.

This module only computes with spans, and never accesses the memory itself.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Round, Schedule, Send, Slice

# Rounds use the halves in turn, so that a round may begin while results of the round before still read the other half.
HALVES = ("even", "odd")
PEER = "peer"  # the buffer of a span in a same-node peer's memory; see `Span` for its other fields
ALIGNED_ELEMENTS = 64  # elements: parts of the workspace begin at multiples, so that no two share a cache line
Chunk: TypeAlias = tuple[str, int]


class Span(NamedTuple):
    """Elements `start` to `stop` of "input", "output", or a part of the workspace; cut into chunks as slice `like` is.

    A span of buffer `PEER` is a part of a same-node peer's memory, and only a source of results. There `start` is the
    peer's rank, `stop` the peer's round from which the part may be read, and `like` the slice of the peer's buffers.
    """

    buffer: str
    start: int
    stop: int
    like: Slice

    @property
    def chunks(self) -> list[Chunk]:
        """The keys of the span: spans with a common key conflict. A part of the workspace overlaps no other part."""
        if self.buffer in HALVES:
            return [(self.buffer, self.start)]
        return [(self.buffer, self.like.first + index) for index in range(self.like.count)]


class Message(NamedTuple):
    """Step `number`, after steps `after`: send `span` to `peer`, or receive `span` from `peer`.

    For a send to a same-node peer, `there` is the peer's round that reads the span. The span then names the buffer as
    the peer does: "input" even where the input lies in the output.
    """

    number: int
    after: frozenset[int]
    peer: int
    span: Span
    sends: bool
    there: int | None = None


class Reduction(NamedTuple):
    """Step `number`, after steps `after`: dst = op(...op(sources[0], sources[1])...); a single source is copied."""

    number: int
    after: frozenset[int]
    dst: Span
    sources: tuple[Span, ...]


PlanStep: TypeAlias = Message | Reduction
_Ends: TypeAlias = tuple[Iterator[Span], Iterator[int]]


def bound(elements: int, chunks: int, index: int) -> int:
    """Return the first element of chunk `index`; ``bound(n, c, c) == n``.

    >>> [bound(10, 4, i) for i in range(5)]
    [0, 3, 6, 8, 10]
    >>> [bound(2, 4, i) for i in range(5)]
    [0, 1, 2, 2, 2]
    """
    length, longer = divmod(elements, chunks)
    return index * length + min(index, longer)


class Layout(NamedTuple):
    """The cut of a buffer of equal blocks: every block of `elements` is cut into `chunks`, block after block.

    A buffer of shape ``(size, *s)`` has a block for each rank. No chunk crosses the border between two blocks, and
    chunk i of every block has the same length.

    >>> layout = Layout(elements=5, chunks=2)
    >>> [layout.span(first, 1) for first in range(6)]
    [(0, 3), (3, 5), (5, 8), (8, 10), (10, 13), (13, 15)]
    >>> layout.span(1, 3)
    (3, 10)
    """

    elements: int
    chunks: int

    def start(self, chunk: int) -> int:
        """Return the first element of `chunk`; chunks are numbered through all blocks."""
        block, inside = divmod(chunk, self.chunks)
        return block * self.elements + bound(self.elements, self.chunks, inside)

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the half-open range of elements of `count` chunks from `first`."""
        return self.start(first), self.start(first + count)


class Ragged(NamedTuple):
    """The cut of a buffer of blocks of unequal length: block i is a single chunk, `starts[i]` to `starts[i + 1]`.

    >>> Ragged.of([2, 0, 3]).span(1, 2)
    (2, 5)
    """

    starts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Ragged:
        """Return the layout of consecutive blocks of these lengths."""
        return cls((0, *itertools.accumulate(lengths)))

    def start(self, chunk: int) -> int:
        """Return the first element of `chunk`."""
        return self.starts[chunk]

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the half-open range of elements of `count` chunks from `first`."""
        return self.starts[first], self.starts[first + count]


class Layouts(NamedTuple):
    """The cuts of the buffers into chunks. Scratch is cut like `input`; schedules of unlike blocks use no scratch."""

    input: Layout | Ragged
    output: Layout | Ragged

    @classmethod
    def of(cls, elements: int, lengths: tuple[tuple[int, ...], tuple[int, ...]] | None, per_block: int) -> Layouts:
        """Return the layouts for `per_block` chunks in a block of `elements`, or for blocks of unequal `lengths`."""
        if lengths is None:
            return cls(*(Layout(elements, per_block),) * 2)
        return cls(Ragged.of(lengths[0]), Ragged.of(lengths[1]))

    def span(self, part: Slice) -> tuple[int, int]:
        """Return the first element of `part` and the element after its last."""
        return self._of(part).span(part.first, part.count)

    def starts(self, part: Slice) -> list[int]:
        """Return the first element of each chunk of `part`, and the end of the last chunk."""
        layout = self._of(part)
        return [layout.start(part.first + index) for index in range(part.count + 1)]

    def _of(self, part: Slice) -> Layout | Ragged:
        return self.output if part.buffer == "output" else self.input


class Plan:
    """The steps of one rank for `schedule` on buffers cut by `layouts`; computed on first use.

    `same_node` are the ranks with memory readable by this rank; `schedules(rank)` returns the schedule of any rank, and
    must be given for `same_node` to have an effect. With `in_place`, input and output are the same memory. If only the
    output has blocks, the input is this rank's block of the output. Where a round reads an input chunk overwritten by
    an earlier round, `copy_input` is true, and the executor must run the plan on a copy of the input. Parts of the
    workspace begin at multiples of `alignment` elements.
    """

    def __init__(self, schedule: Schedule, layouts: Layouts, *, in_place: bool,
                 schedules: Callable[[int], Schedule] | None = None, same_node: Collection[int] = (),
                 alignment: int = ALIGNED_ELEMENTS) -> None:
        self.layouts: Layouts = layouts
        self.schedules: Callable[[int], Schedule] | None = schedules
        self.digest: str = schedule.digest
        row = COLLECTIVES[schedule.collective]
        is_block = row.output.blocks and not row.input.blocks
        first = schedule.rank * (schedule.chunks // schedule.size) if is_block else 0
        # Input and output may stay one memory only if no round needs input that is gone.
        self.copy_input: bool = in_place and _reads_overwritten(schedule.rounds(), first)
        self._alias = first if in_place and not self.copy_input else None  # the output's chunk where the input begins
        self._made_of = schedule, same_node, alignment

    def real(self, part: Slice) -> Slice:
        """Return where the memory of a slice is: an input in place is part of the output."""
        if self._alias is None or part.buffer != "input":
            return part
        return Slice("output", self._alias + part.first, part.count)

    @functools.cached_property
    def shares_input(self) -> bool:
        """Whether the schedule sends some chunk of the input to more than one rank."""
        # Only sends count: a rank's own copies and reductions read the input at no cost to others.
        sent = collections.Counter(chunk for steps in self._made_of[0].rounds() for step in steps
                                   if isinstance(step, Send) and step.src.buffer == "input"
                                   for chunk in range(step.src.first, step.src.first + step.src.count))
        return max(sent.values(), default=0) > 1

    @functools.cached_property
    def rounds(self) -> tuple[tuple[PlanStep, ...], ...]:
        """The steps of each round: receives, then sends, then results.

        The results stand in an order in which none overwrites a source of a later result. Receives, and results formed
        in the workspace, follow no send of their own round: all of them can begin at once.
        """
        return self._resolved[0]

    @functools.cached_property
    def workspace(self) -> dict[str, int]:
        """The number of elements of each part of the workspace: "scratch" and the two halves."""
        return self._resolved[1]

    @functools.cached_property
    def _resolved(self) -> tuple[tuple[tuple[PlanStep, ...], ...], dict[str, int]]:
        schedule, same_node, alignment = self._made_of
        rounds, ends = list(schedule.rounds()), None
        if same_node and self.schedules:
            # Only the schedules of same-node partners are needed; other ranks' schedules would cost time and memory.
            peers = {step.peer for steps in rounds for step in steps if not isinstance(step, Copy | Reduce)}
            ends = {peer: _ends(peer, schedule.rank, self.schedules(peer).rounds())
                    for peer in sorted(peers.intersection(same_node))}
            ends = ends or None
        resolver = _Resolver(self.layouts, self.real, ends, alignment)
        return (*map(resolver.round, itertools.cycle(HALVES), rounds),), resolver.workspace


def _ends(peer: int, rank: int, theirs: Iterable[Round]) -> _Ends:
    """Return the parts that same-node `peer` sends to `rank`, as `PEER` spans, and the rounds of its receives.

    Both follow the order of the schedule `theirs`: the k-th send meets the k-th receive.
    """
    parts, reads = list[Span](), list[int]()
    for number, steps in enumerate(theirs):
        for step in steps:
            if isinstance(step, Send) and step.peer == rank:
                parts.append(Span(PEER, peer, number, step.src))
            elif isinstance(step, Recv | RecvReduce) and step.peer == rank:
                reads.append(number)
    return iter(parts), iter(reads)


def _reads_overwritten(rounds: Iterable[Round], offset: int) -> bool:
    """Return whether a round reads an input chunk overwritten before; input is output from chunk `offset` on."""
    written: set[int] = set()  # chunks of the input
    for steps in rounds:
        # A round reads before it writes: its own writes do not count for its reads.
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
    """The state of lowering rounds in order: readers and last writer of each chunk, and use of the workspace.

    `real` is `Plan.real`; `ends` has the results of `_ends` by same-node peer. If there are same-node peers, every
    receive lands in the workspace: posting a receive does not wait for same-node peers, and some peer may still be
    reading the destination.
    """

    def __init__(self, layouts: Layouts, real: Callable[[Slice], Slice], ends: dict[int, _Ends] | None,
                 alignment: int) -> None:
        self._alignment = alignment
        self._layouts, self._real, self._is_direct, self._ends = layouts, real, ends is None, ends or {}
        self.workspace = dict.fromkeys(("scratch", *HALVES), 0)
        self._number = self._used = 0  # the last step's number; the elements of `_half` in use
        self._half = HALVES[0]
        self._spans: dict[Slice, Span] = {}
        self._writer: dict[Chunk, int] = {}
        self._readers: dict[Chunk, set[int]] = collections.defaultdict(set)  # since the last write
        self._users: dict[str, set[int]] = {half: set() for half in HALVES}  # readers by half
        # Steps that read the half in the last round using the half: a write to the half must follow them.
        self._before: dict[str, set[int]] = {half: set() for half in HALVES}

    def round(self, half: str, steps: Round) -> tuple[PlanStep, ...]:
        """Return the steps of the next round; all moves to one destination become one result."""
        self._half, self._used = half, 0
        # The round before uses the other half: data in the workspace wait for readers from two rounds ago, or from the
        # last round before that used this half.
        if self._users[half]:
            self._before[half], self._users[half] = self._users[half], set()
        moves = [step for step in steps if not isinstance(step, Send)
                 and not (isinstance(step, Copy) and self._span(step.src) == self._span(step.dst))]
        sends = [step for step in steps if isinstance(step, Send)]
        # A round reads everything before writing anything. So a write to one of these chunks must wait, or land in the
        # workspace.
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
                operand = dst if is_direct else self._in_workspace(dst)
                receives.append((step.peer, operand))
            # A combining step adds an operand to the result so far, at first the destination itself; any other step
            # starts anew.
            results[dst] = [*results.get(dst, [dst]), operand] if isinstance(step, RecvReduce | Reduce) else [operand]
        # Results are ordered by their first number. 0: the result overwrites no chunk read in this round. 1: the result
        # overwrites a chunk that is sent. 2: a result formed in the workspace is copied to its destination,
        # after all reads.
        forms = list[tuple[int, Span, list[Span]]]()
        for dst, sources in results.items():
            is_sent, buffers = not sent.isdisjoint(dst.chunks), [source.buffer for source in sources]
            # A result that overwrites a local operand of the round is formed in the workspace first. So is a result
            # that reads one same-node peer and overwrites a chunk sent to another: each of the two ranks might wait for
            # the other's read.
            if not read.isdisjoint(dst.chunks) or (is_sent and PEER in buffers):
                if len(sources) > 1 or buffers[0] not in HALVES:
                    forms.append((0, self._in_workspace(dst), sources))
                    sources = [forms[-1][1]]
                forms.append((2, dst, sources))
            elif sources != [dst]:
                forms.append((is_sent, dst, sources))
        return (*(self._receive(peer, span) for peer, span in receives), *map(self._send, sends),
                *(self._reduce(dst, tuple(sources)) for _, dst, sources in sorted(forms, key=operator.itemgetter(0))))

    def _span(self, part: Slice) -> Span:
        span = self._spans.get(part)
        if span is None:
            real = self._real(part)
            span = self._spans[part] = Span(real.buffer, *self._layouts.span(real), real)
            if part.buffer == "scratch":
                self.workspace["scratch"] = max(self.workspace["scratch"], span.stop)
        return span

    def _in_workspace(self, span: Span) -> Span:
        # Parts begin at cache lines, so that two of them never share a line written by one rank and read by another.
        start, stop = self._used, self._used + span.stop - span.start
        self._used = -(-stop // self._alignment) * self._alignment
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

    def _reduce(self, dst: Span, sources: tuple[Span, ...]) -> Reduction:
        after = self._follow(sources, [dst])
        return Reduction(self._number, after, dst, sources)

    def _follow(self, reads: Iterable[Span], writes: Iterable[Span]) -> frozenset[int]:
        """Number the next step; return the last writers of its spans, and the readers of overwritten spans."""
        self._number += 1
        after = set[int]()
        # A read follows the last writer. A write follows the last writer, too, and all readers since.
        for span in reads:
            after.update(self._writer[chunk] for chunk in span.chunks if chunk in self._writer)
            for chunk in span.chunks:
                self._readers[chunk].add(self._number)
            self._users.get(span.buffer, set()).add(self._number)
        for span in writes:
            after.update(self._before.get(span.buffer, ()))
            for chunk in span.chunks:
                after.update(self._readers.pop(chunk, ()), (self._writer.get(chunk, self._number),))
                self._writer[chunk] = self._number
        return frozenset(after - {self._number})
