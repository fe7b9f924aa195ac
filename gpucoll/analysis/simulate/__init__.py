"""Predict how long a schedule takes on a topology: virtual time, in seconds, for any number of ranks.

What time means:

- A rank's round begins when its previous one has ended; its first begins at 0.
- A message moves from when both its ends have begun their rounds. It takes the alpha of the level of links that it
  reaches, and the time of its bytes through the slowest link of its way; nothing is buffered.
- The messages that share a link share its bandwidth: each takes as long as all bytes of its wave through that link.
  A wave is all messages with equally many messages before them on their longest chain (for an algorithm that is
  alike on all ranks: those of a round). Messages of different waves do not slow each other, even where ranks have
  drifted apart so that they overlap; those of one wave do, even where one begins later.
- Several messages of a round from one rank to another are one: they pay one alpha. Those to and from
  several ranks pay theirs at the same time, and one `gap` for each of them after the first.
- A round ends when its last message has ended, and then what it combines has been combined: gamma of the level that
  the operand came by (the innermost for a local one) for every byte. Copies take no time.
- The schedule ends with its last rank.

Hence ``rounds * alpha + path * beta + reduced * gamma``, with the registry's formulas, is what an algorithm alike on
all ranks takes where every pair has a link of its own and messages no gap (the topology ``mesh``); on a switch `sent`
stands for `path`.

Algorithms alike on all ranks are made for all of them at once, up to 2^27 messages (2^22 in a round). Beyond, on one
switch, where all such ranks end each round at the same time, the formulas serve. Any others, and those that heed
a topology's nodes, are replayed rank by rank, up to 2^20 messages (and 1,024 ranks on nodes). What is beyond is
refused.
(one_shot is listed otherwise for all ranks at once: its own operand then counts as one that came. That is the same
where all levels have one gamma.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy

from gpucoll.algorithms import find
from gpucoll.analysis.simulate.routes import Array, Routes
from gpucoll.analysis.simulate.topologies import DEFAULT, Level, Topology, checked, load, names, shipped
from gpucoll.analysis.simulate.waves import Case, NotAlike, Wave, few_enough, one_by_one, together
from gpucoll.errors import ArgumentError

__all__ = ["DEFAULT", "Level", "Prediction", "Topology", "checked", "load", "names", "shipped", "simulate",
           "simulate_sizes"]

MOST_RANKS = 1 << 17


class Prediction(NamedTuple):
    """What is predicted; the last three are the seconds of the chain that the last rank has waited for."""

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    segments: int
    latency: float
    bandwidth: float
    reduction: float

    @property
    def seconds(self) -> float:
        """The time of the whole."""
        return self.latency + self.bandwidth + self.reduction


def simulate(collective: str, algorithm: str, size: int, nbytes: int, topology: Topology | None = None, *,
             root: int = 0, segments: int = 1) -> Prediction:
    """Return the predicted time of `collective` by `algorithm` for `size` ranks.

    `nbytes` is that of the larger of input and output, `topology` by default one switch of equal links. Where the
    topology has nodes, algorithms heed them. Raises ArgumentError for unknown names, and where there are more
    messages than are simulated.

    >>> [round(part, 9) for part in simulate("broadcast", "tree", 3, 10_000)[5:]]  # the root's two share its link
    [2.5e-06, 2e-06, 0.0]
    """
    return simulate_sizes(collective, algorithm, size, [nbytes], topology, root=root, segments=segments)[0]


def simulate_sizes(collective: str, algorithm: str, size: int, sizes: Sequence[int],
                   topology: Topology | None = None, *, root: int = 0, segments: int = 1) -> list[Prediction]:
    """Return a prediction for each of `sizes` in bytes, for little more work than for one; see `simulate`."""
    case, routes = _case(collective, algorithm, size, topology, root, segments)
    chunks = case.schedule(0).chunks
    parts = _run(case, routes, [nbytes / chunks for nbytes in sizes])
    return [Prediction(collective, algorithm, size, nbytes, case.options.get("segments", 1), *times)
            for nbytes, times in zip(sizes, parts, strict=True)]


def _case(collective: str, algorithm: str, size: int, topology: Topology | None, root: int,
          segments: int) -> tuple[Case, Routes]:
    topology = shipped(DEFAULT) if topology is None else checked(topology)
    if size > MOST_RANKS:
        raise ArgumentError(f"{size} ranks are more than the {MOST_RANKS} that are simulated", code="GC-RANKS")
    entry, nodes = find(collective, algorithm), topology.nodes(size)
    case = Case(entry, algorithm, size, entry.given(root, segments, nodes))
    return case, Routes(topology, size)


def _run(case: Case, routes: Routes, chunks: Sequence[float]) -> list[list[float]]:
    """Return what makes up the time for each length of a chunk, by the quickest way that the algorithm allows."""
    if case.size == 1:
        return [[0.0, 0.0, 0.0] for _ in chunks]
    everyone = case.everyone()
    if everyone is not None and few_enough(case):
        with contextlib.suppress(NotAlike):  # rank by rank, then
            return _replayed(case, together(everyone), routes, chunks)
    elif everyone is not None and routes.uniform:
        return _equal(case, routes, chunks)
    return _replayed(case, one_by_one(case), routes, chunks)


def _replayed(case: Case, waves: Iterable[Wave], routes: Routes, chunks: Sequence[float]) -> list[list[float]]:
    clocks = [Clock(case.size, chunk) for chunk in chunks]
    for wave in priced(waves, routes):
        for clock in clocks:
            clock.advance(wave)
    return [clock.parts() for clock in clocks]


def _equal(case: Case, routes: Routes, chunks: Sequence[float]) -> list[list[float]]:
    """Return the same where all ranks are at the same time: on equal links, what the registry's formulas say."""
    count, segments = case.schedule(0).chunks, case.options.get("segments", 1)
    cost, level = case.entry.price(case.size, count, segments), routes.levels[0]
    latency = cost["rounds"] * level.alpha + cost["beside"] * level.gap
    moved = max(cost["sent"], cost["received"])
    return [[latency, moved * level.beta * chunk, cost["reduced"] * level.gamma * chunk] for chunk in chunks]


class Priced(NamedTuple):
    """A wave with its costs: messages, and the ranks whose round ends with it.

    `alpha` is in seconds, `beta` and `gamma` are seconds for every byte of a chunk; `gamma` belongs to `closing`.
    `touching` are the messages of each of `ranks`, those of one rank in a row: so many of `counts`, from `starts` on.
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
        """Return the message of each of `ranks` that ends last."""
        ended = ends[self.touching]
        latest = numpy.flatnonzero(ended == numpy.repeat(numpy.maximum.reduceat(ended, self.starts), self.counts))
        return self.touching[latest[numpy.searchsorted(latest, self.starts)]]


def priced(waves: Iterable[Wave], routes: Routes) -> Iterator[Priced]:
    """Yield the waves with their costs; one with the same messages as the last costs the same."""
    last: Wave | None = None
    for wave in waves:
        if last is None or not all(map(numpy.array_equal, wave, last)):
            last, price = wave, _priced(wave, routes)
        yield price


def _priced(wave: Wave, routes: Routes) -> Priced:
    alpha, beta = routes.fares(wave.src, wave.dst, wave.chunks)
    seconds = routes.gamma(wave.source, wave.reducer) * wave.reduced
    gamma = numpy.bincount(wave.reducer, seconds, routes.size)[wave.closing]
    ends = numpy.concatenate((wave.src, wave.dst))
    ranks, counts = numpy.unique(ends, return_counts=True)
    touching = numpy.argsort(ends, kind="stable") % max(1, len(wave.src))
    starts = counts.cumsum() - counts
    return Priced(wave.src, wave.dst, alpha, beta, wave.closing, gamma, ranks, touching, starts, counts)


class Clock:
    """The time of every rank for one size; rows are the seconds of latency, bandwidth and reduction that make it up.

    They are those of the chain that the rank has waited for: of two ends of a message the later one, of the messages
    of a round the last one.
    """

    def __init__(self, size: int, chunk: float) -> None:
        self.chunk = chunk  # bytes
        self.began = numpy.zeros((3, size))
        self.ended = numpy.zeros((3, size))

    def advance(self, wave: Priced) -> None:
        """Let the messages of `wave` move and its rounds end."""
        if len(wave.src):  # rounds of both ends last until the messages have ended, where they would not anyway
            parts = self._moved(wave)
            ends = total(parts)
            last = wave.last(ends)
            newer = ends[last] >= total(self.ended)[wave.ranks]
            self.ended[:, wave.ranks[newer]] = parts[:, last[newer]]
        self.ended[2, wave.closing] += wave.gamma * self.chunk
        self.began[:, wave.closing] = self.ended[:, wave.closing]

    def _moved(self, wave: Priced) -> Array:
        """Return the parts of the time at which each message ends."""
        began = total(self.began)
        later = numpy.where(began[wave.src] >= began[wave.dst], wave.src, wave.dst)
        parts = self.began.take(later, 1)
        parts[0] += wave.alpha
        parts[1] += wave.beta * self.chunk
        return parts

    def parts(self) -> list[float]:
        """Return what the time of the rank that ends last is made up of."""
        return self.ended[:, total(self.ended).argmax()].tolist()


def total(parts: Array) -> Array:
    """Return the sum of the three parts, always in the same order."""
    return parts[0] + parts[1] + parts[2]
