"""Cycles of blocking messages: ranks that wait for each other for ever raise the same error, long before a deadline.

A rank that waits long for messages shows its wait on a board shared with the other ranks: the engine's control segments
(`kernels/engine/cycles.h`), or the mailbox of threads. The board knows for each shown wait whether it is stuck: whether
its partner has not begun the other end of the message, and waits itself. A rank in a shown wait begins nothing, so a
cycle of stuck waits, read twice without a change, can never end. Messages between hosts have no board.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.errors import UsageError
from gpucoll.executors import call_site
from gpucoll.progress.operations import Work
from gpucoll.progress.partners import size_of
from gpucoll.progress.waits import Progress

# Seconds of a wait before it is shown, and between two looks at the board: most waits end sooner, and pay nothing.
AFTER, BOARD_INTERVAL = 0.1, 0.05


class StuckEnd(NamedTuple):
    """An end of a message in a shown wait; `stuck_by` is the number of the partner's wait that must end first, or 0."""

    sends: bool
    partner: int
    tag: int
    nbytes: int
    stuck_by: int

    def describe(self, place: str) -> str:
        """Return the message in words, with the `place` in the program."""
        verb, way = ("sends", "to") if self.sends else ("receives", "from")
        return f"{verb} {size_of(self.nbytes)} {way} rank {self.partner}, tag {self.tag} ({place})"


class ShownWait(NamedTuple):
    """The last wait shown by a rank; the number is odd while the wait is shown."""

    number: int
    place: str
    ends: Sequence[StuckEnd]


# A step of a cycle: a rank, the number of its wait, and whether the rank waits for the next one in a send.
CycleStep = tuple[int, int, bool]


class Cycles:
    """The search for cycles through this rank, called between the polls of a wait for messages.

    `board` returns the board, or None. The operation that waits raises the error, and so revokes the communicator.
    """

    def __init__(self, waits: Progress, rank: int, board: Callable[[], Any]) -> None:
        self._waits, self._rank, self._board = waits, rank, board
        self._work: Work[Any] | None = None  # of the present wait
        self._next = 0.0  # when to look next
        self._shown_on: Any = None  # the board, while the wait is shown

    def look(self, work: Work[Any]) -> None:
        """Show a wait that lasts, and let it fail if it is part of a cycle."""
        now = time.monotonic()
        if work is not self._work:
            self.hide()
            self._work, self._next = work, now + AFTER
        if now < self._next:
            return
        acquire, release, *_ = self._waits.gate()
        if not acquire(blocking=False):
            return  # the progress thread is at work: look at the next poll
        try:
            self._next = now + BOARD_INTERVAL
            board = self._board()
            # A receive of any rank, or a message that has not begun, may still match a message of another rank.
            if board is None or any(end.requests == () for one in (work, *self._waits.messages()) for end in one.ends):
                return
            if not board.show_wait(tuple(one for end in work.ends for one in end.requests or ()), call_site()):
                return
            self._shown_on = board
            if error := self.told() or self._judge(board):
                work.give_up(error)
        finally:
            release()

    def hide(self) -> None:
        """Show no wait any more: the wait has ended."""
        self._work = None
        if self._shown_on is not None:
            board, self._shown_on = self._shown_on, None
            board.hide_wait()

    def told(self) -> UsageError | None:
        """Return the error of the cycle in which a rank has found the wait shown, or None."""
        board, steps, rank = self._shown_on, list[CycleStep](), self._rank
        waits = {} if board is None else _waits(board)
        # The judge notes its own rank last: before that, others may be without their step.
        judge = next((one for one in waits if board.verdict(one, one)[0] and
                      board.verdict(one, rank)[0] == waits[rank].number), None)
        while judge is not None and (not steps or rank != self._rank):
            steps.append((rank, *board.verdict(judge, rank)))
            rank = next(end.partner for end in waits[rank].ends if end.sends == steps[-1][2])
        return self._error(steps, waits) if steps else None

    def _judge(self, board: Any) -> UsageError | None:
        """Note the cycle through this rank's wait, if there is one, and return its error."""
        cycle = ring(self._rank, _waits(board))
        # The second look: between the two, all these waits were shown at once, each of them stuck.
        if cycle and ring(self._rank, _waits(board)) == cycle:
            for step in reversed(cycle):  # this rank is the first
                board.condemn(*step)
        return self.told()

    def describe(self, rank: int) -> str:
        """Return in words the messages that a rank is known to wait for, "" without any."""
        board = self._board()
        wait = None if board is None else _waits(board).get(rank)
        is_shown = wait is not None and wait.number % 2 == 1
        return " and ".join(end.describe(wait.place) for end in wait.ends) if wait is not None and is_shown else ""

    def _error(self, cycle: Sequence[CycleStep], waits: Mapping[int, ShownWait]) -> UsageError:
        stories, first = [], cycle.index(min(cycle))
        for rank, _, sends in (*cycle[first:], *cycle[:first]):  # the same words on all ranks
            end = next(end for end in waits[rank].ends if end.sends == sends)
            stories.append(f"rank {rank} {end.describe(waits[rank].place)}")
        return UsageError(f"a cycle of blocking messages, which no rank can leave: {'; '.join(stories)}; use "
                          "sendrecv(), group(), or async_op=True and wait()", code="GC-DEADLOCK",
                          ranks=tuple(sorted(rank for rank, *_ in cycle)))


def _waits(board: Any) -> dict[int, ShownWait]:
    return {rank: ShownWait(number, place, [StuckEnd(*end) for end in ends])
            for rank, (number, place, ends) in board.shown_waits().items()}


def ring(start: int, waits: Mapping[int, ShownWait]) -> list[CycleStep]:
    """Return a shortest cycle of stuck waits through rank `start`, [] without one.

    >>> def wait(partner, sends=True, stuck_by=1):
    ...     return ShownWait(1, "", [StuckEnd(sends, partner, 0, 8, stuck_by)])
    >>> ring(0, {0: wait(1), 1: wait(2, sends=False), 2: wait(0)})
    [(0, 1, True), (1, 1, False), (2, 1, True)]
    >>> ring(0, {0: wait(1), 1: wait(0, stuck_by=0)})
    []
    """
    before: dict[int, CycleStep] = {}
    queue = [start]
    for rank in queue:
        for end in waits[rank].ends if rank in waits else []:
            partner = waits.get(end.partner)
            if end.stuck_by and partner is not None and end.stuck_by == partner.number and end.partner not in before:
                before[end.partner] = (rank, waits[rank].number, end.sends)
                queue.append(end.partner)
    steps = list[CycleStep]()
    while start in before and (not steps or steps[0][0] != start):
        steps.insert(0, before[steps[0][0] if steps else start])
    return steps
