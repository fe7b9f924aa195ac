"""The shares of calls on a GPU, from events on the calls' streams; the host waits for no call.

A call on a GPU is enqueued long before the GPU comes to the call, so the host's clock tells nothing about the GPU. Two
events around a call give the times of the GPU, and the end of the timed call before gives the time in between. Shorter
calls than LARGE are only counted. Each rank converts the time at which its GPU came to the call to the time of its
host. A later comparison of calls carries this stamp to the other ranks. The stamps of all ranks give the own delay and
the wait of each rank.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Any, NamedTuple

from gpucoll.device import Device, Event, Stream
from gpucoll.executors import call_site
from gpucoll.health.shares import NO_STAMPS, CallClock, Stamps

# Bytes from which a call is timed: the events of a shorter call cost the host about as much time as the call takes.
LARGE = 1 << 20
NO_LIMIT = 1 << 62  # nanoseconds
MOST = 256  # timed calls that wait for events or stamps; older calls are dropped
# The clocks of GPU and host drift apart by up to 50 us in a second. So the GPU is asked for its time once in ANCHOR
# seconds, by an event on an empty stream. The host waits for the answer for at most PATIENCE seconds, since the GPU may
# be busy; for the first answer longer, since without any answer no call is timed.
ANCHOR, QUESTIONS, PATIENCE, FIRST_PATIENCE = 1.0, 3, 1e-3, 0.05


class EventTimes(NamedTuple):
    """The events of a timed call: the end of the timed call before, None for the first, and begin and end of the call.

    `sums` are the sums of this kind of call, see `CallSums`.
    """

    number: int
    sums: list[float]
    place: str
    left: Event | None
    began: Event
    ended: Event


class CallTimes(NamedTuple):
    """A completed timed call, in nanoseconds: the longest possible own delay, the duration, and the stamps by rank."""

    call: EventTimes
    most: int
    duration: int
    arrivals: dict[int, int]


class DeviceShares:
    """The timed calls of a communicator on `device`, counted in the sums of `clock`.

    `size` is the number of ranks that compare calls; 1 without a comparison. Then waiting counts as moving.
    """

    def __init__(self, device: Device, clock: CallClock, rank: int, size: int) -> None:
        self.clock = clock
        self._device, self._rank, self._size = device, rank, size
        self.call_count = 0  # the number of the last call, where no comparison counts the calls
        self._left: Event | None = None  # the end of the last timed call
        self._under_way: collections.deque[EventTimes] = collections.deque()
        self._known: dict[int, CallTimes] = {}  # completed calls, until the stamps of all ranks have come
        self._early: dict[int, dict[int, int]] = {}  # stamps of other ranks for calls that are not completed here
        # Of this rank: number and time of calls, not yet sent.
        self._stamps: collections.deque[tuple[int, int]] = collections.deque()
        self._stream: Stream | None = None  # empty, for questions to the GPU
        self._anchor: tuple[Event, int] | None = None  # an event, and the host's time at the event
        self._asked = 0.0
        self._collecting = threading.Lock()

    def numbered(self, _description: str = "") -> int:
        """Return the number of a call that no comparison counts."""
        self.call_count += 1
        return self.call_count

    def begin(self, number: int, nbytes: int, sums: list[float], stream: Stream) -> EventTimes | None:
        """Return the events of call `number`, of `nbytes` on all ranks, with the begin recorded, if the call is timed.

        `sums` are those of this kind of call.
        """
        if nbytes < LARGE or stream.is_capturing():
            return None
        self._collect()
        began = self._marked(stream)
        return EventTimes(number, sums, call_site(), self._left, began, began)

    def end(self, timed: EventTimes, stream: Stream) -> None:
        """Record the end of a timed call."""
        self._left = ended = self._marked(stream)
        self._under_way.append(timed._replace(ended=ended))
        if len(self._under_way) > MOST:
            self._under_way.popleft()

    def _marked(self, stream: Stream) -> Event:
        event = self._device.new_event(timed=True)
        event.record(stream)
        return event

    def next_stamps(self) -> Stamps:
        """Return the stamps to send with the next comparison."""
        if not self._stamps:  # before most calls
            return NO_STAMPS
        first, second, *_ = *self._stamps, (0, 0), (0, 0)
        return *first, *second

    def sent(self) -> None:
        """Drop the stamps of `next_stamps`: a comparison carries the stamps to all ranks, including this one."""
        if self._stamps:
            for _ in range(min(len(self._stamps), 2)):
                self._stamps.popleft()

    def exchanged(self, stamps: list[Stamps]) -> None:
        """Take the stamps of all ranks, sent with a comparison."""
        for rank, (first, arrival, second, arrival_after) in enumerate(stamps):
            self._arrived(rank, first, arrival)
            self._arrived(rank, second, arrival_after)

    def _arrived(self, rank: int, number: int, arrival: int) -> None:
        if not number:
            return
        known = self._known.get(number)
        arrivals = self._early.get(number, {}) if known is None else known.arrivals
        arrivals[rank] = arrival
        if known is None:
            _put(self._early, number, arrivals)
        if known is not None and len(arrivals) == self._size:
            self._count(self._known.pop(number))

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

    def _completed(self, call: EventTimes) -> None:
        if self._anchor is None:
            return
        event, moment = self._anchor
        span = self._device.nanoseconds
        duration = span(call.began, call.ended)
        most = NO_LIMIT if call.left is None else max(span(call.left, call.began), 0)
        times = CallTimes(call, most, duration, self._early.pop(call.number, {}))
        if self._size == 1:
            self._count(times)
            return
        self._stamps.append((call.number, moment + span(event, call.began)))
        _put(self._known, call.number, times)

    def _count(self, times: CallTimes) -> None:
        """Add the shares of a timed call, once the stamps of all ranks are known."""
        call, arrivals = times.call, times.arrivals or {self._rank: 0}
        mine = arrivals[self._rank]
        own = min(mine - min(arrivals.values()), times.most)
        waited = min(max(arrivals.values()) - mine, times.duration)
        for place, nanoseconds in zip((2, 3, 4), (own, waited, times.duration - waited), strict=True):
            call.sums[place] += 1e-9 * nanoseconds
        self.clock.sums.delayed(own, call.place)

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
            _, event, moment = min(answers, key=lambda answer: answer[0])
            self._anchor = event, moment


def _put(waiting: dict[int, Any], number: int, value: Any) -> None:
    """Add the value of a call; drop the oldest call of many, since a rank whose GPU gives no time sends no stamps."""
    waiting[number] = value
    if len(waiting) > MOST:
        del waiting[next(iter(waiting))]
