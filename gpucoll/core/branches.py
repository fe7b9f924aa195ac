"""Trees of ranks, where each rank leads an interval: the places of ranks, and collectives along the edges."""

from __future__ import annotations

from typing import NamedTuple

from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Rounds, Send, Slice, wrapped


class Branch(NamedTuple):
    """The place of a rank in the tree of root 0: the rank leads `ranks` ranks of the ring, from rank `first` on.

    A child is a triple of the child's rank, the first rank led by the child, and their number. The rank serves the
    children in this order.
    """

    parent: int | None
    first: int
    ranks: int
    children: tuple[tuple[int, int, int], ...]


def halves(rank: int, size: int) -> Branch:
    """Return the place of `rank` in a binomial tree of intervals: root 0, ceil(log2 size) levels.

    The first rank of an interval leads, and hands the later half of the remaining interval to each child in turn.

        0 ─┬─ 4 ─┬─ 6 ─── 7        8 ranks
           │     └─ 5
           ├─ 2 ─── 3
           └─ 1

    >>> halves(0, 5)
    Branch(parent=None, first=0, ranks=5, children=((3, 3, 2), (2, 2, 1), (1, 1, 1)))
    """
    first, count, parent = 0, size, 0
    while rank != first:
        kept = (count + 1) // 2
        later = rank >= first + kept  # in arithmetic, as `rank` may stand for many ranks
        parent += later * (first - parent)
        first, count = first + later * kept, kept + later * (count - 2 * kept)
    children, left = [], count
    while left > 1:
        kept = (left + 1) // 2
        children.append((first + kept, first + kept, left - kept))
        left = kept
    return Branch(parent if rank else None, first, count, tuple(children))


def broadcast(place: Branch) -> Rounds:
    """Yield the rounds that leave the root's input on every rank."""
    result = Slice("output", 0)
    source = Slice("input", 0) if place.parent is None else result
    begun = [Copy(source, result)] if place.parent is None else []
    if place.parent is not None:
        yield (Recv(result, place.parent),)
    for child, _, _ in place.children:
        yield (*begun, Send(source, child))
        begun = []


def reduce(place: Branch) -> Rounds:
    """Yield the rounds that leave the reduction of all inputs on the root; inner ranks form sums in scratch."""
    own, total = Slice("input", 0), Slice("output" if place.parent is None else "scratch", 0)
    begun = [Copy(own, total)]
    for child, _, _ in reversed(place.children):
        yield (*begun, RecvReduce(total, child))
        begun = []
    if place.parent is not None:
        yield (Send(total if place.children else own, place.parent),)


def scatter(rank: int, size: int, root: int) -> Rounds:
    """Yield the rounds that leave block `rank` of the root's input on every rank; others pass through scratch."""
    place, mine = halves((rank - root) % size, size), Slice("output", 0)
    if place.parent is not None:
        came = _blocks(place, place.first, place.ranks, size, root, "input") if place.children else [mine]
        yield tuple(Recv(part, (place.parent + root) % size) for part in came)
    for child, first, count in place.children:
        yield tuple(Send(part, (child + root) % size) for part in _blocks(place, first, count, size, root, "input"))
    if place.children:
        yield (Copy(_blocks(place, rank - root, 1, size, root, "input")[0], mine),)


def gather(rank: int, size: int, root: int) -> Rounds:
    """Yield the rounds that leave the inputs of all ranks, in rank order, on `root`; others pass through scratch."""
    place, mine = halves((rank - root) % size, size), Slice("input", 0)
    if place.children:
        yield (Copy(mine, _blocks(place, rank - root, 1, size, root, "output")[0]),)
    for child, first, count in reversed(place.children):
        yield tuple(Recv(part, (child + root) % size) for part in _blocks(place, first, count, size, root, "output"))
    if place.parent is not None:
        sent = _blocks(place, place.first, place.ranks, size, root, "output") if place.children else [mine]
        yield tuple(Send(part, (place.parent + root) % size) for part in sent)


def _blocks(place: Branch, first: int, count: int, size: int, root: int, whole: Buffer) -> list[Slice]:
    """Return the slices of the blocks of `count` places from `first`, in `whole` on the root, in scratch elsewhere.

    Places count from the root. An interval wrapping in rank order gives two slices on every rank, so both ends of a
    message agree.
    """
    parts = wrapped(whole, first + root, count, size)
    return parts if place.parent is None else [
        Slice("scratch", (part.first - root - place.first) % size, part.count) for part in parts]
