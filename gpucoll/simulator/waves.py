"""A schedule as waves: messages moving together, and the rounds ending with these messages.

Wave d holds the messages with d predecessors on their longest chain: a message is one deeper than the deepest earlier
round of sender and receiver. In a symmetric algorithm, the same on all ranks, the wave is the round, and all ranks are
made at once. For other algorithms the schedules of all ranks are replayed one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.algorithms import Algorithm, all_ranks, schedule
from gpucoll.core.schedule import Copy, RecvReduce, Reduce, Round, Schedule, Send
from gpucoll.errors import ArgumentError
from gpucoll.simulator.routes import AnyRoutes, Array
from gpucoll.verify.symbolic import Turn, replay

TOGETHER = 1 << 27  # limit of messages, all ranks made at once
MESSAGES_AT_ONCE = 1 << 22  # limit of messages in one round, all ranks made at once
ONE_BY_ONE = 1 << 20  # limit of messages, ranks replayed one by one
ON_NODES = 1 << 10  # limit of ranks on nodes: each rank's schedule reads the nodes of all ranks, so time is quadratic


class NotAlike(Exception):
    """In a symmetric algorithm some ranks have fewer messages in a round than others, so a wave is not a round."""


class Scenario(NamedTuple):
    """A case to simulate: an algorithm, the requested name with parameters, and the options."""

    entry: Algorithm
    name: str
    size: int
    options: dict[str, Any]  # of root, segments and nodes: the options accepted by the algorithm

    def schedule(self, rank: int) -> Schedule:
        """Return the schedule of `rank`."""
        return schedule(self.entry.collective, self.name, rank=rank, size=self.size, **self.options)

    def everyone(self) -> Schedule | None:
        """Return the schedule of all ranks, made at once; None for an asymmetric algorithm or with nodes."""
        return None if self.options.get("nodes") is not None else all_ranks(
            self.entry.collective, self.name, size=self.size, segments=self.options.get("segments", 1))


class Wave(NamedTuple):
    """One wave: messages of `chunks` from `src` to `dst`; reductions; and `closing`, the ranks ending a round.

    A reduction combines `reduced` chunks from rank `source` on rank `reducer`.
    """

    src: Array
    dst: Array
    chunks: Array
    reducer: Array
    source: Array
    reduced: Array
    closing: Array


def together(everyone: Schedule) -> Iterator[Wave]:
    """Yield the waves of all ranks' schedule; raise NotAlike if the numbers of messages differ between ranks."""
    ranks, before = numpy.arange(everyone.size), numpy.zeros(0)
    for steps in everyone:
        # Equal sends as in the previous round need no second check.
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
            known = totals.setdefault(_same(peer, seen), [peer, 0])  # steps with equal peers form one message
            known[1] = known[1] + step[0].count
    rows = []
    for peer, chunks in totals.values():
        row = numpy.stack(numpy.broadcast_arrays(ranks, peer, chunks))
        rows.append(row[:, row[2] > 0] if numpy.ndim(chunks) else row)  # an entry 0: no such step
    return numpy.concatenate(rows, axis=1) if rows else numpy.zeros((3, 0), numpy.intp)


def _same(peer: Any, seen: dict[int, bytes]) -> object:
    """Return a key, equal for equal peers; `seen` caches the keys of arrays by identity."""
    if not isinstance(peer, numpy.ndarray):
        return peer
    if id(peer) not in seen:
        seen[id(peer)] = peer.tobytes()
    return seen[id(peer)]


def few_enough(case: Scenario) -> bool:
    """Return whether the messages of all ranks, estimated from rank 0, are within the limits for all at once."""
    total = 0
    for posts in _posts(case, 0):
        total += posts // 2 * case.size
        if total > TOGETHER or posts // 2 * case.size > MESSAGES_AT_ONCE:
            return False
    return True


def _posts(case: Scenario, rank: int) -> Iterator[int]:
    """Yield the number of sends and receives of `rank` in each round: a message may be of many slices."""
    for steps in case.schedule(rank):
        yield sum(not isinstance(step, Copy | Reduce) for step in steps)


def _counted(case: Scenario, rank: int, most: int) -> int:
    """Return the number of messages sent and received by `rank`; stop counting above `most`."""
    total = 0
    for posts in _posts(case, rank):
        total += posts
        if total > most:
            break
    return total


def one_by_one(case: Scenario) -> Iterator[Wave]:
    """Yield the waves of any algorithm; raise ArgumentError if a sample of ranks predicts too many messages."""
    if case.options.get("nodes") is not None and case.size > ON_NODES:
        raise ArgumentError(f"the algorithm depends on nodes, so at most {ON_NODES} ranks can be "
                            "simulated", code="GC-SIMULATE")
    if case.size > ONE_BY_ONE >> 2:
        raise ArgumentError(f"more than {ONE_BY_ONE >> 20} Mi messages: ask for fewer ranks or segments",
                            code="GC-SIMULATE")
    # Counting the messages of all ranks would take as long as the replay: the median of a sample decides.
    some = sorted({*range(0, case.size, -(-case.size // 8)), case.size - 1})
    most = 2 * ONE_BY_ONE // case.size
    if sorted(_counted(case, rank, most) for rank in some)[(len(some) - 1) // 2] > most:
        raise ArgumentError(f"more than {TOGETHER >> 20} Mi messages ({ONE_BY_ONE >> 20} Mi where ranks are not "
                            "alike): ask for fewer ranks or segments", code="GC-SIMULATE")
    yield from waves_of([case.schedule(rank) for rank in range(case.size)])


def waves_of(schedules: Sequence[Schedule]) -> Iterator[Wave]:
    """Yield the waves of the schedules of all ranks."""
    log = _Log(len(schedules))
    replay(schedules, log)
    yield from log.waves()


class _Log:
    """The observer of a replay, noting the wave of every message, reduction and end of a round.

    A round without messages ends in the wave of the previous round, after the previous round.
    """

    def __init__(self, size: int) -> None:
        self._steps: list[Round] = [()] * size
        # By wave: (sender, receiver, chunks) of messages; (rank, peer, chunks) of reductions; (rank,) of ended rounds.
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


# ---------------------------------------------------------------- the time of every rank, wave by wave

class Priced(NamedTuple):
    """A wave with costs: messages, and `closing`, the ranks ending a round with the wave.

    `alpha` is in seconds; `beta` and `gamma` are in seconds per byte of a chunk. `gamma` has an entry per rank of
    `closing`. The messages of ``ranks[i]`` are ``touching[starts[i]:starts[i] + counts[i]]``.
    """

    src: Array
    dst: Array
    alpha: Array
    beta: Array
    closing: Array
    gamma: Array
    ranks: Array
    touching: Array
    starts: Array
    counts: Array

    def last(self, ends: Array) -> Array:
        """Return the last message to end, for each of `ranks`; `ends` are the times of the messages."""
        ended = ends[self.touching]
        latest = numpy.flatnonzero(ended == numpy.repeat(numpy.maximum.reduceat(ended, self.starts), self.counts))
        return self.touching[latest[numpy.searchsorted(latest, self.starts)]]


def priced(waves: Iterable[Wave], routes: AnyRoutes) -> Iterator[Priced]:
    """Yield the waves with costs; a wave equal to the previous wave reuses the previous costs."""
    last: Wave | None = None
    for wave in waves:
        if last is None or not all(map(numpy.array_equal, wave, last)):
            last, price = wave, _priced(wave, routes)
        yield price


def _priced(wave: Wave, routes: AnyRoutes) -> Priced:
    alpha, beta = routes.fares(wave.src, wave.dst, wave.chunks)
    seconds = routes.gamma(wave.source, wave.reducer) * wave.reduced
    gamma = numpy.bincount(wave.reducer, seconds, routes.size)[wave.closing]
    ends = numpy.concatenate((wave.src, wave.dst))
    ranks, counts = numpy.unique(ends, return_counts=True)
    touching = numpy.argsort(ends, kind="stable") % max(1, len(wave.src))
    starts = counts.cumsum() - counts
    return Priced(wave.src, wave.dst, alpha, beta, wave.closing, gamma, ranks, touching, starts, counts)


class Clock:
    """The time of every rank for one size, as three rows: seconds of latency, bandwidth and reduction.

    The rows belong to the chain determining the rank's time: the later rank of each message, the last message of each
    round.
    """

    def __init__(self, size: int, chunk: float) -> None:
        self.chunk = chunk  # bytes
        self.began: Any = numpy.zeros((3, size))
        self.ended: Any = numpy.zeros((3, size))

    def advance(self, wave: Priced) -> None:
        """Move the messages of `wave`, and end the rounds of the closing ranks."""
        if len(wave.src):  # extend the rounds of both ranks to the end of the last message
            parts = self._moved(wave)
            ends = total(parts)
            last = wave.last(ends)
            # A rank's round may span several waves before closing: keep the parts of the latest end.
            newer = ends[last] >= total(self.ended)[wave.ranks]
            self.ended[:, wave.ranks[newer]] = parts[:, last[newer]]
        self.ended[2, wave.closing] += wave.gamma * self.chunk
        self.began[:, wave.closing] = self.ended[:, wave.closing]

    def _moved(self, wave: Priced) -> Array:
        """Return the time at the end of each message, in parts."""
        began = total(self.began)
        # Nothing is buffered: a message starts with the later of its two ranks.
        later = numpy.where(began[wave.src] >= began[wave.dst], wave.src, wave.dst)
        parts = self.began.take(later, 1)
        parts[0] += wave.alpha
        parts[1] += wave.beta * self.chunk
        return parts

    def parts(self) -> list[float]:
        """Return latency, bandwidth and reduction of the last rank to end."""
        return self.ended[:, total(self.ended).argmax()].tolist()


def total(parts: Array) -> Array:
    """Return the sum of the three parts, always added in one order: equal parts give equal floats."""
    return parts[0] + parts[1] + parts[2]
