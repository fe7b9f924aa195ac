"""The emulated device: memory of NumPy arrays, kernels compiled by g++ and run on the CPU, streams as queues.

An action of a stream is a kernel, a copy, a group of messages or a wait for an event. Actions run only inside
`settle`. As on a GPU, the order of actions on different streams is arbitrary: a seeded random generator draws the
order. A missing event between two streams therefore gives wrong results here, too.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import random
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy

from gpucoll.device import Device, Waiting
from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.launch import Arguments, Kernels, Launch
from gpucoll.device.sources import Instance, family, text
from gpucoll.device.store import user_store
from gpucoll.errors import ArgumentError, BackendError, MismatchError

# A CUDA thread of a kernel that waits is a fiber, so threads are expensive, and a few threads show the same errors.
PROCESSORS, CHANNELS, THREADS = 2, 2, 64

# A function that makes as much progress as possible without blocking, and returns whether the action is complete.
Action: TypeAlias = Callable[[], bool]


class EmulatedDevice(Device):
    """The device of one communicator; `seed` determines the order of progress among the device's streams."""

    name = "emulated"
    most_threads, warp = THREADS, 1

    def __init__(self, seed: int = 0) -> None:
        self.kernels = Kernels(_load, PROCESSORS, threads=THREADS)
        self._order = random.Random(seed)
        self._ended = 0  # number of completed actions of all streams
        self._streams: list[EmulatedStream] = []
        self.captured: EmulatedGraph | None = None  # the graph being captured, which receives all enqueued actions
        self._main = self.new_stream()

    current = contextlib.nullcontext()  # host memory: no device must be made current

    def channels(self, ranks: int) -> int:
        return CHANNELS

    def owns(self, array: Any) -> str | None:
        return None if isinstance(array, numpy.ndarray) else "on a GPU"

    def stream(self, given: Any) -> EmulatedStream:
        """Return the main stream for None and for any CUDA stream, so that GPU programs run unchanged."""
        if given is None or hasattr(given, "ptr") or hasattr(given, "__cuda_stream__") or isinstance(given, int):
            return self._main
        if isinstance(given, EmulatedStream):
            return given
        raise ArgumentError(f"stream {given!r} is not a stream", code="GC-STREAM")

    def new_stream(self) -> EmulatedStream:
        self._streams.append(EmulatedStream(self))
        return self._streams[-1]

    def new_event(self, *, timed: bool = False) -> EmulatedEvent:
        return EmulatedEvent()

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype, stream: EmulatedStream) -> Any:
        """Return a new array, kept alive until the queue of `stream` is empty."""
        # A GPU's memory pool gives the same guarantee: freed memory is reused only in the order of the stream.
        stream.kept.append(numpy.empty(shape, dtype))
        return stream.kept[-1]

    def fill(self, row: Any, value: numpy.ndarray[Any, Any], stream: Any) -> None:
        stream.enqueue(lambda: row.view(value.dtype).fill(value[0]))

    def settle(self, stream: EmulatedStream) -> Waiting:
        """Run the actions of all streams until the queue of `stream` is empty; raise the error of its messages."""
        while stream.queue:
            before = self._ended
            if not self._advance():
                # Another waiting call may have run the streams meanwhile: compare the number of completed actions.
                yield lambda before=before: self._advance() or self._ended != before  # type: ignore[misc]
        error, stream.error = stream.error, None
        if error is not None:
            raise error

    def _advance(self) -> bool:
        before = self._ended
        busy = [stream for stream in self._streams if stream.queue]
        # A random order, so that tests meet all orders allowed on a GPU.
        for stream in self._order.sample(busy, len(busy)):
            self._ended += stream.advance()
        return self._ended != before

    def cancel(self) -> None:
        """Empty all queues; cancel the receives and kernels under way."""
        for stream in self._streams:
            for action in stream.queue:
                # Only groups of messages and waiting kernels have `cancel`; for others call `bool()`, a no-op.
                getattr(action, "cancel", bool)()
            stream.queue.clear()


class EmulatedStream:
    """A queue of actions; an action begins after the end of the previous action."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.queue: collections.deque[Action] = collections.deque()
        # Arrays that enqueued actions may still write, even if the caller drops all references.
        self.kept: list[Any] = []
        self._device = device
        # The error of a message. Any call may run this stream, but only the call that settles the stream raises.
        self.error: MismatchError | None = None

    def enqueue(self, call: Callable[[], object]) -> None:
        def act() -> bool:
            call()
            return True

        self.enqueue_action(lambda: act)

    def enqueue_action(self, begin: Callable[[], Action]) -> None:
        """Enqueue the action returned by `begin`; during a capture add `begin` to the graph instead."""
        # `begin` makes a new action for every launch of a graph, since an action has state and runs once.
        if self._device.captured is not None:
            self._device.captured.actions.append((self, begin))
        else:
            self.queue.append(begin())

    def advance(self) -> int:
        """Run actions until the first incomplete action; return the number of completed actions."""
        ended = 0
        while self.queue:
            try:
                if not self.queue[0]():
                    break
            # The message itself is complete, so the queue goes on, and `settle` raises the error.
            except MismatchError as error:
                self.error = error
            self.queue.popleft()
            ended += 1
        if not self.queue:
            self.kept.clear()
        return ended

    def wait_event(self, event: EmulatedEvent) -> None:
        self.enqueue_action(event.mark.awaited)

    def begin_capture(self) -> None:
        self._device.captured = EmulatedGraph(self)

    def end_capture(self) -> EmulatedGraph:
        graph, self._device.captured = self._device.captured, None
        assert graph is not None
        return graph

    def is_capturing(self) -> bool:
        return self._device.captured is not None


class _Mark:
    """The record of one event: how often the record was enqueued (`put`), and how often the queue reached the record.

    A record in a graph is enqueued once per launch. A wait refers to the last record enqueued before the wait.
    """

    def __init__(self) -> None:
        self.put = self.passed = 0

    def put_down(self) -> Action:
        self.put += 1
        return self._pass

    def _pass(self) -> bool:
        self.passed += 1
        return True

    def awaited(self) -> Action:
        # Read `put` now, not when the action runs: later records do not concern this wait.
        last = self.put
        return lambda: self.passed >= last


class EmulatedEvent:
    """A point in a stream, as CUDA's events are; an event never recorded counts as complete."""

    def __init__(self) -> None:
        self.mark = _Mark()

    @property
    def done(self) -> bool:
        return self.mark.passed >= self.mark.put

    def record(self, stream: EmulatedStream) -> None:
        # A new object, because waits enqueued earlier refer to the previous record.
        self.mark = _Mark()
        stream.enqueue_action(self.mark.put_down)


class EmulatedGraph:
    """The actions enqueued during a capture begun on `origin`, each with the stream of the action."""

    def __init__(self, origin: EmulatedStream) -> None:
        self.origin = origin
        self.actions: list[tuple[EmulatedStream, Callable[[], Action]]] = []

    def launch(self, stream: EmulatedStream) -> None:
        """Enqueue all actions once more, ordered like one action of `stream`."""
        self._meet(stream, self.origin)
        for captured, begin in self.actions:
            captured.enqueue_action(begin)
        self._meet(self.origin, stream)

    def _meet(self, first: EmulatedStream, then: EmulatedStream) -> None:
        event = EmulatedEvent()
        event.record(first)
        then.wait_event(event)


def _load(instance: Instance) -> Launch:
    source = text(*family(instance))
    path = user_store().path(source, ".so", functools.partial(compile_shared, source), flags=recipe())
    library = ctypes.CDLL(str(path))
    function = getattr(library, instance.entry)
    function.restype = ctypes.c_char_p
    # Only peer kernels, which wait for other ranks, are compiled with the scheduler of fibers.
    may_wait = hasattr(library, "gc_world")

    def run(blocks: int, threads: int, arguments: Arguments) -> None:
        _raise_fault(instance.entry, function(blocks, threads, ctypes.c_void_p(arguments.ctypes.data)))

    def launch(blocks: int, threads: int, arguments: Arguments, stream: EmulatedStream) -> None:
        if may_wait:
            stream.enqueue_action(functools.partial(RunningKernel, library, instance.entry, blocks, threads, arguments))
        else:
            stream.enqueue(functools.partial(run, blocks, threads, arguments))

    return launch


def _raise_fault(entry: str, fault: bytes | None) -> None:
    if fault is not None:
        raise BackendError(f"kernel {entry}: {fault.decode()}", code="GC-CUDA")


class RunningKernel:
    """An action running a kernel with fibers as threads: when all fibers wait for other ranks, the call returns."""

    def __init__(self, library: ctypes.CDLL, entry: str, blocks: int, threads: int, arguments: Arguments) -> None:
        self._library, self._entry, self._grid, self._arguments = library, entry, (blocks, threads), arguments
        library.gc_world.restype, library.gc_complaint.restype = ctypes.c_void_p, ctypes.c_char_p
        self._world: Any = None

    def __call__(self) -> bool:
        # The launch waits for the action's turn in the queue, because the kernel reads the results of earlier actions.
        if self._world is None:
            self._world = ctypes.c_void_p(self._library.gc_world(ctypes.c_uint64(0), self._grid[0], 0))
            self._library.gc_launch(self._world, 0, getattr(self._library, f"{self._entry}_thread"),
                                    ctypes.c_void_p(self._arguments.ctypes.data), *self._grid)
        if self._library.gc_advance(self._world, 0):
            return False
        _raise_fault(self._entry, self._library.gc_complaint(self._world))
        self.cancel()
        return True

    def cancel(self) -> None:
        """Destroy the fibers, finished or not."""
        if self._world is not None:
            self._library.gc_end(self._world)
            self._world = None
