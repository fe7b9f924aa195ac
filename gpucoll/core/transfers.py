"""Schedules from lists of messages: in each step, each piece of the data and the link that the piece crosses.

The data of all ranks are divided into pieces, equally many for each rank; a rank's pieces stand in a row. The steps
that combine are the steps of an all-gather in reverse: a tree that brings a piece to all ranks brings, in reverse, the
contributions of all ranks to one rank. `gpucoll synthesize` finds the messages.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from gpucoll.core.schedule import Copy, Recv, RecvReduce, Rounds, Send, Slice, Step, joined

PieceMessage: TypeAlias = tuple[int, int, int]  # piece, sender, receiver
PieceSlice: TypeAlias = Callable[[int, int], Slice]  # of a rank and a piece


def backwards(steps: Sequence[Sequence[PieceMessage]]) -> list[list[PieceMessage]]:
    """Return the messages in reverse, the last step first."""
    return [[(piece, receiver, sender) for piece, sender, receiver in step] for step in reversed(steps)]


class Transfers:
    """Messages in steps, as the schedule of an all_gather, a reduce_scatter or an all_reduce for `size` ranks.

    A block has `per_block` pieces. The first `combining` steps add up, the others copy: none, all, or those of the
    reduce-scatter that precedes the all-gather of an all-reduce.

    >>> pair = Transfers("all_gather", 2, 1, [[(0, 0, 1), (1, 1, 0)]])
    >>> [type(step).__name__ for steps in pair.rounds(0) for step in steps]
    ['Copy', 'Send', 'Recv']
    """

    def __init__(self, collective: str, size: int, per_block: int, steps: Sequence[Iterable[PieceMessage]],
                 combining: int = 0) -> None:
        self.collective: str = collective
        self.size: int = size
        self.per_block: int = per_block
        self.combining: int = combining
        self.steps: list[list[PieceMessage]] = [sorted(step) for step in steps]
        self.chunks: int = size * per_block
        self._scratch = [self._slots(rank) for rank in range(size)]
        self._begun = {(rank, piece): number for number in reversed(range(combining))
                       for piece, _, rank in self.steps[number]}  # the first step with a contribution
        self._beginning: dict[tuple[int, int], list[int]] = collections.defaultdict(list)  # by rank and step: pieces
        for (rank, piece), number in sorted(self._begun.items()):
            self._beginning[rank, number].append(piece)

    def rounds(self, rank: int) -> Rounds:
        """Yield the rounds of a rank."""
        yield from self._sums(rank)
        own = Slice("input", 0, self.per_block), Slice("output", rank * self.per_block, self.per_block)
        begun: list[Step] = [] if self.combining else [Copy(*own)]
        for messages in self.steps[self.combining:]:
            yield (*begun, *self._messages(rank, messages, self._held, self._held, Recv))
            begun = []

    def _slots(self, rank: int) -> dict[int, int]:
        """Return the chunk of scratch for each partial sum that `rank` passes on in a reduce-scatter.

        Chunk i of scratch is as long as chunk i of the data, counted round, so a piece keeps its place in the block.
        """
        counts: dict[int, int] = collections.Counter()
        slots: dict[int, int] = {}
        for piece in sorted({piece for step in self.steps for piece, _, receiver in step if receiver == rank}):
            if self.collective == "reduce_scatter" and rank != piece // self.per_block:
                place = piece % self.per_block
                slots[piece] = counts[place] * self.per_block + place
                counts[place] += 1
        return slots

    def _held(self, rank: int, piece: int) -> Slice:
        """Return the place of a piece on its way to all ranks."""
        is_own = rank == piece // self.per_block and not self.combining
        return Slice("input", piece % self.per_block) if is_own else Slice("output", piece)

    def _total(self, rank: int, piece: int) -> Slice:
        """Return the place of the sum of a piece on `rank`."""
        if self.collective == "all_reduce":
            return Slice("output", piece)
        is_own = rank == piece // self.per_block
        return Slice("output", piece % self.per_block) if is_own else Slice("scratch", self._scratch[rank][piece])

    def _sums(self, rank: int) -> Rounds:
        """Yield the rounds that combine: a sum begins with the rank's own contribution, a leaf sends its input."""
        def sent(sender: int, piece: int) -> Slice:
            return self._total(sender, piece) if (sender, piece) in self._begun else Slice("input", piece)

        for number, messages in enumerate(self.steps[:self.combining]):
            copies = [Copy(Slice("input", piece), self._total(rank, piece)) for piece in self._beginning[rank, number]]
            yield (*copies, *self._messages(rank, messages, sent, self._total, RecvReduce))

    def _messages(self, rank: int, messages: list[PieceMessage], before: PieceSlice, after: PieceSlice,
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
