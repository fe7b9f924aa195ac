"""Shapes of rings, trees, hypercubes and tori: who is whose neighbour, parent and child."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Round, Rounds, Send, Slice, Step


class TreeNode(NamedTuple):
    """A rank's place in a binary tree; `height` is that of the whole tree."""

    parent: int | None
    children: tuple[int, ...]
    depth: int
    height: int


def binary_tree(rank: int, size: int) -> TreeNode:
    """Return the place of `rank` in a binary tree of `size` ranks with root 0 and height floor(log2 size).

    A node is the first rank of its subtree, its two halves follow: every subtree is an
    interval of ranks, so that ranks of one node of a cluster meet the network seldom.

        0 ─┬─ 1 ─┬─ 2 ─── 3        8 ranks
           │     └─ 4
           └─ 5 ─┬─ 6
                 └─ 7

    >>> [binary_tree(rank, 8).children for rank in range(8)]
    [(1, 5), (2, 4), (3,), (), (), (6, 7), (), ()]
    """
    first, count, parent, depth = 0, size, None, 0
    while rank != first:
        half = count // 2
        parent, depth = first, depth + 1
        first, count = (first + 1, half) if rank <= first + half else (first + 1 + half, count - 1 - half)
    half = count // 2
    children = tuple(child for child in (first + 1, first + 1 + half) if child < first + count)
    return TreeNode(parent, children if half else (), depth, size.bit_length() - 1)


def chain(rank: int, size: int) -> TreeNode:
    """Return the place of `rank` in the tree that is a chain: 0, 1, ..., size - 1.

    >>> chain(1, 3)
    TreeNode(parent=0, children=(2,), depth=1, height=2)
    """
    return TreeNode(rank - 1 if rank else None, (rank + 1,) if rank + 1 < size else (), rank, size - 1)


def in_order_tree(rank: int, size: int) -> TreeNode:
    """Return the place of `rank` in a tree whose root, 0, has one child, and whose odd ranks are all leaves.

    A rank's children are half as far away as its parent. Its height is log2 size, rounded up.

        0 ─── 4 ─┬─ 2 ─┬─ 1        8 ranks
                 │     └─ 3
                 └─ 6 ─┬─ 5
                       └─ 7

    >>> [in_order_tree(rank, 7).children for rank in range(7)]
    [(4,), (), (1, 3), (), (2, 6), (), (5,)]
    """
    height = (size - 1).bit_length()
    if rank == 0:
        return TreeNode(None, (1 << height - 1,), 0, height)
    reach = rank & -rank
    parent = rank & ~reach | reach << 1
    parent = parent if parent < size else rank & ~reach
    nearer = (rank + (reach >> level) for level in range(1, reach.bit_length()))
    right = next((child for child in nearer if child < size), None)
    children = tuple(child for child in (rank - reach // 2, right) if child is not None) if reach > 1 else ()
    return TreeNode(parent, children, in_order_tree(parent, size).depth + 1, height)


def ascend(node: TreeNode, time: int, segments: int, sums: Buffer) -> Round:
    """Return what `node` does at `time` of the ascent: take from the children, pass to the parent.

    The clock is the same for both ends of every message, so that no order of waiting can lock.
    """
    taken, passed = time - (node.height - node.depth - 1), time - (node.height - node.depth)
    steps: list[Step] = []
    if 0 <= passed < segments and node.parent is not None:
        steps.append(Send(Slice(sums if node.children else "input", passed), node.parent))
    if 0 <= taken < segments and node.children:
        steps.append(Copy(Slice("input", taken), Slice(sums, taken)))
        steps += [RecvReduce(Slice(sums, taken), child) for child in node.children]
    return tuple(steps)


def descend(node: TreeNode, time: int, segments: int) -> Round:
    """Return what `node` does at `time` of the descent: take from the parent, pass to the children."""
    taken, passed = time - (node.depth - 1), time - node.depth
    steps: list[Step] = []
    if 0 <= passed < segments:
        steps += [Send(Slice("output", passed), child) for child in node.children]
    if 0 <= taken < segments and node.parent is not None:
        steps.append(Recv(Slice("output", taken), node.parent))
    return tuple(steps)


def up_and_down(node: TreeNode, segments: int) -> Rounds:
    """Yield an all-reduce, a round for every time of the clock, empty ones included."""
    for time in range(2 * node.height + segments - 1):
        yield (*ascend(node, time, segments, "output"), *descend(node, time - node.height, segments))


def up(node: TreeNode, segments: int) -> Rounds:
    """Yield a reduction to the tree's root, a round for every time; inner nodes add up in scratch."""
    sums: Buffer = "output" if node.parent is None else "scratch"
    return (ascend(node, time, segments, sums) for time in range(node.height + segments - 1))


def down(node: TreeNode, segments: int) -> Rounds:
    """Yield a broadcast from the tree's root, which has copied its input first, a round for every time."""
    if node.parent is None:
        yield (Copy(Slice("input", 0, segments), Slice("output", 0, segments)),)
    else:
        yield ()
    for time in range(node.height + segments - 1):
        yield descend(node, time, segments)


class Split(NamedTuple):
    """A rank's place where intervals of ranks are halved again and again, each led by its first rank.

    It leads so many ranks from itself on; the later half of what is left goes to each of `children` in turn, whose
    second field is how many ranks they lead.
    """

    parent: int | None
    leads: int
    children: tuple[tuple[int, int], ...]


def splits(rank: int, size: int) -> Split:
    """Return the place of `rank` in a binomial tree of intervals: root 0, log2 size levels, rounded up.

        0 ─┬─ 4 ─┬─ 6 ─── 7        8 ranks
           │     └─ 5
           ├─ 2 ─── 3
           └─ 1

    >>> splits(0, 5)
    Split(parent=None, leads=5, children=((3, 2), (2, 1), (1, 1)))
    """
    first, count, parent = 0, size, None
    while rank != first:
        kept = (count + 1) // 2
        if rank >= first + kept:
            parent, first, count = first, first + kept, count - kept
        else:
            count = kept
    children, left = [], count
    while left > 1:
        kept = (left + 1) // 2
        children.append((first + kept, left - kept))
        left = kept
    return Split(parent, count, tuple(children))


# Formulas of costs. Whether there are ranks beyond a power of two; and of the blocks that the first numbers of the core
# have twice, the sum of min(2^k, rest(P)) for 2^k < two(P).
FOLDED = "(rest(P) > 0)"
TWICE = "2 ** (lg(rest(P)) + 1) - 1 + (lg(P) - lg(rest(P)) - 1) * rest(P)"


class Fold(NamedTuple):
    """A rank's place where each rank beyond a power of two hands its part to a partner.

    `core` ranks remain, of which this one is `number` (None where it hands over); `extra` of them have a partner.
    """

    core: int
    extra: int
    number: int | None
    partner: int | None

    def rank_of(self, number: int) -> int:
        """Return the rank that has `number`; pairs are neighbours, of which the odd one stays."""
        return number + self.extra - (self.extra - number - 1) * (number < self.extra)

    def across(self, number: int) -> list[int]:
        """Return the ranks at a distance of half of the core, a quarter, ..., 1: on the other side of its hypercube."""
        return [self.rank_of(number ^ self.core >> step) for step in range(1, self.core.bit_length())]

    def blocks_before(self, number: int) -> int:
        """Return how many ranks stand behind the numbers below `number`."""
        return number + self.extra - (self.extra - number) * (number < self.extra)

    def blocks(self, buffer: Buffer, number: int, count: int) -> Slice:
        """Return the blocks of the ranks behind `count` numbers from `number`."""
        first = self.blocks_before(number)
        return Slice(buffer, first, self.blocks_before(number + count) - first)


def fold(rank: int, size: int) -> Fold:
    """Return the place of `rank`; for a power of two it is its number, and may be an array of ranks.

    >>> [fold(rank, 6).number for rank in range(6)]
    [None, 0, None, 1, 2, 3]
    """
    core = 1 << size.bit_length() - 1
    extra = size - core
    if not extra or rank >= 2 * extra:
        return Fold(core, extra, rank - extra, None)
    return Fold(core, extra, rank // 2, rank - 1) if rank % 2 else Fold(core, extra, None, rank + 1)


def folded(place: Fold, sums: Slice, core: Callable[[int, Slice], Iterable[Round]]) -> Rounds:
    """Yield an all-reduce: partners hand over, the others run ``core(number, source)`` and hand back the result.

    A pair adds up in `sums`, which is as long as the data; it is then the source.
    """
    own, result = Slice("input", 0, sums.count), Slice("output", 0, sums.count)
    if place.number is None:
        yield from ((Send(own, place.partner),), (Recv(result, place.partner),))  # type: ignore[arg-type] # a pair
    elif place.partner is None:
        yield from core(place.number, own)
    else:
        yield (Copy(own, sums), RecvReduce(sums, place.partner))
        yield from core(place.number, sums)
        yield (Send(result, place.partner),)


Part: TypeAlias = Callable[[Buffer, int, int], Slice]


def halving(position: int, partners: Sequence[int], source: Buffer, part: Part = Slice) -> Rounds:
    """Yield a reduce-scatter of 2 ** len(partners) blocks to which every partner in turn contributes one half.

    It leaves block `position` of output reduced. What is left is halved each time: one half goes to the partner,
    whose position lies in it, the other half is kept. `part` says where blocks are.
    """
    for step, partner in enumerate(partners):
        count = 1 << len(partners) - 1 - step
        kept = part("output", position & -count, count)
        given = part(source if step == 0 else "output", (position & -count) ^ count, count)
        begun = [Copy(part("input", position & -count, count), kept)] if step == 0 and source == "input" else []
        yield (Send(given, partner), *begun, RecvReduce(kept, partner))


def doubling(position: int, partners: Sequence[int], part: Part = Slice) -> Rounds:
    """Yield the all-gather that undoes `halving` of the same partners: block `position` of output is there before."""
    for step, partner in reversed(list(enumerate(partners))):
        count = 1 << len(partners) - 1 - step
        yield (Send(part("output", position & -count, count), partner),
               Recv(part("output", (position & -count) ^ count, count), partner))


_HALVES = "2 * (two(P) - 1) * N / two(P)"
# The costs of `halved_and_doubled`.
HALVED_AND_DOUBLED = {
    "chunks": "two(P)", "alike": "not rest(P)", "rounds": f"2 * lg(P) + 2 * {FOLDED}",
    "path": f"{_HALVES} + 2 * {FOLDED} * N", "sent": f"{_HALVES} + {FOLDED} * N",
    "reduced": f"(two(P) - 1) * N / two(P) + {FOLDED} * N"}


def halved_and_doubled(place: Fold, partners: Callable[[int], list[int]],
                       position: Callable[[int], int] = lambda number: number) -> Rounds:
    """Yield an all-reduce by `halving` and `doubling`; of every number of the core its partners and its position."""
    def core(number: int, source: Slice) -> Rounds:
        yield from halving(position(number), partners(number), source.buffer)
        yield from doubling(position(number), partners(number))

    return folded(place, Slice("output", 0, place.core), core)


@functools.cache
def factors(size: int) -> tuple[int, ...]:
    """Return the sides of the torus of `size` ranks with the fewest hops: 2-D or 3-D, or a ring for a prime.

    >>> factors(8), factors(12), factors(16), factors(7)
    ((2, 2, 2), (3, 2, 2), (4, 2, 2), (7,))
    """
    divisors = [side for side in range(2, size) if size % side == 0]
    products = [(size // math.prod(rest), *rest) for count in (1, 2)
                for rest in itertools.combinations_with_replacement(divisors, count) if size % math.prod(rest) == 0]
    tori = [tuple(sorted(sides, reverse=True)) for sides in products if sides[0] > 1]
    return min(tori, key=lambda sides: sum(sides) - len(sides), default=(size,))


def hops(size: int) -> int:
    """Return how many hops a way along all sides of the torus of `size` ranks has.

    >>> hops(12)
    4
    """
    return sum(side - 1 for side in factors(size))


def group(size: int) -> int:
    """Return the size of the groups that stand for nodes: the largest divisor not above the square root.

    >>> [group(size) for size in (4, 7, 8, 12, 64)]
    [2, 1, 2, 3, 8]
    """
    return next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)


def node_shape(size: int, nodes: Sequence[int] | None) -> tuple[int, int]:
    """Return how many ranks the largest node has, and how many nodes there are.

    >>> node_shape(6, None), node_shape(3, [0, 1, 1])
    ((2, 3), (2, 2))
    """
    if nodes is None:
        return group(size), size // group(size)
    return max(nodes.count(node) for node in set(nodes)), len(set(nodes))


class Grid(NamedTuple):
    """A rank's place among `nodes` groups of `each` ranks: number `local` of group `node`.

    `members` are the ranks of all groups, None where they are consecutive: then `rank` may be an array.
    """

    each: int
    nodes: int
    local: int
    node: int
    members: tuple[tuple[int, ...], ...] | None = None

    def rank_of(self, node: int, local: int) -> int:
        """Return the rank that is number `local` of group `node`."""
        return node * self.each + local if self.members is None else self.members[node][local]


def grid(rank: int, size: int, nodes: Sequence[int] | None = None) -> Grid:
    """Return the place of `rank`; nodes that differ are cut into groups of their sizes' greatest common divisor.

    >>> grid(4, 6), grid(2, 3, [0, 1, 0]).nodes
    (Grid(each=2, nodes=3, local=0, node=2, members=None), 3)
    """
    if nodes is None:
        each = group(size)
        return Grid(each, size // each, rank % each, rank // each)
    ranks = members_of(nodes)
    each = math.gcd(*map(len, ranks))
    members = tuple(one[start:start + each] for one in ranks for start in range(0, len(one), each))
    node = next(number for number, one in enumerate(members) if rank in one)
    return Grid(each, len(members), members[node].index(rank), node, members)


def members_of(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each node, the node of rank 0 first.

    >>> members_of([1, 0, 1])
    [(0, 2), (1,)]
    """
    return [tuple(rank for rank, other in enumerate(nodes) if other == node) for node in dict.fromkeys(nodes)]
