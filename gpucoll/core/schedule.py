"""The vocabulary of schedules: slices, steps, rounds, and functions composing schedules.

A schedule describes the part of a single rank: an iterable of rounds, each a tuple of steps allowed to run together. A
round reads everything before writing anything. Within a round a destination has at most one Copy or Recv. That step is
listed before every RecvReduce or Reduce on the same destination, and these apply in listed order. The k-th Send from a
to b matches the k-th receive of b from a.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Buffer: TypeAlias = Literal["input", "output", "scratch"]


class Slice(NamedTuple):
    """`count` chunks of `buffer` from chunk `first`.

    A range wrapping around is two slices.

    Parameters
    ----------
    buffer : {"input", "output", "scratch"}
        The buffer; scratch is memory of the schedule's own.
    first : int
        The number of the first chunk.
    count : int, optional
        The number of chunks.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.Slice("input", 2)
    Slice(buffer='input', first=2, count=1)
    """

    buffer: Buffer
    first: int
    count: int = 1  # type: ignore[assignment] # the contract's name, though tuples have a method of it


class Send(NamedTuple):
    """Send `src` to rank `peer`.

    Parameters
    ----------
    src : Slice
        The chunks to send.
    peer : int
        The other rank.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.Send(gc.Slice("input", 0), peer=1).peer
    1
    """

    src: Slice
    peer: int


class Recv(NamedTuple):
    """Receive from rank `peer` into `dst`.

    Parameters
    ----------
    dst : Slice
        The place of the chunks.
    peer : int
        The other rank.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.Recv(gc.Slice("output", 3), peer=1).dst.first
    3
    """

    dst: Slice
    peer: int


class RecvReduce(NamedTuple):
    """Receive from rank `peer` and combine it into `dst`: ``dst = op(dst, received)``.

    Parameters
    ----------
    dst : Slice
        The chunks to combine into.
    peer : int
        The other rank.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.RecvReduce(gc.Slice("output", 0), peer=2).peer
    2
    """

    dst: Slice
    peer: int


class Copy(NamedTuple):
    """Copy `src` to `dst` on this rank; a copy onto itself does nothing.

    Parameters
    ----------
    src : Slice
        The chunks to copy.
    dst : Slice
        The place of the copy, of as many chunks.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.Copy(gc.Slice("input", 0), gc.Slice("output", 4)).dst.first
    4
    """

    src: Slice
    dst: Slice


class Reduce(NamedTuple):
    """Combine `src` into `dst` on this rank: ``dst = op(dst, src)``.

    Parameters
    ----------
    src : Slice
        The chunks to add, for example.
    dst : Slice
        The chunks to combine into.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.Reduce(gc.Slice("scratch", 0), gc.Slice("output", 0)).src.buffer
    'scratch'
    """

    src: Slice
    dst: Slice


Step: TypeAlias = Send | Recv | RecvReduce | Copy | Reduce
Round: TypeAlias = tuple[Step, ...]
Rounds: TypeAlias = Iterator[Round]


@dataclass(eq=False, repr=False)
class Schedule:
    """The part of a single rank in a single collective; every iteration yields the rounds anew.

    ``chunks`` is the number of chunks in the larger of input and output, the same on every rank. Rounds are made while
    iterating: a schedule for 65,536 ranks costs only the rounds read. `digest` identifies a user's algorithm, ""
    otherwise.
    """

    collective: str
    algorithm: str
    rank: int
    size: int
    chunks: int
    rounds: Callable[[], Iterable[Round]]
    digest: str = ""

    def __iter__(self) -> Rounds:
        return iter(self.rounds())

    def __repr__(self) -> str:
        return (f"<Schedule {self.collective}:{self.algorithm} rank={self.rank} size={self.size} "
                f"chunks={self.chunks}>")


def wrapped(buffer: Buffer, first: int, count: int, total: int) -> list[Slice]:
    """Return `count` chunks of a ring of `total`, from chunk `first`: two slices where the range wraps.

    For an array of ranks the result always has two slices; the second has count 0 on ranks without a wrap. No chunks
    give an empty list.

    >>> wrapped("output", 3, 2, 4)
    [Slice(buffer='output', first=3, count=1), Slice(buffer='output', first=0, count=1)]
    """
    if not count:
        return []
    begun = first % total
    over = (begun + count - total) * (begun + count > total)
    head = Slice(buffer, begun, count - over)
    return [head] if isinstance(over, int) and not over else [head, Slice(buffer, 0, over)]


def in_rank_order(own: Slice, total: Slice, rank: int, size: int) -> list[Step]:
    """Return the steps of a round leaving the contributions of all ranks in `total`; `own` is this rank's contribution.

    The steps combine in rank order, so every rank forms the same bits. For an array of ranks the steps are listed by
    distance, because no peer is first on all ranks.

    >>> [type(step).__name__ for step in in_rank_order(Slice("input", 0), Slice("output", 0), rank=1, size=3)]
    ['Recv', 'Reduce', 'RecvReduce']
    """
    if not isinstance(rank, int):
        return [Copy(own, total), *(RecvReduce(total, (rank + distance) % size) for distance in range(1, size))]
    first = Recv(total, 0) if rank else Copy(own, total)
    return [first, *(Reduce(own, total) if peer == rank else RecvReduce(total, peer) for peer in range(1, size))]


def moved(rounds: Iterable[Round], place: Callable[[Slice], Slice] = lambda part: part,
          peer: Callable[[int], int] = lambda rank: rank) -> Rounds:
    """Yield the same rounds elsewhere: `place` maps every slice, `peer` renames every rank.

    An example is a schedule for the ranks of a node, moved to ranks of the world. A copy onto itself is left out.

    >>> rounds = [(Send(Slice("input", 1), 1), Recv(Slice("output", 1), 1))]
    >>> list(moved(rounds, lambda part: Slice("scratch", 2 * part.first, 2)))[0][1].dst
    Slice(buffer='scratch', first=2, count=2)
    """
    for steps in rounds:
        made: list[Step] = []
        for step in steps:
            if isinstance(step, Copy | Reduce):
                src, dst = place(step.src), place(step.dst)
                apart = src.buffer != dst.buffer or src.first - dst.first
                if isinstance(step, Reduce) or (apart if isinstance(apart, int) else apart.any()):
                    made.append(type(step)(src, dst))
            else:
                made.append(type(step)(place(step[0]), peer(step.peer)))
        yield tuple(made)


def by_chunks(steps: Round) -> Round:
    """Return the round with every step split into steps of a single chunk.

    >>> by_chunks((Send(Slice("input", 2, 2), 1),))[1]
    Send(src=Slice(buffer='input', first=3, count=1), peer=1)
    """
    return tuple(type(step)(*(Slice(part.buffer, part.first + index) if isinstance(part, Slice) else part
                              for part in step))  # type: ignore[arg-type] # each part is of its own kind
                 for step in steps for index in range(step[0].count))


def joined(rows: Iterable[tuple[Slice, ...]]) -> Iterator[tuple[Slice, ...]]:
    """Yield rows of slices, with single chunks joined to the row before that follow it in every column.

    >>> list(joined([(Slice("input", 0), Slice("output", 4)), (Slice("input", 1), Slice("output", 5))]))
    [(Slice(buffer='input', first=0, count=2), Slice(buffer='output', first=4, count=2))]
    """
    last: tuple[Slice, ...] = ()
    for row in rows:
        if last and all(one.buffer == other.buffer and one.first + one.count == other.first
                        for one, other in zip(last, row, strict=True)):
            last = tuple(one._replace(count=one.count + 1) for one in last)
            continue
        if last:
            yield last
        last = row
    if last:
        yield last


def within(renamed: dict[str, Buffer], offset: int = 0, scale: int = 1) -> Callable[[Slice], Slice]:
    """Return a place for `moved`: chunk i becomes the `scale` chunks from `offset` + i * `scale`, buffers renamed.

    >>> within({"output": "scratch"}, offset=4, scale=2)(Slice("output", 1, 3))
    Slice(buffer='scratch', first=6, count=6)
    """
    def place(part: Slice) -> Slice:
        return Slice(renamed.get(part.buffer, part.buffer), offset + part.first * scale, part.count * scale)

    return place


def spread(renamed: dict[str, Buffer], chunks: int, onto: int, offset: int = 0,
           total: int = 0) -> Callable[[Slice], Slice]:
    """Return a place for `moved`: `chunks` chunks of unequal length are laid over `onto` chunks from `offset` on.

    Scratch may be larger: each further `chunks` chunks of scratch move on by `total` chunks (default `onto`), so every
    chunk of scratch is as long as the chunk of data in the same position.

    >>> spread({"input": "output"}, chunks=2, onto=5, offset=10)(Slice("input", 1))
    Slice(buffer='output', first=12, count=3)
    """
    def place(part: Slice) -> Slice:
        bank, first = divmod(part.first, chunks)
        begin, end = first * onto // chunks, (first + part.count) * onto // chunks
        return Slice(renamed.get(part.buffer, part.buffer), bank * (total or onto) + offset + begin, end - begin)

    return place


def following(*parts: Iterable[Round]) -> Rounds:
    """Yield all `parts` as a pipeline: each part starts a round after the part before.

    Simultaneous rounds are merged into a single round.
    """
    return together(*(itertools.chain([()] * number, part) for number, part in enumerate(parts)))


def together(*parts: Iterable[Round]) -> Rounds:
    """Yield the k-th rounds of all `parts` merged into a single round; shorter parts end earlier."""
    for rounds in itertools.zip_longest(*parts, fillvalue=()):
        yield tuple(itertools.chain.from_iterable(rounds))
