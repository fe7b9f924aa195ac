"""The three shares of every call: this rank's own delay, the wait for other ranks, moving and reducing.

The engine counts the shares of its calls itself (kernels/engine/walker.h), and device_shares.py those of calls on a
GPU. All other calls are counted here, from two readings of the clock and from the findings of the engine and of the
comparison by messages.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy

from gpucoll.executors import CallRequest, call_site
from gpucoll.progress.operations import Operation

LONG_DELAY = 100_000  # nanoseconds of an own delay from which the call site is noted; as in kernels/binding/calls.h
SUMS = 5  # of a kind of calls: calls, bytes, then the seconds of the three shares; kernels/binding/calls.h adds alike
TIMED = 32  # timings kept for each kind of call
HEADER = -1  # in place of the bit length: the host messages that announce a collective
NAMES = ("calls", "bytes", "own_seconds", "waiting_seconds", "moving_seconds")
Kind = tuple[str, int]  # the collective, and the bit length of the bytes
Stats = dict[Kind, dict[str, float]]


class CallSums:
    """The sums of a communicator by kind of call: of the calls counted here, and of the engine's repeated calls.

    `times` has timings of blocking calls on host arrays, by name, executor, algorithm and bit length of the size.
    Number 0 of a row is the number of calls, then comes a ring of the seconds of the last `TIMED` calls, then the sums
    of the engine's repeated calls.
    """

    def __init__(self) -> None:
        self.python: dict[Kind, list[float]] = collections.defaultdict(lambda: [0.0] * SUMS)
        self.delays: dict[str, float] = collections.defaultdict(float)  # seconds of own delays by place: see `delayed`
        self.times: dict[tuple[str, str, str, int], Any] = collections.defaultdict(
            lambda: numpy.zeros(1 + TIMED + SUMS))

    def delayed(self, nanoseconds: int, place: str | None = None) -> None:
        """Note an own delay before a call, if the delay is long.

        The place is the user's line running now, unless given: a description of the call, or "" for unknown.
        """
        if nanoseconds > LONG_DELAY:
            self.delays[call_site() if place is None else place] += 1e-9 * nanoseconds

    def rows(self) -> Iterator[tuple[Kind, list[float]]]:
        """Yield the sums of each kind of calls, of one kind perhaps several."""
        # Copies of both tables: another thread may add a kind of call meanwhile.
        yield from (((name, bits), row[-SUMS:].tolist()) for (name, _, _, bits), row in list(self.times.items()))
        yield from list(self.python.items())

    def absorb(self, other: CallSums) -> None:
        """Add the sums of a closed communicator."""
        for kind, row in other.rows():
            self.python[kind] = [*map(sum, zip(self.python[kind], row, strict=True))]
        for place, seconds in list(other.delays.items()):
            self.delays[place] += seconds

    def stats(self) -> Stats:
        """Return the figures by collective and size class."""
        return stats_of(self.rows())


class CallClock:
    """Counts the shares of calls in `sums`, from the totals of `counters`: the engines, and the comparison by messages.

    `shares` of a counter returns own delays, waits, and the time of the end of the last call, in nanoseconds.
    """

    def __init__(self, counters: Callable[[], Iterable[Any]], sums: CallSums) -> None:
        self.sums = sums
        self._left = time.monotonic_ns()
        self._counters = counters

    def enqueued(self, sums: list[float], nbytes: int) -> None:
        """Count a call that was only enqueued, on a GPU: events give its seconds."""
        self._left = time.monotonic_ns()
        sums[0] += 1
        sums[1] += nbytes

    def measured(self, operation: Operation, kind: Kind, nbytes: int, place: str | None = None, *,
                 by_events: bool = False) -> Operation:
        """Return an operation that carries out another and counts its shares; a failed call is not counted.

        `place` is None if the call ends in the user's line that makes the call, else "". If the call has events on a
        GPU, they give its shares. Own delay and wait are at most the time since the last call, and in the call.
        """
        began, (own_before, waited_before, left) = time.monotonic_ns(), self._totals()
        yield from operation
        (own, waited, _), sums = self._totals(), self.sums.python[kind]
        self.enqueued(sums, nbytes)
        if by_events:
            return
        own = min(max(own - own_before, 0), began - left)
        waited = min(max(waited - waited_before, 0), self._left - began)
        for place_of_share, nanoseconds in zip((2, 3, 4), (own, waited, self._left - began - waited), strict=True):
            sums[place_of_share] += 1e-9 * nanoseconds
        self.sums.delayed(own, place)

    def _totals(self) -> tuple[int, int, int]:
        """Return own delays and waits, nanoseconds summed over all calls, and the time of the end of the last call."""
        owns, waits, ends = zip((0, 0, self._left), *(one.shares() for one in self._counters()), strict=True)
        return sum(owns), sum(waits), max(ends)


def kind_of(request: CallRequest) -> Kind:
    """Return the kind of a call; messages that announce a collective are a kind of their own."""
    return (request.header, HEADER) if request.header else (request.collective, request.nbytes.bit_length())


def size_class(bits: int) -> int:
    """Return the largest power of two not above a number of bytes, given its bit length; 0 for no bytes.

    >>> [size_class(nbytes.bit_length()) for nbytes in (0, 1, 4095, 4096, 5000)]
    [0, 1, 2048, 4096, 4096]
    """
    return 1 << (bits - 1) if bits else 0


def stats_of(rows: Iterable[tuple[Kind, Iterable[float]]]) -> Stats:
    """Return the figures by collective and size class, given kind and sums of calls.

    The seconds of host messages that announce a collective are divided among the size classes of the collective, in
    proportion to the calls.
    """
    found: dict[Kind, list[float]] = collections.defaultdict(lambda: [0.0] * SUMS)
    for kind, row in rows:
        found[kind] = [*map(sum, zip(found[kind], row, strict=True))]
    for name in [name for name, bits in found if bits == HEADER]:
        header = found.pop((name, HEADER))
        announced = [row for (collective, _), row in found.items() if collective == name]
        calls = sum(row[0] for row in announced)
        for row in announced if calls else ():
            row[2:] = [seconds + more * row[0] / calls for seconds, more in zip(row[2:], header[2:], strict=True)]
        if not calls and header[0]:  # a call without a collective of its own, such as `check_numerics`
            found[name, int(header[1] / header[0]).bit_length()] = header
    return {(name, size_class(bits)): dict(zip(NAMES, [int(row[0]), int(row[1]), *row[2:]], strict=True))
            for (name, bits), row in sorted(found.items()) if row[0]}
