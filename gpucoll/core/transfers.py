"""Schedules from lists of messages: in each step, each piece of the data and the link that the piece crosses.

A piece is a chunk of one rank's input for one rank or for all ranks. A rank keeps pieces for other ranks in scratch.
The steps that combine are the steps of a copying collective in reverse: a tree that brings a piece to all ranks brings,
in reverse, the contributions of all ranks to one rank. `gpucoll synthesize` finds the messages.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gpucoll.core.collectives import Side
from gpucoll.core.collectives import collective as collective_row
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Round, Rounds, Send, Slice, Step, joined

Message: TypeAlias = tuple[int, int, int]  # piece, sender, receiver
Place: TypeAlias = Callable[[int, int], Slice]  # of a rank and a piece


class Delivery(NamedTuple):
    """A part of the data: the rank with the piece in its input, and the rank that needs the piece; None: all ranks."""

    source: int
    target: int | None


def pieces_of(collective: str, size: int, chunks: int) -> list[Delivery]:
    """Return the pieces of a copying collective with blocks of `chunks` chunks; the root is rank 0.

    >>> pieces_of("scatter", 3, 1)
    [Delivery(source=0, target=0), Delivery(source=0, target=1), Delivery(source=0, target=2)]
    """
    row, ranks = collective_row(collective), range(size)
    pairs: list[Delivery] = {
        "all_gather": [Delivery(rank, None) for rank in ranks],
        "broadcast": [Delivery(0, None)],
        "gather": [Delivery(rank, 0) for rank in ranks],
        "scatter": [Delivery(0, rank) for rank in ranks],
        "all_to_all": [Delivery(rank, peer) for rank in ranks for peer in ranks],
    }[row.name]
    return [pair for pair in pairs for _ in range(chunks)]


DUALS = {"reduce": "broadcast", "reduce_scatter": "all_gather"}  # in reverse, the second is the first


def backwards(steps: Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Return the messages in reverse, the last step first."""
    return [[(piece, receiver, sender) for piece, sender, receiver in step] for step in reversed(steps)]


class Transfers:
    """Messages in steps, as a schedule for `size` ranks; the root is rank 0.

    Blocks, and arrays without blocks, have `chunks` chunks. The first `combining` steps add up, the others copy. An
    all-reduce with steps that combine is a reduce-scatter with an all-gather; without, every rank receives all arrays
    and adds them up in rank order.

    >>> pair = Transfers("all_gather", 2, 1, [[(0, 0, 1), (1, 1, 0)]])
    >>> [type(step).__name__ for steps in pair.rounds(0) for step in steps]
    ['Copy', 'Send', 'Recv']
    """

    def __init__(self, collective: str, size: int, chunks: int, steps: Sequence[Iterable[Message]],
                 combining: int = 0) -> None:
        self.collective, self.size, self.per_block, self.combining = collective, size, chunks, combining
        self.steps = [sorted(step) for step in steps]
        self._row = collective_row(collective)
        # An all-reduce has no blocks; its array is shared in the same way, or gathered as a whole.
        self._is_shared = collective == "all_reduce" and combining > 0
        self.gathers = collective == "all_reduce" and not combining
        self.chunks = size * chunks if self._row.blocks or self._is_shared else chunks
        copied = "all_gather" if collective == "all_reduce" else DUALS.get(collective, collective)
        self.pieces = pieces_of(copied, size, chunks)
        self._scratch = [self._slots(rank) for rank in range(size)]
        self._begun = {(rank, piece): number for number in reversed(range(combining))
                       for piece, _, rank in self.steps[number]}  # the first step with a contribution
        self._beginning: dict[tuple[int, int], list[int]] = collections.defaultdict(list)  # by rank and step: pieces
        for (rank, piece), number in sorted(self._begun.items()):
            self._beginning[rank, number].append(piece)

    def rounds(self, rank: int) -> Rounds:
        """Yield the rounds of a rank."""
        yield from self._sums(rank)
        begun: list[Step] = [] if self.combining else self._own(rank)
        for messages in self.steps[self.combining:]:
            yield (*begun, *self._messages(rank, messages, self._held, self._held, Recv))
            begun = []
        if self.gathers:
            yield self._added(rank)

    def _slots(self, rank: int) -> dict[int, int]:
        """Return the chunk of scratch for each piece of other ranks that `rank` passes on.

        Chunk i of scratch is as long as chunk i of the data, counted round, so a piece keeps its place in the block.
        """
        counts: dict[int, int] = collections.Counter()
        slots: dict[int, int] = {}
        for piece in sorted({piece for step in self.steps for piece, _, receiver in step if receiver == rank}):
            source, target = self.pieces[piece]
            if rank != source and (self.combining or target not in (None, rank)):
                place = piece % self.per_block
                slots[piece] = counts[place] * self.per_block + place
                counts[place] += 1
        return slots

    def _index(self, piece: int, side: Side, block: int | None) -> int:
        """Return the chunk of a piece in the input or output, where `block` is the block of the piece."""
        return piece % self.per_block + ((block or 0) * self.per_block if side.blocks or self._is_shared else 0)

    def _given(self, rank: int, piece: int) -> Slice:
        """Return the place of a piece in the input of `rank`."""
        source, target = self.pieces[piece]
        return Slice("input", self._index(piece, self._row.input, source if self.combining else target))

    def _result(self, piece: int) -> Slice:
        """Return the place of a piece in the output of a rank that needs it."""
        return Slice("output", self._index(piece, self._row.output, self.pieces[piece].source))

    def _held(self, rank: int, piece: int) -> Slice:
        """Return the place of a piece on its way."""
        source, target = self.pieces[piece]
        if source == rank and not self.combining:
            return self._given(rank, piece)
        if self.gathers:
            return Slice("scratch", piece)
        return self._result(piece) if target in (None, rank) else Slice("scratch", self._scratch[rank][piece])

    def _total(self, rank: int, piece: int) -> Slice:
        """Return the place of the sum of a piece on `rank`."""
        if self.collective == "all_reduce" or rank == self.pieces[piece].source:
            return self._result(piece)
        return Slice("scratch", self._scratch[rank][piece])

    def _sums(self, rank: int) -> Rounds:
        """Yield the rounds that combine: a sum begins with the rank's own contribution, a leaf sends its input."""
        def sent(sender: int, piece: int) -> Slice:
            return (self._total if (sender, piece) in self._begun else self._given)(sender, piece)

        for number, messages in enumerate(self.steps[:self.combining]):
            copies = [Copy(self._given(rank, piece), self._total(rank, piece))
                      for piece in self._beginning[rank, number]]
            yield (*copies, *self._messages(rank, messages, sent, self._total, RecvReduce))

    def _own(self, rank: int) -> list[Step]:
        """Return the copies of the rank's own data into its output."""
        own = [] if self.gathers else [piece for piece, (source, target) in enumerate(self.pieces)
                                       if source == rank and target in (None, rank)]
        return [Copy(src, dst) for src, dst in joined((self._given(rank, piece), self._result(piece)) for piece in own)]

    def _messages(self, rank: int, messages: list[Message], before: Place, after: Place,
                  received: type[Recv] | type[RecvReduce]) -> list[Step]:
        """Return the messages of a rank in a step.

        Chunks in a row on both sides are one message; not where they combine, as all contributions to a chunk in a
        round have to name the same range.
        """
        by_link: dict[tuple[int, int], list[tuple[Slice, Slice]]] = collections.defaultdict(list)
        for piece, sender, receiver in messages:
            if rank in (sender, receiver):
                by_link[sender, receiver].append((before(sender, piece), after(receiver, piece)))
        return [Send(src, receiver) if rank == sender else received(dst, sender)
                for (sender, receiver), slices in by_link.items()
                for src, dst in (joined(slices) if received is Recv else slices)]

    def _added(self, rank: int) -> Round:
        """Return the round that adds up the arrays of all ranks."""
        arrays = [Slice("input", 0, self.per_block) if one == rank
                  else Slice("scratch", one * self.per_block, self.per_block) for one in range(self.size)]
        total = Slice("output", 0, self.per_block)
        return (Copy(arrays[0], total), *(Reduce(array, total) for array in arrays[1:]))
