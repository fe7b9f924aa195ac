"""Tree: a pipelined binary tree; latency logarithmic in P, up to 3 N bytes sent by a rank.

Contributions go up from the leaves to the root, and then the result comes down. Segments form a pipeline: at time t a
rank of depth d receives segment t - (H - d - 1) from its children and sends segment t - (H - d) to its parent, where H
is the height of the tree.

        0 ─┬─ 1 ─┬─ 2 ─── 3        depth 0   1   2   3
           │     └─ 4
           └─ 5 ─┬─ 6              up:   3 ► 2 ► 1 ► 0    at times 0, 1, 2
                 └─ 7              down: 0 ► 1 ► 2 ► 3    at times 3, 4, 5

Both ends of a message use the same clock, so no ranks wait for each other in a cycle. Cost: about 2 log2 P + S - 1
rounds of N / S bytes for an all-reduce, about log2 P + S - 1 for a broadcast or a reduction. Good for short and middle
arrays on many ranks; `double_tree` uses links better for long arrays. Source: folklore.
"""

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Rounds
from gpucoll.core.topology import binary_tree, down, up, up_and_down


@algorithm("all_reduce", chunks="S", rounds="(P > 1) * (2 * lg(P) + S - 1)",
           path="(P > 1) * (2 * lg(P) + S - 1) * N / S", sent="((P > 1) + (P > 2) + (P > 5)) * N",
           reduced="min(2, P - 1) * N", gaps="2 * (P > 2)")
def tree_all_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs on every rank: up to rank 0, and down again.

    >>> for steps in tree_all_reduce(rank=1, size=4):
    ...     print([type(step).__name__ for step in steps])
    ['Copy', 'RecvReduce']
    ['Send']
    ['Recv']
    ['Send']
    """
    yield from filter(None, up_and_down(binary_tree(rank, size), segments))


@algorithm("reduce", chunks="S", rounds="(P > 1) * (lg(P) + S - 1)", path="(P > 1) * (lg(P) + S - 1) * N / S",
           sent="(P > 1) * N", received="min(2, P - 1) * N", reduced="min(2, P - 1) * N", gaps="1 * (P > 2)")
def tree_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs on rank 0, the root; inner nodes form sums in scratch."""
    yield from filter(None, up(binary_tree(rank, size), segments))


@algorithm("broadcast", chunks="S", rounds="(P > 1) * (lg(P) + S - 1)", path="(P > 1) * (lg(P) + S - 1) * N / S",
           sent="min(2, P - 1) * N", received="(P > 1) * N", gaps="1 * (P > 2)")
def tree_broadcast(rank: int, size: int, segments: int = 1) -> Rounds:
    yield from filter(None, down(binary_tree(rank, size), segments))
