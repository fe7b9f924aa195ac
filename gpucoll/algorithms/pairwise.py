"""Pairwise: P - 1 rounds; in each round every rank sends to a single peer and receives from a single peer.

In round d a rank sends its block for the rank d places on, and receives a block from the rank d places back.

    round 1   0 ──► 1 ──► 2 ──► 3 ──► 0        round 2   0 ◄──► 2   1 ◄──► 3        4 ranks
    round 3   0 ──► 3 ──► 2 ──► 1 ──► 0

Cost: P - 1 rounds and (P - 1) N / P bytes, the minimum. Good for long blocks: no byte moves twice, and no receiver is
flooded as may happen in `direct`. Source: see Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH" (2005).
"""

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Copy, Recv, Rounds, Send, Slice


@algorithm("all_to_all", chunks="P", vectorised="1", rounds="P - 1", path="(P - 1) * N / P")
def pairwise_all_to_all(rank: int, size: int) -> Rounds:
    """Leave block `rank` of every rank's input, in rank order, on every rank.

    >>> [steps[-2].peer for steps in pairwise_all_to_all(rank=1, size=4)]
    [2, 3, 0]
    """
    begun = [Copy(Slice("input", rank), Slice("output", rank))]
    for distance in range(1, size):
        right, left = (rank + distance) % size, (rank - distance) % size
        yield (*begun, Send(Slice("input", right), right), Recv(Slice("output", left), left))
        begun = []
