"""Dissemination: a barrier in ceil(log2 P) rounds for every P.

Source: see Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988). In round k every rank sends
an empty message to the rank 2^k ahead, and waits for the message of the rank 2^k behind. After round k a rank knows
that 2^(k+1) ranks have arrived.

    P = 5:  +1: 0►1 1►2 2►3 3►4 4►0    +2: 0►2 1►3 2►4 3►0 4►1    +4: 0►4 1►0 2►1 3►2 4►3

Cost: ceil(log2 P) rounds, the minimum, and no bytes. Good for every P.
"""

from gpucoll.algorithms import Traits, algorithm
from gpucoll.core.schedule import Recv, Rounds, Send, Slice

NO_CHUNK = Slice("scratch", 0, 0)


@algorithm("barrier", chunks="1", vectorised="1", rounds="lg(2 * P - 1)", path="0", traits=Traits(probes=(0,)))
def dissemination_barrier(rank: int, size: int) -> Rounds:
    """Let no rank leave before every rank has entered; only empty messages move.

    >>> list(dissemination_barrier(rank=0, size=2))[0][0].peer
    1
    """
    distance = 1
    while distance < size:
        yield (Send(NO_CHUNK, (rank + distance) % size), Recv(NO_CHUNK, (rank - distance) % size))
        distance *= 2
