"""One shot: every rank sends all of its data to every other rank and reduces locally; a single round.

    0 ──► 1, 2, 3     1 ──► 0, 2, 3     2 ──► 0, 1, 3     3 ──► 0, 1, 2        all at once

Cost: 1 round; (P - 1) N bytes sent, received and combined by every rank. Good for short arrays where links join all
pairs, because no message waits for another. All ranks combine in rank order and form the same bits. In a scan a rank
sends all of its data to the ranks after it.

    0 ──► 1, 2, 3     1 ──► 2, 3        2 ──► 3                                    all at once

Source: folklore.
"""

from gpucoll.algorithms import Traits, algorithm
from gpucoll.core.schedule import Recv, RecvReduce, Rounds, Send, Slice, in_rank_order

OTHERS = "(P - 1) * N"


@algorithm("all_reduce", in_rank_order="1", chunks="1", vectorised="1", rounds="min(1, P - 1)",
           path="min(1, P - 1) * N", sent=OTHERS, reduced=OTHERS, gaps="max(0, P - 2)",
           traits=Traits(at_source=True, barriers=1, kernel="fold_all"))
def one_shot_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs, in rank order, on every rank.

    >>> [steps] = one_shot_all_reduce(rank=1, size=3)
    >>> [type(step).__name__ for step in steps]
    ['Send', 'Send', 'Recv', 'Reduce', 'RecvReduce']
    """
    own, total = Slice("input", 0), Slice("output", 0)
    sends = [Send(own, (rank + distance) % size) for distance in range(1, size)]
    yield (*sends, *in_rank_order(own, total, rank, size))


@algorithm("scan", in_rank_order="1", chunks="1", rounds="min(1, P - 1)", path="min(1, P - 1) * N", sent=OTHERS,
           received=OTHERS, reduced=OTHERS, gaps="max(0, P - 2)", traits=Traits(at_source=True))
def one_shot_scan(rank: int, size: int) -> Rounds:
    """Leave the reduction of the inputs of ranks 0 to `rank`, in rank order, on every rank."""
    own, total = Slice("input", 0), Slice("output", 0)
    yield (*(Send(own, peer) for peer in range(rank + 1, size)), *in_rank_order(own, total, rank, rank + 1))


@algorithm("exscan", in_rank_order="1", chunks="1", rounds="min(1, P - 1)", path="min(1, P - 1) * N", sent=OTHERS,
           received=OTHERS, reduced="max(0, P - 2) * N", gaps="max(0, P - 2)", traits=Traits(at_source=True))
def one_shot_exscan(rank: int, size: int) -> Rounds:
    """Leave the reduction of the inputs of ranks 0 to `rank` - 1, in rank order, on every rank but rank 0."""
    own, total = Slice("input", 0), Slice("output", 0)
    yield (*(Send(own, peer) for peer in range(rank + 1, size)), *(Recv(total, 0) for _ in range(min(1, rank))),
           *(RecvReduce(total, peer) for peer in range(1, rank)))
