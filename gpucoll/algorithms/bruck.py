"""Bruck: ceil(log2 P) rounds for every P; each rank numbers the blocks from its own rank on.

Source: see Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997). Block i of an all-to-all is for the rank i places on; the example has i = 5.

    all_gather    rank r has block r; then r, r + 1; then r ... r + 3; ...        each from the rank 1, 2, 4, ... on
    all_to_all    the block for the rank i places on travels 1, 2, 4, ... places, as the binary digits of i say

    i = 5 = 101:   0 ── 1 ──► 1 ───── 4 ─────► 5

An all-gather moves (P - 1) N / P bytes, the minimum: good for all lengths at every P. An all-to-all moves each block
about log2 P / 2 times, about N log2 P / 2 bytes in all: good for short blocks, with rounds costing more than bytes.
"""

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Copy, Recv, Rounds, Send, Slice, wrapped


@algorithm("all_gather", chunks="P", vectorised="1", rounds="lg(2 * P - 1)", path="(P - 1) * N / P")
def bruck_all_gather(rank: int, size: int) -> Rounds:
    """Leave the inputs of all ranks, in rank order, on every rank; block i of scratch belongs to rank + i.

    Each round doubles the number of blocks held. The last round copies scratch to output in rank order.

    >>> [steps[-1].dst for steps in bruck_all_gather(rank=0, size=5)][1:3]
    [Slice(buffer='scratch', first=2, count=2), Slice(buffer='scratch', first=4, count=1)]
    """
    begun, have = [Copy(Slice("input", 0), Slice("scratch", 0))], 1
    while have < size:
        count = min(have, size - have)
        sent = Slice("input", 0) if begun else Slice("scratch", 0, count)
        yield (*begun, Send(sent, (rank - have) % size), Recv(Slice("scratch", have, count), (rank + have) % size))
        begun, have = [], have + count
    head, *tail = wrapped("output", rank, size, size)
    yield (Copy(Slice("scratch", 0, head.count), head),
           *(Copy(Slice("scratch", head.count, part.count), part) for part in tail))


@algorithm("all_to_all", chunks="P", vectorised="1", rounds="lg(2 * P - 1)", path="ones(P) * N / P")
def bruck_all_to_all(rank: int, size: int) -> Rounds:
    """Leave block `rank` of every rank's input, in rank order, on every rank.

    Block i is for the rank i places on. Each round packs all moving blocks into a single message.
    """
    where = [Slice("input", (rank + i) % size) for i in range(size)]
    room, distance = (size + 1) // 2, 1
    used = room
    while distance < size:
        moving = [i for i in range(size) if i & distance]
        yield tuple(Copy(where[i], Slice("scratch", place)) for place, i in enumerate(moving))
        yield (Send(Slice("scratch", 0, len(moving)), (rank + distance) % size),
               Recv(Slice("scratch", used, len(moving)), (rank - distance) % size))
        for place, i in enumerate(moving):
            where[i] = Slice("scratch", used + place)
        used, distance = used + len(moving), 2 * distance
    yield tuple(Copy(where[i], Slice("output", (rank - i) % size)) for i in range(size))
