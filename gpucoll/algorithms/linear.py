"""Linear: the root exchanges with each of the P - 1 others directly; scans go from rank to rank.

Broadcast, reduce, gather and scatter take a single round, and all bytes pass the root's link: (P - 1) N bytes for
broadcast and reduce, (P - 1) N / P for gather and scatter. Good for few ranks, and the yardstick for other rooted
collectives.

    gather    1 ──►┐        scatter      ┌──► 1        scan   0 ──► 1 ──► 2 ──► 3
              2 ──►├── 0             0 ──├──► 2
              3 ──►┘                     └──► 3

A scan is a pipeline of P + S - 2 rounds of N / S bytes: a rank sends segment k while receiving segment k + 1. Good for
long arrays; `recursive_doubling` is better for short arrays. Source: folklore.
"""

from gpucoll.algorithms import Traits, algorithm
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Rounds, Send, Slice, Step, in_rank_order

AT_SOURCE = Traits(at_source=True)


@algorithm("broadcast", chunks="1", rounds="min(1, P - 1)", path="min(1, P - 1) * N", sent="(P - 1) * N",
           received="min(1, P - 1) * N", gaps="max(0, P - 2)", traits=Traits(at_source=True, barriers=1))
def linear_broadcast(rank: int, size: int, root: int = 0) -> Rounds:
    own, result = Slice("input", 0), Slice("output", 0)
    if rank != root:
        yield (Recv(result, root),)
    else:
        yield (Copy(own, result), *(Send(own, peer) for peer in range(size) if peer != root))


@algorithm("reduce", in_rank_order="1", chunks="1", rounds="min(1, P - 1)", path="min(1, P - 1) * N",
           received="(P - 1) * N", reduced="(P - 1) * N", gaps="max(0, P - 2)", traits=AT_SOURCE)
def linear_reduce(rank: int, size: int, root: int = 0) -> Rounds:
    """Leave the reduction of all inputs, in rank order, on `root`."""
    own, result = Slice("input", 0), Slice("output", 0)
    if rank != root:
        yield (Send(own, root),)
    else:
        yield tuple(in_rank_order(own, result, root, size))


@algorithm("gather", rounds="min(1, P - 1)", path="min(1, P - 1) * N / P", received="(P - 1) * N / P",
           gaps="max(0, P - 2)", traits=AT_SOURCE)
def linear_gather(rank: int, size: int, root: int = 0, segments: int = 1) -> Rounds:
    own = Slice("input", 0, segments)
    if rank != root:
        yield (Send(own, root),)
    else:
        yield (Copy(own, Slice("output", rank * segments, segments)),
               *(Recv(Slice("output", peer * segments, segments), peer) for peer in range(size) if peer != root))


@algorithm("scatter", rounds="min(1, P - 1)", path="min(1, P - 1) * N / P", sent="(P - 1) * N / P",
           received="min(1, P - 1) * N / P", gaps="max(0, P - 2)", traits=AT_SOURCE)
def linear_scatter(rank: int, size: int, root: int = 0, segments: int = 1) -> Rounds:
    own = Slice("output", 0, segments)
    if rank != root:
        yield (Recv(own, root),)
    else:
        yield (Copy(Slice("input", rank * segments, segments), own),
               *(Send(Slice("input", peer * segments, segments), peer) for peer in range(size) if peer != root))


@algorithm("scan", in_rank_order="by steps", chunks="S", rounds="(P > 1) * (P + S - 2)",
           path="(P > 1) * (P + S - 2) * N / S", sent="(P > 1) * N", reduced="(P > 1) * N")
def linear_scan(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of the inputs of ranks 0 to `rank` on every rank, combined in rank order."""
    for time in range(segments + 1):
        steps: list[Step] = []
        if rank + 1 < size and time > 0:
            steps.append(Send(Slice("output", time - 1), rank + 1))
        if time < segments:
            steps.append(Copy(Slice("input", time), Slice("output", time)))
            steps += [RecvReduce(Slice("output", time), rank - 1)] if rank else []
        if steps:
            yield tuple(steps)


@algorithm("exscan", in_rank_order="by steps", chunks="S", rounds="(P > 1) * (P + S - 2)",
           path="(P > 1) * (P + S - 2) * N / S", sent="(P > 1) * N", reduced="(P > 2) * N")
def linear_exscan(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of the inputs of ranks 0 to `rank` - 1 on every rank but rank 0.

    The output of rank 0 is unchanged. The message to the right is formed in scratch: the segment from the left,
    combined with this rank's input.
    """
    for time in range(segments + 1):
        came, own = Slice("output", time), Slice("input", time)
        steps: list[Step] = []
        if rank + 1 < size and time > 0:
            steps.append(Send(Slice("scratch", time - 1) if rank else Slice("input", time - 1), rank + 1))
        if rank and time < segments:
            steps.append(Recv(came, rank - 1))
        if steps:
            yield tuple(steps)
        if 0 < rank < size - 1 and time < segments:
            passed = Slice("scratch", time)
            yield (Copy(came, passed), Reduce(own, passed))
