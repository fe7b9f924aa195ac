"""Whether programs of all ranks come to their ends on slots of which there are only so many.

A block does in a round whatever can be done next. What it puts into slots and takes out of them depends on the program
alone, never on who is faster, so that programs which end in one order end in every order.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from gpucoll.executors.peer.program import Lane, Program, Step
from gpucoll.proof import ScheduleError


def check(programs: Sequence[Program], channels: int, depth: int, slot: int) -> int:
    """Return how many pieces the first blocks of all ranks, and the last ones, exchange; ScheduleError where they stop.

    `slot` is in elements. Shares are not rounded to words here, as the kernels round them: alike at both ends.
    """
    return sum(_Walk(programs, channels, channel, depth, slot).run() for channel in {0, channels - 1})


class _Walk:
    """One block of every rank."""

    def __init__(self, programs: Sequence[Program], channels: int, channel: int, depth: int, slot: int) -> None:
        self._programs: list[tuple[Step, ...]] = [program.steps for program in programs]
        self._share = channel, channels
        self._depth, self._slot = depth, slot
        self._slots: dict[tuple[int, int], collections.deque[int]] = collections.defaultdict(collections.deque)
        self._rounds = [0] * len(programs)
        self._lanes = [self._begin(rank) for rank in range(len(programs))]
        self._moved = 0

    def run(self) -> int:
        while any([self._advance(rank) for rank in range(len(self._programs))]):
            pass
        for rank, steps in enumerate(self._programs):
            if self._rounds[rank] < len(steps):
                lane = next(lane for lane, pieces in self._lanes[rank] if pieces)
                raise ScheduleError(f"rank {rank}, round {self._rounds[rank]}: rank {lane.peer} never "
                                    f"{'sends' if lane.receives else 'takes'} what it should", ranks=(rank,))
        if any(self._slots.values()):
            raise ScheduleError("something was sent that no rank receives")
        return self._moved

    def _begin(self, rank: int) -> list[tuple[Lane, collections.deque[int]]]:
        steps, number = self._programs[rank], self._rounds[rank]
        if number == len(steps):
            return []
        return [(lane, collections.deque(self._pieces(lane))) for lane in steps[number].lanes]

    def _pieces(self, lane: Lane) -> list[int]:
        pieces = []
        for span, _ in lane.parts:
            channel, channels = self._share
            count = span.stop - span.start
            share = count * (channel + 1) // channels - count * channel // channels
            pieces += [min(self._slot, share - start) for start in range(0, share or 1, self._slot)]
        return pieces

    def _advance(self, rank: int) -> bool:
        """Move what can be moved, end the round if that is all; return whether anything was done."""
        if self._rounds[rank] == len(self._programs[rank]):
            return False
        moved = [self._move(rank, lane, pieces) for lane, pieces in self._lanes[rank]]
        self._moved += sum(moved)
        if any(pieces for _, pieces in self._lanes[rank]):
            return any(moved)
        self._rounds[rank] += 1
        self._lanes[rank] = self._begin(rank)
        return True

    def _move(self, rank: int, lane: Lane, pieces: collections.deque[int]) -> int:
        moved = 0
        slots = self._slots[(lane.peer, rank) if lane.receives else (rank, lane.peer)]
        while pieces and (slots if lane.receives else len(slots) < self._depth):
            count = pieces.popleft()
            if not lane.receives:
                slots.append(count)
            elif slots.popleft() != count:
                raise ScheduleError(f"rank {rank} expects {count} elements from rank {lane.peer}, which sends others",
                                    ranks=(rank, lane.peer))
            moved += 1
        return moved
