"""Symmetries of a graph of links: permutations of the nodes with equal links before and after.

An algorithm that is alike under a group of permutations is found by its messages on one rank of each orbit: the search
is smaller by the number of permutations. The group must move every rank, otherwise a permutation that keeps a rank
would ask equal messages of different links of this rank.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import TypeAlias

from gpucoll.analysis.graphs.link_graph import LinkGraph

Permutation: TypeAlias = tuple[int, ...]
TRIED = 16          # permutations tried for each pair of ranks
MOST_VISITS = 20_000  # nodes visited in search of the permutations of a pair


def free_group(graph: LinkGraph) -> list[Permutation]:
    """Return a group of permutations of the nodes that keep the links; all but the identity move every rank.

    >>> from gpucoll.analysis.graphs.link_graph import load_graph
    >>> [len(free_group(load_graph(name))) for name in ("ring(6)", "dgx1", "grid(3)")]
    [6, 4, 1]
    """
    identity = tuple(range(graph.size))
    group, links = [identity], _Links(graph)
    for rank in range(1, graph.ranks):
        if any(one[0] == rank for one in group):
            continue
        for tried, found in enumerate(links.moving(0, rank)):
            larger = _closed([*group, found], graph.ranks)
            if larger is not None:
                group = larger
                break
            if tried >= TRIED:
                break
    return group


def _closed(members: list[Permutation], ranks: int) -> list[Permutation] | None:
    """Return the group made by permutations; None if another than the identity keeps a rank in place."""
    identity = tuple(range(len(members[0])))
    found, waiting = {identity}, [identity]
    while waiting:
        one = waiting.pop()
        for other in members:
            product = tuple(other[node] for node in one)
            if product in found:
                continue
            if any(product[rank] == rank for rank in range(ranks)):
                return None
            found.add(product)
            waiting.append(product)
    return sorted(found)


class _Links:
    """The links of a graph, for the search of permutations: a node follows a neighbour."""

    def __init__(self, graph: LinkGraph) -> None:
        self._graph, self._near = graph, collections.defaultdict[int, set[int]](set)
        for src, dst in graph.edges:
            self._near[src].add(dst)
            self._near[dst].add(src)

    def moving(self, src: int, dst: int) -> Iterator[Permutation]:
        """Yield permutations that keep the links and move node `src` to `dst`, up to a limit of visits."""
        order, waiting = [src], collections.deque([src])
        parents = {src: src}
        while waiting:
            node = waiting.popleft()
            for near in sorted(self._near[node] - parents.keys()):
                parents[near] = node
                order.append(near)
                waiting.append(near)
        visits = 0
        stack: list[tuple[tuple[int, ...], Iterator[int]]] = [((), iter([dst]))]
        while stack:
            images, candidates = stack[-1]
            image = next(candidates, None)
            visits += 1
            if visits > MOST_VISITS:
                return
            if image is None:
                stack.pop()
            elif self._fits(order, images, image):
                longer = (*images, image)
                if len(longer) == len(order):
                    yield tuple(to for _, to in sorted(zip(order, longer, strict=True)))
                    continue
                parent = longer[order.index(parents[order[len(longer)]])]
                stack.append((longer, iter(sorted(self._near[parent] - {*longer}))))

    def _fits(self, order: list[int], images: tuple[int, ...], image: int) -> bool:
        """Return whether the next node of `order` may be moved to `image`, after the nodes before."""
        node, ranks, edges = order[len(images)], self._graph.ranks, self._graph.edges
        if (node < ranks) != (image < ranks) or len(self._near[node]) != len(self._near[image]):
            return False
        return all(edges.get((node, one)) == edges.get((image, to)) and edges.get((one, node)) == edges.get((to, image))
                   for one, to in zip(order, images, strict=False))
