"""In which order the steps of MSCCL's thread blocks happen: messages matched, waits that never end, races.

Every step is one or two events: it receives, then it sends, or it works alone. An event follows those before it in its
thread block, what its step waits for, and a receipt follows its sending, which waits for nobody.
"""

from __future__ import annotations

import collections
import contextlib
import graphlib
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from gpucoll.errors import ArgumentError
from gpucoll.msccl.documents import RECEIVES, REDUCES, SENDS, Place, XmlProgram, XmlStep

Toucher = TypeVar("Toucher")


class XmlEvent(NamedTuple):
    """What an XML step does at once: `kind` "send", "receive" or "local"; which chunks it reads, and writes.

    `operand` is what a reduction combines with what it gets. They are places of its own GPU.
    """

    step: XmlStep
    kind: str
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    operand: tuple[Place, ...] = ()


class Order(NamedTuple):
    """Events in an order in which they may happen, and for each receipt (by index) the sending that it meets."""

    events: list[XmlEvent]
    sender: dict[int, int]


def refused(step: XmlStep, why: str) -> ArgumentError:
    """Return the error that names a step that is wrong."""
    return ArgumentError(f"{step}: {why}", code="GC-PROOF")


def ordered(program: XmlProgram, *, local_source: bool) -> Order:
    """Return the program's events in order; raise ArgumentError that names a step where there is a fault.

    `local_source`: a reduction of what is received takes its operand from the step's source on its own GPU, as the
    runtime does; else from its destination, the source being the sender's, as msccl-tools write it.
    """
    events = [event for step in program.steps for event in _events(program, step, local_source)]
    first, last = dict[tuple[int, int, int], int](), dict[tuple[int, int, int], int]()
    before: list[list[int]] = [[] for _ in events]
    for index, event in enumerate(events):
        key = event.step[:3]
        first.setdefault(key, index)
        last[key] = index
        if index and events[index - 1].step[:2] == event.step[:2]:
            before[index].append(index - 1)
    for index in first.values():
        step = events[index].step
        if step.after is not None:
            waited = last.get((step.gpu, *step.after))
            if waited is None:
                raise refused(step, f"it waits for tb {step.after[0]}, step {step.after[1]}, which is not there")
            before[index].append(waited)
    sender = _matched(events)
    for receipt, sent in sender.items():
        before[receipt].append(sent)
    turns = in_order(before)
    if len(turns) < len(events):
        stuck = min({*range(len(events))} - {*turns})
        raise refused(events[stuck].step, "it waits for ever: what it waits for waits for it")
    _check_races(events, before, turns)
    place = {index: turn for turn, index in enumerate(turns)}
    return Order([events[index] for index in turns], {place[one]: place[other] for one, other in sender.items()})


def in_order(before: Sequence[Iterable[int]]) -> list[int]:
    """Return numbers after those `before` them, else by number; those that follow each other in a circle are left out.

    >>> in_order([[1], [], [3], [2]])
    [1, 0]
    """
    sorter, turns = graphlib.TopologicalSorter(dict(enumerate(before))), list[int]()
    with contextlib.suppress(graphlib.CycleError):
        sorter.prepare()
    while ready := sorted(sorter.get_ready()):
        turns += ready
        sorter.done(*ready)
    return turns


def _events(program: XmlProgram, step: XmlStep, local_source: bool) -> Iterable[XmlEvent]:
    """Yield the events of a step, places with two names by one."""
    src, dst = (tuple(_place(program, step.gpu, buffer, first + index) for index in range(step.count))
                for buffer, first in (step.src, step.dst))
    if step.type in RECEIVES:
        operand = (src if local_source else dst) if step.type in REDUCES else ()
        if step.type == "rrs":  # its result goes on, and is kept nowhere
            dst = tuple((f"tb {step.block}, step {step.number}", index) for index in range(step.count))
        yield XmlEvent(step, "receive", operand, dst, operand)
    if step.type in SENDS:
        yield XmlEvent(step, "send", src if step.type == "s" else dst, ())
    if step.type in ("re", "cpy", "nop"):
        places = (src, dst) if step.type != "nop" else ((), ())
        yield XmlEvent(step, "local", *places, dst if step.type == "re" else ())


def _place(program: XmlProgram, gpu: int, buffer: str, chunk: int) -> Place:
    """Return a place by its one name: in place the smaller side is part of the larger, or both are input."""
    if program.in_place and buffer != "s":
        name, chunks = program.row.name, program.per_block
        if name in ("all_gather", "gather"):
            return ("o", chunk + gpu * chunks * (buffer == "i"))
        return ("i", chunk + gpu * chunks * (buffer == "o" and name in ("reduce_scatter", "scatter")))
    return buffer, chunk


def _matched(events: list[XmlEvent]) -> dict[int, int]:
    """Return which sending each receipt meets: the k-th on a channel between two GPUs the k-th."""
    ends: dict[tuple[int, int, int, str], list[int]] = collections.defaultdict(list)
    for index, event in enumerate(events):
        step = event.step
        if event.kind != "local":
            way = (step.gpu, step.send) if event.kind == "send" else (step.recv, step.gpu)
            posts = ends[*way, step.channel, event.kind]
            if posts and events[posts[-1]].step.block != step.block:
                raise refused(step, f"tb {events[posts[-1]].step.block} uses that channel of that peer, too")
            posts.append(index)
    sender = dict[int, int]()
    for (source, target, channel, kind), posts in ends.items():
        others = ends.get((source, target, channel, "receive" if kind == "send" else "send"), [])
        if len(posts) > len(others):
            raise refused(events[posts[len(others)]].step, "it waits for ever: its partner has no such step")
        for one, other in zip(posts, others, strict=False) if kind == "receive" else ():  # more others are refused
            sender[one] = other
            if events[one].step.count != events[other].step.count:
                raise refused(events[one].step, f"it takes {events[one].step.count} chunks of the "
                                                f"{events[other].step.count} of {events[other].step}")
    return sender


class Touched(Generic[Toucher]):
    """Who has written and read each place last."""

    def __init__(self) -> None:
        self._writer = dict[Any, Toucher]()
        self._readers: dict[Any, list[Toucher]] = collections.defaultdict(list)

    def follows(self, one: Toucher, reads: Iterable[Any], writes: Iterable[Any]) -> list[tuple[Toucher, Any, bool]]:
        """Return whom `one` has to follow, at which place, and whether that has written it; now it has touched them."""
        before = [(self._writer[place], place, True) for place in (*reads, *writes) if place in self._writer]
        before += [(reader, place, False) for place in writes for reader in self._readers.pop(place, ())]
        for place in reads:
            self._readers[place].append(one)
        self._writer.update(dict.fromkeys(writes, one))
        return [each for each in before if each[0] != one]


def _check_races(events: list[XmlEvent], before: list[list[int]], turns: list[int]) -> None:
    """Raise where two steps of a GPU touch a chunk, one of them writing, and neither is sure to come first."""
    touched: list[Touched[int]] = [Touched() for _ in range(1 + max(event.step.gpu for event in events))]
    clocks = _Clocks(events, before, turns)
    for index in turns:
        event = events[index]
        for other, place, _ in touched[event.step.gpu].follows(index, event.reads + event.operand, event.writes):
            clocks.check(other, index, place)


class _Clocks:
    """Tells what is sure to come before what: by the waits inside a GPU, and if need be by messages through others."""

    def __init__(self, events: list[XmlEvent], before: list[list[int]], turns: list[int]) -> None:
        self._events, self._before, self._turns = events, before, turns
        self._known: list[dict[int, int]] = [{} for _ in events]  # of each event: the last one before it by block
        self._whole = set[int]()  # GPUs whose are known through all others
        self._follow(None)

    def _follow(self, gpu: int | None) -> None:
        """Note what comes before each event of `gpu`; None: of each GPU, by its own waits only."""
        clocks: list[dict[int, int]] = [{} for _ in self._events]
        for index in self._turns:
            mine = clocks[index]
            for other in self._before[index]:
                step = self._events[other].step
                if gpu is None and step.gpu != self._events[index].step.gpu:
                    continue
                for block, last in clocks[other].items():
                    mine[block] = max(mine.get(block, -1), last)
                if gpu in (None, step.gpu):
                    mine[step.block] = max(mine.get(step.block, -1), other)
        for index in self._turns:
            if gpu in (None, self._events[index].step.gpu):
                self._known[index] = clocks[index]

    def check(self, one: int, other: int, place: Place) -> None:
        """Raise where `one` is not sure to come before `other`."""
        step, gpu = self._events[one].step, self._events[other].step.gpu
        if self._known[other].get(step.block, -1) < one and gpu not in self._whole:
            self._whole.add(gpu)
            self._follow(gpu)
        if self._known[other].get(step.block, -1) < one:
            raise refused(self._events[other].step, f"it touches {place[0]}[{place[1]}] as {step} does, and does not "
                                                    "wait for it: either may come first")
