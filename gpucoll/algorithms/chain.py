"""Chain: a pipeline through all ranks; with many segments at the bandwidth bound, with a latency linear in P.

Every rank receives from a neighbour and sends to the other, N bytes in all. While segment k travels over a link,
segment k - 1 travels over the next link: P - 2 + S rounds of N / S bytes.

    broadcast   0 ──► 1 ──► 2 ──► 3        segments at time 2:   0 ─2─► 1 ─1─► 2 ─0─► 3
    reduce      0 ◄── 1 ◄── 2 ◄── 3

The best S is sqrt((P - 2) beta N / alpha): many segments for long arrays, a single segment for short arrays. Good for
long arrays on few ranks. Source: folklore.
"""

from gpucoll.algorithms import Traits, algorithm
from gpucoll.core.schedule import Rounds
from gpucoll.core.topology import chain, down, up

COST = {"chunks": "S", "rounds": "(P > 1) * (P + S - 2)", "path": "(P > 1) * (P + S - 2) * N / S",
        "sent": "(P > 1) * N"}
RING = Traits(in_nccl="ring")


@algorithm("broadcast", **COST, traits=RING)
def chain_broadcast(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the input of rank 0, the root, on every rank.

    >>> for steps in chain_broadcast(rank=1, size=3, segments=2):
    ...     print(*(f"{type(step).__name__} {step.peer}" for step in steps))
    Recv 0
    Send 2 Recv 0
    Send 2
    """
    yield from filter(None, down(chain(rank, size), segments))


@algorithm("reduce", **COST, reduced="(P > 1) * N", traits=RING)
def chain_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs on rank 0, the root; the ranks between form sums in scratch."""
    yield from filter(None, up(chain(rank, size), segments))
