"""Double tree: a separate tree for each half of the data; inner ranks of one tree are leaves of the other.

Source: see Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009). In
a single binary tree the leaves, half of the ranks, send nothing down, and the inner ranks send twice. With two trees
every rank sends and receives at most N bytes on the way up and N on the way down, the minimum. Rank 0 is the root of
both trees. In each round of the pipeline a rank handles one segment of each half.

    0 ─── 4 ─┬─ 2 ─┬─ 1             0 ─── 5 ─┬─ 3 ─┬─ 2        8 ranks
             │     └─ 3                      │     └─ 4
             └─ 6 ─┬─ 5                      └─ 7 ─┬─ 6
                   └─ 7                            └─ 1
    first half of the chunks        second half: the others moved on by one rank
                                    (for odd P the others in reverse)

Cost: about 2 log2 P + S rounds of N / (2 S) bytes for an all-reduce, about log2 P + S for a broadcast or a reduction.
Good for long arrays on many ranks, with latency logarithmic in P.
"""

from collections.abc import Callable
from typing import TypeAlias

from gpucoll.algorithms import Traits, algorithm
from gpucoll.core.schedule import Rounds, moved, together, within
from gpucoll.core.topology import TreeNode, down, in_order_tree, up, up_and_down

LAYOUT = Traits(layout="in_order")  # drawn as the first tree
Traffic: TypeAlias = Callable[[TreeNode, int], Rounds]


@algorithm("all_reduce", chunks="2 * S", rounds="(P > 1) * (2 * lg(2 * P - 1) + S - 1)",
           path="(P > 1) * (2 * lg(2 * P - 1) + S - 1 + (2 < P < 5) * max(S - 3, 0)) * N / (2 * S) * (1 + (P == 2))",
           sent="(2 * (P > 1) + (P > 2) + (P > 3)) * N / 2", reduced="(P > 1) * N", gaps="2 * (P > 2)",
           traits=LAYOUT)
def double_tree_all_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs on every rank: up to rank 0 in both trees, and down again.

    >>> [sum(step.peer == 0 for step in steps) for steps in double_tree_all_reduce(rank=1, size=2)]
    [2, 2]
    """
    return _both(up_and_down, rank, size, segments)


@algorithm("reduce", chunks="2 * S", rounds="(P > 1) * (lg(2 * P - 1) + S - 1)",
           path="(P > 1) * (lg(2 * P - 1) + S - 1) * N / (2 * S) * (1 + (P == 2))", sent="(P > 1) * N",
           reduced="(P > 1) * N", gaps="1 * (P > 2)", traits=LAYOUT)
def double_tree_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs on rank 0, the root; inner nodes form sums in scratch."""
    return _both(up, rank, size, segments)


@algorithm("broadcast", chunks="2 * S", rounds="(P > 1) * (lg(2 * P - 1) + S - 1)",
           path="(P > 1) * (lg(2 * P - 1) + S - 1) * N / (2 * S) * (1 + (P == 2))", sent="(P > 1) * N",
           gaps="1 * (P > 2)", traits=LAYOUT)
def double_tree_broadcast(rank: int, size: int, segments: int = 1) -> Rounds:
    return _both(down, rank, size, segments)


def _both(traffic: Traffic, rank: int, size: int, segments: int) -> Rounds:
    """Yield the rounds of both trees merged; the trees share the clock."""
    first = traffic(in_order_tree(rank, size), segments)
    second = moved(traffic(in_order_tree(_other(rank, size, 1), size), segments), within({}, offset=segments),
                   lambda peer: _other(peer, size, -1))
    return filter(None, together(first, second))


def _other(place: int, size: int, way: int) -> int:
    """Return the place in the second tree of a place in the first tree; `way` -1 gives the reverse."""
    if place == 0 or size % 2:
        return (size - place) % size
    return (place - 1 - way) % (size - 1) + 1
