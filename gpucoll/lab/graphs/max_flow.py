"""Maximum flow between two nodes, in whole numbers, by Dinic's algorithm; and the minimum cut that limits the flow."""

from __future__ import annotations

import collections
from collections.abc import Mapping


class FlowNetwork:
    """Nodes and directed edges with integer capacities; reused for many flows.

    >>> pair = FlowNetwork(3, {(0, 1): 5, (1, 2): 3})
    >>> pair.flow(0, 2), sorted(pair.side(0))
    (3, [0, 1])
    """

    def __init__(self, size: int, capacities: Mapping[tuple[int, int], int] | None = None) -> None:
        self.capacity: list[int] = []  # of edge 2 i; edge 2 i + 1 leads back and has none
        self._left: list[int] = []
        self._head: list[int] = []
        self._out: list[list[int]] = [[] for _ in range(size)]
        for edge, capacity in (capacities or {}).items():
            self.add(*edge, capacity)

    def add(self, src: int, dst: int, capacity: int) -> int:
        """Add an edge and return its number, an index of `capacity`."""
        edge = len(self._head)
        self._head += [dst, src]
        self.capacity += [capacity, 0]
        self._out[src].append(edge)
        self._out[dst].append(edge + 1)
        return edge

    def node(self) -> int:
        """Add a node and return its number."""
        self._out.append([])
        return len(self._out) - 1

    def flow(self, source: int, sink: int, most: int | None = None) -> int:
        """Return the largest flow from `source` to `sink`, or `most` if the flow reaches this number."""
        self._left = self.capacity[:]
        total = 0
        while most is None or total < most:
            levels = self._levels(source, sink)
            if levels[sink] < 0:
                break
            total += self._push(source, sink, levels, None if most is None else most - total)
        return total

    def side(self, source: int) -> set[int]:
        """Return the nodes on the source's side of the minimum cut, after `flow` without a limit reached."""
        reached, waiting = {source}, [source]
        while waiting:
            for edge in self._out[waiting.pop()]:
                if self._left[edge] and self._head[edge] not in reached:
                    reached.add(self._head[edge])
                    waiting.append(self._head[edge])
        return reached

    def _levels(self, source: int, sink: int) -> list[int]:
        levels = [-1] * len(self._out)
        levels[source] = 0
        waiting = collections.deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self._out[node]:
                if self._left[edge] and levels[self._head[edge]] < 0:
                    levels[self._head[edge]] = levels[node] + 1
                    if self._head[edge] == sink:
                        return levels
                    waiting.append(self._head[edge])
        return levels

    def _push(self, source: int, sink: int, levels: list[int], most: int | None) -> int:
        """Push flow along all paths of rising levels, at most `most`; return the amount.

        After each path the search goes on at the first full edge, not at the source: most of a path serves again.
        """
        left, head, out = self._left, self._head, self._out
        places = [0] * len(out)
        path: list[int] = []
        node, total = source, 0
        while most is None or total < most:
            if node == sink:
                pushed = min(left[edge] for edge in path)
                pushed = pushed if most is None else min(pushed, most - total)
                for edge in path:
                    left[edge] -= pushed
                    left[edge ^ 1] += pushed
                total += pushed
                first = next((index for index, edge in enumerate(path) if not left[edge]), 0)
                node = head[path[first] ^ 1]
                del path[first:]
                continue
            edges, place, above = out[node], places[node], levels[node] + 1
            while place < len(edges) and not (left[edges[place]] and levels[head[edges[place]]] == above):
                place += 1
            places[node] = place
            if place < len(edges):
                path.append(edges[place])
                node = head[edges[place]]
            elif path:
                levels[node] = -1  # a dead end
                node = head[path.pop() ^ 1]
            else:
                break
        return total
