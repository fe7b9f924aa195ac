"""Reduce-scatter, then gather: a reduction for long arrays, with every rank combining a share.

Source: see Rabenseifner, "Optimization of collective reduction operations" (2004). The reduce-scatter is Träff's
circulant reduce-scatter, so every P is supported.

    all      ──► blocks to each other, until block r is complete on rank r        4 ranks
    3 ──► block 3 to 2;   2 ──► blocks 2-3 to 0;   1 ──► block 1 to 0

Cost: 2 ceil(log2 P) rounds, 2 (P - 1) N / P bytes on the longest path, (P - 1) N / P bytes combined by a rank. Good for
long arrays: a tree combines N bytes or more on inner ranks. Rank 0 is the root.
"""

from gpucoll.algorithms import algorithm, phases
from gpucoll.core.branches import halves
from gpucoll.core.schedule import Recv, Round, Rounds, Send, Slice, moved, within


@algorithm("reduce", chunks="P", rounds="2 * lg(2 * P - 1)", path="2 * (P - 1) * N / P",
           sent="(P - 1 + P // 2) * N / P", received="2 * (P - 1) * N / P", reduced="(P - 1) * N / P")
def reduce_scatter_gather_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on rank 0; the other ranks form sums in scratch.

    >>> [type(steps[-1]).__name__ for steps in reduce_scatter_gather_reduce(rank=1, size=4)]
    ['RecvReduce', 'RecvReduce', 'Send']
    """
    sums = within({"output": "scratch"} if rank else {})
    yield from moved(phases("reduce_scatter")["circulant"](rank, size), sums)
    split = halves(rank, size)
    gather: list[Round] = [(Recv(Slice("output", first, count), child),)
                           for child, first, count in reversed(split.children)]
    if split.parent is not None:
        gather.append((Send(Slice("output", rank, split.ranks), split.parent),))
    yield from moved(gather, sums)
