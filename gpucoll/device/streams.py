"""Device memory reused by successive calls, and the order of a communicator's operations on all streams.

`mark` enqueues an event that completes with all earlier work of its stream. An operation is one enqueued call.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from gpucoll.device import Device, Event, Stream
from gpucoll.errors import GpucollError

MOMENT = 0.1  # seconds for recording an event, unless CUDA lets the thread wait
EVERY = 16  # operations per event of the watchdog: an event for every operation would slow down short calls


class Workspace:
    """Scratch arrays by name. An outgrown array stays allocated, since a stream may still be using the array."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rows: dict[str, Any] = {}
        self._outgrown: list[Any] = []

    def row(self, name: str, nbytes: int, stream: Stream) -> Any:
        """Return the array `name` with at least `nbytes` bytes; None for 0 bytes."""
        row = self._rows.get(name)
        if nbytes and (row is None or row.nbytes < nbytes):
            self._outgrown.append(row)
            # Sizes are powers of two, so all outgrown arrays together are smaller than the current array.
            wanted = 1 << max(nbytes - 1, 16).bit_length()
            row = self._rows[name] = self._device.empty(wanted, numpy.dtype("u1"), stream)
        return row if nbytes else None

    def rows(self) -> list[Any]:
        """Return all arrays, including the outgrown arrays."""
        return [row for row in (*self._rows.values(), *self._outgrown) if row is not None]

    def clear(self) -> None:
        self._rows.clear()
        self._outgrown.clear()


class Output(NamedTuple):
    """Memory of a result, set to NaN if the call fails. `owner` is a weak reference to the array of this memory."""

    owner: Callable[[], object]
    address: int
    nbytes: int


class StreamOrder:
    """The execution order of a communicator's operations: each starts after the previous one, on any streams."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Stream of the last operation, and the event at the end of that operation, made on demand.
        self._last: Stream | None = None
        self._event: Event | None = None
        # Events of operations under way, each with the memory in use until the event completes.
        self._flying: collections.deque[tuple[Event, object]] = collections.deque()
        # Memory used by the user's CUDA graphs. The time of the last launch is unknown, so nothing is ever released.
        self._captured: list[object] = []
        self.is_watched = False  # whether a watchdog monitors the operations
        self._look: Event | None = None  # the watchdog's event, see `watch`
        self._recording: _Recording | None = None  # the batch ending with this event, until completion
        # The watchdog's batches: the event at the end of at most EVERY operations, and the results of the operations.
        self._batches: collections.deque[tuple[Event, list[Output]]] = collections.deque()
        self._outputs: list[Output] = []  # results of the operations after the last batch
        self._unmarked = self._asked = 0  # number of operations after the last batch: now, and at the last `oldest()`

    def follow(self, stream: Stream) -> None:
        """Make `stream` wait for the previous operation, unless `stream` is being captured."""
        # Operations on one stream need no event.
        if self._event is None and (self._last is None or self._last is stream or self._last == stream):
            return
        # The user is responsible for the order of a CUDA graph.
        if stream.is_capturing():
            return
        # Made only now, because most programs use one stream and never need the event.
        if self._event is None:
            self._event = self._device.mark(self._last)
        stream.wait_event(self._event)

    def enqueue(self, launch: Callable[[Stream], None], stream: Stream, output: Output | None = None,
                keep: object = None) -> None:
        """Enqueue an operation on `stream` by calling `launch`, after the previous operation; not during a capture.

        `keep` lives until the end of the operation.
        """
        # The conditions spare the common case, successive calls on one stream, two calls of Python functions.
        if stream is not self._last or self._event is not None:
            self.follow(stream)
        launch(stream)
        if stream is not self._last or self._event is not None or self._flying:
            self.passed(stream, None)
        if self.is_watched or keep is not None:
            self.noted(stream, output, None if keep is None else self.hold(stream, keep))

    def passed(self, stream: Stream, keep: object) -> None:
        """Record the operation just enqueued on `stream` as the last; in a capture only keep `keep` alive."""
        if self.keep_captured(stream, keep):
            return
        self._last, self._event = stream, None
        # Another library may destroy a foreign stream before the next operation: record the event at once.
        if not self._device.lasts(stream):
            self._event = self._device.mark(stream)
        self.let_go()

    def mark(self, stream: Stream, keep: object) -> Event:
        """Call `passed`, return an event at the end of the operation, and keep `keep` alive until the event."""
        self.passed(stream, keep)
        event = self.hold(stream, keep)
        if not stream.is_capturing():
            self._event = event
        return event

    def hold(self, stream: Stream, keep: object) -> Event:
        """Return an event at the current end of `stream`, and keep `keep` alive until the event completes."""
        event = self._device.mark(stream)
        if not self.keep_captured(stream, keep):
            self._flying.append((event, keep))
            self.let_go()
        return event

    def keep_captured(self, stream: Stream, memory: object) -> bool:
        """Return whether `stream` is being captured; if so, keep `memory` alive for the user's graph."""
        if stream.is_capturing():
            self._captured.append(memory)
            return True
        return False

    @property
    def has_captured(self) -> bool:
        """Whether a CUDA graph of the user contains calls of this communicator."""
        return bool(self._captured)

    def let_go(self) -> None:
        """Release the memory kept for completed operations."""
        while self._flying and self._flying[0][0].done:
            self._flying.popleft()

    def watch(self) -> None:
        """Start to keep the batches for a watchdog.

        The watchdog's event is made here. While a thread copies to ordinary host memory, CUDA makes no event until the
        end of the copy, and the watchdog is there to end a copy waiting in vain.
        """
        self._look = self._look or self._device.new_event()
        self.is_watched = True

    def noted(self, stream: Stream, output: Output | None = None, event: Event | None = None) -> None:
        """Report an operation enqueued on `stream`, and its result, to the watchdog.

        `event` is the event at the end of the operation, if available. Otherwise every EVERY-th operation gets an
        event. Operations complete in order, so the event also covers all earlier operations.
        """
        if not self.is_watched:
            return
        if output is not None:
            self._outputs.append(output)
        self._unmarked += 1
        if event is not None or self._unmarked >= EVERY:
            self._cut(self._device.mark(stream) if event is None else event)

    def noted_message(self, event: Event) -> None:
        """Report point-to-point messages, ending at `event`, to the watchdog; messages are outside the order."""
        if self.is_watched:
            self._batches.append((event, []))

    def _cut(self, event: Event) -> None:
        outputs, self._outputs, self._unmarked = self._outputs, [], 0
        self._batches.append((event, outputs))

    def oldest(self) -> object:
        """Return an object identifying the oldest batch under way, the same until the batch completes; else None.

        Only the watchdog calls this method.
        """
        recording, self._recording = self._recording, None
        if recording is not None and not self._is_recorded(recording):
            self._recording = recording
            return recording
        while self._batches and self._batches[0][0].done:
            self._batches.popleft()
        if self._batches:
            return self._batches[0]
        # Close a batch here only if no operation was added since the last call: an event recorded now also waits for
        # later work on the stream. A thread enqueuing more operations closes the batch in `noted`.
        before, self._asked = self._asked, self._unmarked
        if self._unmarked and self._unmarked == before and self._last is not None and not self._last.is_capturing():
            if self._event is not None:
                self._cut(self._event)
                return self._batches[0]
            if self._look is not None:
                outputs, self._outputs, self._unmarked = self._outputs, [], 0
                self._recording = _Recording(self._device, self._look, self._last, outputs)
                return self._recording
        return None

    def _is_recorded(self, recording: _Recording) -> bool:
        try:
            return recording.done
        # CUDA refuses, for example during a capture: the next look tries again.
        except Exception:
            self._outputs[:0] = recording.outputs
            self._unmarked += 1
            raise

    def unfinished(self) -> list[Output]:
        """Return the results of all operations not known to be complete."""
        # Iterate over a copy, because the watchdog's thread calls this method while another thread may add batches.
        batches = [outputs for event, outputs in list(self._batches) if not _is_done(event)]
        recording = [] if self._recording is None else self._recording.outputs
        return [output for outputs in (recording, *batches, self._outputs) for output in outputs]

    def awaited(self) -> list[Event]:
        """Return the events of all operations and messages under way; all are complete when every event is."""
        return [event for event, _ in self._flying] + self.last()

    def last(self) -> list[Event]:
        """Return the event at the end of the last operation, which follows all operations before; [] without one."""
        if self._last is not None and self._event is None:
            # The null stream has one address on all GPUs: the current device decides whose null stream is meant.
            with self._device.current:
                self._event = self._device.mark(self._last)
        return [self._event] if self._event else []


class _Recording:
    """A batch ending with the present work of `stream`, where a thread of the batch records `event`.

    CUDA may let the thread wait until the end of a copy in the same stream; the watchdog must not wait for that.
    """

    def __init__(self, device: Device, event: Event, stream: Stream, outputs: list[Output]) -> None:
        self._device, self._event, self._stream, self.outputs = device, event, stream, outputs
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._record, name="gpucoll event", daemon=True).start()
        self._has_ended.wait(MOMENT)

    def _record(self) -> None:
        try:
            with self._device.relaxed:
                self._event.record(self._stream)
        except Exception as error:
            self._error = error
        self._has_ended.set()

    @property
    def done(self) -> bool:
        """Whether the operations of the batch have completed; raises an error of CUDA."""
        if self._error is not None:
            raise self._error
        return self._has_ended.is_set() and self._event.done


def _is_done(event: Event) -> bool:
    """Return whether an event is complete; False for an event of a capture or a failed GPU."""
    try:
        return event.done
    except GpucollError:
        return False
