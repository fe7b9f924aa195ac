"""A plan as a program for the step kernel: tables of rounds, lanes, parts and writes.

Block c of every rank works on share c of each part, and on nothing else, so that no block waits for another one of its
own rank. Hence parts are chunks of the schedule: what lies in share c of a chunk on one rank lies in share c wherever
it goes. With one block a part may be as long as it likes. Staging holds other chunks in every round, so that every
block has a region of its own there.

Pure: it knows spans, not memory.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy

from gpucoll.analysis.replay import ScheduleError
from gpucoll.chunks import Layout, Ragged
from gpucoll.device.launch import WORD
from gpucoll.device.peer import LANE, PART, ROUND, WRITE
from gpucoll.executors import PIECE, Layouts, Message, Plan, PlannedRound, Span, Write, resolve

BUFFERS = ("input", "output", "scratch", "staging")
Table: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.void]]"


class Lane(NamedTuple):
    """What goes to or comes from `peer` in a round: spans, and which of them are combined with what is there."""

    peer: int
    receives: bool
    parts: tuple[tuple[Span, bool], ...]


class Step(NamedTuple):
    """A round: writes, then lanes that go on side by side, then writes. A write is dst and its operands."""

    before: tuple[tuple[Span, ...], ...]
    lanes: tuple[Lane, ...]
    after: tuple[tuple[Span, ...], ...]


class Program(NamedTuple):
    """The steps of a rank, and how many elements of staging every block needs."""

    steps: tuple[Step, ...]
    region: int


def program(plan: Plan, layouts: Layouts, channels: int, itemsize: int, *, empty: bool = False) -> Program:
    """Return the program of `plan` for so many blocks; messages without data are left out unless `empty`.

    In staging a part's span tells where in a block's region its share begins.
    """
    steppers = [_Stepper(planned, layouts, _Shares(channels, itemsize), empty) for planned in plan.rounds]
    steps = tuple(step for step in (stepper.step() for stepper in steppers) if any(step))
    return Program(steps, max((stepper.region for stepper in steppers), default=0))


def everyone(plan: Plan, size: int, channels: int, itemsize: int, *, empty: bool) -> list[Program]:
    """Return the programs of all ranks, as far as messages go.

    Where blocks are not alike, no rank knows how long the others' are: then every one counts as one element.
    """
    assert plan.schedules is not None
    assert plan.layouts is not None
    ragged = Ragged.of([1] * size)
    layouts = Layouts(ragged, ragged) if isinstance(plan.layouts.input, Ragged) else plan.layouts
    plans = (resolve(plan.schedules(rank), layouts, in_place=False) for rank in range(size))
    return [program(one, layouts, channels, itemsize, empty=empty) for one in plans]


def tables(steps: tuple[Step, ...]) -> dict[str, Table]:
    """Return the program as the kernel reads it."""
    parts: list[tuple[int, int, int, bool]] = []
    lanes: list[tuple[int, bool, int, int]] = []
    writes, rounds = list[tuple[int, int]](), []
    for step in steps:
        rounds.append((len(lanes), len(step.lanes), len(writes), len(step.before), len(step.after)))
        for write in (*step.before, *step.after):
            writes.append((len(parts), len(write) - 1))
            parts += [_row(span, False) for span in write]
        for lane in step.lanes:
            lanes.append((lane.peer, lane.receives, len(parts), len(lane.parts)))
            parts += [_row(span, combined) for span, combined in lane.parts]
    return {"rounds": numpy.array(rounds, ROUND), "lanes": numpy.array(lanes, LANE), "parts": numpy.array(parts, PART),
            "writes": numpy.array(writes, WRITE)}


def _row(span: Span, combined: bool) -> tuple[int, int, int, bool]:
    return span.start, span.stop - span.start, BUFFERS.index(span.buffer), combined


class _Shares(NamedTuple):
    """How parts are shared out among blocks."""

    channels: int
    itemsize: int

    def most(self, count: int) -> int:
        """Return how many elements of `count` a block has at most, in whole words."""
        per_word = WORD // self.itemsize
        words = -(-count // per_word)
        return -(-words // self.channels) * per_word


class _Stepper:
    """Makes one step of one planned round; `region` is what it needs of staging, in elements."""

    def __init__(self, planned: PlannedRound, layouts: Layouts, shares: _Shares, empty: bool) -> None:
        self._planned, self._layouts, self._shares, self._empty = planned, layouts, shares, empty
        self._places: dict[int, int] = {}
        self.region = 0
        self._stand_for = dict(_staged(planned))  # what each part of staging is cut like
        self._fused = {write.operands[0]: write.dst for write in planned.writes if self._is_fused(write)}

    def step(self) -> Step:
        before = [part for source, kept in self._planned.snapshots for part in self._write(kept, source)]
        after = [part for write in self._planned.writes if not self._is_fused(write)
                 for part in self._write(write.dst, write.base, *write.operands)]
        sends, receives = (self._lanes(messages, receives=receives) for messages, receives in
                           ((self._planned.sends, False), (self._planned.receives, True)))
        return Step(tuple(before), (*sends, *receives), tuple(after))

    def _is_fused(self, write: Write) -> bool:
        """Return whether what comes may be combined as it comes: it is alone, and what it changes is not sent."""
        sent = any(_meet(message.span, write.dst) for message in self._planned.sends)
        return len(write.operands) == 1 and write.base == write.dst and write.needs > 0 and not sent \
            and write.operands[0].buffer == "staging"

    def _lanes(self, messages: Sequence[Message], *, receives: bool) -> Iterator[Lane]:
        for peer in dict.fromkeys(message.peer for message in messages):
            spans = _joined([message.span for message in messages if message.peer == peer])
            parts = tuple(part for span in spans for part in self._parts(span))
            if parts:
                yield Lane(peer, receives, parts)

    def _parts(self, span: Span) -> list[tuple[Span, bool]]:
        for staged, target in self._fused.items():
            if _holds(staged, span):
                moved = target.start + span.start - staged.start
                real = Span(target.buffer, moved, moved + span.stop - span.start)
                return [(part, True) for part in self._cut(real)]
        return [(part, False) for part in self._cut(span)]

    def _write(self, *spans: Span) -> list[tuple[Span, ...]]:
        cut = [self._cut(span) for span in spans]
        if len({tuple(part.stop - part.start for part in parts) for parts in cut}) > 1:
            raise ScheduleError(f"{spans} are not cut alike: a step names chunks of other lengths")
        return [write for write in zip(*cut, strict=True) if write[0].start < write[0].stop]

    def _cut(self, span: Span) -> list[Span]:
        """Return `span` chunk by chunk; chunks without elements are left out."""
        if span.start == span.stop:
            return [span] if self._empty else []
        if span.buffer != "staging":
            return self._chunks(span)
        staged, real = next(pair for pair in self._stand_for.items() if _holds(pair[0], span))
        shift = staged.start - real.start
        chunks = self._chunks(Span(real.buffer, span.start - shift, span.stop - shift))
        return [self._place(part.start + shift, part.stop - part.start) for part in chunks]

    def _chunks(self, span: Span) -> list[Span]:
        if self._shares.channels == 1:
            return [span]
        layout = self._layouts.output if span.buffer == "output" else self._layouts.input
        points = [span.start, *_starts(layout, span.start, span.stop), span.stop]
        return [Span(span.buffer, *pair) for pair in itertools.pairwise(points)]

    def _place(self, start: int, count: int) -> Span:
        """Return where the share of `count` elements that are staged at `start` is in every block's region."""
        if start not in self._places:
            self._places[start] = self.region
            self.region += self._shares.most(count)
        return Span("staging", self._places[start], self._places[start] + count)


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return `spans` with those put together that `resolve` has cut for MPI."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.stop == span.start and last.buffer == span.buffer \
                and (last.stop - last.start) % PIECE == 0 and last.stop > last.start:
            joined[-1] = Span(span.buffer, last.start, span.stop)
        else:
            joined.append(span)
    return joined


def _staged(planned: PlannedRound) -> Iterator[tuple[Span, Span]]:
    """Yield the parts of staging in use, each with what is kept there or what is made of it."""
    for write in planned.writes:
        yield from ((span, write.dst) for span in (write.base, *write.operands) if span.buffer == "staging")
    yield from ((kept, source) for source, kept in planned.snapshots)


def _starts(layout: Layout | Ragged, start: int, stop: int) -> list[int]:
    """Return where chunks begin between `start` and `stop`."""
    chunks = (len(layout.starts) - 1 if isinstance(layout, Ragged) else
              (stop // layout.elements + 1) * layout.chunks)
    first = bisect.bisect_right(range(chunks), start, key=layout.start)
    last = bisect.bisect_left(range(chunks), stop, key=layout.start)
    return sorted({layout.start(chunk) for chunk in range(first, last)})


def _holds(outer: Span, inner: Span) -> bool:
    return outer.buffer == inner.buffer and outer.start <= inner.start and inner.stop <= outer.stop


def _meet(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop
