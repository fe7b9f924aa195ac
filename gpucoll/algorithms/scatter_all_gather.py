"""Scatter, then all-gather: a broadcast for long arrays; the root sends N bytes about twice instead of log2 P times.

Source: see Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience"
(2007). The algorithm is van de Geijn's; the all-gather is Träff's `circulant`.

    root 0   ──► blocks 2-3 to 2, block 1 to 1; 2 ──► block 3 to 3        4 ranks
    all      ──► their blocks to each other

Cost: 2 ceil(log2 P) rounds and 2 (P - 1) N / P bytes. Good for long arrays at every P. Rank 0 is the root.
"""

from gpucoll.algorithms import algorithm, phases
from gpucoll.core.branches import halves
from gpucoll.core.schedule import Copy, Recv, Rounds, Send, Slice, Step


@algorithm("broadcast", chunks="P", rounds="2 * lg(2 * P - 1)", path="2 * (P - 1) * N / P",
           received="(P - 1 + P // 2) * N / P")
def scatter_all_gather_broadcast(rank: int, size: int) -> Rounds:
    """Leave the input of rank 0 on every rank.

    >>> [type(steps[-1]).__name__ for steps in scatter_all_gather_broadcast(rank=1, size=4)]
    ['Recv', 'Recv', 'Recv']
    """
    split = halves(rank, size)
    begun: Step = Copy(Slice("input", 0, size), Slice("output", 0, size))
    if split.parent is not None:
        begun = Recv(Slice("output", rank, split.ranks), split.parent)
    yield (begun,)
    yield from ((Send(Slice("output", child, count), child),) for child, _, count in split.children)
    yield from phases("all_gather")["circulant"](rank, size)
