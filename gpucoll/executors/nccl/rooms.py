"""Device memory that is kept from call to call, and the order of a communicator's operations on any streams."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.device import Device, Event, Stream
from gpucoll.executors import Task
from gpucoll.waits import NAP


class Rooms:
    """Scratch and staging. Rooms only grow, by doubling: a stream may still be using the old one, so it is kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rooms: dict[str, Any] = {}
        self._outgrown: list[Any] = []

    def of(self, task: Task, source: Any, target: Any, stream: Stream) -> dict[str, Any]:
        """Return the buffers of `task` by name: rows, or None; `input` is a room where the plan needs a copy of it."""
        plan, width = task.plan, task.dtype.itemsize
        assert plan is not None
        rows = {"input": source, "output": target,
                **{name: self._room(name, count * width, stream) for name, count in plan.workspace.items()}}
        if task.collective == "barrier":  # which has a byte for every message
            rows["token"] = self._room("token", 1 + max(map(len, plan.rounds), default=0), stream)
        if plan.copy_input:
            rows["input"] = self._room("input", source.nbytes, stream)
        return rows

    def _room(self, name: str, nbytes: int, stream: Stream) -> Any:
        room = self._rooms.get(name)
        if nbytes and (room is None or room.nbytes < nbytes):
            self._outgrown.append(room)
            room = self._rooms[name] = self._device.empty(1 << (nbytes - 1).bit_length(), numpy.dtype("u1"), stream)
        return room

    def clear(self) -> None:
        """Let go of all of them."""
        self._rooms.clear()
        self._outgrown.clear()


class StreamOrder:
    """The operations of a communicator follow each other, whatever streams they are on."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: Stream | None = None
        self._event: Event | None = None
        self._flying: collections.deque[tuple[Event, object]] = collections.deque()
        self._captured: list[object] = []  # what graphs of the user's work on: there is no telling for how long

    def follow(self, stream: Stream) -> None:
        """Let `stream` wait for the operation before; a graph of the user's own brings its own order."""
        if self._event is None and (self._last is None or self._last is stream or self._last == stream):
            return
        if stream.is_capturing():
            return
        if self._event is None:  # most operations are on one stream, and need none
            self._event = self._device.new_event()
            self._event.record(self._last)
        stream.wait_event(self._event)

    def enqueue(self, launch: Callable[[Stream], None], stream: Stream) -> None:
        """Enqueue an operation by `launch`, after the one before; not in a capture."""
        if stream is not self._last or self._event is not None:
            self.follow(stream)
        launch(stream)
        if stream is not self._last or self._event is not None or self._flying:
            self.passed(stream, None)

    def passed(self, stream: Stream, keep: object) -> None:
        """The operation enqueued on `stream` is the last one from here on; a graph of the user's keeps its memory."""
        if self.keep_captured(stream, keep):
            return
        self._last, self._event = stream, None
        if not self._device.lasts(stream):  # it may be gone by the next operation
            self._event = self._device.new_event()
            self._event.record(stream)
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
        event = self._device.new_event()
        event.record(stream)
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

    def has_ended(self, timeout: float) -> bool:
        """Return whether the last operation and those beside it come to an end within `timeout` seconds."""
        if self._last is not None and self._event is None:
            self._event = self._device.new_event()
            with self._device.current:  # by which the null stream is known
                self._event.record(self._last)
        deadline = time.monotonic() + timeout
        waiting = [event for event, _ in self._flying] + ([self._event] if self._event else [])
        while not all(event.done for event in waiting):
            if time.monotonic() > deadline:
                return False
            time.sleep(NAP)
        return True
