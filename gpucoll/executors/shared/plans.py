"""Plans as the engine carries them out: what a call does, in bytes of the ranks' buffers, wherever those are.

Every rank shows one number, its mark: 2 k once it has entered its round k, all that it wrote before being there to be
read; 2 k + 1 once it has, moreover, read all that it reads in round k. So a rank sees by the sender's mark when it may
read, and by its readers' marks when it may overwrite what they read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpucoll.algorithms import find
from gpucoll.arrays import address, combiner
from gpucoll.arrays.symmetric import Heap, Segment, at
from gpucoll.collectives import COLLECTIVES
from gpucoll.dtypes import DTYPES, Dtype
from gpucoll.executors import Called, Task, fingerprint, shortened
from gpucoll.executors.shared.neighbours import BUFFERS, SMALL, TINY, Neighbours
from gpucoll.executors.shared.tables import (
    ASIDE,
    AWAIT,
    CALL,
    FORM,
    GIVEN,
    INPUT,
    LINE,
    OUTPUT,
    RESULT,
    SIGNAL,
    TEXT,
)
from gpucoll.ops import LOGICAL, OPS, Op
from gpucoll.plan import HALVES, NEAR, Form, Message, Plan, Span
from gpucoll.signature import is_refusal

KEPT = 256
LEAST, MOST_ROUNDED = 1 << 16, 1 << 28  # bytes of staging: the least, and where it is no longer rounded up
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
        self._bare: dict[str, Any] = {}
        self._staging: dict[int, Segment] = {}
        self._outgrown: list[Segment] = []  # a call that is under way may still use them

    def of(self, task: Task) -> Any:
        """Return the engine's plan for calls like `task`."""
        plan, symmetric = task.plan, self._is_symmetric(task)
        assert plan is not None
        small = task.nbytes <= TINY or (task.nbytes <= SMALL and not symmetric)
        # What several ranks read is copied once to where they all map it: the system's copies take twice as long.
        copies = plan.copy_input or (plan.shares_input and not small and not symmetric)
        row = COLLECTIVES[task.collective]
        is_block = row.output.blocks and not row.input.blocks  # which is as good as a copy that others read
        alias = task.in_place and not small and (is_block or not copies) and (self._near.copies or symmetric)
        # A plan of unlike blocks knows this rank's lengths only, and not how long the longest one's are.
        key = (id(plan), id(task.op), task.dtype.name, task.nbytes, alias, small, copies, task.in_place, task.shape,
               task.header)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == KEPT:
                self._kept.clear()
            # With them plan and op, so that no others are found under their numbers.
            found = self._kept[key] = (self._made(task, alias, small, copies), plan, task.op)
        return found[0]

    def _made(self, task: Task, alias: bool, small: bool, copies: bool) -> Any:
        plan, near = task.plan, self._near
        assert plan is not None
        assert plan.schedules is not None
        by_node = Plan(plan.schedules(near.rank), plan.layouts, in_place=alias, schedules=plan.schedules, near=near.all)
        by_engine = task.op is None or not task.op.expression
        # Reduced by shares and gathered; alike on all ranks, wherever their arrays are
        one_pass = task.op is not None and find(task.collective, task.algorithm).traits.barriers == 2 and by_engine \
            and len(near.all) == near.size > 1 and task.nbytes > SMALL
        sizes = [0 if row is None else row.nbytes for row in (task.input, task.output)]
        sizes.append(by_node.workspace["scratch"] * task.dtype.itemsize)
        for buffer, wanted in enumerate((copies or not near.copies, not near.copies, True)):
            if wanted and sizes[buffer] > (SMALL if small else 0):
                self._stage(buffer, sizes[buffer])
        writer = Writer(task, near.rank, by_node, self._messages, apart=small)
        instructions = (*(writer.fused() if one_pass else writer.rows()),)
        readers = [(BUFFERS.index(name), peer, mark) for (name, peer), mark in writer.readers.items()]
        readers += [(INPUT, peer, 0) for peer in self._readers_of_call(task)]
        starts = () if task.lengths is None else tuple(
            start for layout in plan.layouts for start in _padded(layout, near.size + 1))
        # Alike on all ranks, unlike their scratch: the engine refuses what is too long for a workspace.
        in_control = small and task.nbytes <= TINY and task.lengths is None and len(near.all) == near.size
        flags = (in_control, small, copies,
                 task.in_place and task.collective == "broadcast", task.collective == "broadcast", False,
                 self._is_announced(task))
        return self._shown_plan(task.words, (*sizes, writer.aside, task.dtype.itemsize),
                                 self._reduction(task), flags, task.root,
                                 (*writer.peers,), tuple(readers), starts, instructions, (*writer.calls,))

    def by_calls(self, task: Task, key: Any, made: Callable[[], Called]) -> Any:
        """Return the plan of calls like `task` that a function does, once ranks have compared them; `made` makes it.

        `key` tells apart what `made` depends on.
        """
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == KEPT:
                self._kept.clear()
            sizes = [0 if row is None else row.nbytes for row in (task.input, task.output)]
            is_broadcast = task.collective == "broadcast"
            call = CALL, 0, 1, (self._near.rank, RESULT, 0), 0, ((self._near.rank, GIVEN, 0),), ()
            readers = [(INPUT, peer, 0) for peer in self._readers_of_call(task)]
            flags = False, False, False, False, is_broadcast, False, self._is_announced(task)
            plan = self._shown_plan(task.words, (0 if is_broadcast else sizes[0], sizes[1], 0, 0, task.dtype.itemsize),
                                    self._reduction(task), flags, task.root, (), (*readers,), (), (call,),
                                    (self._messages.idle, made()))
            found = self._kept[key] = (plan, None, None)
        return found[0]

    def _is_announced(self, task: Task) -> bool:
        """Return whether the other ranks learn from what the root shows that there is this call."""
        near = self._near
        return (task.header != "" or task.collective == "scatter") and COLLECTIVES[task.collective].rooted \
            and len(near.all) == near.size

    def _readers_of_call(self, task: Task) -> frozenset[int]:
        """Return who reads what this rank shows of its call, beside comparing it."""
        near = self._near
        return near.all - {near.rank} if self._is_announced(task) and near.rank == task.root else frozenset()

    def _reduction(self, task: Task) -> tuple[int, int, int]:
        """Return dtype and op as the engine has them, and what `_finish` does."""
        place = NOTHING if task.op is None or task.op.expression else list(OPS).index(
            "sum" if task.op.factor is not None else task.op.name)
        return list(DTYPES).index(task.dtype.name), place, self._finish(task)

    def _shown_plan(self, words: str, *more: Any) -> Any:
        return self._engine.plan(shortened(words, TEXT - 1), fingerprint(words), *more)

    def without_data(self, words: str) -> Any:
        """Return the plan of ranks that only compare what they call, or of one that refuses that."""
        if words not in self._bare:
            if len(self._bare) == KEPT:
                self._bare.clear()
            flags = (True, True, False, False, False, is_refusal(words), False)
            self._bare[words] = self._shown_plan(words, (0, 0, 0, 0, 1), (0, NOTHING, 0), flags, 0, (), (), (), (), ())
        return self._bare[words]

    def _finish(self, task: Task) -> int:
        """Return of how many contributions the engine forms the mean, or the truth value; 0 where it does neither."""
        if task.op is None or task.output is None or task.collective == "exscan":
            return 0
        contributions = self._near.rank + 1 if task.collective == "scan" else self._near.size
        alone = task.op.name in LOGICAL and contributions == 1
        return contributions if alone or (task.op.name == "avg" and task.op.factor is None) else 0

    def _is_symmetric(self, task: Task) -> bool:
        """Return whether all of this rank's arrays are in symmetric memory."""
        return all(row is None or self._heap.find(address(row), row.nbytes) for row in (task.input, task.output))

    def _stage(self, buffer: int, nbytes: int) -> None:
        """Have memory for a buffer that others could not read where it is, kept from call to call."""
        staging = self._staging.get(buffer)
        if staging is not None and staging.nbytes >= nbytes:
            return
        if staging is not None:
            self._outgrown.append(staging)
        rounded = 1 << (nbytes - 1).bit_length() if nbytes < MOST_ROUNDED else nbytes
        staging = self._staging[buffer] = Segment(max(LEAST, rounded))
        self._engine.staging(buffer, staging.key, staging.start, staging.nbytes)

    def close(self) -> None:
        """Let go of the memory."""
        for staging in (*self._staging.values(), *self._outgrown):
            staging.close()
        self._staging.clear()
        self._outgrown.clear()
        self._kept.clear()
        self._bare.clear()


def _padded(layout: Any, length: int) -> Sequence[int]:
    """Return where so many blocks start; those that a buffer has not are empty."""
    return (*layout.starts, *[layout.starts[-1]] * (length - len(layout.starts)))


class Writer:
    """Writes one plan for the engine; results that would be empty are left out.

    `peers` are those whose memory is read; `readers` has, for a buffer and who reads it, the mark that is shown then.
    Where input and output are `apart` from the caller's arrays, only what is sent or read again goes by way of them.
    """

    def __init__(self, task: Task, rank: int, plan: Plan, messages: Messages, *, apart: bool) -> None:
        self._task, self._rank, self._plan, self._messages = task, rank, plan, messages
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
        self._under_way[number] = None
        yield self._called(lambda place: self._messages.begin(number, sends, peer, place, nbytes), self._part(span),
                           nbytes)

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

