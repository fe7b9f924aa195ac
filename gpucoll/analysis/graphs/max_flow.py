"""Maximum flow between two nodes, in whole numbers, by Dinic's algorithm; and the minimum cut that limits the flow."""

from __future__ import annotations

import collections


class FlowNetwork:
    """Nodes and directed edges with integer capacities; reused for many flows.

    >>> pair = FlowNetwork(3)
    >>> edges = [pair.add(0, 1, 5), pair.add(1, 2, 3)]
    >>> pair.flow(0, 2), sorted(pair.side(0))
    (3, [0, 1])
    """

    def __init__(self, size: int) -> None:
        self.capacity: list[int] = []  # of edge 2 i; edge 2 i + 1 leads back and has none
        self._left: list[int] = []
        self._head: list[int] = []
        self._out: list[list[int]] = [[] for _ in range(size)]

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
            places = [0] * len(self._out)
            while most is None or total < most:
                pushed = self._push(source, sink, levels, places, None if most is None else most - total)
                if not pushed:
                    break
                total += pushed
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

    def _push(self, source: int, sink: int, levels: list[int], places: list[int], most: int | None) -> int:
        """Push flow along one path of rising levels; return the amount, 0 without such a path."""
        path: list[int] = []
        node = source
        while node != sink:
            edges = self._out[node]
            while places[node] < len(edges):
                edge = edges[places[node]]
                if self._left[edge] and levels[self._head[edge]] == levels[node] + 1:
                    break
                places[node] += 1
            else:
                if not path:
                    return 0
                levels[node] = -1  # a dead end
                node = self._head[path.pop() ^ 1]
                continue
            path.append(edge)
            node = self._head[edge]
        pushed = min(self._left[edge] for edge in path)
        pushed = pushed if most is None else min(pushed, most)
        for edge in path:
            self._left[edge] -= pushed
            self._left[edge ^ 1] += pushed
        return pushed
