"""The shares of calls on a GPU, from events on the calls' streams; the host waits for no call.

A call on a GPU is enqueued long before the GPU comes to the call, so the host's clock tells nothing about the GPU. Two
events around a call give the times of the GPU, and the end of the timed call before gives the time in between. Shorter
calls than TIMED_FROM are only counted. Each rank converts the time at which its GPU came to the call to the time of its
host. The comparison of a later timed call carries this stamp to the other ranks. The stamps of all ranks give the own
delay and the wait of each rank.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from dataclasses import dataclass, field

from gpucoll.arrays import Array
from gpucoll.device import Device, Event, Stream
from gpucoll.executors import call_site
from gpucoll.health.flight import CallRecord
from gpucoll.health.preflight import NO_STAMPS

# Bytes from which a call is timed: the events of a shorter call cost the host about as much time as the call takes.
TIMED_FROM = 1 << 20
MOST = 256  # timed calls that wait for events or stamps; older calls are dropped
# The clocks of GPU and host drift apart by up to 50 us in a second. So the GPU is asked for its time once in ANCHOR
# seconds, by an event on an empty stream. The host waits for the answer for at most PATIENCE seconds, since the GPU may
# be busy; for the first answer longer, since without any answer no call is timed.
ANCHOR, QUESTIONS, PATIENCE, FIRST_PATIENCE = 1.0, 3, 1e-3, 0.05


@dataclass(slots=True)
class TimedCall:
    """A timed call: the end of the timed call before (None for the first), begin and end, and the sums of its kind."""

    number: int
    sums: list[float]
    place: str
    left: Event | None
    began: Event
    ended: Event
    most: int = 0  # nanoseconds: the longest possible own delay
    duration: int = 0
    arrivals: dict[int, int] = field(default_factory=dict)  # by rank: when the GPU came to the call


class DeviceShares:
    """The timed calls of a communicator on `device`, counted in the sums of `record`.

    `size` is the number of ranks that compare calls; 1 without a comparison. Then waiting counts as moving.
    """

    def __init__(self, device: Device, record: CallRecord, rank: int, size: int) -> None:
        self.record = record
        self._device, self._rank, self._size = device, rank, size
        self.call_count = 0  # the number of the last call, where no comparison counts the calls
        self._number = 0  # of the last call of at least TIMED_FROM bytes, the same on all ranks
        self._left: Event | None = None  # the end of the last timed call
        self._under_way: collections.deque[TimedCall] = collections.deque(maxlen=MOST)
        self._open: dict[int, TimedCall] = {}  # by number: calls until the stamps of all ranks have come
        # Of this rank: number and time of calls, not yet sent.
        self._stamps: collections.deque[tuple[int, int]] = collections.deque()
        self._stream: Stream | None = None  # empty, for questions to the GPU
        self._anchor: tuple[Event, int] | None = None  # an event, and the host's time at the event
        self._asked = 0.0
        self._collecting = threading.Lock()

    def counted(self) -> None:
        """Count a call that nothing compares."""
        self.call_count += 1

    def begin(self, sums: list[float], stream: Stream) -> TimedCall | None:
        """Return the next call of at least TIMED_FROM bytes, with its begin recorded; None if it is not timed.

        `sums` are those of this kind of call.
        """
        self._number += 1
        if stream.is_capturing():
            return None
        self._collect()
        began = self._marked(stream)
        return TimedCall(self._number, sums, call_site(), self._left, began, began)

    def end(self, timed: TimedCall | None, stream: Stream) -> None:
        """Record the end of a call, if it is timed."""
        if timed is not None:
            self._left = timed.ended = self._marked(stream)
            self._under_way.append(timed)
            self._open[timed.number] = timed
            if len(self._open) > MOST:  # a rank whose GPU gives no time sends no stamps
                del self._open[next(iter(self._open))]

    def _marked(self, stream: Stream) -> Event:
        event = self._device.new_event(timed=True)
        event.record(stream)
        return event

    def next_stamps(self) -> Array:
        """Return the stamps that go to all ranks with the comparison of the next timed call, this rank included.

        They tell when the GPU came to each of two calls: the number of the call, 0 for none, and nanoseconds since 1970
        by the clock of the host.
        """
        found = NO_STAMPS.copy()
        for place in range(min(len(self._stamps), len(found) // 2)):
            found[2 * place:2 * place + 2] = self._stamps.popleft()
        return found

    def exchanged(self, stamps: Array) -> None:
        """Take the stamps of all ranks, sent with a comparison."""
        for place, (number, arrival) in enumerate(stamps.reshape(-1, 2).tolist() if stamps.any() else ()):
            if number in self._open:
                self._came(self._open[number], 2 * place // len(NO_STAMPS), arrival)

    def _collect(self) -> None:
        """Stamp the timed calls that the GPU has completed."""
        if not self._under_way or not self._collecting.acquire(blocking=False):
            return
        try:
            with self._device.relaxed:
                self._ask()
                while self._under_way and self._under_way[0].ended.done:
                    self._completed(self._under_way.popleft())
        finally:
            self._collecting.release()

    def _completed(self, call: TimedCall) -> None:
        if self._anchor is None:
            return
        (event, moment), span = self._anchor, self._device.nanoseconds
        arrival, call.duration = moment + span(event, call.began), span(call.began, call.ended)
        # Before the first call nothing limits a delay.
        call.most = sys.maxsize if call.left is None else max(span(call.left, call.began), 0)
        if self._size == 1:
            self._came(call, self._rank, arrival)
        else:
            self._stamps.append((call.number, arrival))

    def _came(self, call: TimedCall, rank: int, arrival: int) -> None:
        """Take the stamp of a rank; once those of all ranks are known, add the shares of the call.

        The own delay is at most the time since the timed call before, the wait as long as the call.
        """
        call.arrivals[rank] = arrival
        if len(call.arrivals) < self._size or self._open.pop(call.number, None) is None:
            return
        mine, times = call.arrivals[self._rank], call.arrivals.values()
        own, waited = min(mine - min(times), call.most), min(max(times) - mine, call.duration)
        self.record.shared(call.sums, own, waited, call.duration - waited, call.place)

    def _ask(self) -> None:
        """Ask the GPU for its time: of several answers the quickest tells the time of the host best."""
        started = time.monotonic()
        if self._stream is not None and started < self._asked + ANCHOR:
            return
        self._stream, self._asked = self._stream or self._device.new_stream(), started
        answers, patience = [], FIRST_PATIENCE if self._anchor is None else PATIENCE
        for _ in range(QUESTIONS):
            asked, event = time.time_ns(), self._marked(self._stream)
            while not event.done:
                if time.monotonic() > started + patience:
                    break
            else:
                answered = time.time_ns()
                answers.append((answered - asked, event, (asked + answered) // 2))
        if answers:
            self._anchor = min(answers, key=lambda answer: answer[0])[1:]
