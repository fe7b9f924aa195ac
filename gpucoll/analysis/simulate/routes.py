"""What messages that go together cost: which links each takes, and how much goes through those."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeAlias

import numpy

from gpucoll.analysis.simulate.topologies import Level, Topology

Array: TypeAlias = numpy.ndarray
Uses: TypeAlias = Iterator[tuple[Array, Array]]  # messages, and a link that each of them takes


class Routes:
    """The ways between `size` ranks on a topology.

    A message goes through the innermost level that joins both its ranks. It takes that level's links, and on either
    side those of the switches and buses below, which bound its bandwidth; its alpha is that of the level it reaches.
    """

    def __init__(self, topology: Topology, size: int) -> None:
        self.levels = topology.levels
        self.spans = topology.spans(size)
        self.size = size
        self._alphas = numpy.array([level.alpha for level in self.levels], float)  # a file may have whole numbers
        self._gammas = numpy.array([level.gamma for level in self.levels], float)
        self._gaps = numpy.array([level.gap for level in self.levels], float)

    @property
    def uniform(self) -> bool:
        """Whether every rank has one equal link, to one switch."""
        return len(self.levels) == 1 and self.levels[0].medium == "switch"

    def reach(self, src: Array, dst: Array) -> Array:
        """Return the index of the level that each message reaches."""
        reached = numpy.zeros(len(src), numpy.intp)
        for span in self.spans[:-1]:
            reached += src // span != dst // span
        return reached

    def gamma(self, src: Array, dst: Array) -> Array:
        """Return the seconds per byte that `dst` combines with what came from `src`."""
        return self._gammas[self.reach(src, dst)]

    def fares(self, src: Array, dst: Array, chunks: Array) -> tuple[Array, Array]:
        """Return what these messages cost when all of them go at the same time: seconds, and seconds for every byte
        of a chunk.

        Those on one link share its bandwidth, so that each takes as long as all of their bytes; the slowest link of
        its way is what a message takes. Those of one rank leave it, and reach it, one gap after the other: each is as
        late as the last of them.
        """
        reached = self.reach(src, dst)
        alpha, beta = self._alphas[reached], numpy.zeros(len(src))
        if self._gaps.any():
            alpha += self._gaps[reached] * self._beside(src, dst)
        for index, level in enumerate(self.levels):
            crossing, passing = numpy.flatnonzero(reached == index), numpy.flatnonzero(reached > index)
            uses = [*self._uses(index, src, dst, crossing, passing)]
            if uses:
                loads = numpy.bincount(numpy.concatenate([links for _, links in uses]),
                                       numpy.concatenate([chunks[messages] for messages, _ in uses]))
            for messages, links in uses:
                beta[messages] = numpy.maximum(beta[messages], loads[links] * level.beta)
                alpha[messages] += level.hop
            alpha[crossing] -= level.hop
        return alpha, beta

    def _beside(self, src: Array, dst: Array) -> Array:
        """Return for each message to or from how many more ranks one of its ends has others."""
        pairs = numpy.unique(src * self.size + dst)  # several messages of a pair are one
        to, of = (numpy.bincount(ranks, minlength=self.size) for ranks in numpy.divmod(pairs, self.size))
        return numpy.maximum(to[src], of[dst]) - 1

    def _uses(self, index: int, src: Array, dst: Array, crossing: Array, passing: Array) -> Uses:
        """Yield which messages take which links of a level; `crossing` go no further, `passing` go beyond."""
        level, span = self.levels[index], self.spans[index]
        below = self.spans[index - 1] if index else 1
        if level.medium == "switch":
            both = numpy.concatenate((crossing, passing))
            yield both, 2 * _port(src[both], below, level.links)
            yield both, 2 * _port(dst[both], below, level.links) + 1
        elif level.medium == "bus":
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
    """Return the link of its unit that each rank uses. The ranks of a unit are dealt evenly to its links.

    Links beyond one for each rank stay idle. They get no number, because the loads are an array over all numbers.
    """
    links = min(links, below)
    return rank // below * links + rank % below * links // below


@functools.cache
def squarest(number: int, dimensions: int) -> tuple[int, ...]:
    """Return `dimensions` factors of `number`, the largest first, as near to each other as can be.

    >>> squarest(24, 2), squarest(24, 3), squarest(7, 2)
    ((6, 4), (4, 3, 2), (7, 1))
    """
    if dimensions == 1:
        return (number,)
    shapes = [(*squarest(number // least, dimensions - 1), least) for least in range(1, number + 1)
              if number % least == 0 and least ** dimensions <= number]
    return min((shape for shape in shapes if min(shape) == shape[-1]), key=max)


def _hops(src: Array, dst: Array, units: int, level: Level) -> Uses:
    """Yield, link after link, which messages take which link: along the row first, each time the shorter way round."""
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


def _along(place: Array, hops: Array, step: Array, length: int) -> Uses:
    """Yield, hop after hop, who moves on along a ring of `length`, and from where."""
    moving = numpy.flatnonzero(hops)
    at, step, hops = place[moving], step[moving], hops[moving]
    while len(moving):
        yield moving, at
        at, hops = (at + step) % length, hops - 1
        if not hops.all():
            further = numpy.flatnonzero(hops)
            moving, at, step, hops = moving[further], at[further], step[further], hops[further]
