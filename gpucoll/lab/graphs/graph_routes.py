"""Routes through a graph of links: the way of each message, and the load of each link.

A message takes a way with the fewest links through switches, or through ranks that forward where no other way exists;
among these a way of the least latency, then of the largest bandwidth of its narrowest link. Equal ways share the bytes
in proportion to their bandwidth.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy

from gpucoll.errors import ArgumentError
from gpucoll.internal import Array
from gpucoll.lab.graphs.link_graph import LinkGraph

MOST_WAYS = 16  # equal ways that share the bytes


class Way(NamedTuple):
    """The way of a pair of ranks: seconds of latency, the links used, and the share of the bytes on each link."""

    alpha: float
    links: Array
    shares: Array


class GraphRoutes:
    """The routes between the ranks of a graph, as the simulator needs."""

    def __init__(self, graph: LinkGraph, size: int) -> None:
        if size != graph.ranks:
            raise ArgumentError(f"graph {graph.name} has {graph.ranks} ranks, not {size}", code="GC-TOPOLOGY")
        self.size: int = size
        self.graph: LinkGraph = graph
        self._numbers = {key: number for number, key in enumerate(graph.edges)}
        self._betas = numpy.array([1e-9 / float(edge.GBps) for edge in graph.edges.values()])
        self.way: Callable[[int, int], Way] = functools.lru_cache(None)(self._found)
        self._through_switches = functools.lru_cache(None)(functools.partial(self._search, only_switches=True))
        self._through_ranks = functools.lru_cache(None)(functools.partial(self._search, only_switches=False))
        self._after = graph.after()

    def gamma(self, src: Array, dst: Array) -> Array:
        """Return the seconds per byte for combining: graphs have links only, so combining takes no time."""
        return numpy.zeros(len(src))

    def fares(self, src: Array, dst: Array, chunks: Array) -> tuple[Array, Array]:
        """Return the costs of messages moving at the same time: seconds, and seconds per byte of a chunk.

        A link takes the time of all its bytes; a message takes the time of the slowest link on its way.
        """
        loads = numpy.zeros(len(self._betas))
        ways = [self.way(int(one), int(other)) for one, other in zip(src, dst, strict=True)]
        for way, count in zip(ways, chunks, strict=True):
            loads[way.links] += way.shares * count
        seconds = loads * self._betas
        return numpy.array([way.alpha for way in ways]), numpy.array([seconds[way.links].max() for way in ways])

    def _found(self, src: int, dst: int) -> Way:
        """Return the way of a pair of ranks: the best ways of a search in order of links, latency and bandwidth."""
        best = self._through_switches(src).get(dst) or self._through_ranks(src)[dst]  # a graph joins all ranks
        widths = numpy.array([float(min(self.graph.edges[link].GBps for link in way)) for way in best])
        used: dict[int, float] = collections.defaultdict(float)
        for way, share in zip(best, widths / widths.sum(), strict=True):
            for link in way:
                used[self._numbers[link]] += share
        latency = sum(float(self.graph.edges[link].us) for link in best[0]) * 1e-6
        return Way(latency, numpy.array([*used], numpy.intp), numpy.array([*used.values()]))

    def _search(self, src: int, *, only_switches: bool) -> dict[int, list[list[tuple[int, int]]]]:
        """Return the equal best ways from a rank to each node, each a list of links; at most `MOST_WAYS` to a node."""
        ways: dict[int, list[list[tuple[int, int]]]] = {src: [[]]}
        found = dict(ways)
        while ways:
            longer: dict[int, list[list[tuple[int, int]]]] = collections.defaultdict(list)
            for node, there in ways.items():
                if node == src or not only_switches or node >= self.graph.ranks:
                    for after in self._after[node]:
                        if after not in found:
                            longer[after] += [[*way, (node, after)] for way in there]
            ways = {node: self._best(there) for node, there in longer.items()}
            found |= ways
        return found

    def _best(self, ways: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        """Return the ways of the least latency among these, of these the widest."""
        def rank(way: list[tuple[int, int]]) -> tuple[object, object]:
            return sum(self.graph.edges[link].us for link in way), -min(self.graph.edges[link].GBps for link in way)

        if len(ways) == 1:
            return ways
        ranks = [*map(rank, ways)]
        least = min(ranks)
        return [way for way, one in zip(ways, ranks, strict=True) if one == least][:MOST_WAYS]

