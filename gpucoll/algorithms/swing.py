"""Swing: halving and doubling between ranks near each other on a ring or torus.

Source: see De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth allreduce" (2024). In
step s an even rank exchanges with the rank rho(s) = 1 - 2 + 4 - ... places on, an odd rank with the rank as far back.
The distances are 1, -1, 3, -5, 11, ... instead of 1, 2, 4, 8, 16, so messages cross fewer links.

    step 0   0 ◄► 1    2 ◄► 3    4 ◄► 5    6 ◄► 7        8 ranks on a ring
    step 1   7 ◄► 0    1 ◄► 2    3 ◄► 4    5 ◄► 6
    step 2   0 ◄────────► 3      2 ◄────────► 5          and so on

Cost: rounds and bytes of `halving_doubling`, and the same folding of ranks beyond a power of two. Good for middle and
long arrays on rings and tori.
"""

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Rounds
from gpucoll.core.topology import HALVED_AND_DOUBLED, fold, halved_and_doubled


@algorithm("all_reduce", **HALVED_AND_DOUBLED)
def swing_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank.

    >>> [(steps[0].peer, steps[0].src.count) for steps in swing_all_reduce(rank=0, size=8)]
    [(1, 4), (7, 2), (3, 1), (3, 1), (7, 2), (1, 4)]
    """
    place = fold(rank, size)

    def partners(number: int) -> list[int]:
        ahead = 1 - 2 * (number % 2)  # an odd number's partner is as far behind
        return [place.rank_of((number + ahead * rho(step)) % place.core) for step in range(place.core.bit_length() - 1)]

    return halved_and_doubled(place, partners, lambda number: _position(number, place.core))


def rho(step: int) -> int:
    """Return the distance of a step, 1 - 2 + 4 - ... with step + 1 terms: 1, -1, 3, -5, 11."""
    return (1 - (-2) ** (step + 1)) // 3


def _position(number: int, core: int) -> int:
    """Return the position of the block completed by `number`, chosen so every half sent or kept is a contiguous range.

    In step s the numbers still served by this rank are the even numbers equal to it modulo 2 ** (s + 1), and the odd
    numbers equal to it after subtraction of rho. The position therefore lists these bits, the lowest first, and parity
    last.
    """
    bits = core.bit_length() - 1
    even = (number - number % 2 * rho(bits - 1)) % core
    return sum((even >> bit & 1) << bits - bit for bit in range(1, bits)) + number % 2
