"""Symmetries of a graph, permutations of the nodes with equal links before and after; and trees that are turned.

In a torus, in boxes that are alike, and in many networks more, rank numbers are digits of given sides, and to raise a
digit (modulo its side) on all ranks is a symmetry. These rotations take every rank to every other rank in one way. So
the trees of rank 0, turned, are the trees of all ranks, and a link carries as much as all links of its class: the links
to which rotations take it. Trees of rank 0 that use each class within its bandwidth are enough, and a flow to rank 0
bounds the flows to all ranks. No symmetry is believed: each rotation is compared link by link.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import numpy

from gpucoll.internal import SpanningTree
from gpucoll.lab.graphs.link_graph import LinkGraph

Link: TypeAlias = tuple[int, int]
Permutation: TypeAlias = tuple[int, ...]
Option: TypeAlias = tuple[int, tuple[int, ...]]  # a parent, and the classes of links on the way from there
MOST_VISITS = 20_000  # of nodes, in search of a permutation with given images
MOST_LOOKS = 1 << 18  # at links, for the ways from a rank through switches: beyond, no symmetric trees are made


class Rotations(NamedTuple):
    """The sides of the digits, the highest digit first, and for each digit the image of every node."""

    sides: tuple[int, ...]
    images: tuple[Permutation, ...]


def rotations(graph: LinkGraph) -> Rotations | None:
    """Return rotations that take rank 0 to every rank; None if the numbering of the ranks has none.

    >>> from gpucoll.lab.graphs.link_graph import load_graph
    >>> [rotations(load_graph(name)).sides for name in ("torus(3x4)", "dgx_a100(2)", "dgx2(2)")]
    [(3, 4), (2, 8), (2, 8, 2)]
    """
    links = _Links(graph)

    @functools.cache
    def of_digits_from(stride: int) -> Rotations | None:
        if stride == graph.ranks:
            return Rotations((), ())
        for side in (side for side in range(graph.ranks // stride, 1, -1) if graph.ranks // stride % side == 0):
            raised = {rank: rank + stride if rank // stride % side + 1 < side else rank - stride * (side - 1)
                      for rank in range(graph.ranks)}
            image = links.permutation(raised)
            higher = of_digits_from(stride * side) if image is not None else None
            if image is not None and higher is not None:
                return Rotations((*higher.sides, side), (*higher.images, image))
        return None

    return of_digits_from(1)


def representatives(graph: LinkGraph) -> tuple[int, ...]:
    """Return ranks to which rotations take all ranks: what holds for these ranks holds for all."""
    return tuple(range(graph.ranks if rotations(graph) is None else 1))


class _Links:
    """The links of a graph, for the search of permutations: a node follows a neighbour."""

    def __init__(self, graph: LinkGraph) -> None:
        self._graph, self._near = graph, collections.defaultdict[int, set[int]](set)
        for src, dst in graph.edges:
            self._near[src].add(dst)
            self._near[dst].add(src)

    def permutation(self, given: Mapping[int, int]) -> Permutation | None:
        """Return a permutation that keeps the links and has the `given` images; None: not found in `MOST_VISITS`."""
        order, parents = [*given], dict.fromkeys(given, -1)
        for node in order:  # grows: neighbours follow
            order += sorted(self._near[node] - parents.keys())
            parents |= {near: node for near in order[len(parents):]}
        images: dict[int, int] = {}
        stack = [iter([given[order[0]]])]
        for _ in range(MOST_VISITS):
            image = next(stack[-1], None)
            if image is None:
                stack.pop()
                if not stack:
                    break
                images.popitem()
            elif self._fits(order[len(images)], image, images):
                images[order[len(images)]] = image
                if len(images) == len(order):
                    return tuple(images[node] for node in range(len(order)))
                node = order[len(images)]
                stack.append(iter([given[node]] if node in given else
                                  sorted(self._near[images[parents[node]]] - {*images.values()})))
        return None

    def _fits(self, node: int, image: int, images: Mapping[int, int]) -> bool:
        """Return whether a node may move to `image`, after the nodes before."""
        ranks, edges, copying = self._graph.ranks, self._graph.edges, self._graph.multicast
        if (node < ranks, node in copying, len(self._near[node])) != (
                image < ranks, image in copying, len(self._near[image])):
            return False
        return all(edges.get((node, one)) == edges.get((image, images[one]))
                   and edges.get((one, node)) == edges.get((images[one], image))
                   for one in self._near[node] & images.keys())


class Hop(NamedTuple):
    """A way from rank 0 to another rank through switches: the rank, and the classes of its links."""

    rank: int
    classes: tuple[int, ...]


class Symmetric:
    """A graph with rotations; finds trees of rank 0 whose turned copies fill the links."""

    def __init__(self, graph: LinkGraph, turns: Rotations) -> None:
        self.graph: LinkGraph = graph
        self.sides: tuple[int, ...] = turns.sides
        self._digits = numpy.array(numpy.unravel_index(range(graph.ranks), self.sides))
        self._classes, sizes = self._classes_of_links(turns)
        # A class has the bandwidth of all its links, for the trees of all ranks.
        self.budgets: list[Fraction] = [Fraction(0)] * len(sizes)
        for link, number in self._classes.items():
            self.budgets[number] = graph.edges[link].GBps * sizes[number] / graph.ranks
        scale = math.lcm(*(budget.numerator for budget in self.budgets))
        self._weights = [int(scale / budget) for budget in self.budgets]
        self._hops = self._ways()
        self._depth = self._depths() if self._hops else {}
        self._parents = self._options()

    def _classes_of_links(self, turns: Rotations) -> tuple[dict[Link, int], list[int]]:
        classes: dict[Link, int] = {}
        sizes: list[int] = []
        for link in self.graph.edges:
            if link in classes:
                continue
            classes[link], waiting, count = len(sizes), [link], 1
            while waiting:
                src, dst = waiting.pop()
                for image in turns.images:
                    there = image[src], image[dst]
                    if there not in classes:
                        classes[there] = len(sizes)
                        waiting.append(there)
                        count += 1
            sizes.append(count)
        return classes, sizes

    def _ways(self) -> list[Hop]:
        """Return the ways from rank 0 to other ranks through switches, no two alike; none if there are too many."""
        after = self.graph.after()
        found: dict[Hop, None] = {}
        waiting: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0,), ())]
        looked = 0
        while waiting:
            nodes, classes = waiting.pop()
            looked += len(after[nodes[-1]])
            for node in after[nodes[-1]]:
                ahead = (*classes, self._classes[nodes[-1], node])
                if node >= self.graph.ranks and node not in nodes:
                    waiting.append(((*nodes, node), ahead))
                elif 0 < node < self.graph.ranks:
                    found[Hop(node, tuple(sorted(ahead)))] = None
            if looked > MOST_LOOKS:
                return []
        return sorted(found, key=lambda hop: (self._price(hop.classes), hop))

    def _price(self, classes: tuple[int, ...]) -> int:
        """Return the largest share of a class that a way uses, in units of `_weights`."""
        counts = collections.Counter(classes)
        return max(count * self._weights[number] for number, count in counts.items())

    def trees(self, count: int) -> tuple[list[SpanningTree], Fraction]:
        """Return `count` trees of rank 0, and the rate in GB/s of each rank if all ranks have them turned.

        The rate is 0 if there are more ways through switches than are looked at.
        """
        if not self._hops:
            return [], Fraction(0)
        used = [0] * len(self.budgets)  # of each class, times its weight
        chosen: dict[tuple[int, int], Option] = {}
        for tree in range(count):  # ranks without a choice first: the others make up for them
            for rank in sorted(self._parents, key=lambda one: (len(self._parents[one]), self._depth[one])):
                chosen[tree, rank] = self._cheapest(rank, used)
                self._use(used, chosen[tree, rank][1], 1)
        self._even(used, chosen)
        by_depth = sorted(self._parents, key=lambda one: (self._depth[one], one))
        trees = collections.Counter(tuple((chosen[tree, rank][0], rank) for rank in by_depth) for tree in range(count))
        scale = self.budgets[0] * self._weights[0]
        return [SpanningTree(0, share, edges) for edges, share in trees.items()], count * scale / max(used)

    def _depths(self) -> dict[int, int]:
        """Return a depth for each rank: ways of dear classes lead once into each set of ranks that cheaper ways join.

        Without this order, a star would take the network between boxes for each rank of a box.
        """
        prices = sorted({self._price(hop.classes) for hop in self._hops})
        joined = [numpy.arange(self.graph.ranks)]  # for each price the set of each rank, joined by cheaper ways
        for price in prices[:-1]:
            here = joined[-1].copy()
            for hop in self._hops:
                if self._price(hop.classes) == price:
                    for rank, end in enumerate(self._from(hop.rank)):
                        if here[rank] != here[end]:
                            here[here == here[end]] = here[rank]
            joined.append(here)
        tiers = [(prices.index(self._price(hop.classes)), self._from(hop.rank)) for hop in self._hops]
        depths, waiting = {0: 0}, collections.deque([0])
        entered = [{part[0]} for part in joined]
        while waiting:
            rank = waiting.popleft()
            for tier, there in tiers:
                end = there[rank]
                if joined[tier][end] not in entered[tier]:
                    for part, known in zip(joined, entered, strict=True):
                        known.add(part[end])
                    depths[end] = depths[rank] + 1
                    waiting.append(end)
        return depths

    def _options(self) -> dict[int, list[Option]]:
        """Return for each rank but 0 the flattest parent for each kind of way from a rank of less depth."""
        best, depths = dict[tuple[int, tuple[int, ...]], int](), self._depth
        for hop in self._hops:
            for rank, there in enumerate(self._from(hop.rank)):
                key = there, hop.classes
                if there and depths[rank] < depths[there] and depths[rank] < depths[best.get(key, there)]:
                    best[key] = rank
        options: dict[int, list[Option]] = collections.defaultdict(list)
        for (there, classes), rank in best.items():
            options[there].append((rank, classes))
        return options

    def _cheapest(self, rank: int, used: list[int]) -> Option:
        """Return the way to a rank whose fullest class is the least full."""
        return min(self._parents[rank], key=lambda option: self._fullest(option[1], used))

    def _fullest(self, classes: tuple[int, ...], used: list[int]) -> int:
        """Return the use of the fullest class of a way that is taken once more."""
        return max(used[number] + self._weights[number] for number in classes)

    def _use(self, used: list[int], classes: tuple[int, ...], sign: int) -> None:
        for number in classes:
            used[number] += sign * self._weights[number]

    def _even(self, used: list[int], chosen: dict[tuple[int, int], Option]) -> None:
        """Move edges of the fullest class to other ways as long as the fullest class becomes less full."""
        is_moved = True
        while is_moved:
            is_moved = False
            for place, (_, classes) in chosen.items():
                most = max(used)
                if len(self._parents[place[1]]) < 2 or used.index(most) not in classes:
                    continue
                self._use(used, classes, -1)
                other = self._cheapest(place[1], used)
                is_better = self._fullest(other[1], used) < most
                self._use(used, other[1] if is_better else classes, 1)
                if is_better:
                    chosen[place], is_moved = other, True

    def _from(self, offset: int) -> list[int]:
        """Return for each rank the rank to which the rotations take `offset` if they take 0 to the rank."""
        digits = (self._digits + self._digits[:, offset, None]) % numpy.array(self.sides)[:, None]
        there: list[int] = numpy.ravel_multi_index([*digits], self.sides).tolist()
        return there
