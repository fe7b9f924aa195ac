"""Ring: each rank exchanges data only with its two neighbours; bandwidth-optimal, with latency linear in P.

Source: see Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
Reduce-scatter for four ranks: chunk c starts on rank c + 1, travels right and collects one contribution per hop. After
three hops chunk c is complete on rank c.

              rank 0        rank 1        rank 2        rank 3
    hop 1   3 ────────►   0 ────────►   1 ────────►   2 ────────► (to rank 0)
    hop 2   2+ ───────►   3+ ───────►   0+ ───────►   1+ ───────►
    hop 3   1++ ──────►   2++ ──────►   3++ ──────►   0++ ──────►
            0 complete    1 complete    2 complete    3 complete

An all-gather then sends the complete chunks once round the ring. A chunk is sent as `segments` messages in the same
round, so that one message is combined while the next is in transit. Cost: P - 1 rounds and (P - 1) N / P bytes for each
half, and twice as much for an all-reduce. Good for long arrays.

In all_gather_v blocks of different lengths also go round the ring, because every rank has room for all blocks. In the
other v-variants each block goes straight to its target rank: round d serves all ranks at distance d.

The code uses `rank` in arithmetic only, so `rank` may be a NumPy array, to generate the schedules of all ranks at once.
"""

from collections.abc import Callable

from gpucoll.algorithms import Traits, algorithm, find, phase
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Rounds, Send, Slice, Step

# Calibration measures the bandwidth of short and long messages by ring phases, because all links carry equal bytes.
SEGMENTED = Traits(1 << 22, by_block=True)
MEASURED = SEGMENTED._replace(probes=(1 << 16, 1 << 20))
# Costs of the v-variants: all blocks but the own once round the ring, each of N / P bytes on average.
ONCE_AROUND = {"rounds": "P - 1", "path": "(P - 1) * N / P", "sent": "(P - 1) * N / P"}


@algorithm("all_reduce", vectorised="1", rounds="2 * (P - 1)", path="2 * (P - 1) * N / P", reduced="(P - 1) * N / P",
           traits=SEGMENTED)
def ring_all_reduce(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave the reduction of all inputs on every rank: reduce-scatter, then all-gather, both within output.

    >>> for steps in ring_all_reduce(rank=0, size=2):
    ...     print([type(step).__name__ for step in steps])
    ['Send', 'Copy', 'RecvReduce']
    ['Send', 'Recv']
    """
    yield from collect(rank, size, segments)
    yield from distribute(rank, size, segments)


@algorithm("reduce_scatter", vectorised="1", rounds="P - 1", path="(P - 1) * N / P", reduced="(P - 1) * N / P",
           traits=MEASURED)
def ring_reduce_scatter(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave block `rank`, reduced over all inputs, on every rank; partial sums alternate between two scratch blocks."""
    def formed(hop: int, segment: int) -> Slice:
        last = hop == size - 1
        return Slice("output", segment) if last else Slice("scratch", hop % 2 * segments + segment)

    yield from _collect(rank, size, segments, formed)


@algorithm("all_gather", vectorised="1", rounds="P - 1", path="(P - 1) * N / P", traits=MEASURED)
def ring_all_gather(rank: int, size: int, segments: int = 1) -> Rounds:
    own = Slice("input", 0, segments)
    rounds = _distribute(rank, size, segments, own)
    yield (Copy(own, Slice("output", rank * segments, segments)), *next(rounds))
    yield from rounds


@algorithm("all_gather_v", chunks="P", vectorised="1", **ONCE_AROUND)
def ring_all_gather_v(rank: int, size: int) -> Rounds:
    """Leave the inputs of all ranks, in rank order, on every rank; inputs may have unequal lengths."""
    return ring_all_gather(rank, size)


@algorithm("all_to_all_v", chunks="P", vectorised="1", **ONCE_AROUND)
def ring_all_to_all_v(rank: int, size: int) -> Rounds:
    """Leave block `rank` of every rank's input, in rank order, on every rank; a distance per round, see `pairwise`."""
    return find("all_to_all", "pairwise").make(rank, size)


@algorithm("reduce_scatter_v", chunks="P", vectorised="1", **(ONCE_AROUND | {"reduced": ONCE_AROUND["sent"]}))
def ring_reduce_scatter_v(rank: int, size: int) -> Rounds:
    """Leave block `rank`, reduced over all inputs, on every rank.

    Each round brings the contribution of a single rank, a place further left each time.
    """
    own = Slice("output", 0)
    begun = [Copy(Slice("input", rank), own)]
    for distance in range(1, size):
        right, left = (rank + distance) % size, (rank - distance) % size
        yield (Send(Slice("input", right), right), *begun, RecvReduce(own, left))
        begun = []


@algorithm("gather_v", chunks="P", **(ONCE_AROUND | {"sent": "min(1, P - 1) * N / P", "received": ONCE_AROUND["sent"]}))
def ring_gather_v(rank: int, size: int, root: int = 0) -> Rounds:
    """Leave the inputs of all ranks, in rank order, on `root`.

    The root receives from a single rank per round, beginning with the left neighbour.
    """
    own = Slice("input", 0)
    if rank != root:
        yield (Send(own, root),)
        return
    yield (Copy(own, Slice("output", rank)),)
    for distance in range(1, size):
        left = (rank - distance) % size
        yield (Recv(Slice("output", left), left),)


@algorithm("scatter_v", chunks="P", **(ONCE_AROUND | {"received": "min(1, P - 1) * N / P"}))
def ring_scatter_v(rank: int, size: int, root: int = 0) -> Rounds:
    """Leave block `rank` of the root's input on every rank.

    The root sends to a single rank per round, beginning with the right neighbour.
    """
    own = Slice("output", 0)
    if rank != root:
        yield (Recv(own, root),)
        return
    yield (Copy(Slice("input", rank), own),)
    for distance in range(1, size):
        right = (rank + distance) % size
        yield (Send(Slice("input", right), right),)


@phase("reduce_scatter")
def collect(rank: int, size: int, segments: int = 1) -> Rounds:
    """Leave block `rank` of output reduced; partial sums of a block are formed in the same block of output."""
    def formed(hop: int, segment: int) -> Slice:
        return Slice("output", (rank - hop - 1) % size * segments + segment)

    return _collect(rank, size, segments, formed)


@phase("all_gather")
def distribute(rank: int, size: int, segments: int = 1) -> Rounds:
    return _distribute(rank, size, segments, Slice("output", rank * segments, segments))


def _collect(rank: int, size: int, segments: int, formed: Callable[[int, int], Slice]) -> Rounds:
    """Yield the hops of the reduce-scatter; `formed(hop, segment)` is the slice for the sum of that hop and segment."""
    left, right = (rank - 1) % size, (rank + 1) % size
    for hop in range(1, size):
        steps: list[Step] = []
        for segment in range(segments):
            begun = Slice("input", (rank - 1) % size * segments + segment)
            own = Slice("input", (rank - hop - 1) % size * segments + segment)
            came = formed(hop, segment)
            steps += [Send(begun if hop == 1 else formed(hop - 1, segment), right), Copy(own, came),
                      RecvReduce(came, left)]
        yield tuple(steps)


def _distribute(rank: int, size: int, segments: int, own: Slice) -> Rounds:
    """Yield the hops of the all-gather: `own` goes first, then each rank passes on the chunk received last."""
    left, right = (rank - 1) % size, (rank + 1) % size
    sent = own
    for hop in range(1, size):
        came = Slice("output", (rank - hop) % size * segments, segments)
        steps: list[Step] = []
        for segment in range(segments):
            steps += [Send(Slice(sent.buffer, sent.first + segment), right),
                      Recv(Slice(came.buffer, came.first + segment), left)]
        yield tuple(steps)
        sent = came
