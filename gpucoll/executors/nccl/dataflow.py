"""A plan as a program for two streams: messages on the first, and what may run beside them on the second.

Pure: it knows spans, not memory. Every round's staging lies in one of two halves in turn, so that what came in one
round is combined while the next round's messages come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gpucoll.executors import Message, Plan, PlannedRound, Span, Write


class Exchange(NamedTuple):
    """Messages that are under way together."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Combine: TypeAlias = tuple[Write, ...]


@dataclass
class Node:
    """One thing to enqueue: on the second stream where `side`, after node `after` of the other one.

    `awaited`: a node of the other stream waits for it.
    """

    work: Exchange | Combine
    side: bool = False
    after: int | None = None
    awaited: bool = False


class StreamProgram(NamedTuple):
    """The nodes in the order in which they are enqueued; all of the second stream's are awaited in the end."""

    nodes: tuple[Node, ...]


def program(plan: Plan) -> StreamProgram:
    """Return the program of `plan`; what conflicts is ordered, and nothing else."""
    works = [work for number, planned in enumerate(plan.rounds)
             for work in _works(_in_half(planned, number % 2 * plan.staging))]
    nodes = [Node(work, _may_run_beside(works, number)) for number, work in enumerate(works)]
    if any(node.side for node in nodes):
        nodes.append(Node(()))  # where the first stream meets the second in the end
    _order(nodes)
    return StreamProgram(tuple(nodes))


def _in_half(planned: PlannedRound, shift: int) -> PlannedRound:
    """Return the round with its staging moved by `shift` elements."""
    def move(span: Span) -> Span:
        return Span("staging", span.start + shift, span.stop + shift) if span.buffer == "staging" else span

    return planned._replace(
        receives=tuple(Message(m.peer, move(m.span)) for m in planned.receives),
        snapshots=tuple((source, move(kept)) for source, kept in planned.snapshots),
        writes=tuple(Write(w.dst, move(w.base), tuple(map(move, w.operands)), w.needs) for w in planned.writes))


def _works(planned: PlannedRound) -> Iterator[Exchange | Combine]:
    """Yield a round's snapshots, groups of messages and writes; several groups where its messages pair up."""
    if planned.snapshots:
        yield tuple(Write(kept, source, (), 0) for source, kept in planned.snapshots)
    pairs = _pairs(planned)
    done = 0
    for come in range(1, pairs + 1) if pairs else [len(planned.receives)]:
        first = come - 1 if pairs else 0
        sends = planned.sends[first:come] if pairs else planned.sends
        if sends or planned.receives[first:come]:
            yield Exchange(sends, planned.receives[first:come])
        ready = tuple(write for write in planned.writes
                      if done < write.needs <= come or (not first and not write.needs))
        done = come
        if ready:
            yield ready


def _pairs(planned: PlannedRound) -> int:
    """Return how many pairs of one send and one receive the round is; 0 where it is not made of such.

    All sends go to one peer and all receives come from one, so that every rank of a ring forms the same pairs.
    """
    one_way = len({m.peer for m in planned.sends}) == 1 == len({m.peer for m in planned.receives})
    alike = len(planned.sends) == len(planned.receives) > 1
    return len(planned.sends) if one_way and alike and not planned.hold else 0


def _may_run_beside(works: list[Exchange | Combine], number: int) -> bool:
    """Return whether a combination follows messages, and does not touch those that come next."""
    if isinstance(works[number], Exchange) or not number or not isinstance(works[number - 1], Exchange):
        return False
    following = next((work for work in works[number + 1:] if isinstance(work, Exchange)), None)
    return following is not None and not _conflict(works[number], following)


def _order(nodes: list[Node]) -> None:
    """Say for each node which one of the other stream it must follow; later ones imply earlier ones."""
    met = -1  # the last node of the second stream that the first one has waited for
    for number, node in enumerate(nodes):
        if node.side:
            node.after = number - 1
        else:
            beside = [other for other in range(met + 1, number) if nodes[other].side]
            last = node.work == ()
            node.after = next((other for other in reversed(beside) if last or _conflict(nodes[other].work, node.work)),
                              None)
            met = met if node.after is None else node.after
        if node.after is not None:
            nodes[node.after].awaited = True


def _conflict(a: Exchange | Combine, b: Exchange | Combine) -> bool:
    """Return whether one writes what the other touches."""
    (reads, writes), (others_reads, others_writes) = _touched(a), _touched(b)
    return (_meet(writes, others_reads + others_writes) or _meet(reads, others_writes))


def _touched(work: Exchange | Combine) -> tuple[list[Span], list[Span]]:
    """Return what `work` reads and what it writes."""
    if isinstance(work, Exchange):
        return [m.span for m in work.sends], [m.span for m in work.receives]
    return [span for write in work for span in (write.base, *write.operands)], [write.dst for write in work]


def _meet(some: list[Span], others: list[Span]) -> bool:
    return any(a.buffer == b.buffer and a.start < b.stop and b.start < a.stop for a in some for b in others)
