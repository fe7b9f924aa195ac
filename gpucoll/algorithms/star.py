"""Star: every worker sends to the master; the master combines in rank order and sends the result back.

        1 ──►┐                     ┌──► 1
        2 ──►├── 0    then    0 ───├──► 2
        3 ──►┘                     └──► 3

Cost: S + 1 rounds, 2 without segments; (P - 1) N bytes into and as many out of a single rank. Good only for few ranks
and short arrays, and the yardstick of the other all-reduces. Source: the master-worker all-reduce, folklore.
"""

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Rounds, Send, Slice, Step

MASTER = 0


@algorithm("all_reduce", in_rank_order="1", chunks="S", rounds="(P > 1) * (S + 1)", path="(P > 1) * (S + 1) * N / S",
           sent="(P - 1) * N", reduced="(P - 1) * N", gaps="2 * max(0, P - 2)")
def star_all_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs, in rank order, on every rank; a result leaves while the next segment comes in.

    >>> for steps in star_all_reduce(rank=2, size=3):
    ...     print([type(step).__name__ for step in steps])
    ['Send']
    ['Recv']
    """
    workers = range(1, size)
    for time in range(segments + 1):
        steps: list[Step] = []
        if rank == MASTER and time > 0:
            steps += [Send(Slice("output", time - 1), worker) for worker in workers]
        if rank == MASTER and time < segments:
            total = Slice("output", time)
            steps += [Copy(Slice("input", time), total), *(RecvReduce(total, worker) for worker in workers)]
        if rank != MASTER and time < segments:
            steps.append(Send(Slice("input", time), MASTER))
        if rank != MASTER and time > 0:
            steps.append(Recv(Slice("output", time - 1), MASTER))
        yield tuple(steps)
