"""Preflight: ranks compare their calls before data move, or defer the comparison to the next call.

The engine compares the calls of one node. By messages each rank shows a description of each call to all other ranks.
A rank holding the descriptions of all ranks decides alone whether the calls agree, and all ranks raise the same error.
A rank that refuses the arguments of a call shows the refusal instead of the description.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy

from gpucoll.arrays import Array
from gpucoll.core.signature import LastCall, is_refusal
from gpucoll.errors import GpucollError
from gpucoll.executors import LengthsDiffer, call_site, disagreement, lack_lengths, shortened
from gpucoll.progress.operations import Operation
from gpucoll.progress.waits import SHORTEST_SLEEP, Progress
from gpucoll.transport.control import Exchange
from gpucoll.transport.tags import Tag

if TYPE_CHECKING:
    from gpucoll.health.device_shares import DeviceShares

# A message has the description of a call, and the call site in the user's code; longer text is shortened.
MESSAGE_BYTES = 512
# Behind the description: the time (`time.time_ns`) at which the rank came to the call, and two stamps (device_shares).
STAMPS = 4
NO_STAMPS = numpy.zeros(STAMPS, numpy.int64)
# Seconds to wait, after a transport error, for all descriptions: the real cause may be a call that differs.
EXPLAINS = 1.0


class Deferring:
    """A comparison that may be open while data move. It is judged by the next call, and by `check` in every wait."""

    is_comparing = False  # whether this rank does nothing else than wait for the comparison

    def __init__(self, waits: Progress) -> None:
        self._waits = waits
        self.heard = NO_STAMPS  # the stamps shown by all ranks with the last call judged

    def check(self) -> bool:
        """Return whether the last comparison is open; raise if ranks are known to differ in a deferred call."""
        raise NotImplementedError

    def _show(self, description: str, stamps: Array | None) -> Operation:
        """Do the work of `deferred`; `stamps` go to all ranks."""
        raise NotImplementedError

    def deferred(self, description: str, shares: DeviceShares | None = None) -> Operation:
        """Begin to compare a call, once the previous call is known to agree; raise the previous call's difference.

        With the call go the stamps of `shares`, which gets those of all ranks that went with the last call judged.
        """
        yield from self._show(description, None if shares is None else shares.next_stamps())
        if shares is not None:
            shares.exchanged(self.heard)

    def starter(self, description: str, shares: DeviceShares | None = None) -> Callable[[], None]:
        """Return a function that does as `deferred` each time; this thread itself waits.

        The caller holds the lock of `Progress.gate`.
        """
        def start() -> None:
            # `patient` waits a short time for the other ranks: this thread has nothing else to do.
            for pending in self.deferred(description, shares):
                self._waits.until(getattr(pending, "patient", pending), "comparing calls", self._waits.deadline())

        return start

    def settled(self) -> Operation:
        """Wait until the last call is known to agree on all ranks; raise if ranks differ in it."""
        while self.check():
            yield lambda: not self.check()

    def meet(self, description: str) -> Operation:
        """Wait until all ranks are known to come to a meeting outside of calls; raise on all ranks if one does not."""
        yield from self.deferred(f"{description}\n{call_site()}")
        yield from self.settled()

    def explain(self, patience: float) -> GpucollError | None:
        """Return the difference between calls that explains an error; None if none is found in `patience` seconds."""
        # Sleep without running hooks: this runs while an error is being handled, and a hook must not raise another. A
        # rank that has waited for the descriptions gives them no more time.
        deadline = time.monotonic() + (0 if self.is_comparing else patience)
        try:
            while self.check() and time.monotonic() < deadline:
                time.sleep(SHORTEST_SLEEP)
        except GpucollError as error:
            return error
        return None


class DeferredOnNode(Deferring):
    """The comparison of calls on GPUs by the engine of `executor`, deferred to the next call of the communicator.

    The engine counts these calls together with the calls on the host, so that it finds a call on the host against a
    call on a GPU, too.
    """

    number = 0  # the engine counts the calls, and knows the awaited ranks

    def __init__(self, executor: Any, waits: Progress) -> None:
        super().__init__(waits)
        self._executor = executor
        self.missing: Any = executor.judge
        self.progress: Any = executor.progress

    def check(self) -> bool:
        return bool(self.missing())

    def _show(self, description: str, stamps: Array | None) -> Operation:
        executor, engine = self._executor, self._executor.engine
        plan = executor.plans.deferred(description, 0 if stamps is None else stamps.nbytes)
        try:
            if not engine.defer(plan, stamps):
                yield executor.has_ended
        except BaseException as error:
            executor.cancel(error, plan, stamps)
            raise
        if stamps is not None:
            self.heard: Any = numpy.frombuffer(engine.heard(), numpy.int64)

    def starter(self, description: str, shares: DeviceShares | None = None) -> Callable[[], None]:
        make: Callable[..., Callable[[], None]] = super().starter if shares else self._executor.deferrer
        return make(description, shares or self._waits)

    def explain(self, patience: float) -> GpucollError | None:
        # A rank may have found that its call on a GPU meets a call on the host here, which awaits other ranks.
        return super().explain(patience) or self._executor.difference()


class Descriptions(Exchange):
    """The exchange of one call's descriptions by messages, for any thread; if it `moves`, data move meanwhile."""

    def __init__(self, wire: Any, rank: int, size: int, text: str, stamps: Array | None, *, moves: bool) -> None:
        self.moves: bool = moves
        self.is_stamped: bool = stamps is not None
        rows = numpy.zeros((size, MESSAGE_BYTES + 8 * (1 + STAMPS)), numpy.uint8)
        row = shortened(text, MESSAGE_BYTES).encode().ljust(MESSAGE_BYTES, b"\0")
        numbers = numpy.array([time.time_ns(), *(NO_STAMPS if stamps is None else stamps)])
        rows[rank] = numpy.frombuffer(row + numbers.tobytes(), numpy.uint8)
        super().__init__(wire, rank, range(size), rows, Tag.COMPARISON)

    def numbers(self) -> Array:
        """Return what follows the descriptions, by rank: the time of arrival, and the stamps; once it has ended."""
        return self._rows[:, MESSAGE_BYTES:].copy().view(numpy.int64)

    def text_of(self, rank: int) -> str:
        """Return the description of a rank's call, and perhaps its place; only once this description has arrived."""
        return self._rows[rank, :MESSAGE_BYTES].tobytes().rstrip(b"\0").decode(errors="replace")

    def difference(self) -> GpucollError | None:
        """Return the error to raise on all ranks if calls differ, else None; None as well if every rank refuses."""
        calls = [self.text_of(rank) for rank in range(len(self._rows))]
        # The call sites may differ. If every rank refuses the arguments, each rank raises its own refusal.
        if len({call.partition("\n")[0] for call in calls}) == 1 or all(map(is_refusal, calls)):
            return None
        if not self.moves and lack_lengths(calls):
            return LengthsDiffer("the lengths of blocks have changed")
        return disagreement(range(len(calls)), calls, moved=self.moves)


class Preflight(Deferring):
    """The comparison of one communicator's calls, by messages of `link` with a tag of their own.

    `compare` waits for the result, unless it `defers`: then, and in `deferred`, the result is judged during later waits
    and by the next call. A difference is raised then, after data have moved, so the communicator has failed.
    """

    def __init__(self, link: Any, waits: Progress, *, defers: bool) -> None:
        super().__init__(waits)
        self.defers = defers
        self._wire, self._rank, self._size = link.wire, link.place.rank, link.place.size
        self._nodes = link.place.nodes
        self.number: int = 0  # of comparisons
        # The exchange not judged so far; of the last compared call, and of the call before.
        self._open: Any = None
        self._last: Descriptions | None = None
        self._before: Descriptions | None = None

    def compare(self, description: str) -> Operation:
        """Wait until all ranks are known to make this call; else raise MismatchError or PeerError, on all ranks."""
        if self.defers:
            yield from self.deferred(description)
            return
        yield from self._show(f"{description}\n{call_site()}", None, moves=False)
        exchange = self._open
        while not exchange.has_ended():
            yield exchange.has_ended
        self._judge(exchange)

    def _show(self, description: str, stamps: Array | None, *, moves: bool = True) -> Operation:
        # At most one exchange is in flight: `_open` holds a single one.
        yield from self.settled()
        if not self.number:
            self._waits.hooks.append(self.check)
        # The exchange before stays: it has the last known call of a rank that does not come to this one.
        self.number, self._before = self.number + 1, self._last
        self._open = self._last = Descriptions(self._wire, self._rank, self._size, description, stamps, moves=moves)

    def _judge(self, exchange: Descriptions) -> None:
        """Raise the error of ranks that make different calls, if any."""
        # A difference found after data have moved stays open, so that every later check raises again.
        error = exchange.difference()
        if error is None or not exchange.moves:
            self._open = None
        if error is not None:
            raise error

    def check(self) -> bool:
        exchange = self._open
        if exchange is not None and exchange.moves and exchange.has_ended():
            self._judge(exchange)
            if exchange.is_stamped:
                self.heard: Any = exchange.numbers()[:, 1:].ravel()
        return self._open is not None

    @property
    def is_comparing(self) -> bool:  # type: ignore[override] # here it changes
        return self._open is not None and not self._open.moves

    def missing(self) -> set[int]:
        """Return the ranks whose descriptions for the current comparison have not arrived."""
        exchange = self._open
        return set() if exchange is None else exchange.missing()

    def progress(self) -> dict[int, LastCall]:
        """Return the last call of each rank, as far as known: the calls compared here."""
        last, before = self._last, self._before
        if last is None:
            return dict.fromkeys(range(self._size), LastCall())
        ahead, missing, found = time.time_ns() * 1e-9 - time.monotonic(), self.missing(), {}
        for rank in range(self._size):
            number, exchange = (self.number - 1, before) if rank in missing else (self.number, last)
            # Only the clock of this node is known here.
            is_near = exchange is not None and self._nodes[rank] == self._nodes[self._rank]
            when = max(0.0, 1e-9 * int(exchange.numbers()[rank, 0]) - ahead) if exchange and is_near else 0.0
            found[rank] = LastCall(number, "" if exchange is None else exchange.text_of(rank), None, when)
        return found

