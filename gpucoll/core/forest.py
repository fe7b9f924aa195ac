"""Schedules of spanning trees: pipelined along the edges, all trees at once, as `gpucoll synthesize` finds them.

Every block is cut into the shares of the block's trees, and every share into segments. Segment s crosses an edge at
depth d in round s + d - 1, counted from the root of a broadcast tree. A reduction runs along the same trees backwards.
In the middle of a schedule every edge carries one segment per round, so no link waits.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Round, Rounds, Send, Slice, Step


class SpanningTree(NamedTuple):
    """A tree from `root` over all ranks; `edges` are pairs of parent and child, every parent before its children.

    `share` is the number of chunks of a segment that the tree carries, out of all chunks of the root's trees.
    """

    root: int
    share: int
    edges: tuple[tuple[int, int], ...]

    def depths(self) -> dict[int, int]:
        """Return the number of edges between the root and each rank."""
        depths = {self.root: 0}
        for parent, child in self.edges:
            depths[child] = depths[parent] + 1
        return depths

    @property
    def height(self) -> int:
        """The largest depth."""
        return max(self.depths().values())


def turned(trees: Iterable[Sequence[object]], sides: Sequence[int]) -> list[SpanningTree]:
    """Return the trees of rank 0, and the same trees turned to every other rank: one after the other in rank order.

    Rank numbers are digits of the given sides, the first the highest; to turn to a rank is to add its digits.

    >>> turned([(0, 1, ((0, 1),))], [2])
    [SpanningTree(root=0, share=1, edges=((0, 1),)), SpanningTree(root=1, share=1, edges=((1, 0),))]
    """
    given = [SpanningTree(*tree) for tree in trees]  # type: ignore[arg-type] # literals of a file
    made, images = [], [[0]]
    for side in sides:  # images of the ranks of the digits so far
        images = [[high * side + (digit + add) % side for high in image for digit in range(side)]
                  for image in images for add in range(side)]
    for image in images:
        for root, share, edges in given:
            made.append(SpanningTree(image[root], share, tuple((image[one], image[other]) for one, other in edges)))
    return made


class Forest:
    """Spanning trees, cut into `segments`; makes the rounds of a rank.

    With `has_blocks` every rank is a root with its own block, and the sum of the shares is equal for all roots.
    Otherwise the trees share one array.

    >>> pair = Forest([SpanningTree(0, 1, ((0, 1),)), SpanningTree(1, 1, ((1, 0),))], 1)
    >>> [type(step).__name__ for steps in pair.all_reduce(0) for step in steps]
    ['Copy', 'RecvReduce', 'Send', 'Send', 'Recv']
    """

    def __init__(self, trees: Iterable[Sequence[object]], segments: int, *, has_blocks: bool = True) -> None:
        self.trees: list[SpanningTree] = [
            SpanningTree(*tree) for tree in trees]  # type: ignore[arg-type] # literals of a file
        self.segments: int = segments
        self.has_blocks: bool = has_blocks
        self._heights: list[int] = []
        self._inner: list[set[int]] = []  # the ranks with children
        # For each rank its edges: tree, parent, child, and the depth of the child. A rank looks at no other edges.
        self._edges: dict[int, list[tuple[int, int, int, int]]] = collections.defaultdict(list)
        for number, tree in enumerate(self.trees):
            depths = tree.depths()
            self._heights.append(max(depths.values()))
            self._inner.append({parent for parent, _ in tree.edges})
            for parent, child in tree.edges:
                edge = number, parent, child, depths[child]
                self._edges[parent].append(edge)
                self._edges[child].append(edge)
        self.height: int = max(self._heights)
        first: dict[int, int] = collections.defaultdict(int)
        self._offsets: list[int] = []  # of each tree's share in a segment of the block, or of the array
        for tree in self.trees:
            block = tree.root if has_blocks else 0
            self._offsets.append(first[block])
            first[block] += tree.share
        self.shares: int = max(first.values())  # chunks of a segment
        self.chunks: int = self.shares * segments * len(first)

    @property
    def links(self) -> dict[tuple[int, int], int]:
        """The chunks that each edge carries in a round: the sum of the shares of the trees with the edge."""
        counts: dict[tuple[int, int], int] = collections.Counter()
        for tree in self.trees:
            counts.update(dict.fromkeys(tree.edges, tree.share))
        return counts

    def all_gather(self, rank: int) -> Rounds:
        """Yield the rounds of an all-gather: every root's block goes down the root's trees."""
        block = self.shares * self.segments
        begun: Round = (Copy(Slice("input", 0, block), Slice("output", rank * block, block)),)
        return self._down(rank, begun, source="input")

    def broadcast(self, rank: int) -> Rounds:
        """Yield the rounds of a broadcast from the root of all trees."""
        is_root = rank == self.trees[0].root
        begun = (Copy(Slice("input", 0, self.chunks), Slice("output", 0, self.chunks)),) if is_root else ()
        return self._down(rank, begun, source="input")

    def reduce_scatter(self, rank: int) -> Rounds:
        """Yield the rounds of a reduce-scatter: partial sums go up the trees of the block's owner."""
        return self._up(rank, "scratch")

    def reduce(self, rank: int) -> Rounds:
        """Yield the rounds of a reduction to the root of all trees."""
        return self._up(rank, "scratch")

    def all_reduce(self, rank: int) -> Rounds:
        """Yield the rounds of an all-reduce: reduce-scatter, then all-gather, both within output."""
        yield from self._up(rank, "output")
        yield from self._down(rank, (), source="output")

    def tree_all_reduce(self, rank: int) -> Rounds:
        """Yield the rounds of an all-reduce; a segment goes down each tree as soon as the root has its sum.

        An edge carries sums one way and results the other way, both at the same time.
        """
        up = itertools.chain(self._up(rank, "output"), itertools.repeat(()))
        down = self._down(rank, (), source="output", delay=lambda number, depth: self._heights[number] + depth - 1)
        for steps, further in zip(up, down, strict=False):
            yield (*steps, *further)

    def place(self, number: int, segment: int, segments: int) -> tuple[int, int]:
        """Return first chunk and length of a tree's share of one of `segments`, in an array of all blocks."""
        tree = self.trees[number]
        block = tree.root * self.shares * segments if self.has_blocks else 0
        return block + segment * self.shares + self._offsets[number], tree.share

    def _place(self, number: int, segment: int) -> tuple[int, int]:
        return self.place(number, segment, self.segments)

    def _own(self, buffer: Buffer, number: int, segment: int) -> Slice:
        """Return a tree's share of a segment in an array of the root's block alone."""
        return Slice(buffer, segment * self.shares + self._offsets[number], self.trees[number].share)

    def _clock(self, rank: int, delay: Callable[[int, int], int]) -> Iterator[list[tuple[int, int, int, int]]]:
        """Yield for each round the messages of a rank: tree, segment, parent and child of the edge.

        ``delay(tree, depth)`` is the round of the first segment on the edge to a child at this depth.
        """
        edges = [(delay(number, depth), number, parent, child) for number, parent, child, depth in self._edges[rank]]
        last = max(delay(number, depth) for number, height in enumerate(self._heights) for depth in (1, height))
        for time in range(self.segments + last):
            yield [(number, time - first, parent, child) for first, number, parent, child in edges
                   if 0 <= time - first < self.segments]

    def _down(self, rank: int, begun: Round, source: Buffer,
              delay: Callable[[int, int], int] = lambda _, depth: depth - 1) -> Rounds:
        for messages in self._clock(rank, delay):
            steps: list[Step] = [*begun]
            begun = ()
            for number, segment, parent, child in messages:
                place = Slice("output", *self._place(number, segment))
                is_first = parent == self.trees[number].root and source == "input"
                if rank == parent:
                    steps.append(Send(self._own("input", number, segment) if is_first else place, child))
                elif rank == child:
                    steps.append(Recv(place, parent))
            yield tuple(steps)

    def _up(self, rank: int, sums: Buffer) -> Rounds:
        # The chunks of a block may differ in length by an element: a partial sum keeps the place of its chunk.
        for messages in self._clock(rank, lambda number, depth: self._heights[number] - depth):
            steps: list[Step] = []
            begun = set[int]()
            for number, segment, parent, child in messages:
                place = self._place(number, segment)
                given, total = Slice("input", *place), Slice(sums, *place)
                if rank == child:
                    steps.append(Send(total if child in self._inner[number] else given, parent))
                elif rank == parent:
                    if sums == "scratch" and parent == self.trees[number].root:
                        total = self._own("output", number, segment)
                    if number not in begun:
                        begun.add(number)
                        steps.append(Copy(given, total))
                    steps.append(RecvReduce(total, child))
            yield tuple(steps)
