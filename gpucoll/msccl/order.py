"""The order of the steps of MSCCL's thread blocks: match messages, find endless waits.

Every step is one or two events: a receive and then a send, or local work. An event happens after the earlier events of
its thread block and after the step awaited by its step. A receive also happens after the matching send. A send does not
wait for the receive.
"""

from __future__ import annotations

import collections
import contextlib
import graphlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpucoll.errors import ArgumentError
from gpucoll.msccl.documents import RECEIVES, REDUCES, SENDS, ChunkPlace, XmlProgram, XmlStep


class XmlEvent(NamedTuple):
    """One event of an XML step: `kind` "send", "receive" or "local", and the places read and written.

    `operand` are the places combined with the data received or read, in a reduction. All places are on the step's GPU.
    """

    step: XmlStep
    kind: str
    reads: tuple[ChunkPlace, ...]
    writes: tuple[ChunkPlace, ...]
    operand: tuple[ChunkPlace, ...] = ()


class EventOrder(NamedTuple):
    """Events in a possible order, and the matching of messages: `sender` maps a receive's index to the send's index."""

    events: list[XmlEvent]
    sender: dict[int, int]


def refused(step: XmlStep, why: str) -> ArgumentError:
    """Return the error for a wrong step: ArgumentError with code GC-PROOF."""
    return ArgumentError(f"{step}: {why}", code="GC-PROOF")


def ordered(program: XmlProgram, *, local_source: bool) -> EventOrder:
    """Return the program's events in order; raise ArgumentError naming a step for an endless wait.

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
    if len(turns) < len(events):
        first_stuck = min({*range(len(events))} - {*turns})
        raise refused(events[first_stuck].step, "waits for ever, in a circle of waiting steps or for such a circle")
    place = {index: turn for turn, index in enumerate(turns)}
    return EventOrder([events[index] for index in turns], {place[one]: place[other] for one, other in sender.items()})


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


def _place(program: XmlProgram, gpu: int, buffer: str, chunk: int) -> ChunkPlace:
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
