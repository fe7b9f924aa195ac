"""The order of the steps of MSCCL's thread blocks: match messages, find endless waits and races.

Every step is one or two events: a receive and then a send, or local work. An event happens after the earlier events of
its thread block and after the step awaited by its step. A receive also happens after the matching send. A send does not
wait for the receive.
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
    """One event of an XML step: `kind` "send", "receive" or "local", and the places read and written.

    `operand` are the places combined with the data received or read, in a reduction. All places are on the step's GPU.
    """

    step: XmlStep
    kind: str
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    operand: tuple[Place, ...] = ()


class Order(NamedTuple):
    """Events in a possible order, and the matching of messages: `sender` maps a receive's index to the send's index."""

    events: list[XmlEvent]
    sender: dict[int, int]


def refused(step: XmlStep, why: str) -> ArgumentError:
    """Return the error for a wrong step: ArgumentError with code GC-PROOF."""
    return ArgumentError(f"{step}: {why}", code="GC-PROOF")


def ordered(program: XmlProgram, *, local_source: bool) -> Order:
    """Return the program's events in order; raise ArgumentError naming a step for an endless wait or a race.

    `local_source` selects the operand combined with received data. With True the operand is the step's source, a place
    of its own GPU, as in MSCCL's runtime. With False the operand is the step's destination, and the source names the
    sender's place, as written by msccl-tools.
    """
    events = [event for step in program.steps for event in _events(program, step, local_source)]
    first, last = dict[tuple[int, int, int], int](), dict[tuple[int, int, int], int]()
    before: list[list[int]] = [[] for _ in events]
    for index, event in enumerate(events):
        key = event.step[:3]
        # A step of two events starts with the first event and is done with the last: the step's wait delays the first
        # event, and steps waiting for the step follow the last event.
        first.setdefault(key, index)
        last[key] = index
        if index and events[index - 1].step[:2] == event.step[:2]:
            before[index].append(index - 1)
    for index in first.values():
        step = events[index].step
        if step.after is not None:
            waited = last.get((step.gpu, *step.after))
            if waited is None:
                raise refused(step, f"waits for tb {step.after[0]}, step {step.after[1]}, a step missing in the file")
            before[index].append(waited)
    # A receive follows its send. The send follows nothing of the receiver's: MSCCL buffers messages.
    sender = _matched(events)
    for receipt, sent in sender.items():
        before[receipt].append(sent)
    turns = in_order(before)
    # Events in a cycle of waits never happen, nor do events waiting for the cycle. Name the first event of the cycle.
    if len(turns) < len(events):
        raise refused(events[min(_cycle(before))].step, "waits for ever, in a circle of waiting steps")
    _check_races(events, before, turns)
    place = {index: turn for turn, index in enumerate(turns)}
    return Order([events[index] for index in turns], {place[one]: place[other] for one, other in sender.items()})


def in_order(before: Sequence[Iterable[int]]) -> list[int]:
    """Return the numbers in topological order, ties by number; numbers in a cycle or after a cycle are left out.

    ``before[i]`` are the numbers required before i.

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


def _cycle(before: Sequence[Iterable[int]]) -> list[int]:
    """Return the numbers of a cycle in `before`, which must have a cycle.

    >>> _cycle([[2], [2], [1]])
    [2, 1, 2]
    """
    try:
        graphlib.TopologicalSorter(dict(enumerate(before))).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    raise AssertionError("no cycle")


def _events(program: XmlProgram, step: XmlStep, local_source: bool) -> Iterable[XmlEvent]:
    """Yield the events of a step; in-place buffers get one name for each place."""
    src, dst = (tuple(_place(program, step.gpu, buffer, first + index) for index in range(step.count))
                for buffer, first in (step.src, step.dst))
    if step.type in RECEIVES:
        operand = (src if local_source else dst) if step.type in REDUCES else ()
        if step.type == "rrs":  # the result is sent on without being stored: a private place, named after the step
            dst = tuple((f"tb {step.block}, step {step.number}", index) for index in range(step.count))
        yield XmlEvent(step, "receive", operand, dst, operand)
    if step.type in SENDS:
        yield XmlEvent(step, "send", src if step.type == "s" else dst, ())
    if step.type in ("re", "cpy", "nop"):
        places = (src, dst) if step.type != "nop" else ((), ())
        yield XmlEvent(step, "local", *places, dst if step.type == "re" else ())


def _place(program: XmlProgram, gpu: int, buffer: str, chunk: int) -> Place:
    """Return the unique name of a place: in place, the smaller of input and output is part of the larger.

    If both are equally large the place is in the input.
    """
    if program.in_place and buffer != "s":
        name, chunks = program.row.name, program.per_block
        if name in ("all_gather", "gather"):
            return ("o", chunk + gpu * chunks * (buffer == "i"))
        return ("i", chunk + gpu * chunks * (buffer == "o" and name in ("reduce_scatter", "scatter")))
    return buffer, chunk


def _matched(events: list[XmlEvent]) -> dict[int, int]:
    """Return the matching send of each receive: the k-th send of a channel between two GPUs meets the k-th receive.

    Raises ArgumentError if two thread blocks share one end of a channel, or if sends and receives do not match.
    """
    ends: dict[tuple[int, int, int, str], list[int]] = collections.defaultdict(list)
    for index, event in enumerate(events):
        step = event.step
        if event.kind != "local":
            way = (step.gpu, step.send) if event.kind == "send" else (step.recv, step.gpu)
            posts = ends[*way, step.channel, event.kind]
            # Messages are matched by order, and only steps of one thread block have an order.
            if posts and events[posts[-1]].step.block != step.block:
                raise refused(step, f"tb {events[posts[-1]].step.block} uses the same channel of the same peer")
            posts.append(index)
    sender = dict[int, int]()
    for (source, target, channel, kind), posts in ends.items():
        others = ends.get((source, target, channel, "receive" if kind == "send" else "send"), [])
        if len(posts) > len(others):
            raise refused(events[posts[len(others)]].step, "waits for ever: the partner has no matching step")
        # Pairs are noted in the turn of the receives; surplus sends are refused in the turn of the sends.
        for one, other in zip(posts, others, strict=False) if kind == "receive" else ():
            sender[one] = other
            if events[one].step.count != events[other].step.count:
                raise refused(events[one].step, f"takes {events[one].step.count} chunks of the "
                                                f"{events[other].step.count} of {events[other].step}")
    return sender


class Touched(Generic[Toucher]):
    """The last writer and the later readers of each place."""

    def __init__(self) -> None:
        self._writer = dict[Any, Toucher]()
        self._readers: dict[Any, list[Toucher]] = collections.defaultdict(list)

    def follows(self, one: Toucher, reads: Iterable[Any], writes: Iterable[Any]) -> list[tuple[Toucher, Any, bool]]:
        """Note the places read and written by `one`; return the earlier touches conflicting with `one`.

        A touch is (earlier reader or writer, place, whether the place was written). Reads conflict with writes only.
        """
        before = [(self._writer[place], place, True) for place in (*reads, *writes) if place in self._writer]
        before += [(reader, place, False) for place in writes for reader in self._readers.pop(place, ())]
        for place in reads:
            self._readers[place].append(one)
        self._writer.update(dict.fromkeys(writes, one))
        return [each for each in before if each[0] != one]


def _check_races(events: list[XmlEvent], before: list[list[int]], turns: list[int]) -> None:
    """Raise ArgumentError for a race: two steps touch a chunk, at least one writes, and the order is not enforced."""
    touched: list[Touched[int]] = [Touched() for _ in range(1 + max(event.step.gpu for event in events))]
    clocks = _Clocks(events, before, turns)
    for index in turns:
        event = events[index]
        for other, place, _ in touched[event.step.gpu].follows(index, event.reads + event.operand, event.writes):
            clocks.check(other, index, place)


class _Clocks:
    """Vector clocks over thread blocks, deciding happens-before between events of one GPU.

    The clocks first follow only waits inside each GPU. If these waits do not order two events of a GPU, the clocks of
    this GPU are computed again, following messages through other GPUs. A pass visits all events, hence only on demand.
    """

    def __init__(self, events: list[XmlEvent], before: list[list[int]], turns: list[int]) -> None:
        self._events, self._before, self._turns = events, before, turns
        self._known: list[dict[int, int]] = [{} for _ in events]  # by event: the last event before, by block
        self._whole = set[int]()  # GPUs with clocks following messages through other GPUs
        self._follow(None)

    def _follow(self, gpu: int | None) -> None:
        """Compute the clocks of the events of `gpu`; None means all GPUs, following only waits inside each GPU."""
        clocks: list[dict[int, int]] = [{} for _ in self._events]
        for index in self._turns:
            mine = clocks[index]
            for other in self._before[index]:
                step = self._events[other].step
                if gpu is None and step.gpu != self._events[index].step.gpu:
                    continue
                # Everything before `other` is before this event, too.
                for block, last in clocks[other].items():
                    mine[block] = max(mine.get(block, -1), last)
                if gpu in (None, step.gpu):
                    mine[step.block] = max(mine.get(step.block, -1), other)
        for index in self._turns:
            if gpu in (None, self._events[index].step.gpu):
                self._known[index] = clocks[index]

    def check(self, one: int, other: int, place: Place) -> None:
        """Raise ArgumentError unless event `one` happens before event `other`; `place` is for the message."""
        # Event numbers increase along a thread block, so the last known event of the block of `one` covers `one`.
        step, gpu = self._events[one].step, self._events[other].step.gpu
        # Waits inside the GPU may not suffice: follow messages through other GPUs, once per GPU, and compare again.
        if self._known[other].get(step.block, -1) < one and gpu not in self._whole:
            self._whole.add(gpu)
            self._follow(gpu)
        if self._known[other].get(step.block, -1) < one:
            raise refused(self._events[other].step, f"touches {place[0]}[{place[1]}] like {step}, and does not "
                                                    "wait for that step: either may come first")
