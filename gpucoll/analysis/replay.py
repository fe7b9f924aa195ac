"""Run the schedules of all ranks together, message by message, for whoever wants to look.

The k-th Send from a to b meets the k-th receive of b from a; a rank's round ends when all its
messages have met, as strict as an executor without any buffering: what ends here ends on
every transport. Ranks that wait for each other, or for a step that never comes, are a fault.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from gpucoll.errors import GpucollError
from gpucoll.schedule import Copy, Reduce, Round, Send

Post: TypeAlias = tuple[int, int]  # rank, index of the step in its round
LOCAL = (Copy, Reduce)


class ScheduleError(GpucollError):
    """A schedule is wrong; the message says on which rank, in which round, and why."""

    default_code = "GC-SCHEDULE"


class Observer(Protocol):
    """Is told what happens: a round begins, two ends of a message meet, a round ends."""

    def begin(self, rank: int, steps: Round) -> None:
        """`rank` begins the round `steps`."""

    def meet(self, sender: int, sent: int, receiver: int, received: int) -> None:
        """Step `sent` of the sender's round meets step `received` of the receiver's."""

    def finish(self, rank: int) -> None:
        """All messages of the round of `rank` have met."""


def replay(schedules: Iterable[Iterable[Round]], observer: Observer) -> int:
    """Run all ranks to their end and return how many messages met; raise ScheduleError where some wait for ever."""
    wire = _Wire([iter(rounds) for rounds in schedules], observer)
    ready = deque(range(len(wire.rounds)))
    while ready:
        ready.extend(wire.advance(ready.popleft()))
    wire.check_idle()
    return wire.messages


class _Wire:
    """Every rank's place in its schedule, and the ends of messages that wait for the other end."""

    def __init__(self, rounds: Sequence[Iterator[Round]], observer: Observer) -> None:
        self.rounds = rounds
        self.messages = 0
        self._observer = observer
        self._steps: list[Round] = [()] * len(rounds)
        self._number = [0] * len(rounds)
        self._open = [0] * len(rounds)
        self._sends: dict[tuple[int, int], deque[Post]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[Post]] = defaultdict(deque)

    def advance(self, rank: int) -> list[int]:
        """Begin the next round of `rank`; return the ranks whose rounds ended by it."""
        steps = next(self.rounds[rank], None)
        if steps is None:
            return []
        self._steps[rank] = steps
        self._number[rank] += 1
        self._observer.begin(rank, steps)
        pairs = self._post(rank, steps)
        ended = [] if self._open[rank] else [rank]
        for pair in pairs:
            ended += self._match(pair)
        for done in ended:
            self._observer.finish(done)
        return ended

    def _post(self, rank: int, steps: Round) -> set[tuple[int, int]]:
        pairs = set()
        for index, step in enumerate(steps):
            if not isinstance(step, LOCAL):
                sends = isinstance(step, Send)
                pair = (rank, step.peer) if sends else (step.peer, rank)
                (self._sends if sends else self._receives)[pair].append((rank, index))
                self._open[rank] += 1
                pairs.add(pair)
        return pairs

    def _match(self, pair: tuple[int, int]) -> list[int]:
        sends, receives, ended = self._sends[pair], self._receives[pair], []
        while sends and receives:
            (sender, sent), (receiver, received) = sends.popleft(), receives.popleft()
            self._observer.meet(sender, sent, receiver, received)
            self.messages += 1
            for rank in (sender, receiver):
                self._open[rank] -= 1
                if not self._open[rank]:
                    ended.append(rank)
        return ended

    def check_idle(self) -> None:
        """Raise where an end of a message is left over."""
        for waiting in (*self._receives.values(), *self._sends.values()):
            for rank, index in waiting:
                raise ScheduleError(f"rank {rank}, round {self._number[rank]}: {self._steps[rank][index]} waits for "
                                    "ever: its partner has no such step, or waits as well", ranks=(rank,))
