"""Translate a plan into the engine's instructions, on bytes of the ranks' buffers, independent of addresses.

A rank's progress counter is one number, visible to all ranks of the node. In a call with rounds 0, 1, ...:

    2 k      the rank has entered round k: all data written before are ready to be read
    2 k + 1  the rank has also finished all reads of round k: data read there may be overwritten

A receive becomes a wait for the sender's counter and a reduction or copy from the sender's memory. A result that
overwrites a chunk sent in the round must wait for the readers' counters. The engine's instructions:

    WAIT peer counter         wait until `peer` shows `counter`
    PUBLISH counter           show `counter`
    REDUCE to sources copies  write op(sources) to `to` and to each of `copies`
    CALL i to sources         call Python's function i with addresses, again and again while the result is False

and, for ranks of other nodes (see `between_nodes`):

    SEND peer i to            begin to send message i, the bytes of `to`
    RECEIVE peer i to         begin to receive message i
    END i                     wait until message i has ended
    OPEN peer to              send the greeting, with the bytes of `to`
    TAKE peer to              wait for the greeting of `peer`, and copy its data to `to`
    AGREE                     wait until all ranks are known to make this call

A part is (rank, buffer, offset in bytes). The engine looks up the base address of each rank's buffer in each call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy

from gpucoll.arrays import HOST, Array, at
from gpucoll.arrays.reductions import combine_written
from gpucoll.core.dtypes import DTYPES, Dtype, numpy_dtype
from gpucoll.core.ops import EXACT_NAMES, Op
from gpucoll.core.schedule import Schedule, Send
from gpucoll.executors import CallRequest
from gpucoll.executors.engine import tables
from gpucoll.executors.engine.between_nodes import WireRoles
from gpucoll.executors.engine.extension import library
from gpucoll.executors.engine.neighbours import BUFFERS
from gpucoll.plan import HALVES, PEER, Message, Plan, Reduction, Span

CALLERS = (tables.OUTPUT, tables.RESULT)  # buffers that may be the caller's array; no instruction writes to GIVEN
Part = tuple[int, int, int]  # rank, buffer, offset in bytes (or a block's number, where blocks differ in length)
# Opcode, peer, counter (of a CALL the number of the function), destination, bytes, sources, copies.
Row = tuple[int, int, int, Part | None, int, tuple[Part, ...], tuple[Part, ...]]


def opened(schedule: Schedule, peers: Collection[int]) -> set[int]:
    """Return the ranks among `peers` that get data of the schedule's rank in the first round.

    The first send to such a peer travels with the greeting, if it is short.
    """
    # Only the first round: later data wait for the greetings of all leaders.
    return {step.peer for step in next(iter(schedule.rounds()), ()) if isinstance(step, Send)}.intersection(peers)


class Writer:
    """The writer of one plan's instructions; empty results are left out.

    `peers` are the ranks to be read from. `readers` maps (buffer, reading rank) to the reader's counter after the last
    read. With `apart`, a chunk that a peer, or this rank again, reads is formed in a workspace; every other chunk goes
    straight to the caller's array. `comparing` is called before data is sent, until True.
    `roles` are this rank's in messages between nodes.
    """

    def __init__(self, request: CallRequest, rank: int, plan: Plan, roles: WireRoles | None,
                 comparing: Callable[[], bool] | None = None, *, apart: bool) -> None:
        self._request, self._rank, self._plan, self._roles = request, rank, plan, roles
        self._comparing = comparing
        self._shown, self._used, self._places = _shown_and_used(plan) if apart else (set(), set(), False)
        self._reads_given = apart and not request.in_place and not plan.copy_input
        self._width = request.dtype.itemsize
        # Both halves of the plan share one piece of memory: the engine carries out instructions in order, so that a
        # round begins when all results of the round before have been formed.
        self._kept = max(plan.workspace[half] for half in HALVES) * self._width
        self.private_bytes: int = self._kept
        self._counters: dict[int, tuple[int, int]] = {}  # by number of a send to a same-node peer: peer and counter
        self._under_way: dict[int, Message] = {}  # messages between nodes not yet awaited, by number
        # Whether AGREE is still to come, the numbers of messages that travel with greetings, and the engine's numbers
        # of the others.
        self._must_agree, self._greets = roles is not None and roles.compares, set[int]()
        self._begun: dict[int, int] = {}
        self._passed: dict[int, int] = {}  # the highest counter awaited of each peer
        self.peers: dict[int, None] = {}
        self.readers: dict[tuple[str, int], int] = {}
        self.calls: list[Callable[..., Any]] = []  # Python's functions

    def rows(self) -> Iterator[Row]:
        """Yield the instructions of the plan, round by round."""
        if self._reads_given:
            yield from self._moved(tables.INPUT, tables.GIVEN, self._shown)
        if self._must_agree:
            yield from self._openings()
        if self._comparing is not None:
            yield self._called(self._comparing)
        for number, steps in enumerate(self._plan.rounds):
            if number:
                yield _counter_row(tables.PUBLISH, 2 * number)
            sent = set[int]()
            for step in steps:
                if isinstance(step, Message):
                    sent.update([step.number] if step.sends else ())
                    yield from self._sent(step)
                    continue
                # The result overwrites a chunk sent in this round. The plan has put all reads of peers before. So
                # report this rank's reads as done before waiting for its readers: the readers may wait for this rank.
                if not sent.isdisjoint(step.after):
                    sent.clear()
                    yield _counter_row(tables.PUBLISH, 2 * number + 1)
                yield from self._wait(step)
                yield from self._reduced(step)
        # The counter after the last round ends all waits for this rank's reads.
        yield _counter_row(tables.PUBLISH, 2 * len(self._plan.rounds))
        yield from self._agree()
        yield from self._end(list(self._under_way))
        if self._places:
            yield from self._moved(tables.RESULT, tables.OUTPUT, self._used)
        if self._request.collective == "exscan" and self._rank == 0:
            yield from self._filled()

    def _openings(self) -> Iterator[Row]:
        """Send short first data with the greetings, and note the receives that take data from greetings."""
        plan, roles = self._plan, self._roles
        if roles is None or plan.schedules is None:
            return
        messages = [step for steps in plan.rounds for step in steps if isinstance(step, Message) and step.there is None]
        peers = {step.peer for step in messages}.intersection(roles.partners)
        mine = opened(plan.schedules(self._rank), peers)
        theirs = {peer for peer in peers if opened(plan.schedules(peer), (self._rank,))}
        # The k-th send meets the k-th receive, of the same length: data of a greeting are the first message in either
        # direction.
        for step in messages:
            left = mine if step.sends else theirs
            if step.peer not in left:
                continue
            left.remove(step.peer)
            # Longer data take a message of their own, after the greeting.
            if self._bytes(step.span) <= tables.OPENING:
                self._greets.add(step.number)
                if step.sends:
                    yield tables.OPEN, step.peer, 0, self._part(step.span), self._bytes(step.span), (), ()

    def _agree(self) -> Iterator[Row]:
        """Wait until all ranks are known to make this call, unless awaited before."""
        if self._must_agree:
            self._must_agree = False
            yield _counter_row(tables.AGREE, 0)

    def _filled(self) -> Iterator[Row]:
        """Fill the result of an exscan's first rank in Python, once the peers have read an input in the same place."""
        op, dtype, nbytes = self._request.op, self._request.dtype, self._request.sizes[1]
        value = numpy.empty(1, numpy_dtype(dtype.name))
        for (_, peer), counter in self.readers.items():
            yield _counter_row(tables.WAIT, counter, peer)
        assert op is not None
        if nbytes:
            HOST.fill_identity(op, value, dtype)
            yield self._called(lambda place: numpy.copyto(at(place, nbytes).view(value.dtype), value),
                               (self._rank, tables.RESULT, 0), nbytes)

    def _moved(self, to: int, source: int, chunks: set[int]) -> Iterator[Row]:
        """Copy the chunks between a buffer and the caller's array, each run of neighbours at once."""
        layout = self._plan.layouts.input if to == tables.INPUT else self._plan.layouts.output
        for first in sorted(one for one in chunks if one - 1 not in chunks):
            end = next(one for one in itertools.count(first) if one not in chunks)
            start, stop = (layout.start(one) * self._width for one in (first, end))
            if start < stop:
                yield tables.REDUCE, 0, 0, (self._rank, to, start), stop - start, ((self._rank, source, start),), ()

    def fused(self) -> Iterator[Row]:
        """Yield the instructions of a two_shot all-reduce in one pass, in place of `rows`.

        Each rank reduces one block, and writes each piece to all ranks while the piece is in the cache. No other rank
        reads the block, so that even in place no operand is overwritten before use.
        """
        # Counter 2 means: this rank has reduced its block and written the result into all outputs.
        first, second = self._plan.rounds
        forms = [step for step in first if isinstance(step, Reduction)]
        self.peers = {span.start: None for span in forms[0].sources if span.buffer == PEER}
        self.readers = {(name, peer): 2 for name in ("input", "output") for peer in self.peers}
        copies = tuple((step.peer, *self._part(step.span)[1:]) for step in second if isinstance(step, Message))
        yield from self._reduced(forms[0]._replace(dst=forms[-1].dst), copies)
        yield from (_counter_row(tables.PUBLISH, 2), *(_counter_row(tables.WAIT, 2, peer) for peer in self.peers))

    def _wait(self, form: Reduction) -> Iterator[Row]:
        """Await the counters and messages needed by `form`, unless awaited before."""
        # Every peer has entered round 0 before the first instruction, so a wait for counter 0 is left out.
        after = sorted(form.after, reverse=True)
        sources = [(span.start, 2 * span.stop) for span in form.sources if span.buffer == PEER]
        self.peers.update((peer, None) for peer, _ in sources)
        for peer, counter in (*sources, *(self._counters[number] for number in after if number in self._counters)):
            if counter > self._passed.get(peer, 0):
                self._passed[peer] = counter
                yield _counter_row(tables.WAIT, counter, peer)
        yield from self._end(after)

    def _end(self, numbers: Iterable[int]) -> Iterator[Row]:
        for number in numbers:
            message = self._under_way.pop(number, None)
            if message is None:
                continue
            nbytes = self._bytes(message.span)
            if number in self._greets:
                part = self._part(message.span)
                yield from self._agree() if part[1] in CALLERS else ()
                yield tables.TAKE, message.peer, 0, part, nbytes, (), ()
            else:
                yield tables.END, message.peer, self._begun[number], None, nbytes, (), ()

    def _reduced(self, form: Reduction, copies: tuple[Part, ...] = ()) -> Iterator[Row]:
        nbytes, op, where = self._bytes(form.dst), self._request.op, self._part(form.dst)
        sources = tuple(self._part(span, is_read=True) for span in form.sources)
        if not nbytes:
            return
        if where[1] in CALLERS:
            yield from self._agree()
        if op is None or not op.expression or len(sources) == 1:
            yield tables.REDUCE, 0, 0, where, nbytes, sources, copies
            return
        here, used = [], self._kept
        for source in sources:
            here.append(source)
            # Python's functions read only this rank's memory: have the engine fetch a peer's part first.
            if source[0] != self._rank:
                here[-1] = self._rank, tables.PRIVATE, used
                yield tables.REDUCE, 0, 0, here[-1], nbytes, (source,), ()
                used += -(-nbytes // tables.CACHE_LINE) * tables.CACHE_LINE
        self.private_bytes = max(self.private_bytes, used)
        yield from self._agree()
        yield self._called(_combining(op, self._request.dtype, nbytes), where, nbytes, tuple(here))

    def _sent(self, message: Message) -> Iterator[Row]:
        number, _, peer, span, sends, there = message
        if there is not None:
            counter = self.readers[span.buffer, peer] = 2 * there + 1
            self._counters[number] = peer, counter
            return
        nbytes = self._bytes(span)
        if number in self._greets and sends:  # sent at the beginning
            return
        if nbytes:  # empty parts need no order, though all begin at one place and seem to conflict
            yield from self._end(sorted(message.after))
        self._under_way[number] = message
        if number in self._greets:
            return
        # A message of an unlike call could be longer than the room for it. The data of greetings are kept apart.
        yield from self._agree()
        self._begun[number] = len(self._begun)
        yield tables.SEND if sends else tables.RECEIVE, peer, self._begun[number], self._part(span), nbytes, (), ()

    def _called(self, function: Callable[..., Any], to: Part | None = None, nbytes: int = 0,
                sources: tuple[Part, ...] = ()) -> Row:
        self.calls.append(function if to is not None else lambda _: function())
        return tables.CALL, 0, len(self.calls) - 1, to, nbytes, sources, ()

    def _bytes(self, span: Span) -> int:
        return (span.stop - span.start) * self._width

    def _part(self, span: Span, is_read: bool = False) -> Part:
        if span.buffer in HALVES:
            return self._rank, tables.PRIVATE, span.start * self._width
        if span.buffer == "input" and is_read and self._reads_given:
            return self._rank, tables.GIVEN, span.start * self._width
        if span.buffer == "output" and self._places and self._used.isdisjoint(_chunks(span)):
            return self._rank, tables.RESULT, span.start * self._width
        if span.buffer != PEER:
            return self._rank, BUFFERS.index(span.buffer), span.start * self._width
        # If blocks differ in length, this rank does not know the peer's offsets. The part then holds the block's
        # number, and the engine looks up the start that the peer shows.
        part = span.like
        first = part.first if self._request.cut.lengths is not None else self._plan.layouts.span(part)[0] * self._width
        return span.start, BUFFERS.index(part.buffer), first


def _chunks(span: Span) -> range:
    return range(span.like.first, span.like.first + span.like.count)


def _shown_and_used(plan: Plan) -> tuple[set[int], set[int], bool]:
    """Return the input chunks shown to other ranks, the output chunks read by any rank, and whether others are left.

    A span is accessed as a whole: chunks in one span with a chunk read by any rank count as read.
    """
    shown, used, together = set[int](), set[int](), list[range]()
    for step in itertools.chain.from_iterable(plan.rounds):
        reads = [step.span] if isinstance(step, Message) and step.sends else \
            step.sources if isinstance(step, Reduction) else []
        for span in (step.dst, *reads) if isinstance(step, Reduction) else [step.span]:
            together.extend([_chunks(span)] if span.buffer == "output" else [])
        used.update(*(_chunks(span) for span in reads if span.buffer == "output"))
        if isinstance(step, Message):
            shown.update(*(_chunks(span) for span in reads if span.buffer == "input"))
    # Repeat until no span is half inside: each extension may touch further spans.
    is_more = True
    while is_more:
        more = [span for span in together if not used.isdisjoint(span) and not used.issuperset(span)]
        used.update(*more)
        is_more = bool(more)
    return shown, used, any(used.isdisjoint(span) for span in together)


def _counter_row(opcode: int, counter: int, peer: int = 0) -> Row:
    return opcode, peer, counter, None, 0, (), ()


def numbers_of(op: Op, dtype: Dtype) -> tuple[int, int]:
    """Return dtype and op by the engine's numbers; the op is -1 if NumPy combines."""
    name = "sum" if op.factor is not None and op.name not in EXACT_NAMES else op.name
    return list(DTYPES).index(dtype.name), tables.OP_NAMES.index(name) if name in tables.OP_NAMES else -1


def combine(op: Op, dtype: Dtype, to: Array, rows: Sequence[Array]) -> None:
    """Write op(...op(rows[0], rows[1])..., rows[-1]) to `to`, which may be one of the rows; two rows or more.

    float16, bfloat16 and float8 are combined in float32 and rounded once. Integers wrap around; NaN propagates. The
    exact ops are rounded once.

    >>> import numpy
    >>> from gpucoll.core.dtypes import row_of
    >>> from gpucoll.core.ops import EXACT
    >>> rows = [numpy.array([x]) for x in (1.0, 1e100, -1e100)]
    >>> combine(EXACT["sum"], row_of("float64"), rows[0], rows)
    >>> rows[0]
    array([1.])
    """
    numbers = numbers_of(op, dtype)
    if numbers[1] < 0:
        combine_written(op, dtype, to, rows[0], rows[1:])
    else:
        library().combine(*numbers, to, (*rows,))


def _combining(op: Op, dtype: Dtype, nbytes: int) -> Callable[..., None]:
    """Return a function that combines rows at addresses by an op written by the user."""
    kind = numpy_dtype(dtype.name)

    def combined(to: int, *sources: int) -> None:
        combine(op, dtype, at(to, nbytes).view(kind), [at(source, nbytes).view(kind) for source in sources])

    return combined

