"""Binomial: divide and conquer in ceil(log2 P) rounds for every P.

The interval of all ranks is cut in two halves. The first rank of the interval sends to the first rank of the later
half. Both ranks then continue with their own halves at the same time:

    round 1   0 ───────────────► 4              8 ranks, a broadcast or a scatter
    round 2   0 ───────► 2       4 ───────► 6
    round 3   0 ──► 1    2 ──► 3 4 ──► 5    6 ──► 7

A reduction or a gather runs the same edges in reverse. Broadcast and reduce move N bytes in each round: good for short
arrays. Scatter and gather move only the blocks of the interval, (P - 1) N / P bytes on the longest path: rounds and
bytes are both minimal. Source: see Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH" (2005).
"""

import itertools

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Rounds, Send, Slice
from gpucoll.core.topology import splits

ROUNDS = "lg(2 * P - 1)"
WHOLE = {"chunks": "1", "rounds": ROUNDS, "path": f"{ROUNDS} * N"}
BLOCKS = {"chunks": "P", "rounds": ROUNDS, "path": "(P - 1) * N / P"}
LESS, MORE = "P // 2 * N / P", "(P - 1) * N / P"  # half of all blocks; all blocks but the root's own


@algorithm("broadcast", **WHOLE, sent=f"{ROUNDS} * N", received="(P > 1) * N")
def binomial_broadcast(rank: int, size: int) -> Rounds:
    """Leave the input of rank 0, the root, on every rank: ceil(log2 P) rounds of N bytes.

    >>> [steps[-1].peer for steps in binomial_broadcast(rank=0, size=8)]
    [4, 2, 1]
    """
    place, result = splits(rank, size), Slice("output", 0)
    source = result if rank else Slice("input", 0)
    begun = [Copy(source, result)] if rank == 0 else []
    if place.parent is not None:
        yield (Recv(result, place.parent),)
    for child, _ in place.children:
        yield (*begun, Send(source, child))
        begun = []


@algorithm("reduce", **WHOLE, sent="(P > 1) * N", received=f"{ROUNDS} * N", reduced=f"{ROUNDS} * N")
def binomial_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on rank 0, the root: ceil(log2 P) rounds of N bytes.

    Inner ranks form sums in scratch.
    """
    place, own = splits(rank, size), Slice("input", 0)
    total = Slice("scratch" if rank else "output", 0)
    begun = [Copy(own, total)]
    for child, _ in reversed(place.children):
        yield (*begun, RecvReduce(total, child))
        begun = []
    if place.parent is not None:
        yield (Send(total if place.children else own, place.parent),)


@algorithm("scatter", **BLOCKS, sent=MORE, received=LESS)
def binomial_scatter(rank: int, size: int, root: int = 0) -> Rounds:
    """Leave block `rank` of the root's input on every rank; blocks of other ranks pass through scratch."""
    place, mine = (rank - root) % size, Slice("output", 0)
    split = splits(place, size)
    own = _blocks(place, 1, place, size, root, "input")[0]
    if split.parent is not None:
        came = _blocks(place, split.leads, place, size, root, "input") if split.children else [mine]
        yield tuple(Recv(part, (split.parent + root) % size) for part in came)
    for child, count in split.children:
        parts = _blocks(child, count, place, size, root, "input")
        yield tuple(Send(part, (child + root) % size) for part in parts)
    if split.children:
        yield (Copy(own, mine),)


@algorithm("gather", **BLOCKS, sent=LESS, received=MORE)
def binomial_gather(rank: int, size: int, root: int = 0) -> Rounds:
    """Leave the inputs of all ranks, in rank order, on `root`; blocks of other ranks pass through scratch."""
    place, mine = (rank - root) % size, Slice("input", 0)
    split = splits(place, size)
    if split.children:
        yield (Copy(mine, _blocks(place, 1, place, size, root, "output")[0]),)
    for child, count in reversed(split.children):
        parts = _blocks(child, count, place, size, root, "output")
        yield tuple(Recv(part, (child + root) % size) for part in parts)
    if split.parent is not None:
        sent = _blocks(place, split.leads, place, size, root, "output") if split.children else [mine]
        yield tuple(Send(part, (split.parent + root) % size) for part in sent)


def _blocks(first: int, count: int, place: int, size: int, root: int, whole: Buffer) -> list[Slice]:
    """Return the slices of the blocks of `count` places from `first`: in `whole` on the root, in scratch elsewhere.

    Places count from the root. A range wrapping in rank order gives two slices on every rank, so both ends of a message
    agree.
    """
    cuts = [first, size - root, first + count] if first < size - root < first + count else [first, first + count]
    return [Slice(whole, (begin + root) % size, end - begin) if place == 0 else
            Slice("scratch", begin - place, end - begin) for begin, end in itertools.pairwise(cuts)]
