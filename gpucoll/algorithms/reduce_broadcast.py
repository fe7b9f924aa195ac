"""Reduce, then broadcast: divide and conquer up to rank 0, and down again.

    0 ◄── 4    0 ◄── 2    0 ◄── 1    then    0 ──► 4    0 ──► 2    0 ──► 1        8 ranks
               4 ◄── 6    ...                           4 ──► 6    ...

Cost: 2 ceil(log2 P) rounds of N bytes, for every P. Good for short arrays; `recursive_doubling` needs half of the
rounds on 2^m ranks. Source: composed of two `binomial` collectives.
"""

from gpucoll.algorithms import algorithm, find
from gpucoll.core.schedule import Rounds, moved, within


@algorithm("all_reduce", chunks="1", rounds="2 * lg(2 * P - 1)", path="2 * lg(2 * P - 1) * N", sent="lg(2 * P - 1) * N",
           reduced="lg(2 * P - 1) * N")
def reduce_broadcast_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank.

    >>> [type(steps[-1]).__name__ for steps in reduce_broadcast_all_reduce(rank=0, size=4)]
    ['RecvReduce', 'RecvReduce', 'Send', 'Send']
    """
    yield from find("reduce", "binomial").make(rank, size)
    yield from moved(find("broadcast", "binomial").make(rank, size), within({"input": "output"}))
