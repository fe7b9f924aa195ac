"""The messages awaited by a rank: partner, tag and bytes of each end; the words of errors and warnings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from gpucoll.errors import CollectiveTimeout, GpucollError

# The state of the two ends of a message on this rank: of the receive, then of the send. A state is a sequence of
# requests of the carrier, empty before the beginning, and None after the end.
State = list[Any]
RECEIVING, SENDING = 0, 1
BYTE_UNITS = ("bytes", "kB", "MB", "GB")


class End:
    """An end of a message on this rank, under way: a send to `partner`, or a receive or probe; None is any.

    The operation notes its progress in `state`.
    """

    __slots__ = ("nbytes", "partner", "state", "tag", "verb")

    def __init__(self, verb: str, partner: int | None, tag: int | None, nbytes: int, state: State) -> None:
        self.verb: str = verb
        self.partner: int | None = partner
        self.tag: int | None = tag
        self.nbytes: int = nbytes
        self.state: State = state

    @property
    def sends(self) -> bool:
        return self.verb == "send"

    @property
    def requests(self) -> Sequence[Any] | None:
        """The requests of the carrier, empty before the beginning; None after the end."""
        requests: Sequence[Any] | None = self.state[SENDING if self.sends else RECEIVING]
        return requests

    def is_left(self) -> bool:
        """Return whether the message is still under way. May test the carrier's requests of a send."""
        # An operation waits for its receive first: its send may have ended since. A receive is not asked, because MPI
        # tells the length of a message only once.
        return self.requests is not None and not (self.sends and self.requests and all(
            request.Test() for request in self.requests))

    def __str__(self) -> str:
        way = "to" if self.sends else "from"
        partner = "any rank" if self.partner is None else f"rank {self.partner}"
        size = "" if self.verb == "probe" else f" of {size_of(self.nbytes)}"
        return f"{self.verb}{size} {way} {partner}, {'any tag' if self.tag is None else f'tag {self.tag}'}"


def size_of(nbytes: int) -> str:
    """Return a number of bytes in words.

    >>> size_of(64), size_of(1_600_000), size_of(33_554_432)
    ('64 bytes', '1.6 MB', '33.6 MB')
    """
    power = min(len(BYTE_UNITS) - 1, (len(str(nbytes)) - 1) // 3 if nbytes > 9999 else 0)
    return f"{round(nbytes / 1000 ** power, 1):g} {BYTE_UNITS[power]}"


def partners_of(ends: Sequence[End]) -> tuple[int, ...]:
    """Return the partners of messages, in order; none for a message of any rank."""
    return tuple(sorted({end.partner for end in ends if end.partner is not None}))


def lateness(ends: Sequence[End], waited: float, describe: Callable[[int], str]) -> str:
    """Return the words of a wait in vain for messages: the messages, and the state of their partners.

    >>> lateness([End("recv", 0, 3, 64, [(), None])], 2, lambda rank: f"rank {rank} runs")
    'recv of 64 bytes from rank 0, tag 3: waited 2 s; rank 0 runs; it has not sent this message'
    """
    stories = [f"{describe(partner)}; it has {_not_done(end for end in ends if end.partner == partner)}"
               for partner in partners_of(ends)]
    if any(end.partner is None for end in ends):
        stories.append("no rank has sent such a message")
    return f"{' and '.join(map(str, ends))}: waited {waited:g} s; {'; '.join(stories)}"


def timed_out(name: str, waited: float, ends: Sequence[End], blame: Callable[[], tuple[str, tuple[int, ...]]],
              describe: Callable[[int], str]) -> CollectiveTimeout:
    """Return the error of a wait in vain: the partners of messages are to blame, or else the ranks behind."""
    if ends:
        return CollectiveTimeout(f"{lateness(ends, waited, describe)}; timeout= sets the deadline",
                                 ranks=partners_of(ends))
    reasons, ranks = blame()
    late = f"the other ranks: {reasons}" if reasons else "the other ranks"
    return CollectiveTimeout(f"{name}: waited {waited:g} s for {late}; is every rank in the same call, with the same "
                             "shape, dtype and algorithm? timeout= sets the deadline", ranks=ranks)


def _not_done(ends: Any) -> str:
    """Return the omission of a partner, by the messages awaited from this partner."""
    sends = {end.sends for end in ends}
    return {(False,): "not sent this message", (True,): "not received this message"}.get(
        tuple(sends), "neither sent the one nor received the other")


class MessageWait:
    """The wait for messages of the thread that makes the communicator's calls.

    `look` is called between the polls of the wait, and `leave` after the end. `told` returns the error of the cycle in
    which a rank has found this wait, or None.
    """

    def __init__(self) -> None:
        self.work: Any = None  # the `Work` awaited
        self.look: Callable[[Any], Any] = lambda work: None
        self.leave: Callable[[], None] = lambda: None
        self.told: Callable[[], GpucollError | None] = lambda: None

    def until(self, waits: Any, work: Any) -> None:
        """Poll until the messages of `work` have ended; the operation has a deadline of its own."""
        # Another thread may wait for the messages, while the thread of the calls goes on: then nothing is known.
        if threading.get_native_id() != waits.thread:
            waits.until(work.is_enqueued, work.name, float("inf"))
            return

        before, self.work = self.work, work
        try:
            waits.until(lambda: work.is_enqueued() or self.look(work), work.name, float("inf"))
        except GpucollError as error:  # the end of a rank that has read the verdict first is no cause
            raise self.told() or error from error.__cause__
        finally:
            self.work = before
            self.leave()

    def partners(self) -> set[int] | None:
        """Return the partners of the messages awaited; None if unknown, or without a wait."""
        # No test of requests: the caller may be a hook beside another thread's test.
        ends = [] if self.work is None else [end for end in self.work.ends if end.requests is not None]
        return None if any(end.partner is None for end in ends) else {*partners_of(ends)} or None
