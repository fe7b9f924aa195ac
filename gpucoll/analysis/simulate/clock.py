"""Virtual time: when the round of every rank began and ended, and where its time went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy

from gpucoll.analysis.simulate.routes import Array, Routes
from gpucoll.analysis.simulate.waves import Wave


class Parts(NamedTuple):
    """Seconds along a chain of messages: of alpha, of bytes on links, of combining."""

    latency: float
    bandwidth: float
    reduction: float


class Priced(NamedTuple):
    """A wave with its costs: messages, and the ranks whose round ends with it.

    `alpha` is in seconds, `beta` and `gamma` are seconds for every byte of a chunk; `gamma` belongs to `closing`.
    `touching` are the messages of each of `ranks`, a row each; None where some have more of them than others.
    """

    src: Array
    dst: Array
    alpha: Array
    beta: Array
    closing: Array
    gamma: Array
    ranks: Array
    touching: Array | None

    def last(self, ends: Array) -> Array:
        """Return the message of each of `ranks` that ends last."""
        if self.touching is not None and self.touching.shape[1] == 2:
            one, other = self.touching.T
            return numpy.where(ends[one] >= ends[other], one, other)
        if self.touching is not None:
            return self.touching[numpy.arange(len(self.ranks)), ends[self.touching].argmax(1)]
        ranks = numpy.concatenate((self.src, self.dst))
        order = numpy.lexsort((numpy.concatenate((ends, ends)), ranks))
        last = numpy.flatnonzero(numpy.diff(ranks[order], append=-1))
        return order[last] % len(self.src)


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
    touching = None
    if len(counts) and (counts == counts[0]).all():
        touching = (numpy.argsort(ends, kind="stable") % len(wave.src)).reshape(len(ranks), counts[0])
    return Priced(wave.src, wave.dst, alpha, beta, wave.closing, gamma, ranks, touching)


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

    def parts(self) -> Parts:
        """Return what the time of the rank that ends last is made up of."""
        return Parts(*self.ended[:, total(self.ended).argmax()].tolist())


def total(parts: Array) -> Array:
    """Return the sum of the three parts, always in the same order."""
    return parts[0] + parts[1] + parts[2]
