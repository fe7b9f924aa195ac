"""Device memory that is kept from call to call, and the order of a communicator's operations on any streams."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from gpucoll.device import Device, Event, Stream
from gpucoll.errors import GpucollError

EVERY = 16  # operations for which the watchdog has one event


class Workspace:
    """Rows by name. They only grow, by doubling: a stream may still be using the old one, so it is kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rows: dict[str, Any] = {}
        self._outgrown: list[Any] = []

    def row(self, name: str, nbytes: int, stream: Stream) -> Any:
        """Return a row of so many bytes at least, None of none."""
        row = self._rows.get(name)
        if nbytes and (row is None or row.nbytes < nbytes):
            self._outgrown.append(row)
            wanted = 1 << max(nbytes - 1, 16).bit_length()
            row = self._rows[name] = self._device.empty(wanted, numpy.dtype("u1"), stream)
        return row if nbytes else None

    def rows(self) -> list[Any]:
        """Return all memory that an operation may still be using."""
        return [row for row in (*self._rows.values(), *self._outgrown) if row is not None]

    def clear(self) -> None:
        self._rows.clear()
        self._outgrown.clear()


class Output(NamedTuple):
    """Memory of a result that can become NaN, as long as its `owner` is there: a weak reference to an array."""

    owner: Callable[[], object]
    address: int
    nbytes: int


class StreamOrder:
    """The operations of a communicator follow each other, whatever streams they are on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Stream | None = None
        self._event: Event | None = None
        self._flying: collections.deque[tuple[Event, object]] = collections.deque()
        self._captured: list[object] = []  # what graphs of the user's work on: there is no telling for how long
        self.is_watched = False  # whether a watchdog looks after the operations
        self._batches: collections.deque[tuple[Event, list[Output]]] = collections.deque()  # with events at their ends
        self._outputs: list[Output] = []  # of the operations after those
        self._unmarked = self._asked = 0  # how many there are, and were when the watchdog asked

    def follow(self, stream: Stream) -> None:
        """Let `stream` wait for the operation before; a graph of the user's own brings its own order."""
        if self._event is None and (self._last is None or self._last is stream or self._last == stream):
            return
        if stream.is_capturing():
            return
        if self._event is None:  # most operations are on one stream, and need none
            self._event = self._device.mark(self._last)
        stream.wait_event(self._event)

    def enqueue(self, launch: Callable[[Stream], None], stream: Stream, output: Output | None = None) -> None:
        """Enqueue an operation by `launch`, after the one before; not in a capture."""
        if stream is not self._last or self._event is not None:
            self.follow(stream)
        launch(stream)
        if stream is not self._last or self._event is not None or self._flying:
            self.passed(stream, None)
        self.noted(stream, output)

    def passed(self, stream: Stream, keep: object) -> None:
        """The operation enqueued on `stream` is the last one from here on; a graph of the user's keeps its memory."""
        if self.keep_captured(stream, keep):
            return
        self._last, self._event = stream, None
        if not self._device.lasts(stream):  # it may be gone by the next operation
            self._event = self._device.mark(stream)
        self.let_go()

    def mark(self, stream: Stream, keep: object) -> Event:
        """Return the event that stands for the end of what was enqueued on `stream`; `keep` lives until then."""
        self.passed(stream, keep)
        event = self.hold(stream, keep)
        if not stream.is_capturing():
            self._event = event
        return event

    def hold(self, stream: Stream, keep: object) -> Event:
        """Return the event that stands for the end of what `stream` has; `keep` lives until it has come."""
        event = self._device.mark(stream)
        if not self.keep_captured(stream, keep):
            self._flying.append((event, keep))
            self.let_go()
        return event

    def keep_captured(self, stream: Stream, memory: object) -> bool:
        """Return whether `stream` is being captured: then a graph of the user's goes on using `memory`, which stays."""
        if stream.is_capturing():
            self._captured.append(memory)
            return True
        return False

    @property
    def has_captured(self) -> bool:
        """Whether a graph of the user's has calls of this communicator."""
        return bool(self._captured)

    def let_go(self) -> None:
        """Let go of what was kept for operations that have ended."""
        while self._flying and self._flying[0][0].done:
            self._flying.popleft()

    def noted(self, stream: Stream, output: Output | None = None, event: Event | None = None) -> None:
        """Let the watchdog know of an operation that was enqueued on `stream`, and of its result.

        `event` is its end, where there is an event. Else one in EVERY operations gets an event: an operation follows
        those before, so that the event stands for them all.
        """
        if not self.is_watched:
            return
        if output is not None:
            self._outputs.append(output)
        self._unmarked += 1
        if event is not None or self._unmarked == EVERY:
            self._cut(self._device.mark(stream) if event is None else event)

    def noted_message(self, event: Event) -> None:
        """Let the watchdog know of messages, which no operation follows."""
        if self.is_watched:
            self._batches.append((event, []))

    def _cut(self, event: Event) -> None:
        outputs, self._outputs, self._unmarked = self._outputs, [], 0
        self._batches.append((event, outputs))

    def oldest(self) -> object:
        """Return what stands for the oldest operations under way, the same as long as they are; None without any.

        The watchdog asks. It makes an event itself only where no operation has come since it asked before: a thread
        that goes on enqueuing does so in time, and an event of the watchdog's would stand behind other work as well.
        """
        while self._batches and self._batches[0][0].done:
            self._batches.popleft()
        if self._batches:
            return self._batches[0]
        before, self._asked = self._asked, self._unmarked
        if self._unmarked and self._unmarked == before and self._last is not None and not self._last.is_capturing():
            self._cut(self._device.mark(self._last) if self._event is None else self._event)
            return self._batches[0]
        return None

    def unfinished(self) -> list[Output]:
        """Return the results of operations that are not known to have ended."""
        batches = [outputs for event, outputs in list(self._batches) if not _is_done(event)]
        return [output for outputs in (*batches, self._outputs) for output in outputs]

    def awaited(self) -> list[Event]:
        """Return what has come once the last operation and those beside it have ended."""
        if self._last is not None and self._event is None:
            with self._device.current:  # by which the null stream is known
                self._event = self._device.mark(self._last)
        return [event for event, _ in self._flying] + ([self._event] if self._event else [])


def _is_done(event: Event) -> bool:
    """Return whether an event has come, as far as that can be known."""
    try:
        return event.done
    except GpucollError:  # it was captured, or the GPU has failed
        return False
