"""One plan as instructions for the engine: what a call does, in bytes of the ranks' buffers, wherever those are.

Every rank shows one number, its mark: 2 k once it has entered its round k, all that it wrote before being there to be
read; 2 k + 1 once it has, moreover, read all that it reads in round k. So a rank sees by the sender's mark when it may
read, and by its readers' marks when it may overwrite what they read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpucoll.arrays import HOST, combiner
from gpucoll.arrays.segments import at
from gpucoll.core.dtypes import Dtype
from gpucoll.core.ops import Op
from gpucoll.executors import Task
from gpucoll.executors.shared.neighbours import BUFFERS
from gpucoll.executors.shared.tables import ASIDE, AWAIT, CALL, FORM, GIVEN, INPUT, LINE, OUTPUT, RESULT, SIGNAL
from gpucoll.plan import HALVES, NEAR, Form, Message, Plan, Span

Part = tuple[int, int, int]
Row = tuple[int, int, int, Part | None, int, tuple[Part, ...], tuple[Part, ...]]


class Messages:
    """What a plan asks of message number i, across nodes: to begin it on memory at an address, and whether it has come.
    """

    def __init__(self, begin: Callable[[int, bool, int, int, int], None], has_come: Callable[[int], bool],
                 idle: Callable[[], None]) -> None:
        self.begin, self.has_come, self.idle = begin, has_come, idle


class Writer:
    """Writes one plan for the engine; results that would be empty are left out.

    `peers` are those whose memory is read; `readers` has, for a buffer and who reads it, the mark that is shown then.
    Where input and output are `apart` from the caller's arrays, only what is sent or read again goes by way of them.
    `comparing` is called before data move, until it returns True.
    """

    def __init__(self, task: Task, rank: int, plan: Plan, messages: Messages,
                 comparing: Callable[[], bool] | None = None, *, apart: bool) -> None:
        self._task, self._rank, self._plan, self._messages = task, rank, plan, messages
        self._comparing = comparing
        self._shown, self._used, self._places = _shown_and_used(plan) if apart else (set(), set(), False)
        self._reads_given = apart and not task.in_place and not plan.copy_input
        self._width = task.dtype.itemsize
        # One half: a round begins when all of the one before has been formed.
        self.aside = self._kept = max(plan.workspace[half] for half in HALVES) * self._width
        self._marks: dict[int, tuple[int, int]] = {}  # that end what near peers are sent
        self._under_way: dict[int, None] = {}  # messages to and from other nodes
        self._passed: dict[int, int] = {}
        self.peers: dict[int, None] = {}
        self.readers: dict[tuple[str, int], int] = {}
        self.calls: list[Callable[..., Any]] = []  # those of Python's, the first while the engine waits

    def rows(self) -> Iterator[Row]:
        """Yield the instructions."""
        if self._reads_given:
            yield from self._moved(INPUT, GIVEN, self._shown)
        if self._comparing is not None:
            yield self._called(self._comparing)
        for number, steps in enumerate(self._plan.rounds):
            if number:
                yield _marked(SIGNAL, 2 * number)
            sent = set[int]()
            for step in steps:
                if isinstance(step, Message):
                    sent.update([step.number] if step.sends else ())
                    yield from self._sent(step)
                    continue
                if not sent.isdisjoint(step.after):  # from here on nothing is read of others
                    sent.clear()
                    yield _marked(SIGNAL, 2 * number + 1)
                yield from self._wait(step)
                yield from self._formed(step)
        yield _marked(SIGNAL, 2 * len(self._plan.rounds))
        yield from self._end(list(self._under_way))
        if self._places:
            yield from self._moved(RESULT, OUTPUT, self._used)
        if self._task.collective == "exscan" and self._rank == 0:
            yield from self._filled()

    def _filled(self) -> Iterator[Row]:
        """Fill the result of an exscan's first rank in Python. Its input may be there, which the others have read then.
        """
        task = self._task
        for (_, peer), mark in self.readers.items():
            yield _marked(AWAIT, mark, peer)
        op, dtype, kind, nbytes = task.op, task.dtype, task.output.dtype, task.output.nbytes
        assert op is not None
        if nbytes:
            yield self._called(lambda place: HOST.fill_identity(op, at(place, nbytes).view(kind), dtype),
                               (self._rank, RESULT, 0), nbytes)

    def _moved(self, to: int, source: int, chunks: set[int]) -> Iterator[Row]:
        """Copy those chunks between a buffer and the caller's array, neighbours at once."""
        layout = self._plan.layouts.input if to == INPUT else self._plan.layouts.output
        for first in sorted(one for one in chunks if one - 1 not in chunks):
            end = next(one for one in itertools.count(first) if one not in chunks)
            start, stop = (layout.start(one) * self._width for one in (first, end))
            if start < stop:
                yield FORM, 0, 0, (self._rank, to, start), stop - start, ((self._rank, source, start),), ()

    def fused(self) -> Iterator[Row]:
        """Yield those of a two_shot all-reduce in one pass: what is reduced goes to everybody while it is at hand.

        The rank that reduces a block is the only one that reads it, so that it may be overwritten in place.
        """
        first, second = self._plan.rounds
        forms = [step for step in first if isinstance(step, Form)]
        self.peers = {span.start: None for span in forms[0].sources if span.buffer == NEAR}
        self.readers = {(name, peer): 2 for name in ("input", "output") for peer in self.peers}
        copies = tuple((step.peer, *self._part(step.span)[1:]) for step in second if isinstance(step, Message))
        yield from self._formed(forms[0]._replace(dst=forms[-1].dst), copies)
        yield from (_marked(SIGNAL, 2), *(_marked(AWAIT, 2, peer) for peer in self.peers))

    def _wait(self, form: Form) -> Iterator[Row]:
        """Wait for what has not been waited for yet; every peer has entered round 0 before."""
        after = sorted(form.after, reverse=True)
        near = [(span.start, 2 * span.stop) for span in form.sources if span.buffer == NEAR]
        self.peers.update((peer, None) for peer, _ in near)
        for peer, mark in (*near, *(self._marks[number] for number in after if number in self._marks)):
            if mark > self._passed.get(peer, 0):
                self._passed[peer] = mark
                yield _marked(AWAIT, mark, peer)
        yield from self._end(after)

    def _end(self, numbers: Iterable[int]) -> Iterator[Row]:
        for number in numbers:
            if number in self._under_way:
                del self._under_way[number]
                yield self._called(functools.partial(self._messages.has_come, number))

    def _formed(self, form: Form, copies: tuple[Part, ...] = ()) -> Iterator[Row]:
        nbytes, op, where = self._bytes(form.dst), self._task.op, self._part(form.dst)
        sources = tuple(self._part(span, is_read=True) for span in form.sources)
        if not nbytes:
            return
        if op is None or not op.expression or len(sources) == 1:
            yield FORM, 0, 0, where, nbytes, sources, copies
            return
        here, used = [], self._kept
        for source in sources:
            here.append(source)
            if source[0] != self._rank:  # Python's functions read what is mapped
                here[-1] = self._rank, ASIDE, used
                yield FORM, 0, 0, here[-1], nbytes, (source,), ()
                used += -(-nbytes // LINE) * LINE
        self.aside = max(self.aside, used)
        some = self._task.output if self._task.output is not None else self._task.input
        yield self._called(_combining(op, self._task.dtype, some.dtype, nbytes), where, nbytes, tuple(here))

    def _sent(self, message: Message) -> Iterator[Row]:
        number, _, peer, span, sends, there = message
        if there is not None:
            mark = self.readers[span.buffer, peer] = 2 * there + 1
            self._marks[number] = peer, mark
            return
        nbytes = self._bytes(span)
        if nbytes:  # empty parts lie at one place, and follow nothing
            yield from self._end(sorted(message.after))
        self._under_way[number] = None
        begin = self._messages.begin  # a plan must not keep this writer, which has the arrays of its first call
        yield self._called(lambda place: begin(number, sends, peer, place, nbytes), self._part(span), nbytes)

    def _called(self, function: Callable[..., Any], to: Part | None = None, nbytes: int = 0,
                sources: tuple[Part, ...] = ()) -> Row:
        if not self.calls:
            self.calls.append(self._messages.idle)
        self.calls.append(function if to is not None else lambda _: function())
        return CALL, 0, len(self.calls) - 1, to, nbytes, sources, ()

    def _bytes(self, span: Span) -> int:
        return (span.stop - span.start) * self._width

    def _part(self, span: Span, is_read: bool = False) -> Part:
        if span.buffer in HALVES:
            return self._rank, ASIDE, span.start * self._width
        if span.buffer == "input" and is_read and self._reads_given:
            return self._rank, GIVEN, span.start * self._width
        if span.buffer == "output" and self._places and self._used.isdisjoint(_chunks(span)):
            return self._rank, RESULT, span.start * self._width
        if span.buffer != NEAR:
            return self._rank, BUFFERS.index(span.buffer), span.start * self._width
        part = span.like  # of blocks that are not alike it has the number
        first = part.first if self._task.lengths is not None else self._plan.layouts.span(part)[0] * self._width
        return span.start, BUFFERS.index(part.buffer), first


def _chunks(span: Span) -> range:
    return range(span.like.first, span.like.first + span.like.count)


def _shown_and_used(plan: Plan) -> tuple[set[int], set[int], bool]:
    """Return the chunks of input that are sent; those of output that are sent or read again, with whatever is written
    together with one of them; and whether there are others."""
    shown, used, together = set[int](), set[int](), list[range]()
    for step in itertools.chain.from_iterable(plan.rounds):
        reads = [step.span] if isinstance(step, Message) and step.sends else \
            step.sources if isinstance(step, Form) else []
        for span in (step.dst, *reads) if isinstance(step, Form) else [step.span]:
            together.extend([_chunks(span)] if span.buffer == "output" else [])
        used.update(*(_chunks(span) for span in reads if span.buffer == "output"))
        if isinstance(step, Message):
            shown.update(*(_chunks(span) for span in reads if span.buffer == "input"))
    is_more = True
    while is_more:
        more = [span for span in together if not used.isdisjoint(span) and not used.issuperset(span)]
        used.update(*more)
        is_more = bool(more)
    return shown, used, any(used.isdisjoint(span) for span in together)


def _marked(opcode: int, mark: int, peer: int = 0) -> Row:
    return opcode, peer, mark, None, 0, (), ()


def _combining(op: Op, dtype: Dtype, kind: Any, nbytes: int) -> Callable[..., None]:
    """Return what combines rows at addresses by an op of the user's own."""
    combine = combiner(op, dtype)

    def combined(to: int, *sources: int) -> None:
        first, *others = (at(source, nbytes).view(kind) for source in sources)
        combine(at(to, nbytes).view(kind), first, others)

    return combined

