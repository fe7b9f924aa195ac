"""Preflight: ranks compare their calls by messages before data move.

Each rank sends each call in words to all others. A rank with the words of all ranks knows whether they agree, without
any further step of another rank, and all ranks raise the same error. A rank that refuses its own arguments sends its
refusal in place of the call. The ranks of one node need no messages for arrays on the host: the engine compares calls.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.core.signature import is_refusal
from gpucoll.errors import GpucollError
from gpucoll.executors import call_site, disagreement, shortened
from gpucoll.health.guard import LOOK
from gpucoll.progress.operations import Operation, keep_for_ever
from gpucoll.progress.pauses import NAP
from gpucoll.progress.waits import Waits
from gpucoll.transport.tags import BYTES, Tag

WORDS = 512  # bytes of a call in words, and of its place in the user's code
EXPLAINS = 1.0  # seconds in which an error of the transport may turn out to be a call that differs


class Exchange:
    """The words of one call, on their way between all ranks; `moves` says that data move in the meantime.

    Any thread may look, but only one at a time: MPI forbids that two threads test one request.
    """

    def __init__(self, wire: Any, rank: int, size: int, text: str, *, moves: bool) -> None:
        self.moves, self.is_judged = moves, False
        self._testing = threading.Lock()
        self._rows = numpy.empty((size, WORDS), numpy.uint8)
        self._rows[rank] = _row(text)
        others = [other for other in range(size) if other != rank]
        self._receives: dict[int, Any] = {}
        self._sends: list[Any] = []
        self._receives = {other: wire.Irecv([self._rows[other], BYTES], other, Tag.COMPARISON) for other in others}
        self._sends = [wire.Isend([self._rows[rank], BYTES], other, Tag.COMPARISON) for other in others]

    def missing(self) -> set[int]:
        """Return the ranks whose words are not known to have come."""
        self.has_ended()
        return set(self._receives)

    def has_ended(self) -> bool:
        """Return whether all words are known to have come, and to have gone."""
        if (self._receives or self._sends) and self._testing.acquire(blocking=False):
            try:
                self._receives = {other: one for other, one in self._receives.items() if not one.Test()}
                self._sends = [one for one in self._sends if not one.Test()]
            finally:
                self._testing.release()
        return not self._receives and not self._sends

    def __del__(self) -> None:
        if self._receives or self._sends:  # as of a communicator that has failed, or was dropped
            keep_for_ever((self._rows, self._receives, self._sends))

    def words(self, rank: int) -> str:
        """Return the call of a rank whose words have come, without its place in the code."""
        return _text(self._rows[rank].tobytes()).partition("\n")[0]

    def judge(self) -> None:
        """Raise where ranks differ."""
        error = self.difference()
        self.is_judged = error is None or not self.moves
        if error is not None:
            raise error

    def difference(self) -> GpucollError | None:
        """Return what all ranks raise where they differ, unless all of them refuse their arguments; else None."""
        rows = [row.tobytes() for row in self._rows]
        if rows.count(rows[0]) == len(rows):
            return None
        calls = [_text(row) for row in rows]
        are_alike = len({call.partition("\n")[0] for call in calls}) == 1  # but for their places in the code
        if are_alike or all(map(is_refusal, calls)):
            return None
        return disagreement(range(len(calls)), calls, moved=self.moves)


class Preflight:
    """Compares the calls of one communicator, by messages of `link` that no other part of the library receives.

    `elsewhere` returns the ranks for which a call waits that is compared in another way, and that call in words. Where
    such a rank makes a call that is compared here, this rank takes part with the words of its own call.

    A call that only begins to compare is judged while ranks wait, and by the next call: ranks that differ are told in
    that call or in the next one. Data have moved then, so that the communicator has failed.
    """

    def __init__(self, link: Any, waits: Waits, elsewhere: Callable[[], tuple[Collection[int], str]]) -> None:
        self._wire, self._waits, self._rank, self._size = link.wire, waits, link.place.rank, link.place.size
        self._elsewhere = elsewhere
        self._calls, self._agreed = 0, ""  # how many, and the one before the last in words
        self._exchange: Exchange | None = None  # of the last call that is compared here
        self._looked = 0.0
        self._missed = set[int]()  # ranks whose words were there at the last look, and for which this rank waited
        waits.hooks.append(self.check)
        self._is_seen: Callable[..., bool] | None = None
        if link.has_collectives:  # between threads, and by a store, no message is seen before it is received
            from mpi4py import MPI

            self._is_seen = functools.partial(link.wire.Iprobe, tag=Tag.COMPARISON)
            self._anybody = MPI.ANY_SOURCE
            waits.hooks.append(self._look)

    def compare(self, words: str) -> Operation:
        """Return when all ranks are known to make this call; raise MismatchError, or PeerError, on all of them."""
        yield from self.settled()
        exchange = self._begin(f"{words}\n{call_site()}", moves=False)
        while not exchange.has_ended():
            yield exchange.has_ended
        exchange.judge()

    def settled(self) -> Operation:
        """Return when the call before is known to agree; raise where ranks differ in it."""
        while not self._has_settled():
            yield self._has_settled

    def begin(self, words: str) -> None:
        """Begin to compare a call; for at most the deadline the one before is waited for, which may raise."""
        if not self._has_settled():
            self._waits.until(self._has_settled, "comparing calls", self._waits.deadline())
        self._begin(words, moves=True)

    def _begin(self, text: str, *, moves: bool) -> Exchange:
        self._calls += 1
        if self._exchange is not None:
            self._agreed = self._exchange.words(self._rank)
        self._exchange = Exchange(self._wire, self._rank, self._size, text, moves=moves)
        return self._exchange

    @property
    def _under_way(self) -> Exchange | None:
        exchange = self._exchange
        return None if exchange is None or exchange.is_judged else exchange

    def _has_settled(self) -> bool:
        self.check()
        return self._under_way is None

    def check(self) -> None:
        """Raise where ranks are known to differ in a call during which data move."""
        exchange = self._under_way
        if exchange is not None and exchange.moves and exchange.has_ended():
            exchange.judge()

    def explain(self, patience: float, *, differ: bool) -> GpucollError | None:
        """Return the difference between calls that an error may stem from; None where none is known in so many seconds.

        Where ranks are known to `differ`, this one takes part in a comparison that it has not come to.
        """
        exchange = self._under_way
        if exchange is None and differ and self._is_seen is not None and self._is_seen(self._anybody):
            exchange = self._begin(self._elsewhere()[1], moves=True)
        if exchange is None or not exchange.moves:
            return None
        deadline = time.monotonic() + patience
        while not exchange.has_ended() and time.monotonic() < deadline:
            time.sleep(NAP)
        return exchange.difference() if exchange.has_ended() else None

    def _look(self) -> None:
        """Take part in the comparison of a rank for which this one waits, and which will not come otherwise."""
        now = time.monotonic()
        if self._under_way is not None or now < self._looked + LOOK:
            return
        self._looked = now
        is_seen = self._is_seen
        assert is_seen is not None
        awaited, words = self._elsewhere() if is_seen(self._anybody) else ((), "")
        missed = {rank for rank in awaited if is_seen(rank)}
        if missed & self._missed:
            self._begin(words, moves=True)
        self._missed = missed

    @property
    def is_comparing(self) -> bool:
        """Whether a call waits for the words of all ranks."""
        exchange = self._under_way
        return exchange is not None and not exchange.moves

    def missing(self) -> set[int]:
        """Return the ranks that have not come to the call which is compared now."""
        exchange = self._under_way
        return set() if exchange is None else exchange.missing()

    def progress(self) -> dict[int, tuple[int, str]]:
        """Return the number and the words of the last call of each rank, as far as they are known."""
        last, missing = self._exchange, self.missing()
        if last is None:
            return dict.fromkeys(range(self._size), (0, ""))
        return {rank: (self._calls - 1, self._agreed) if rank in missing else (self._calls, last.words(rank))
                for rank in range(self._size)}


class Deferred:
    """The same for calls that do not wait for it."""

    def __init__(self, preflight: Preflight) -> None:
        self.begin, self._settled = preflight.begin, preflight.settled

    def compare(self, words: str) -> Operation:
        """Begin to compare this call, once the one before is known to agree."""
        yield from self._settled()
        self.begin(words)


@functools.lru_cache(256)
def _row(text: str) -> Array:
    row = numpy.zeros(WORDS, numpy.uint8)
    kept = shortened(text, WORDS).encode()
    row[:len(kept)] = numpy.frombuffer(kept, numpy.uint8)
    return row


@functools.lru_cache(256)
def _text(row: bytes) -> str:
    return row.rstrip(b"\0").decode(errors="replace")
