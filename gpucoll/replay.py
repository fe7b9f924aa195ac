"""Run the schedules of all ranks together, message by message, for whoever wants to look.

The k-th Send from a to b meets the k-th receive of b from a; a rank's round ends when all its
messages have met, as strict as an executor without any buffering: what ends here ends on
every transport. Ranks that wait for each other, or for a step that never comes, are a fault.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

from gpucoll.errors import GpucollError
from gpucoll.schedule import Copy, Reduce, Round, Send, Step

Post: TypeAlias = tuple[int, int]  # rank, index of the step in its round
Key: TypeAlias = tuple[int, int, str]  # sender, receiver, and which end
LOCAL = (Copy, Reduce)


class ScheduleError(GpucollError):
    """A schedule is wrong; the message says on which rank, in which round, and why."""

    default_code = "GC-SCHEDULE"
    step: tuple[int, int, int] | None = None  # rank, round and index, counted from 0, of the step that is wrong


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
    rounds = [iter(one) for one in schedules]
    steps: list[Round] = [()] * len(rounds)
    number, left = [0] * len(rounds), [0] * len(rounds)  # of each rank's round, and of its messages that have not met
    waiting: dict[Key, deque[Post]] = defaultdict(deque)
    messages, ready = 0, deque(range(len(rounds)))
    while ready:
        rank = ready.popleft()
        begun = next(rounds[rank], None)
        if begun is None:
            continue
        observer.begin(rank, begun)
        steps[rank], number[rank] = begun, number[rank] + 1
        posts = [index for index, step in enumerate(begun) if not isinstance(step, LOCAL)]
        left[rank], ended = len(posts), [] if posts else [rank]
        for index in posts:
            (key, partner), post = _ends(rank, begun[index]), (rank, index)
            if not waiting[partner]:
                waiting[key].append(post)
                continue
            other, messages = waiting[partner].popleft(), messages + 1
            if isinstance(begun[index], Send):
                observer.meet(*post, *other)
            else:
                observer.meet(*other, *post)
            for end in (rank, other[0]):
                left[end] -= 1
                ended += [end] * (not left[end])
        for done in ended:
            observer.finish(done)
        ready += ended
    for rank, index in (post for posts in waiting.values() for post in posts):
        step = steps[rank][index]
        error = ScheduleError(f"rank {rank}, round {number[rank]}, {place_of(step)}: {step} waits for ever: its "
                              "partner has no such step, or waits as well", ranks=(rank,))
        error.step = rank, number[rank] - 1, index
        raise error
    return messages


def place_of(step: Step) -> str:
    """Return the chunks that a step sends or writes, in words.

    >>> from gpucoll.schedule import Slice
    >>> place_of(Copy(Slice("input", 0, 2), Slice("output", 4, 2)))
    'output chunks 4 to 5'
    """
    part = step.src if isinstance(step, Send) else step.dst
    return f"{part.buffer} chunk {part.first}" if part.count == 1 else \
        f"{part.buffer} chunks {part.first} to {part.first + part.count - 1}"


def _ends(rank: int, step: Any) -> tuple[Key, Key]:
    """Return where a message's end waits for the other one, and where that would wait."""
    way = (rank, step.peer) if isinstance(step, Send) else (step.peer, rank)
    kinds = ("send", "receive") if isinstance(step, Send) else ("receive", "send")
    return (*way, kinds[0]), (*way, kinds[1])
