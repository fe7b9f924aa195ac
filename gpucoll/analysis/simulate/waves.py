"""A schedule as waves: the messages that go together, and the rounds that end with them.

Wave d holds the messages with d messages before them on their longest chain: a message is one deeper than the deepest
of the rounds before it on either side. In an algorithm that is alike on all ranks that is its round, and all ranks are
made at once; for any other the schedules of all ranks are replayed one by one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy

from gpucoll.algorithms import Algorithm, all_ranks, schedule
from gpucoll.analysis.simulate.routes import Array
from gpucoll.core.schedule import Copy, RecvReduce, Reduce, Round, Schedule, Send
from gpucoll.errors import ArgumentError
from gpucoll.verify.symbolic import Turn, replay

TOGETHER = 1 << 27  # messages of all ranks made at once
AT_ONCE = 1 << 22  # messages of one round of those
ONE_BY_ONE = 1 << 20  # messages of schedules that are replayed
ON_NODES = 1 << 10  # ranks of those that heed nodes: each of them looks at all ranks' nodes


class NotAlike(Exception):
    """Some ranks of an algorithm that is alike on all wait for a message where others do not."""


class Case(NamedTuple):
    """What is simulated: an algorithm under the name that it was asked for by, and how."""

    entry: Algorithm
    name: str
    size: int
    options: dict[str, Any]  # those of root, segments and nodes that it takes

    def schedule(self, rank: int) -> Schedule:
        """Return what `rank` does."""
        return schedule(self.entry.collective, self.name, rank=rank, size=self.size, **self.options)

    def everyone(self) -> Schedule | None:
        """Return what all ranks do, made at once; None where they are not alike."""
        return None if self.options.get("nodes") is not None else all_ranks(
            self.entry.collective, self.name, size=self.size, segments=self.options.get("segments", 1))


class Wave(NamedTuple):
    """Messages of `chunks` from `src` to `dst`; what is combined: by whom, with what from whom; whose rounds end."""

    src: Array
    dst: Array
    chunks: Array
    reducer: Array
    source: Array
    reduced: Array
    closing: Array


def together(everyone: Schedule) -> Iterator[Wave]:
    """Yield the waves of what all ranks do; raise NotAlike where not all have as many messages."""
    ranks, before = numpy.arange(everyone.size), numpy.zeros(0)
    for steps in everyone:
        sends = ends(steps, Send, ranks)
        if not numpy.array_equal(before, sends):
            if len(numpy.unique(numpy.bincount(sends[:2].ravel(), minlength=everyone.size))) > 1:
                raise NotAlike
            before = sends
        combined = numpy.concatenate((ends(steps, RecvReduce, ranks), ends(steps, Reduce, ranks)), axis=1)
        yield Wave._make([*sends, *combined, ranks])


def ends(steps: Round, kind: object, ranks: Array) -> Array:
    """Return rows of rank, peer and chunks of the steps of `kind`; a local step's peer is its own rank."""
    seen: dict[int, bytes] = {}
    totals: dict[object, list[Any]] = {}
    for step in steps:
        if isinstance(step, kind):  # type: ignore[arg-type] # a type or several
            peer = ranks if isinstance(step, Copy | Reduce) else step.peer
            known = totals.setdefault(_same(peer, seen), [peer, 0])  # the pieces of one message have one peer
            known[1] = known[1] + step[0].count
    rows = []
    for peer, chunks in totals.values():
        row = numpy.stack(numpy.broadcast_arrays(ranks, peer, chunks))
        rows.append(row[:, row[2] > 0] if numpy.ndim(chunks) else row)  # an array may say that a rank has no such step
    return numpy.concatenate(rows, axis=1) if rows else numpy.zeros((3, 0), numpy.intp)


def _same(peer: Any, seen: dict[int, bytes]) -> object:
    """Return what equal peers have in common; those that are one object are looked at once."""
    if not isinstance(peer, numpy.ndarray):
        return peer
    if id(peer) not in seen:
        seen[id(peer)] = peer.tobytes()
    return seen[id(peer)]


def few_enough(case: Case) -> bool:
    """Return whether all ranks at once are few enough messages, should they be alike."""
    total = 0
    for posts in _posts(case, 0):
        total += posts // 2 * case.size
        if total > TOGETHER or posts // 2 * case.size > AT_ONCE:
            return False
    return True


def _posts(case: Case, rank: int) -> Iterator[int]:
    """Yield how many messages `rank` sends and receives in each of its rounds."""
    for steps in case.schedule(rank):
        yield len({(isinstance(step, Send), step.peer) for step in steps if not isinstance(step, Copy | Reduce)})


def _counted(case: Case, rank: int, most: int) -> int:
    """Return how many messages `rank` sends and receives; where there are more than `most`, any number above it."""
    total = 0
    for posts in _posts(case, rank):
        total += posts
        if total > most:
            break
    return total


def one_by_one(case: Case) -> Iterator[Wave]:
    """Yield the waves of any algorithm; ArgumentError where there are far more than ONE_BY_ONE messages."""
    if case.options.get("nodes") is not None and case.size > ON_NODES:
        raise ArgumentError(f"more than {ON_NODES} ranks, whose nodes it heeds", code="GC-SIMULATE")
    some = sorted({*range(0, case.size, -(-case.size // 8)), case.size - 1})  # which stand for all of them
    most = 2 * ONE_BY_ONE // case.size
    if statistics.median_low(_counted(case, rank, most) for rank in some) > most:
        raise ArgumentError(f"more than {TOGETHER >> 20} Mi messages ({ONE_BY_ONE >> 20} Mi where ranks are not "
                            "alike): ask for fewer ranks or segments", code="GC-SIMULATE")
    log = _Log(case.size)
    replay([case.schedule(rank) for rank in range(case.size)], log)
    yield from log.waves()


class _Log:
    """The observer of a replay: writes down in which wave everything happens.

    A round without messages ends in the wave of the one before it, after it.
    """

    def __init__(self, size: int) -> None:
        self._steps: list[Round] = [()] * size
        # By wave: sender, receiver and chunks of messages; rank, peer and chunks of what is combined; whose rounds end.
        self._rows: dict[Turn, tuple[list[Any], list[Any], list[Any]]] = defaultdict(lambda: ([], [], []))

    def begin(self, rank: int, steps: Round) -> None:
        self._steps[rank] = steps

    def meet(self, turn: Turn, sender: int, sent: int, receiver: int, received: int) -> None:
        self._rows[turn][0].append((sender, receiver, self._steps[sender][sent][0].count))

    def finish(self, turn: Turn, rank: int) -> None:
        for step in self._steps[rank]:
            if isinstance(step, RecvReduce | Reduce):
                self._rows[turn][1].append((rank, step.peer if isinstance(step, RecvReduce) else rank, step.dst.count))
        self._rows[turn][2].append((rank,))

    def waves(self) -> Iterator[Wave]:
        for _, (messages, reductions, closings) in sorted(self._rows.items(), key=lambda row: row[0]):
            yield Wave(*_columns(messages, 3), *_columns(reductions, 3), *_columns(closings, 1))


def _columns(rows: list[tuple[int, ...]], width: int) -> Array:
    return numpy.array(rows, numpy.intp).reshape(-1, width).T
