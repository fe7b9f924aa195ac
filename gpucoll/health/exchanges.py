"""Exchanges of the descriptions of one call between all ranks: by messages, or by memory mapped by all ranks."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence, Set
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.core.signature import is_refusal
from gpucoll.errors import GpucollError
from gpucoll.executors import LengthsDiffer, disagreement, lack_lengths, shortened
from gpucoll.health.mapped import OFFER, MappedDescriptions
from gpucoll.health.shares import NO_STAMPS, CallShares, Stamps
from gpucoll.progress.operations import keep_for_ever
from gpucoll.transport.control import LossyRequest
from gpucoll.transport.tags import BYTES, Tag

# A message has the description of a call, and the call site in the user's code; longer text is shortened.
MESSAGE_BYTES = 512
# Numbers of 8 bytes behind the description: the time (`time.time_ns`) at which the rank came to the call, and stamps.
TIMES = 5
NO_OFFER = numpy.zeros(OFFER, numpy.int64)


class Exchange:
    """The exchange of one call's descriptions between all ranks, for any thread; if it `moves`, data move meanwhile."""

    def __init__(self, rows: Sequence[Array], text: str, *, moves: bool) -> None:
        self.text, self.moves, self.is_judged = text, moves, False
        self.is_awaited = not moves  # whether this rank waits for the end, and does nothing meanwhile
        self.rows = rows  # the descriptions of all ranks, valid once arrived
        self.call: CallShares | None = None  # the call, until its shares are counted

    def missing(self) -> Set[int]:
        """Return the ranks from which no description is known to have arrived."""
        raise NotImplementedError

    def arrivals(self) -> list[int]:
        """Return when each rank came to the call, nanoseconds since 1970 by its own clock; only once it has ended."""
        raise NotImplementedError

    def stamps(self) -> list[Stamps] | None:
        """Return the stamps of all ranks, sent with the descriptions; None without any; only once it has ended."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Return whether the descriptions of all ranks have arrived; never waits."""
        return not self.missing()

    def text_of(self, rank: int) -> str:
        """Return the description of a rank's call, and perhaps its place; only once this description has arrived."""
        return text_of_row(self.rows[rank].tobytes())

    def judge(self) -> None:
        """Raise the error of ranks that make different calls, if any."""
        # A difference found after data have moved stays unjudged, so that every later check raises again.
        error = self.difference()
        self.is_judged = error is None or not self.moves
        if error is not None:
            raise error

    def difference(self) -> GpucollError | None:
        """Return the error to raise on all ranks if calls differ, else None; None as well if every rank refuses."""
        rows = [row.tobytes() for row in self.rows]
        if rows.count(rows[0]) == len(rows):
            return None
        calls = [text_of_row(row) for row in rows]
        are_alike = len({call.partition("\n")[0] for call in calls}) == 1  # the call sites may differ
        # If every rank refuses the arguments, each rank raises its own refusal.
        if are_alike or all(map(is_refusal, calls)):
            return None
        if not self.moves and lack_lengths(calls):
            return LengthsDiffer("the lengths of blocks have changed")
        return disagreement(range(len(calls)), calls, moved=self.moves)


class MappedExchange(Exchange):
    """The exchange of call `number`, published before, by memory mapped by all ranks."""

    def __init__(self, mapped: MappedDescriptions, number: int, text: str, *, moves: bool) -> None:
        super().__init__(mapped.rows[number % 2], text, moves=moves)
        self._published, self.number = mapped.published, number

    def arrivals(self) -> list[int]:
        return self._published.arrivals(self.number)

    def stamps(self) -> list[Stamps] | None:
        return self._published.stamps(self.number)

    def missing(self) -> Set[int]:
        return self._published.missing(self.number)

    def difference(self) -> GpucollError | None:
        error = super().difference()
        # Another thread of this rank has judged this call, and begun the next: the rows may hold later calls.
        return error if self._published.number == self.number else None


class MessageExchange(Exchange):
    """The exchange by messages of `wire`; `stamps` and `offer` (see `MappedDescriptions`) go with the description."""

    def __init__(self, wire: Any, rank: int, size: int, text: str, offer: Array = NO_OFFER, *, moves: bool,
                 stamps: Stamps = NO_STAMPS) -> None:
        self._testing = threading.Lock()  # MPI forbids two threads to test one request at the same time
        self._rows = numpy.empty((size, MESSAGE_BYTES + 8 * TIMES + offer.nbytes), numpy.uint8)
        rows = self._rows[:, :MESSAGE_BYTES]
        super().__init__(rows, text, moves=moves)  # type: ignore[arg-type] # a sequence of rows
        stamped = numpy.array([time.time_ns(), *stamps, *offer])
        self._rows[rank] = numpy.frombuffer(row_of(text) + stamped.tobytes(), numpy.uint8)
        others = [other for other in range(size) if other != rank]
        # Note each request once posted: if a later one raises, `__del__` keeps the memory of the earlier ones.
        self._receives: dict[int, Any] = {}
        self._sends: list[Any] = []
        for other in others:
            request = wire.Irecv([self._rows[other], BYTES], other, Tag.COMPARISON)
            self._receives[other] = LossyRequest(request, ended=False)
        for other in others:
            request = wire.Isend([self._rows[rank], BYTES], other, Tag.COMPARISON)
            self._sends.append(LossyRequest(request, ended=True))

    def arrivals(self) -> list[int]:
        return self._numbers()[:, 0].tolist()

    def stamps(self) -> list[Stamps] | None:
        stamps = self._numbers()[:, 1:TIMES]
        return [*map(tuple, stamps.tolist())] if stamps.any() else None

    def _numbers(self) -> Array:
        return self._rows[:, MESSAGE_BYTES:].copy().view(numpy.int64)

    def missing(self) -> set[int]:
        self.has_ended()
        return set(self._receives)

    def has_ended(self) -> bool:
        """Return whether all receives and sends are known to have completed; never waits."""
        # Without blocking: if another thread is testing, this thread learns the result at its next poll.
        if (self._receives or self._sends) and self._testing.acquire(blocking=False):
            try:
                self._receives = {other: one for other, one in self._receives.items() if not one.Test()}
                self._sends = [one for one in self._sends if not one.Test()]
            finally:
                self._testing.release()
        return not self._receives and not self._sends

    def __del__(self) -> None:
        # The communicator has failed or was dropped: MPI may still read and write the rows.
        if self._receives or self._sends:
            keep_for_ever((self._rows, self._receives, self._sends))

    def offers(self) -> Array:
        """Return the offers of all ranks, once the messages have arrived."""
        return self._numbers()[:, TIMES:]


# Cached: a training loop repeats the same few calls.
@functools.lru_cache(256)
def row_of(text: str) -> bytes:
    """Return a description as a row of MESSAGE_BYTES bytes."""
    return shortened(text, MESSAGE_BYTES).encode().ljust(MESSAGE_BYTES, b"\0")


@functools.lru_cache(256)
def text_of_row(row: bytes) -> str:
    """Return the description in a row."""
    return row.rstrip(b"\0").decode(errors="replace")
