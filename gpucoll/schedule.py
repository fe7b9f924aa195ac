"""The vocabulary of schedules: slices, steps, rounds.

A schedule is what one rank does: an iterable of rounds, each a tuple of steps that may run
together. A round reads everything before it writes anything. In a round a destination has
at most one Copy or Recv, listed before any RecvReduce or Reduce on it; these apply in
listed order. The k-th Send from a to b meets the k-th receive of b from a.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias

Buffer: TypeAlias = Literal["input", "output", "scratch"]


class Slice(NamedTuple):
    """`count` chunks of `buffer` from chunk `first`; a range that wraps is two slices."""

    buffer: Buffer
    first: int
    count: int = 1  # type: ignore[assignment] # the contract's name, though tuples have a method of it


class Send(NamedTuple):
    """Send `src` to rank `peer`."""

    src: Slice
    peer: int


class Recv(NamedTuple):
    """Receive from rank `peer` into `dst`."""

    dst: Slice
    peer: int


class RecvReduce(NamedTuple):
    """Receive from rank `peer` and combine it into `dst`: ``dst = op(dst, received)``."""

    dst: Slice
    peer: int


class Copy(NamedTuple):
    """Copy `src` to `dst` on this rank; a copy onto itself is nothing."""

    src: Slice
    dst: Slice


class Reduce(NamedTuple):
    """Combine `src` into `dst` on this rank: ``dst = op(dst, src)``."""

    src: Slice
    dst: Slice


Step: TypeAlias = Send | Recv | RecvReduce | Copy | Reduce
Round: TypeAlias = tuple[Step, ...]


class Schedule:
    """What one rank does in one collective, replayable: iterating yields its rounds.

    ``chunks`` is into how many the larger of input and output is cut, the same on every
    rank. Nothing is made before it is iterated, so that a schedule of 65,536 ranks costs
    only the rounds that are looked at.
    """

    def __init__(self, collective: str, algorithm: str, rank: int, size: int, chunks: int,
                 rounds: Callable[[], Iterable[Round]]) -> None:
        self.collective = collective
        self.algorithm = algorithm
        self.rank = rank
        self.size = size
        self.chunks = chunks
        self._rounds = rounds

    def __iter__(self) -> Iterator[Round]:
        return iter(self._rounds())

    def __repr__(self) -> str:
        return (f"<Schedule {self.collective}:{self.algorithm} rank={self.rank} size={self.size} "
                f"chunks={self.chunks}>")


def reads(step: Step) -> tuple[Slice, ...]:
    """Return the slices whose old content `step` needs."""
    match step:
        case Send(src, _) | Copy(src, _):
            return (src,)
        case RecvReduce(dst, _):
            return (dst,)
        case Reduce(src, dst):
            return (src, dst)
    return ()


def writes(step: Step) -> Slice | None:
    """Return the slice that `step` writes, or None for a Send."""
    return None if isinstance(step, Send) else step.dst


def relabel(rounds: Iterable[Round], peer: Callable[[int], int]) -> Iterator[Round]:
    """Yield the same rounds with every peer renamed, e.g. from a node's ranks to the world's.

    >>> rounds = [(Send(Slice("input", 0), 1), Recv(Slice("output", 0), 1))]
    >>> [[step.peer for step in steps] for steps in relabel(rounds, lambda p: 10 * p)]
    [[10, 10]]
    """
    for steps in rounds:
        yield tuple(step if isinstance(step, Copy | Reduce) else step._replace(peer=peer(step.peer))
                    for step in steps)
