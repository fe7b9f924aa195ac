"""CuPy's streams, events and graphs, with the checks of CuPy's `stream.pyx`.

A stream becomes current only on the stream's own device, and the default stream cannot capture.
"""

import collections
import sys
import threading
import warnings

from .._machine import MACHINE
from . import runtime

_local = threading.local()


def _current():
    """Return the calling thread's current streams by device; `entered` has those of its `with` blocks."""
    if not hasattr(_local, "current"):
        _local.current = collections.defaultdict(lambda: Stream.null)
        _local.entered = []
    return _local.current


def get_current_stream(device_id=-1):
    return _current()[runtime.getDevice() if device_id < 0 else device_id]


def get_elapsed_time(start_event, end_event):
    """Return milliseconds; many programs ask an event that a real GPU has passed by then, so this waits for the end."""
    end_event.synchronize()
    return runtime.eventElapsedTime(start_event.ptr, end_event.ptr)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = runtime.eventCreateWithFlags(disable_timing and runtime.eventDisableTiming)

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if self.ptr and not is_shutting_down():
            runtime.eventDestroy(self.ptr)

    done = property(lambda self: runtime.eventQuery(self.ptr) == 0)

    def record(self, stream=None):
        runtime.eventRecord(self.ptr, (get_current_stream() if stream is None else stream).ptr)

    def synchronize(self):
        runtime.eventSynchronize(self.ptr)


class _BaseStream:
    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id

    def __eq__(self, other):
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def __cuda_stream__(self):
        return 0, self.ptr

    def __enter__(self):
        self.use()
        _local.entered.append((runtime.getDevice(), self))
        return self

    def __exit__(self, *_):
        """Go back to the stream of the `with` block around; as in CuPy, one of `use` is forgotten."""
        device, _ = _local.entered.pop()
        _current()[device] = next((one for there, one in reversed(_local.entered) if there == device), Stream.null)

    def use(self):
        """Make the stream current in this thread, for good."""
        device = runtime.getDevice()
        if self.device_id not in (-1, device):
            raise RuntimeError(f"the stream is of device {self.device_id}, not the current one ({device})")
        _current()[device] = self
        return self

    is_non_blocking = property(lambda self: not MACHINE.queue(self.ptr).blocking)
    priority = property(lambda self: MACHINE.queue(self.ptr).priority)
    done = property(lambda self: runtime.streamQuery(self.ptr) == 0)

    def synchronize(self):
        runtime.streamSynchronize(self.ptr)

    def record(self, event=None):
        event = Event() if event is None else event
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event):
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def launch_host_func(self, callback, arg):
        MACHINE.submit(MACHINE.queue(self.ptr), lambda: _HostFunction(callback, arg))

    def add_callback(self, callback, arg):
        self.launch_host_func(lambda given: callback(self, 0, given), arg)

    def begin_capture(self, mode=None):
        if self.ptr in (0, 1, 2):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        runtime.streamBeginCapture(self.ptr, runtime.streamCaptureModeRelaxed if mode is None else mode)

    def end_capture(self):
        return Graph(runtime.streamEndCapture(self.ptr))

    def is_capturing(self):
        return runtime.streamIsCapturing(self.ptr)


class Graph:
    """A CUDA graph, made only by a capture."""

    def __init__(self, handle):
        self._handle = handle

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if not is_shutting_down():
            runtime.graphDestroy(self._handle)

    def upload(self, stream=None):
        """Accept the call; a launch needs no preparation."""

    def launch(self, stream=None):
        runtime.graphLaunch(self._handle, (get_current_stream() if stream is None else stream).ptr)


class _HostFunction:
    """A host function of a stream, on a thread of its own, so that other streams go on."""

    on_host = True

    def __init__(self, callback, arg):
        self._thread = threading.Thread(target=callback, args=(arg,), daemon=True)

    def __call__(self):
        if self._thread.ident is None:
            self._thread.start()
        return not self._thread.is_alive()


class Stream(_BaseStream):
    null = ptds = None
    _foreign_stream_ref = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        if null and ptds:
            raise ValueError("`null` and `ptds` cannot be both True")
        ptr = 0 if null else runtime.streamPerThread if ptds else runtime.streamCreateWithFlags(
            runtime.streamNonBlocking if non_blocking else runtime.streamDefault)
        super().__init__(ptr, -1 if null or ptds else runtime.getDevice())
        if priority is not None:
            MACHINE.queue(ptr).priority = priority

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if not is_shutting_down() and self._foreign_stream_ref is None and getattr(self, "ptr", 0) > 2:
            runtime.streamDestroy(self.ptr)

    @classmethod
    def from_external(cls, obj):
        if not hasattr(obj, "__cuda_stream__"):
            raise TypeError(f"{obj!r} does not implement __cuda_stream__")
        version, pointer = found if isinstance(found := obj.__cuda_stream__(), tuple) and len(found) == 2 else (0, None)
        if version != 0 or not isinstance(pointer, int):
            raise TypeError("__cuda_stream__() must return a 2-tuple (0, int)")
        stream = cls.__new__(cls)
        _BaseStream.__init__(stream, pointer, -1)
        stream._foreign_stream_ref = obj
        return stream


class ExternalStream(_BaseStream):
    def __init__(self, ptr, device_id=-1):
        warnings.warn("ExternalStream is deprecated. Use Stream.from_external()", DeprecationWarning, stacklevel=2)
        super().__init__(ptr, device_id)


if MACHINE.devices:
    Stream.null, Stream.ptds = Stream(null=True), Stream(ptds=True)
