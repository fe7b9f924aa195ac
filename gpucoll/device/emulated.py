"""The emulated device: NumPy's memory, kernels compiled by g++, and streams that are queues.

What is enqueued stays in its stream's queue until `settle`. Of several streams any may go on, in an order drawn from
a seed, as on a GPU: what lacks an event between two streams gives wrong results here too.
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

PROCESSORS, CHANNELS, THREADS = 2, 2, 64  # a CUDA thread may be a fiber: few of them show all that many would

Action: TypeAlias = Callable[[], bool]  # goes on as far as it can; whether it has ended


class EmulatedDevice(Device):
    """The device of one communicator; `seed` decides which of its streams goes on first."""

    name = "emulated"
    most_threads, warp = THREADS, 1

    def __init__(self, seed: int = 0) -> None:
        self.kernels = Kernels(_load, PROCESSORS, threads=THREADS)
        self._order = random.Random(seed)
        self._ended = 0  # actions, of all streams
        self._streams: list[EmulatedStream] = []
        self.captured: EmulatedGraph | None = None  # where what is enqueued goes during a capture
        self._main = self.new_stream()

    current = contextlib.nullcontext()  # there is one

    def channels(self, ranks: int) -> int:
        return CHANNELS

    def owns(self, array: Any) -> str | None:
        return None if isinstance(array, numpy.ndarray) else "on a GPU"

    def stream(self, given: Any) -> EmulatedStream:
        """There is one for the user, whichever stream of CuPy's a program names."""
        if given is None or hasattr(given, "ptr") or hasattr(given, "__cuda_stream__") or isinstance(given, int):
            return self._main
        if isinstance(given, EmulatedStream):
            return given
        raise ArgumentError(f"stream {given!r} is no stream", code="GC-STREAM")

    def new_stream(self) -> EmulatedStream:
        self._streams.append(EmulatedStream(self))
        return self._streams[-1]

    def new_event(self) -> EmulatedEvent:
        return EmulatedEvent()

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype, stream: EmulatedStream) -> Any:
        """Return memory that is not used again before the stream has come so far, as by a GPU's memory pool."""
        stream.kept.append(numpy.empty(shape, dtype))
        return stream.kept[-1]

    def fill(self, row: Any, value: numpy.ndarray[Any, Any], stream: Any) -> None:
        stream.enqueue(lambda: row.view(value.dtype).fill(value[0]))

    def settle(self, stream: EmulatedStream) -> Waiting:
        """Run all streams until nothing is left in this one; whoever else runs them helps."""
        while stream.queue:
            before = self._ended
            if not self._advance():
                yield lambda before=before: self._advance() or self._ended != before  # type: ignore[misc]
        error, stream.error = stream.error, None
        if error is not None:
            raise error

    def _advance(self) -> bool:
        before = self._ended
        busy = [stream for stream in self._streams if stream.queue]
        for stream in self._order.sample(busy, len(busy)):
            self._ended += stream.advance()
        return self._ended != before

    def cancel(self) -> None:
        """Empty the queues; messages under way are called back."""
        for stream in self._streams:
            for action in stream.queue:
                getattr(action, "cancel", bool)()
            stream.queue.clear()


class EmulatedStream:
    """A queue of actions, each begun when those before it have ended."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.queue: collections.deque[Action] = collections.deque()
        self.kept: list[Any] = []  # memory that what is enqueued may still write, whoever lets go of it
        self._device = device
        self.error: MismatchError | None = None  # of a message: whoever waits for it is told, whoever has run it

    def enqueue(self, call: Callable[[], object]) -> None:
        def act() -> bool:
            call()
            return True

        self.enqueue_action(lambda: act)

    def enqueue_action(self, begin: Callable[[], Action]) -> None:
        """Do what `begin` returns when its turn comes; in a graph once for every launch."""
        if self._device.captured is not None:
            self._device.captured.actions.append((self, begin))
        else:
            self.queue.append(begin())

    def advance(self) -> int:
        """Go on as far as possible; return how many actions have ended."""
        ended = 0
        while self.queue:
            try:
                if not self.queue[0]():
                    break
            except MismatchError as error:  # the message has ended
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
    """A place in a stream, put there once or, in a graph, again and again; who waits means the last one so far."""

    def __init__(self) -> None:
        self.put = self.passed = 0

    def put_down(self) -> Action:
        self.put += 1
        return self._pass

    def _pass(self) -> bool:
        self.passed += 1
        return True

    def awaited(self) -> Action:
        last = self.put
        return lambda: self.passed >= last


class EmulatedEvent:
    """A point in a stream; one that was never recorded has come."""

    def __init__(self) -> None:
        self.mark = _Mark()

    @property
    def done(self) -> bool:
        return self.mark.passed >= self.mark.put

    def record(self, stream: EmulatedStream) -> None:
        self.mark = _Mark()
        stream.enqueue_action(self.mark.put_down)


class EmulatedGraph:
    """What was enqueued while `origin` was captured, and on which stream."""

    def __init__(self, origin: EmulatedStream) -> None:
        self.origin = origin
        self.actions: list[tuple[EmulatedStream, Callable[[], Action]]] = []

    def launch(self, stream: EmulatedStream) -> None:
        """Enqueue it all once more: after what `stream` has, and what comes later on `stream` after it."""
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
    may_wait = hasattr(library, "gc_world")  # for other ranks

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
        raise BackendError(f"kernel {entry}: {fault.decode()}", code="GC-KERNEL")


class RunningKernel:
    """A kernel whose threads are fibers, in a stream's queue: begun when its turn has come, gone on with to its end.

    Where it waits for another rank it gives way to whatever else the process has to do.
    """

    def __init__(self, library: ctypes.CDLL, entry: str, blocks: int, threads: int, arguments: Arguments) -> None:
        self._library, self._entry, self._grid, self._arguments = library, entry, (blocks, threads), arguments
        library.gc_world.restype, library.gc_complaint.restype = ctypes.c_void_p, ctypes.c_char_p
        self._world: Any = None

    def __call__(self) -> bool:
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
        """Let go of the fibers, wherever they are."""
        if self._world is not None:
            self._library.gc_end(self._world)
            self._world = None
