"""Two shot: every rank reduces a block received from all others at once, then sends the block to all; two rounds.

    round 1   0 ──► block 1 to 1, block 2 to 2, block 3 to 3        all ranks at once
    round 2   0 ──► block 0, complete, to 1, 2, 3

Cost: 2 rounds of N / P bytes per link; 2 (P - 1) N / P bytes sent by each rank, the minimum. Good for arrays of middle
length where links join all pairs: bandwidth-optimal, and a round waits for no more than the round before. All ranks
form the same bits. Source: folklore; the phases are those of `direct`.
"""

from gpucoll.algorithms import Traits, algorithm, phases
from gpucoll.core.schedule import Rounds


@algorithm("all_reduce", in_rank_order="1", chunks="P", vectorised="1", rounds="2 * min(1, P - 1)",
           path="2 * min(1, P - 1) * N / P", sent="2 * (P - 1) * N / P", reduced="(P - 1) * N / P",
           gaps="2 * max(0, P - 2)", traits=Traits(at_source=True, barriers=2, kernel="fold_share"))
def two_shot_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank.

    >>> len(list(two_shot_all_reduce(rank=0, size=8)))
    2
    """
    yield from phases("reduce_scatter")["direct"](rank, size)
    yield from phases("all_gather")["direct"](rank, size)
