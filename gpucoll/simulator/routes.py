"""Costs of messages moving together: the links used by each message, and the load of each link."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy

from gpucoll.core.dtypes import Array
from gpucoll.simulator.topologies import Level, Topology

LinkUses: TypeAlias = Iterator[tuple[Array, Array]]  # indices of messages, and one link used by each of the messages


class AnyRoutes(Protocol):
    """The routes between `size` ranks on any links; `Routes` has the meaning of the methods."""

    size: int

    def gamma(self, src: Array, dst: Array) -> Array: ...
    def fares(self, src: Array, dst: Array, chunks: Array) -> tuple[Array, Array]: ...


class Routes:
    """The routes between `size` ranks on a topology.

    A message crosses the innermost level joining sender and receiver, and pays the alpha of this level. The message
    uses links of this level and, on both sides, links of switches and buses of the levels below. The slowest link used
    bounds the bandwidth.
    """

    def __init__(self, topology: Topology, size: int) -> None:
        self.levels: tuple[Level, ...] = topology.levels
        self.uniform: bool = topology.is_uniform
        self.spans: tuple[int, ...] = topology.spans(size)
        self.size = size
        # float: a TOML file may have integers
        self._alphas = numpy.array([level.alpha for level in self.levels], float)
        self._gammas = numpy.array([level.gamma for level in self.levels], float)
        self._gaps = numpy.array([level.gap for level in self.levels], float)

    def reach(self, src: Array, dst: Array) -> Array:
        """Return, for each message, the index of the innermost level joining both ranks."""
        reached = numpy.zeros(len(src), numpy.intp)
        for span in self.spans[:-1]:
            reached += src // span != dst // span
        return reached

    def gamma(self, src: Array, dst: Array) -> Array:
        """Return the seconds per byte for combining, on `dst`, data received from `src`."""
        return self._gammas[self.reach(src, dst)]

    def fares(self, src: Array, dst: Array, chunks: Array) -> tuple[Array, Array]:
        """Return the costs of messages moving at the same time: seconds, and seconds per byte of a chunk.

        Messages on one link share the bandwidth: each takes the time of all bytes on the link. The slowest link used
        counts. A rank's messages leave, and arrive, one gap apart; each message is charged the delay of the last.
        """
        reached = self.reach(src, dst)
        alpha, beta = self._alphas[reached], numpy.zeros(len(src))
        if self._gaps.any():
            alpha += self._gaps[reached] * self._concurrent(src, dst)
        for index, level in enumerate(self.levels):
            crossing, passing = numpy.flatnonzero(reached == index), numpy.flatnonzero(reached > index)
            uses = [*self._uses(index, src, dst, crossing, passing)]
            if uses:
                loads = numpy.bincount(numpy.concatenate([links for _, links in uses]),
                                       numpy.concatenate([chunks[messages] for messages, _ in uses]))
            for messages, links in uses:
                beta[messages] = numpy.maximum(beta[messages], loads[links] * level.beta)
                alpha[messages] += level.hop
            # `alpha` includes the first link, so only the links after the first cost a hop.
            alpha[crossing] -= level.hop
        return alpha, beta

    def _concurrent(self, src: Array, dst: Array) -> Array:
        """Return for each message the number of gaps: further receivers of the sender, or senders to the receiver.

        The larger of both numbers counts.
        """
        pairs = numpy.unique(src * self.size + dst)  # several messages between two ranks count as one
        to, of = (numpy.bincount(ranks, minlength=self.size) for ranks in numpy.divmod(pairs, self.size))
        return numpy.maximum(to[src], of[dst]) - 1

    def _uses(self, index: int, src: Array, dst: Array, crossing: Array, passing: Array) -> LinkUses:
        """Yield messages with the links used at level `index`.

        Messages in `crossing` are joined by this level; messages in `passing` continue to a level further out.
        """
        level, span = self.levels[index], self.spans[index]
        below = self.spans[index - 1] if index else 1
        if level.medium == "switch":
            both = numpy.concatenate((crossing, passing))
            yield both, 2 * _port(src[both], below, level.links)
            yield both, 2 * _port(dst[both], below, level.links) + 1
        elif level.medium == "bus":
            # A message inside the group uses the bus once; a message passing on also uses the receiving side's bus.
            yield numpy.concatenate((crossing, passing)), src[numpy.concatenate((crossing, passing))] // span
            yield passing, dst[passing] // span
        elif level.medium == "mesh":
            pairs = src[crossing] // below * self.size + dst[crossing] // below
            yield crossing, numpy.unique(pairs, return_inverse=True)[1]
        elif len(crossing):
            units = -(-min(span, self.size) // below)
            for which, links in _hops(src[crossing] // below, dst[crossing] // below, units, level):
                yield crossing[which], links


def _port(rank: Array, below: int, links: int) -> Array:
    """Return the link used by each rank; the ranks of a unit are spread evenly over the unit's links.

    Links beyond one per rank stay idle and get no number, because the loads are an array indexed by link number.
    """
    links = min(links, below)
    return rank // below * links + rank % below * links // below


@functools.cache
def squarest(number: int, dimensions: int) -> tuple[int, ...]:
    """Return `dimensions` factors of `number`, the largest first, with the smallest possible largest factor.

    >>> squarest(24, 2), squarest(24, 3), squarest(7, 2)
    ((6, 4), (4, 3, 2), (7, 1))
    """
    if dimensions == 1:
        return (number,)
    shapes = [(*squarest(number // least, dimensions - 1), least) for least in range(1, number + 1)
              if number % least == 0 and least ** dimensions <= number]
    return min((shape for shape in shapes if min(shape) == shape[-1]), key=max)


def _hops(src: Array, dst: Array, units: int, level: Level) -> LinkUses:
    """Yield messages with the torus links used, hop by hop: dimension by dimension, the last dimension first.

    In each dimension a message takes the shorter way round.
    """
    here, there = src % units, dst % units
    shape, stride = squarest(units, level.dimensions), 1
    for axis, length in enumerate(reversed(shape)):
        place = here // stride % length
        ahead = (there // stride - place) % length
        up = 2 * ahead <= length
        start = src // units * units + here - place * stride
        for moving, at in _along(place, numpy.where(up, ahead, length - ahead), numpy.where(up, 1, -1), length):
            yield moving, ((start[moving] + at * stride) * len(shape) + axis) * 2 + up[moving]
        here = here + ((place + ahead) % length - place) * stride
        stride *= length


def _along(place: Array, hops: Array, step: Array, length: int) -> LinkUses:
    """Yield, hop by hop, the messages still moving along a ring of `length`, and the places left by the messages."""
    moving = numpy.flatnonzero(hops)
    at, step, hops = place[moving], step[moving], hops[moving]
    while len(moving):
        yield moving, at
        at, hops = (at + step) % length, hops - 1
        if not hops.all():
            further = numpy.flatnonzero(hops)
            moving, at, step, hops = moving[further], at[further], step[further], hops[further]
