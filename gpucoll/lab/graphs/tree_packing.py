"""Spanning trees that fill the links: trees of given numbers from given roots, within integer capacities.

`pack` grows out-trees edge by edge (Berczi and Frank, 2009; ForestColl, arXiv:2402.06787, section 5.4): an edge joins a
tree, or a part of equal trees, as long as all others can still be completed. `forests` packs trees without direction by
exchanges of edges (Roskind and Tarjan, 1985).
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from gpucoll.internal import SpanningTree
from gpucoll.lab.graphs.max_flow import FlowNetwork
from gpucoll.lab.graphs.switches import Capacities, Demand, neighbours, reached

Unit: TypeAlias = tuple[tuple[int, int], int]  # a pair of ranks, and the number of the link between them


class _Growing(NamedTuple):
    """Equal trees under construction: their number, the depth of each rank reached, and the edges."""

    root: int
    number: int
    depths: dict[int, int]
    edges: tuple[tuple[int, int], ...]


def pack(capacities: Capacities, demand: Demand) -> list[SpanningTree]:
    """Return the demanded trees over all ranks; `capacities` of links between ranks are used up.

    The trees exist if ``demand.is_served(capacities)``. Each tree grows from the ranks nearest to the root, so that
    trees stay flat.
    """
    left = dict(capacities)
    waiting = [_Growing(root, count, {root: 0}, ()) for root, count in demand.roots.items()]
    done: list[SpanningTree] = []
    while waiting:
        demand.check()
        waiting.sort(key=lambda one: (max(one.depths.values()), len(one.edges)))
        tree = waiting.pop(0)
        if len(tree.depths) == demand.ranks:
            done.append(SpanningTree(tree.root, tree.number, tree.edges))
            continue
        parent, child, count = _next_edge(left, tree, waiting, demand)
        left[parent, child] -= count
        if count < tree.number:
            waiting.append(tree._replace(number=tree.number - count))
        waiting.append(_Growing(tree.root, count, tree.depths | {child: tree.depths[parent] + 1},
                                (*tree.edges, (parent, child))))
    return done


def _next_edge(left: Capacities, tree: _Growing, others: list[_Growing], demand: Demand) -> tuple[int, int, int]:
    """Return an edge out of the tree, and the number of trees that can take the edge."""
    edges = sorted((tree.depths[src], -min(capacity, tree.number), (dst - src) % demand.ranks, src, dst)
                   for (src, dst), capacity in left.items()
                   if capacity and src in tree.depths and dst not in tree.depths)
    for _, most, _, src, dst in edges:
        count = _takers(left, (src, dst), others, demand, -most)
        if count:
            return src, dst, count
    raise AssertionError("no edge can be added, although the trees fit")


def _takers(left: Capacities, edge: tuple[int, int], others: list[_Growing], demand: Demand, most: int) -> int:
    """Return for how many trees, at most `most`, an edge can be taken while all others can still be completed.

    The flow along other ways must carry the other trees that have the parent: each tree still to be grown needs an edge
    out of each set that it meets.
    """
    parent, child = edge
    network = FlowNetwork(demand.ranks, {link: capacity for link, capacity in left.items() if capacity})
    # A tree that has the child already asks nothing of other ways to the child. Trees over equal ranks are as one.
    asking: dict[frozenset[int], int] = collections.Counter()
    for other in others:
        if child not in other.depths:
            asking[frozenset(other.depths)] += other.number
    total = sum(asking.values())
    endless = sum(left.values()) + total + 1
    for ranks, number in asking.items():
        node = network.node()
        network.add(parent, node, number)
        for rank in ranks:
            network.add(node, rank, endless)
    return max(0, min(most, network.flow(parent, child, total + most) - total))


def forests(capacities: Capacities, ranks: int, count: int) -> list[SpanningTree] | None:
    """Return `count` spanning trees within the capacities of undirected links; None if they do not fit.

    ``capacities[a, b]`` with a < b is the number of trees with a link between a and b. Roots are the centres.
    """
    units = [(pair, copy) for pair, capacity in sorted(capacities.items()) for copy in range(min(capacity, count))]
    held: list[set[Unit]] = [set() for _ in range(count)]
    for unit in units:
        _insert(unit, held)
    if any(len(one) < ranks - 1 for one in held):
        return None
    trees = collections.Counter(frozenset(pair for pair, _ in one) for one in held)
    return [SpanningTree(root, share, edges) for pairs, share in trees.items()
            for root, edges in [_from_centre(pairs, ranks)]]


def _insert(unit: Unit, held: list[set[Unit]]) -> None:
    """Add a link to one of the forests, if an exchange of links makes room."""
    before: dict[Unit, tuple[Unit, int] | None] = {unit: None}
    waiting = collections.deque([unit])
    while waiting:
        one = waiting.popleft()
        for number, forest in enumerate(held):
            if one in forest:
                continue
            path = _path(forest, *one[0])
            if path is None:
                _exchange(one, number, before, held)
                return
            for other in path:
                if other not in before:
                    before[other] = one, number
                    waiting.append(other)


def _exchange(unit: Unit, number: int, before: dict[Unit, tuple[Unit, int] | None], held: list[set[Unit]]) -> None:
    """Put a link into a forest, and each link that waited for its place into the place."""
    while True:
        held[number].add(unit)
        came = before[unit]
        if came is None:
            return
        waiting, place = came
        held[place].discard(unit)
        unit, number = waiting, place


def _path(forest: set[Unit], one: int, other: int) -> list[Unit] | None:
    """Return the links of a forest between two ranks; None if the forest does not join the ranks."""
    units = {pair: (pair, copy) for pair, copy in forest}
    parents = reached(neighbours(units), one)
    if other not in parents:
        return None
    path = []
    while other != one:
        above = parents[other]
        path.append(units[min(other, above), max(other, above)])
        other = above
    return path


def _from_centre(pairs: Iterable[tuple[int, int]], ranks: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the rank from which a tree is least high, and the edges from this root on."""
    near = neighbours(pairs)

    def height(root: int) -> int:
        depths = {root: 0}
        for rank, parent in [*reached(near, root).items()][1:]:
            depths[rank] = depths[parent] + 1
        return max(depths.values())

    root = min(range(ranks), key=height)
    return root, tuple((parent, rank) for rank, parent in reached(near, root).items() if rank != root)
