"""Preflight: ranks compare their calls before data move, by messages or by memory mapped by all ranks of a node.

Each rank shows a description of each call to all other ranks. A rank holding the descriptions of all ranks
decides alone whether the calls agree, and all ranks raise the same error. A rank that refuses the arguments of a call
shows the refusal instead of the description. For host arrays on one node the engine compares calls.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from gpucoll.core.signature import LastCall
from gpucoll.errors import GpucollError
from gpucoll.executors import call_site
from gpucoll.health.exchanges import MESSAGE_BYTES, Exchange, MappedExchange, MessageExchange, row_of, text_of_row
from gpucoll.health.guard import LOOK
from gpucoll.health.mapped import MappedDescriptions
from gpucoll.health.shares import NO_STAMPS, CallClock, Stamps
from gpucoll.progress.operations import Operation
from gpucoll.progress.pauses import POLL_INTERVAL
from gpucoll.progress.waits import Progress
from gpucoll.transport.tags import Tag

# Seconds to wait, after a transport error, for all descriptions: the real cause may be a call that differs.
EXPLAINS = 1.0


class HostCall(NamedTuple):
    """A call on the host: its number, the ranks awaited now, and the description."""

    number: int
    awaited: Collection[int]
    description: str


NO_CALL = HostCall(0, (), "")


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
        self._calls, self._agreed = 0, ""  # the number of comparisons, and the call before the last
        self._meetings = 0  # the number of comparisons that were of no call
        self._came = 0  # when this rank came to the call before the last, if compared by messages, in nanoseconds
        self._exchange: Exchange | None = None  # the exchange of the last compared call
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
        self._calls, self._agreed = last.number + 1, last.text
        self._exchange = MappedExchange(mapped, self._calls, description, moves=True)
        self._exchange.call = self.clock.current
        return True

    def _begin(self, text: str, *, moves: bool) -> Exchange:
        mapped = self._mapped = self._mapped or MappedDescriptions(self._rank, self._nodes, MESSAGE_BYTES)
        self._use_offers(mapped)
        self._calls += 1
        # Keep the description of the call before: the last known call of a rank that has not come to this call.
        if self._exchange is not None:
            self._agreed = self._exchange.text
            if isinstance(self._exchange, MessageExchange):
                self._came = self._exchange.arrivals()[self._rank]
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
            self._exchange = None

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
        last, missing = self._exchange, self.missing()
        if last is None:
            return dict.fromkeys(range(self._size), LastCall())
        before, number = text_of_row(row_of(self._agreed)) if self._agreed else "", self.number
        behind = max(0, number - 1), before, None
        return {rank: LastCall(*behind, self._when(rank, self._calls - 1)) if rank in missing else
                LastCall(number, last.text_of(rank), None, self._when(rank, self._calls))
                for rank in range(self._size)}

    def _when(self, rank: int, number: int) -> float:
        """Return when a rank of this host came to a call, by `time.monotonic`; 0 if unknown."""
        # Another host has another clock.
        if self._nodes[rank] != self._nodes[self._rank] or number < 1:
            return 0.0
        # Mapped memory keeps the arrivals of the last two calls, a message those of one call.
        if isinstance(self._exchange, MappedExchange) and self._mapped is not None:
            nanoseconds = self._mapped.published.arrivals(number)[rank]
        else:
            nanoseconds = self._exchange.arrivals()[rank] if self._exchange and number == self._calls else self._came
        return max(0.0, time.monotonic() - 1e-9 * (time.time_ns() - nanoseconds)) if nanoseconds else 0.0

class Deferred:
    """A comparison that does not delay the call: its result is judged by the next call."""

    def __init__(self, preflight: Preflight) -> None:
        self.begin, self.compare, self.clock = preflight.begin, preflight.deferred, preflight.clock
        self._preflight = preflight

    @property
    def number(self) -> int:
        """The number of the last compared call."""
        return self._preflight.number
