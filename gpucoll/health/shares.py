"""The three shares of every call: this rank's own delay, the wait for other ranks, moving and reducing.

The engine counts the shares of its calls itself (kernels/engine/walker.h), and device_shares.py those of calls on a
GPU. All other calls are counted here, from two readings of the clock and from the findings of the engine and of the
comparison by messages.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from gpucoll.core.signature import described
from gpucoll.executors import call_site
from gpucoll.progress.operations import Operation

if TYPE_CHECKING:
    from gpucoll.health.device_shares import DeviceShares

LONG_DELAY = 100_000  # nanoseconds of an own delay from which the call site is noted; as in kernels/binding/calls.h
SUMS = 5  # of a kind of calls: calls, bytes, then the seconds of the three shares; kernels/binding/calls.h adds alike
TIMED = 32  # timings kept for each kind of call
HEADER = "header of "  # begins the name of a host message that announces the call of the name's rest
NAMES = ("calls", "bytes", "own_seconds", "waiting_seconds", "moving_seconds")
Kind = tuple[str, int]  # the collective, and the bit length of the bytes
Stats = dict[Kind, dict[str, float]]
# When the GPU of a rank came to each of two calls: the number of the call, 0 for none, and nanoseconds since 1970 by
# the clock of the host.
Stamps: TypeAlias = tuple[int, int, int, int]
NO_STAMPS: Stamps = 0, 0, 0, 0


class CallShares:
    """The shares of a call under way, and of the last calls while their comparison is open; nanoseconds.

    `place` is None if the call ends in the user's line that makes the call, else "". `by_events` is whether events on
    a GPU give the shares: then only calls and bytes are counted here.
    """

    __slots__ = ("_duration", "_nbytes", "_waited", "began", "between", "by_events", "place", "sums", "totals")

    def __init__(self, sums: list[float], nbytes: int, began: int, between: int, totals: tuple[int, int]) -> None:
        self.sums, self._nbytes, self.began, self.between, self.totals = sums, nbytes, began, between, totals
        self._duration: int | None = None  # until the call has ended
        self._waited = 0
        self.place: str | None = None
        self.by_events = False

    def end(self, now: int, totals: tuple[int, int]) -> int:
        """Count the call, which ends now, with the shares by which `totals` have grown since the begin.

        Returns the own delay, if known already.
        """
        (own, waited), (own_before, waited_before), sums = totals, self.totals, self.sums
        self._duration = duration = now - self.began
        sums[0] += 1
        sums[1] += self._nbytes
        if self.by_events:
            return 0
        sums[4] += 1e-9 * duration
        early, self._waited = self._waited, 0
        # A call that only enqueued finds its shares later.
        if own != own_before or waited != waited_before or early:
            return self.found(own - own_before, waited - waited_before + early)
        return 0

    def found(self, own: int, waited: int) -> int:
        """Add an own delay and a wait, known only now; at most the time between two calls, and in the call.

        Returns the own delay that counts.
        """
        if self.by_events:
            return 0
        own = min(max(own, 0), self.between)
        self.sums[2] += 1e-9 * own
        if self._duration is None:
            self._waited += max(waited, 0)
            return own
        waited = min(max(waited, 0), self._duration - self._waited)
        self._waited += waited
        self.sums[3] += 1e-9 * waited
        self.sums[4] -= 1e-9 * waited
        return own


class CallSums:
    """The sums of a communicator by kind of call: of the calls counted here, and of the engine's repeated calls.

    `times` has timings of blocking calls on host arrays, by name, executor, algorithm and bit length of the size.
    Number 0 of a row is the number of calls, then comes a ring of the seconds of the last `TIMED` calls, then the sums
    of the engine's repeated calls.
    """

    def __init__(self) -> None:
        self.python: dict[Kind, list[float]] = {}
        self.delays: dict[str, float] = collections.defaultdict(float)  # seconds of own delays by place: see `delayed`
        self.times: dict[tuple[str, str, str, int], Any] = collections.defaultdict(
            lambda: numpy.zeros(1 + TIMED + SUMS))

    def row(self, name: str, nbytes: int) -> list[float]:
        """Return the sums of the calls of a kind that are counted here."""
        return self.python.setdefault((name, nbytes.bit_length()), [0.0] * SUMS)

    def delayed(self, nanoseconds: int, place: str | None = None) -> None:
        """Note an own delay before a call, if the delay is long.

        The place is the user's line running now, unless given: a description of the call, or "" for unknown.
        """
        if nanoseconds > LONG_DELAY:
            self.delays[call_site() if place is None else place] += 1e-9 * nanoseconds

    def stats(self) -> Stats:
        """Return the figures by collective and size class."""
        # Copies of both tables: another thread may add a kind of call meanwhile.
        engine = [(name, bits, row[-SUMS:].tolist()) for (name, _, _, bits), row in list(self.times.items())]
        return stats_of(engine + [(*kind, list(row)) for kind, row in list(self.python.items())])


class CallClock:
    """Counts the shares of calls in `sums`. `engines` returns the engines, each with totals of its own.

    A comparison by messages adds own delays and waits (nanoseconds) to `own` and `waited`, and carries the stamps of
    `device`, the calls on a GPU.
    """

    def __init__(self, engines: Callable[[], Iterable[Any]], sums: CallSums) -> None:
        self.sums = sums
        self.own = self.waited = 0
        self.current: CallShares | None = None
        self.device: DeviceShares | None = None
        self._left = time.monotonic_ns()
        self._engines = engines

    def begin(self, name: str, nbytes: int) -> CallShares:
        """Return the shares of a call that begins now; `nbytes` is the larger of input and output."""
        self.own = self.waited = 0  # of a comparison without a call, such as a refusal
        now, (own, waited, left) = time.monotonic_ns(), self._totals()
        self.current = CallShares(self.sums.row(name, nbytes), nbytes, now, now - left, (own, waited))
        return self.current

    def end(self, call: CallShares) -> None:
        """Count a call that ends now."""
        self._left = now = time.monotonic_ns()
        self.sums.delayed(call.end(now, self._totals()[:2]), call.place)
        self.current = None

    def enqueued(self, sums: list[float], nbytes: int) -> None:
        """Count a call that was only enqueued, on a GPU: events give its seconds."""
        self._left = time.monotonic_ns()
        sums[0] += 1
        sums[1] += nbytes

    def found(self, call: CallShares, own: int, waited: int, description: str) -> None:
        """Add the shares of a call that its comparison has found only after the call."""
        counted = call.found(own, waited)
        if counted > LONG_DELAY:
            self.sums.delayed(counted, described(description))

    def measured(self, operation: Operation, name: str, nbytes: int, place: str | None = None) -> Operation:
        """Return an operation that carries out another and counts its shares; a failed call is not counted."""
        call = self.begin(name, nbytes)
        call.place = place
        try:
            yield from operation
        except BaseException:
            self.current = None
            raise
        self.end(call)

    def reported(self, operation: Operation, report: Callable[[int, int], object]) -> Operation:
        """Return an operation that carries out a comparison, then reports own delay and wait instead of adding both."""
        self.take()  # of a comparison before
        yield from operation
        report(*self.take())

    def take(self) -> tuple[int, int]:
        """Return own delay and wait found by a comparison, and remove both from the totals."""
        found, self.own, self.waited = (self.own, self.waited), 0, 0
        return found

    def _totals(self) -> tuple[int, int, int]:
        """Return own delays and waits, nanoseconds summed over all calls, and the time of the end of the last call."""
        own, waited, left = self.own, self.waited, self._left
        for engine in self._engines():
            more, longer, ended = engine.shares()
            own, waited, left = own + more, waited + longer, max(left, ended)
        return own, waited, left


def size_class(bits: int) -> int:
    """Return the largest power of two not above a number of bytes, given its bit length; 0 for no bytes.

    >>> [size_class(nbytes.bit_length()) for nbytes in (0, 1, 4095, 4096, 5000)]
    [0, 1, 2048, 4096, 4096]
    """
    return 1 << (bits - 1) if bits else 0


def stats_of(sums: Iterable[tuple[str, int, Iterable[float]]]) -> Stats:
    """Return the figures by collective and size class, given name, bit length and sums of each kind of call.

    The seconds of host messages that announce a collective are divided among the size classes of the collective, in
    proportion to the calls.
    """
    found: dict[Kind, list[float]] = {}
    for name, bits, row in sums:
        kind = name, size_class(bits)
        found[kind] = [a + b for a, b in zip(found.get(kind, [0.0] * SUMS), row, strict=True)]
    for (name, size), row in list(found.items()):
        if name.startswith(HEADER) and row[0]:
            del found[name, size]
            _add_header(found, name.removeprefix(HEADER), size, row)
    return {kind: dict(zip(NAMES, [int(row[0]), int(row[1]), *row[2:]], strict=True))
            for kind, row in sorted(found.items()) if row[0]}


def _add_header(found: dict[Kind, list[float]], name: str, size: int, row: list[float]) -> None:
    announced = {kind: sums for kind, sums in found.items() if kind[0] == name and sums[0]}
    if not announced:  # a call without a collective of its own, such as `check_numerics`
        found[name, size] = row
    calls = sum(sums[0] for sums in announced.values())
    for sums in announced.values():
        for place in range(2, SUMS):
            sums[place] += row[place] * sums[0] / calls


def total_of(many: Iterable[Mapping[Kind, Mapping[str, float]]]) -> Stats:
    """Return the sums of several figures as returned by `stats_of`."""
    found: Stats = {}
    for one in many:
        for kind, figures in one.items():
            into = found.setdefault(kind, dict.fromkeys(NAMES, 0))
            for name, value in figures.items():
                into[name] += value
    return dict(sorted(found.items()))
