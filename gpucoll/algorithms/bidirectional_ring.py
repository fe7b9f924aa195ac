"""Bidirectional ring: two rings at once in opposite directions, each with half of the data.

Each round sends a chunk to the right for the first ring and a chunk to the left for the second. Both directions of a
full-duplex link work, so the time is half of the `ring`'s. Good for long arrays on rings of full-duplex links.

    ┌─► 0 ──► 1 ──► 2 ──► 3 ─┐     the first half of the chunks
    └────────────────────────┘
    ┌── 0 ◄── 1 ◄── 2 ◄── 3 ◄┐     the second half
    └────────────────────────┘

Cost: 2 (P - 1) rounds; (P - 1) N / P bytes on the longest path, 2 (P - 1) N / P bytes sent by each rank. Source: two
copies of `ring`.
"""

from gpucoll.algorithms import Traits, algorithm, find
from gpucoll.core.schedule import Rounds, moved, together, within


@algorithm("all_reduce", chunks="2 * P * S", vectorised="1", rounds="2 * (P - 1)",
           path="(1 + (P == 2)) * (P - 1) * N / P", sent="2 * (P - 1) * N / P", reduced="(P - 1) * N / P",
           gaps="2 * (P > 2) * (P - 1)", traits=Traits(1 << 22, by_block=True))
def bidirectional_ring_all_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs on every rank; the second ring numbers the ranks in reverse.

    >>> [step.peer for step in next(bidirectional_ring_all_reduce(rank=0, size=4)) if hasattr(step, "peer")]
    [1, 3, 3, 1]
    """
    ring = find("all_reduce", "ring").make
    back = moved(ring(-rank % size, size, segments), within({}, offset=size * segments), lambda peer: -peer % size)
    return together(ring(rank, size, segments), back)
