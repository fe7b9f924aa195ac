"""Binomial: divide and conquer in ceil(log2 P) rounds for every P.

The interval of all ranks is cut in two halves. The first rank of the interval sends to the first rank of the later
half. Both ranks then continue with their own halves at the same time:

    round 1   0 ───────────────► 4              8 ranks, a broadcast or a scatter
    round 2   0 ───────► 2       4 ───────► 6
    round 3   0 ──► 1    2 ──► 3 4 ──► 5    6 ──► 7

A reduction or a gather runs the same edges in reverse. Broadcast and reduce move N bytes in each round: good for short
arrays. Scatter and gather move only the blocks of the interval, (P - 1) N / P bytes on the longest path: rounds and
bytes are both minimal. Source: see Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH" (2005).
"""

from gpucoll.algorithms import algorithm
from gpucoll.core import branches
from gpucoll.core.schedule import Rounds

DEPTH = "lg(2 * P - 1)"
WHOLE = {"chunks": "1", "rounds": DEPTH, "path": f"{DEPTH} * N"}
BLOCKS = {"chunks": "P", "rounds": DEPTH, "path": "(P - 1) * N / P"}
LESS, MORE = "P // 2 * N / P", "(P - 1) * N / P"  # half of all blocks; all blocks but the root's own


@algorithm("broadcast", **WHOLE, sent=f"{DEPTH} * N", received="(P > 1) * N")
def binomial_broadcast(rank: int, size: int) -> Rounds:
    """Leave the input of rank 0, the root, on every rank: ceil(log2 P) rounds of N bytes.

    >>> [steps[-1].peer for steps in binomial_broadcast(rank=0, size=8)]
    [4, 2, 1]
    """
    return branches.broadcast(branches.halves(rank, size))


@algorithm("reduce", **WHOLE, sent="(P > 1) * N", received=f"{DEPTH} * N", reduced=f"{DEPTH} * N")
def binomial_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on rank 0, the root: ceil(log2 P) rounds of N bytes."""
    return branches.reduce(branches.halves(rank, size))


@algorithm("scatter", **BLOCKS, sent=MORE, received=LESS)
def binomial_scatter(rank: int, size: int, root: int = 0) -> Rounds:
    return branches.scatter(rank, size, root)


@algorithm("gather", **BLOCKS, sent=LESS, received=MORE)
def binomial_gather(rank: int, size: int, root: int = 0) -> Rounds:
    return branches.gather(rank, size, root)
