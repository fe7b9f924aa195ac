"""The time of every rank, wave by wave: waves with costs, and the clock moved by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy

from gpucoll.simulator.routes import AnyRoutes, Array
from gpucoll.simulator.waves import Wave


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
        self.began = numpy.zeros((3, size))
        self.ended = numpy.zeros((3, size))

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
