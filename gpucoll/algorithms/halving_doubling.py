"""Halving and doubling: reduce-scatter by recursive halving, then all-gather by recursive doubling.

Rabenseifner, "Optimization of collective reduction operations" (2004). Partners at a distance
of P / 2, P / 4, ..., 1 exchange halves of what they still have; then all the same ways back.

    0 ◄────────────────► 4      half of the data                8 ranks; 1, 2, 3 alike
    0 ◄──────► 2                a quarter
    0 ◄──► 1                    an eighth, complete on its rank

2 log2 P rounds and 2 (P - 1) / P N bytes, both optimal for a power of two. Otherwise each rank
beyond the power of two first hands its data to its neighbour, and gets the result in the end.
"""

from gpucoll.algorithms import algorithm
from gpucoll.schedule import Rounds, Slice
from gpucoll.topology import doubling, fold, folded, halving

HALVES = "2 * (two(P) - 1) * N / two(P)"
FOLDED = "(rest(P) > 0) * N"


@algorithm("all_reduce", chunks="two(P)", alike="not rest(P)", rounds="2 * lg(P) + 2 * (rest(P) > 0)",
           path=f"{HALVES} + 2 * {FOLDED}", sent=f"{HALVES} + {FOLDED}",
           reduced=f"(two(P) - 1) * N / two(P) + {FOLDED}")
def halving_doubling_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank.

    >>> [(steps[0].peer, steps[0].src.count) for steps in halving_doubling_all_reduce(rank=0, size=8)]
    [(4, 4), (2, 2), (1, 1), (1, 1), (2, 2), (4, 4)]
    """
    place = fold(rank, size)

    def core(number: int, source: Slice) -> Rounds:
        distances = [place.core >> step for step in range(1, place.core.bit_length())]
        partners = [place.rank_of(number ^ distance) for distance in distances]
        yield from halving(number, partners, source.buffer)
        yield from doubling(number, partners)

    return folded(place, Slice("output", 0, place.core), core)
