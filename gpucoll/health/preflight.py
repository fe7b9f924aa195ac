"""Preflight: ranks compare their calls before data move, by messages or by memory mapped by all ranks of a node.

Each rank shows a description of each call to all other ranks. A rank holding the descriptions of all ranks
decides alone whether the calls agree, and all ranks raise the same error. A rank that refuses the arguments of a call
shows the refusal instead of the description. For host arrays on one node the engine compares calls.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any, NamedTuple

import numpy

from gpucoll.arrays import Array
from gpucoll.core.signature import LastCall, is_refusal
from gpucoll.errors import GpucollError
from gpucoll.executors import LengthsDiffer, call_site, disagreement, lack_lengths, shortened
from gpucoll.health.mapped import OFFER, MappedDescriptions
from gpucoll.health.processes import LOOK
from gpucoll.health.shares import NO_STAMPS, CallClock, CallShares, Stamps
from gpucoll.progress.operations import Operation, keep_for_ever
from gpucoll.progress.pauses import POLL_INTERVAL
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import LossyRequest
from gpucoll.transport.tags import BYTES, Tag

# A message has the description of a call, and the call site in the user's code; longer text is shortened.
MESSAGE_BYTES = 512
# Numbers of 8 bytes behind the description: the time (`time.time_ns`) at which the rank came to the call, and stamps.
TIMES = 5
NO_OFFER = numpy.zeros(OFFER, numpy.int64)
# Seconds to wait, after a transport error, for all descriptions: the real cause may be a call that differs.
EXPLAINS = 1.0


class HostCall(NamedTuple):
    """A call on the host: its number, the ranks awaited now, and the description."""

    number: int
    awaited: Collection[int]
    description: str


NO_CALL = HostCall(0, (), "")


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


class Preflight:
    """The comparison of one communicator's calls, by messages of `link` with a tag of their own, or by mapped memory.

    The first two exchanges are messages. The first one carries the ranks' offers of memory, the second one whether each
    rank can map the memory of all ranks; if so, all later exchanges go through this memory.

    `elsewhere` returns the call in progress on the host, compared by the engine. If an awaited rank makes a call
    compared here instead, this rank joins that comparison with its own description.

    `compare` waits for the result. `begin` does not: the result is judged during later waits and by the next call. A
    difference is raised then, after data have moved, so the communicator has failed.

    The time of a call in `compare`, the arrivals of the ranks, and the stamps of their GPUs go to `clock`.
    """

    def __init__(self, link: Any, waits: Progress, elsewhere: Callable[[], HostCall], clock: CallClock) -> None:
        self.clock = clock
        self._wire, self._waits, self._rank, self._size = link.wire, waits, link.place.rank, link.place.size
        self._elsewhere = elsewhere
        self._calls = 0  # the number of comparisons
        self._meetings = 0  # the number of comparisons that were of no call
        self._exchange: Exchange | None = None  # the exchange of the last compared call
        self._before: Exchange | None = None  # the exchange before: the last known call of a rank not in the last one
        self._nodes = link.place.nodes
        self._mapped: MappedDescriptions | None = None  # made for the first exchange
        self._is_mapped = False  # whether the next exchange goes through mapped memory
        self._looked = 0.0
        # The awaited ranks with a comparison message pending at the last `_look`, each with the number of the call.
        self._missed = set[tuple[int, int]]()
        waits.hooks.append(self.check)
        self._is_seen: Callable[..., bool] | None = None
        # Only MPI can probe for a message without receiving it; between threads and over a store this check is missing.
        if link.has_collectives:
            from mpi4py import MPI

            self._probe = functools.partial(link.wire.Iprobe, tag=Tag.COMPARISON)
            self._anybody = MPI.ANY_SOURCE
            self._is_seen = self._has_begun
            waits.hooks.append(self._look)

    def compare(self, description: str) -> Operation:
        """Wait until all ranks are known to make this call; else raise MismatchError or PeerError, on all ranks."""
        yield from self.settled()
        exchange, began = self._begin(f"{description}\n{call_site()}", moves=False), time.monotonic_ns()
        while not exchange.has_ended():
            yield exchange.has_ended
        exchange.judge()
        arrivals = exchange.arrivals()
        self.clock.own += arrivals[self._rank] - min(arrivals)
        self.clock.waited += time.monotonic_ns() - began
        self._stamped(exchange.stamps())

    def meet(self, description: str) -> Operation:
        """Wait until all ranks are known to come to a meeting outside of calls; raise on all ranks if one does not."""
        yield from self.settled()
        # Ranks that meet again later, as after a split, count their calls alike.
        self._meetings += 1
        self._begin(f"{description}\n{call_site()}", moves=True).is_awaited = True
        yield from self.settled()

    def settled(self) -> Operation:
        """Wait until the previous call is known to agree on all ranks; raise if ranks differ in the previous call."""
        while not self._has_settled():
            yield self._has_settled

    def deferred(self, description: str) -> Operation:
        """Begin to compare a call, once the previous call is known to agree; raise the previous call's difference."""
        if not self._advance(description):
            yield from self.settled()
            self._begin(description, moves=True).call = self.clock.current

    def begin(self, description: str) -> int:
        """Begin to compare a call, as `deferred` does; this thread itself waits for the previous comparison.

        Returns the number of the call.
        """
        if not self._advance(description):
            # At most one exchange is in flight: `_exchange` holds a single one.
            if not self._has_settled():
                self._waits.until(self._has_settled, "comparing calls", self._waits.deadline())
            self._begin(description, moves=True).call = self.clock.current
        return self.number

    @property
    def number(self) -> int:
        """The number of the last compared call."""
        return self._calls - self._meetings

    def _advance(self, description: str) -> bool:
        """Begin to compare a call, if the last one was compared alike and is known to agree; return whether done."""
        last, mapped = self._exchange, self._mapped
        if not isinstance(last, MappedExchange) or not last.moves or last.is_judged or mapped is None:
            return False
        device = self.clock.device
        stamps = device.next_stamps() if device else NO_STAMPS
        found = mapped.published.advance(last.number, row_of(description), stamps)
        if found is None:
            return False
        last.is_judged = True
        # Only now: where `advance` publishes nothing, the stamps go with the next comparison.
        if device is not None:
            device.sent()
        own, waited, stamps = found
        self._stamped(stamps)
        if last.call is not None:
            self.clock.found(last.call, own, waited, last.text)
            last.call = None
        self._calls, self._before = last.number + 1, last
        self._exchange = MappedExchange(mapped, self._calls, description, moves=True)
        self._exchange.call = self.clock.current
        return True

    def _begin(self, text: str, *, moves: bool) -> Exchange:
        mapped = self._mapped = self._mapped or MappedDescriptions(self._rank, self._nodes, MESSAGE_BYTES)
        self._use_offers(mapped)
        self._calls, self._before = self._calls + 1, self._exchange
        device = self.clock.device
        stamps = device.next_stamps() if device else NO_STAMPS
        if self._is_mapped:
            mapped.published.publish(self._calls, row_of(text), stamps)
            self._exchange = MappedExchange(mapped, self._calls, text, moves=moves)
        else:
            self._exchange = MessageExchange(self._wire, self._rank, self._size, text, mapped.offer, moves=moves,
                                             stamps=stamps)
        if device is not None:
            device.sent()
        return self._exchange

    def _stamped(self, stamps: list[Stamps] | None) -> None:
        if stamps is not None and self.clock.device is not None:
            self.clock.device.exchanged(stamps)

    def _use_offers(self, mapped: MappedDescriptions) -> None:
        """Take from the first two exchanges, once complete, whether the next exchange goes through mapped memory."""
        last = self._exchange
        if not isinstance(last, MessageExchange) or not last.is_judged:
            return
        if self._calls == 1 and not mapped.rows:
            mapped.accept(last.offers())
        elif self._calls == 2:
            self._is_mapped = bool(last.offers()[:, -1].all())

    def _has_begun(self, rank: int) -> bool:
        """Return whether a rank, or with `_anybody` some rank, has begun a comparison not joined by this rank."""
        mapped = self._mapped
        if mapped is not None:
            self._use_offers(mapped)
        if mapped is None or not self._is_mapped:
            return bool(self._probe(rank))
        missing = mapped.published.missing(self._calls + 1)
        return len(missing) < self._size if rank == self._anybody else rank not in missing

    @property
    def _under_way(self) -> Exchange | None:
        # An exchange counts until its result is judged without an error, not only until the descriptions have arrived.
        exchange = self._exchange
        return None if exchange is None or exchange.is_judged else exchange

    def _has_settled(self) -> bool:
        self.check()
        return self._under_way is None

    def check(self) -> None:
        """Raise if ranks are known to differ in a call begun by `begin`: a hook of every wait."""
        exchange = self._under_way
        if exchange is not None and exchange.moves and exchange.has_ended():
            exchange.judge()
            self._stamped(exchange.stamps())
            call, exchange.call = exchange.call, None
            if call is not None:
                arrivals = exchange.arrivals()
                mine = arrivals[self._rank]
                self.clock.found(call, mine - min(arrivals), max(arrivals) - mine, exchange.text)

    def explain(self, patience: float, *, differ: bool) -> GpucollError | None:
        """Return the difference between calls that explains an error; None if none is found in `patience` seconds.

        If ranks are known to `differ`, this rank joins a comparison begun by another rank.
        """
        exchange = self._under_way
        # This rank is in a call compared by the engine, another rank in a call compared by messages: send this rank's
        # description, so that both ranks learn of both calls.
        if exchange is None and differ and self._is_seen is not None and self._is_seen(self._anybody):
            exchange = self._begin(self._elsewhere().description, moves=True)
        if exchange is None or not exchange.moves:
            return None
        # Sleep without running hooks: this runs while an error is being handled, and a hook must not raise another. A
        # rank that has waited for the descriptions gives them no more time.
        deadline = time.monotonic() + (0 if exchange.is_awaited else patience)
        while not exchange.has_ended() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        return exchange.difference() if exchange.has_ended() else None

    def _look(self) -> None:
        """Join the comparison of an awaited rank that makes a different call: a hook of every wait."""
        # Otherwise the two ranks would wait for each other until the deadline, in calls compared in different ways.
        now = time.monotonic()
        if now < self._looked + LOOK:
            return
        self._looked = now
        if self._under_way is not None:
            return
        is_seen = self._is_seen
        assert is_seen is not None
        call = self._elsewhere() if is_seen(self._anybody) else NO_CALL
        # Require the message at two looks in a row, in one call: between reading `awaited` and the probe, the rank may
        # have completed the common call and begun the next.
        missed = {(call.number, rank) for rank in call.awaited if is_seen(rank)}
        if missed & self._missed:
            self._begin(call.description, moves=True)
        self._missed = missed

    def close(self) -> None:
        """Let go of the mapped memory; no comparison may follow."""
        self._mapped = None
        if isinstance(self._exchange, MappedExchange):
            self._exchange = self._before = None

    @property
    def is_comparing(self) -> bool:
        exchange = self._under_way
        return exchange is not None and exchange.is_awaited

    def missing(self) -> set[int]:
        """Return the ranks whose descriptions for the current comparison have not arrived."""
        exchange = self._under_way
        return set() if exchange is None else set(exchange.missing())

    def progress(self) -> dict[int, LastCall]:
        """Return the last call of each rank, as far as known: the calls compared here."""
        last, before = self._exchange, self._before
        if last is None:
            return dict.fromkeys(range(self._size), LastCall())
        ahead, missing, found = time.time_ns() * 1e-9 - time.monotonic(), self.missing(), {}
        arrivals = {exchange: exchange.arrivals() for exchange in (last, before) if exchange is not None}
        for rank in range(self._size):
            number, exchange = (max(0, self.number - 1), before) if rank in missing else (self.number, last)
            text, when = "", 0.0
            if exchange is not None:
                text = exchange.text_of(rank)
                # Only the clock of this node is known here.
                if number and self._nodes[rank] == self._nodes[self._rank]:
                    when = max(0.0, 1e-9 * arrivals[exchange][rank] - ahead)
            found[rank] = LastCall(number, text, None, when)
        return found


class Deferred:
    """A comparison that does not delay the call: its result is judged by the next call."""

    def __init__(self, preflight: Preflight) -> None:
        self.begin, self.compare, self.clock = preflight.begin, preflight.deferred, preflight.clock
        self._preflight = preflight

    number = property(lambda self: self._preflight.number, doc="The number of the last compared call.")


# Cached: a training loop repeats the same few calls.
@functools.lru_cache(256)
def row_of(text: str) -> bytes:
    """Return a description as a row of MESSAGE_BYTES bytes."""
    return shortened(text, MESSAGE_BYTES).encode().ljust(MESSAGE_BYTES, b"\0")


@functools.lru_cache(256)
def text_of_row(row: bytes) -> str:
    """Return the description in a row."""
    return row.rstrip(b"\0").decode(errors="replace")
