"""Shapes of trees, hypercubes, tori and grids of ranks: neighbours, parents, children, and traffic along the edges."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Round, Rounds, Send, Slice, Step


class TreeNode(NamedTuple):
    """The place of a rank in a binary tree; `height` is the height of the whole tree."""

    parent: int | None
    children: tuple[int, ...]
    depth: int
    height: int


def binary_tree(rank: int, size: int) -> TreeNode:
    """Return the place of `rank` in a binary tree of `size` ranks with root 0 and height floor(log2 size).

    A node is the first rank of its subtree, followed by the two halves. Every subtree is an interval of ranks, so few
    edges join two nodes of a cluster.

        0 ─┬─ 1 ─┬─ 2 ─── 3        8 ranks
           │     └─ 4
           └─ 5 ─┬─ 6
                 └─ 7

    >>> [binary_tree(rank, 8).children for rank in range(8)]
    [(1, 5), (2, 4), (3,), (), (), (6, 7), (), ()]
    """
    first, count, parent, depth = 0, size, None, 0
    while rank != first:
        half, parent, depth = count // 2, first, depth + 1
        later = rank > first + half  # in arithmetic, as `rank` may stand for many ranks
        first, count = first + 1 + later * half, half + later * (count - 1 - 2 * half)
    half = count // 2
    children = tuple(child for child in (first + 1, first + 1 + half) if child < first + count)
    return TreeNode(parent, children if half else (), depth, size.bit_length() - 1)


def chain(rank: int, size: int) -> TreeNode:
    """Return the place of `rank` in a tree without branches: 0, 1, ..., size - 1.

    >>> chain(1, 3)
    TreeNode(parent=0, children=(2,), depth=1, height=2)
    """
    return TreeNode(rank - 1 if rank else None, (rank + 1,) if rank + 1 < size else (), rank, size - 1)


def in_order_tree(rank: int, size: int) -> TreeNode:
    """Return the place of `rank` in a tree of height ceil(log2 size): root 0 has a single child, odd ranks are leaves.

    The distance from a node to its children is at most half of the distance to its parent.

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
    """Return the steps of `node` at `time` of the ascent: receive from the children, send to the parent.

    Both ends of a message share the clock, so waiting ranks never deadlock.
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
    """Return the steps of `node` at `time` of the descent: receive from the parent, send to the children."""
    taken, passed = time - (node.depth - 1), time - node.depth
    steps: list[Step] = []
    if 0 <= passed < segments:
        steps += [Send(Slice("output", passed), child) for child in node.children]
    if 0 <= taken < segments and node.parent is not None:
        steps.append(Recv(Slice("output", taken), node.parent))
    return tuple(steps)


def up_and_down(node: TreeNode, segments: int) -> Rounds:
    """Yield an all-reduce with a round for every time of the clock, empty rounds included."""
    for time in range(2 * node.height + segments - 1):
        yield (*ascend(node, time, segments, "output"), *descend(node, time - node.height, segments))


def up(node: TreeNode, segments: int) -> Rounds:
    """Yield a reduction to the root of the tree with a round for every time; inner nodes form sums in scratch."""
    sums: Buffer = "output" if node.parent is None else "scratch"
    return (ascend(node, time, segments, sums) for time in range(node.height + segments - 1))


def down(node: TreeNode, segments: int) -> Rounds:
    """Yield a broadcast from the root of the tree with a round for every time; at first the root copies its input."""
    if node.parent is None:
        yield (Copy(Slice("input", 0, segments), Slice("output", 0, segments)),)
    else:
        yield ()
    for time in range(node.height + segments - 1):
        yield descend(node, time, segments)


# Cost formulas. FOLDED is true where P is no power of two. TWICE counts the extra blocks moved, because the first
# numbers of the core stand for two ranks: the sum of min(2^k, rest(P)) over all 2^k < two(P).
FOLDED = "(rest(P) > 0)"
TWICE = "2 ** (lg(rest(P)) + 1) - 1 + (lg(P) - lg(rest(P)) - 1) * rest(P)"


class Fold(NamedTuple):
    """The place of a rank where each rank beyond a power of two hands its part to a partner.

    `core` is the largest power of two not above the number of ranks, `extra` is the remainder. `number` is the rank's
    number in the core, None for a rank handing over. `extra` ranks of the core have a partner.
    """

    core: int
    extra: int
    number: int | None
    partner: int | None

    def rank_of(self, number: int) -> int:
        """Return the rank with `number`; a pair is two neighbours, and the odd rank of a pair stays in the core."""
        return number + self.extra - (self.extra - number - 1) * (number < self.extra)

    def across(self, number: int) -> list[int]:
        """Return the partners on the hypercube, at a distance of half of the core, a quarter, ..., 1."""
        return [self.rank_of(number ^ self.core >> step) for step in range(1, self.core.bit_length())]

    def blocks_before(self, number: int) -> int:
        """Return the number of ranks behind all numbers below `number`; a number with a partner has two ranks."""
        return number + self.extra - (self.extra - number) * (number < self.extra)

    def blocks(self, buffer: Buffer, number: int, count: int) -> Slice:
        """Return the blocks of the ranks behind `count` numbers from `number`."""
        first = self.blocks_before(number)
        return Slice(buffer, first, self.blocks_before(number + count) - first)


def fold(rank: int, size: int) -> Fold:
    """Return the place of `rank` for a core of ranks: the largest power of two not above `size`.

    Where the core has all ranks the number is the rank, and `rank` may be an array.

    >>> [fold(rank, 6).number for rank in range(6)]
    [None, 0, None, 1, 2, 3]
    """
    core = 1 << size.bit_length() - 1
    extra = size - core
    if not extra or rank >= 2 * extra:
        return Fold(core, extra, rank - extra, None)
    return Fold(core, extra, rank // 2, rank - 1) if rank % 2 else Fold(core, extra, None, rank + 1)


def folded(place: Fold, sums: Slice, core: Callable[[int, Slice], Iterable[Round]]) -> Rounds:
    """Yield an all-reduce: partners hand over, the core runs ``core(number, source)`` and hands back the result.

    A pair adds up in `sums`, a slice as long as the data; `sums` is then the source.
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


def folded_reduce_scatter(place: Fold, rank: int, size: int, core: Callable[[Buffer], Iterable[Round]]) -> Rounds:
    """Yield a reduce-scatter: partners hand over, ``core(source)`` reduces, and partners hand back a finished block.

    At the end block `rank` of output is reduced. The core finds its contributions in the buffer `source`.
    """
    everything = Slice("output", 0, size)
    if place.number is None:
        yield from ((Send(Slice("input", 0, size), rank + 1),), (Recv(Slice("output", rank), rank + 1),))
        return
    if place.partner is not None:
        yield (Copy(Slice("input", 0, size), everything), RecvReduce(everything, rank - 1))
    yield from core("input" if place.partner is None else "output")
    if place.partner is not None:
        yield (Send(Slice("output", rank - 1), rank - 1),)


def folded_all_gather(place: Fold, rank: int, size: int, core: Callable[[], Iterable[Round]]) -> Rounds:
    """Yield an all-gather: partners hand over their blocks, ``core()`` gathers, and partners hand back all others.

    At the beginning block `rank` of output must be complete.
    """
    def others(block: int) -> list[Slice]:
        parts = [Slice("output", 0, block), Slice("output", block + 1, size - block - 1)]
        return [part for part in parts if part.count]

    if place.number is None:
        yield (Send(Slice("output", rank), rank + 1),)
        yield tuple(Recv(one, rank + 1) for one in others(rank))
        return
    if place.partner is not None:
        yield (Recv(Slice("output", rank - 1), rank - 1),)
    yield from core()
    if place.partner is not None:
        yield tuple(Send(one, rank - 1) for one in others(rank - 1))


PartSlice: TypeAlias = Callable[[Buffer, int, int], Slice]


def halving(position: int, partners: Sequence[int], source: Buffer, part: PartSlice = Slice) -> Rounds:
    """Yield a reduce-scatter of 2 ** len(partners) blocks; every partner in turn contributes one half.

    At the end block `position` of output is reduced. Each round halves the remaining blocks: the half with the
    partner's position goes to the partner, the other half is kept. `part` maps block numbers to slices.
    """
    for step, partner in enumerate(partners):
        count = 1 << len(partners) - 1 - step
        kept = part("output", position & -count, count)
        given = part(source if step == 0 else "output", (position & -count) ^ count, count)
        begun = [Copy(part("input", position & -count, count), kept)] if step == 0 and source == "input" else []
        yield (Send(given, partner), *begun, RecvReduce(kept, partner))


def doubling(position: int, partners: Sequence[int], part: PartSlice = Slice) -> Rounds:
    """Yield the all-gather reversing `halving` with the same partners; block `position` of output must be complete."""
    for step, partner in reversed(list(enumerate(partners))):
        count = 1 << len(partners) - 1 - step
        yield (Send(part("output", position & -count, count), partner),
               Recv(part("output", (position & -count) ^ count, count), partner))


_HALVES = "2 * (two(P) - 1) * N / two(P)"
# Costs of `halved_and_doubled`: halves out and back, and the whole data twice between partners of a pair.
HALVED_AND_DOUBLED = {
    "chunks": "two(P)", "vectorised": "not rest(P)", "rounds": f"2 * lg(P) + 2 * {FOLDED}",
    "path": f"{_HALVES} + 2 * {FOLDED} * N", "sent": f"{_HALVES} + {FOLDED} * N",
    "reduced": f"(two(P) - 1) * N / two(P) + {FOLDED} * N"}


def halved_and_doubled(place: Fold, partners: Callable[[int], list[int]],
                       position: Callable[[int], int] = lambda number: number) -> Rounds:
    """Yield an all-reduce by `halving` and `doubling`.

    `partners` and `position` give the partners and the block position of every number of the core.
    """
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
    """Return the number of hops along all sides of the torus of `size` ranks.

    >>> hops(12)
    4
    """
    return sum(side - 1 for side in factors(size))


def group(size: int) -> int:
    """Return the size of groups standing for nodes: the largest divisor of `size` not above the square root.

    >>> [group(size) for size in (4, 7, 8, 12, 64)]
    [2, 1, 2, 3, 8]
    """
    return next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)


@functools.lru_cache(maxsize=256)
def node_shape(size: int, nodes: tuple[int, ...] | None) -> tuple[int, int]:
    """Return the number of ranks in the largest node, and the number of nodes.

    >>> node_shape(6, None), node_shape(3, (0, 1, 1))
    ((2, 3), (2, 2))
    """
    if nodes is None:
        return group(size), size // group(size)
    return max(nodes.count(node) for node in set(nodes)), len(set(nodes))


class Grid(NamedTuple):
    """The place of a rank among `nodes` groups of `each` ranks: number `local` of group `node`.

    `members` are the ranks of all groups. None means consecutive groups; then `rank` may be an array.
    """

    each: int
    nodes: int
    local: int
    node: int
    members: tuple[tuple[int, ...], ...] | None = None

    def rank_of(self, node: int, local: int) -> int:
        """Return the rank with number `local` in group `node`."""
        return node * self.each + local if self.members is None else self.members[node][local]


def grid(rank: int, size: int, nodes: Sequence[int] | None = None) -> Grid:
    """Return the place of `rank`; nodes of different sizes are cut into groups of the greatest common divisor.

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
    """Return the ranks of each node, starting with the node of rank 0.

    >>> members_of([1, 0, 1])
    [(0, 2), (1,)]
    """
    return [tuple(rank for rank, other in enumerate(nodes) if other == node) for node in dict.fromkeys(nodes)]
