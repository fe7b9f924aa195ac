"""Recursive halving: a reduce-scatter on the hypercube; log2 P rounds and (P - 1) N / P bytes.

Partners at a distance of P / 2, P / 4, ..., 1 exchange and combine halves of the remaining blocks.

    0 ◄────────────────► 4      blocks 4-7 one way, 0-3 the other        8 ranks
    0 ◄──────► 2                blocks 2-3          0-1
    0 ◄──► 1                    block 1             0

Rounds and bytes are both optimal for a power of two. Otherwise each rank beyond the power of two first hands its data
to a neighbour. The neighbour then stands for two blocks, and hands the finished block back at the end: 2 more rounds.
Good for all lengths on 2^m ranks. Source: see Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH" (2005).
"""

from gpucoll.algorithms import algorithm, phase
from gpucoll.core.schedule import Copy, Rounds, Slice, moved, within
from gpucoll.core.topology import FOLDED, TWICE, fold, folded_reduce_scatter, halving


@algorithm("reduce_scatter", chunks="P", vectorised="not rest(P)", rounds=f"lg(P) + 2 * {FOLDED}",
           path=f"(two(P) - 1 + {TWICE} + {FOLDED} * (P + 1)) * N / P", sent=f"(P - 1 + {FOLDED}) * N / P",
           received=f"(two(P) - 1 + {TWICE} + {FOLDED} * P) * N / P",
           reduced=f"(two(P) - 1 + {TWICE} + {FOLDED} * P) * N / P")
def recursive_halving_reduce_scatter(rank: int, size: int) -> Rounds:
    """Leave block `rank`, reduced over all inputs, on every rank; sums are formed in scratch.

    >>> [(steps[0].peer, steps[0].src.count) for steps in collect(rank=0, size=4)]
    [(2, 2), (1, 1)]
    """
    yield from moved(collect(rank, size), within({"output": "scratch"}))
    yield (Copy(Slice("scratch", rank), Slice("output", 0)),)


@phase("reduce_scatter")
def collect(rank: int, size: int) -> Rounds:
    place = fold(rank, size)
    return folded_reduce_scatter(place, rank, size, lambda source: halving(
        place.number, place.across(place.number), source, place.blocks))  # type: ignore[arg-type] # the core's numbers
