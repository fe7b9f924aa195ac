"""Gather, then broadcast: divide and conquer up to rank 0, and down again with everything.

    0 ◄── 1 block ── 1    2 ◄── 1 block ── 3    0 ◄── 2 blocks ── 2        4 ranks
    0 ──── 4 blocks ───► 2     0 ──► 1     2 ──► 3

2 log2 P rounds, for every P; ((P - 1) / P + log2 P) N bytes, since all of it is broadcast.
"""

from gpucoll.algorithms import algorithm, find
from gpucoll.core.schedule import Rounds, moved, within


@algorithm("all_gather", chunks="P", rounds="2 * lg(2 * P - 1)", path="((P - 1) + lg(2 * P - 1) * P) * N / P",
           sent="lg(2 * P - 1) * N", received="(P > 1) * (P + P // 2 - 1) * N / P")
def gather_broadcast_all_gather(rank: int, size: int) -> Rounds:
    """Leave the inputs of all ranks, in rank order, on every rank.

    >>> [len(steps) for steps in gather_broadcast_all_gather(rank=0, size=4)]
    [1, 1, 1, 1, 1]
    """
    yield from find("gather", "binomial").make(rank, size)
    yield from moved(find("broadcast", "binomial").make(rank, size), within({"input": "output"}, scale=size))
