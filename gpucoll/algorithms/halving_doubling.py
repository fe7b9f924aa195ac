"""Halving and doubling: reduce-scatter by recursive halving, then all-gather by recursive doubling.

Source: see Rabenseifner, "Optimization of collective reduction operations" (2004). Partners at a distance of P / 2,
P / 4, ..., 1 exchange halves of the remaining data and combine. The all-gather runs the same exchanges in reverse.

    0 ◄────────────────► 4      half of the data                8 ranks; 1, 2, 3 in the same way
    0 ◄──────► 2                a quarter
    0 ◄──► 1                    an eighth, complete on its rank

Cost: 2 log2 P rounds and 2 (P - 1) N / P bytes, both optimal for a power of two. Otherwise each rank beyond the power
of two first hands its data to a neighbour, and receives the result at the end: 2 more rounds of N bytes. Good for
middle and long arrays on 2^m ranks.
"""

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Rounds
from gpucoll.core.topology import HALVED_AND_DOUBLED, fold, halved_and_doubled


@algorithm("all_reduce", **HALVED_AND_DOUBLED)
def halving_doubling_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank.

    >>> [(steps[0].peer, steps[0].src.count) for steps in halving_doubling_all_reduce(rank=0, size=8)]
    [(4, 4), (2, 2), (1, 1), (1, 1), (2, 2), (4, 4)]
    """
    place = fold(rank, size)
    return halved_and_doubled(place, place.across)
