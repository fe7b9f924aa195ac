"""Gather, then broadcast: divide and conquer up to rank 0, and down again with all blocks.

    0 ◄── 1 block ── 1    2 ◄── 1 block ── 3    0 ◄── 2 blocks ── 2        4 ranks
    0 ──── 4 blocks ───► 2     0 ──► 1     2 ──► 3

The first ceil(log2 P) rounds gather the blocks on rank 0, and as many rounds broadcast all blocks. Cost: 2 ceil(log2 P)
rounds for every P; ((P - 1) / P + log2 P) N bytes on the longest path. Mainly a yardstick: `bruck` needs half of the
rounds and fewer bytes. Source: composed of two `binomial` collectives.
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
