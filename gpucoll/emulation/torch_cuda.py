"""`torch.cuda` on emulated GPUs, as far as tensors in host memory can wear it: for precheck and tests of the backend.

Devices, streams and events are the machine's, and operations of torch end at once: a backend that takes the tensors for
tensors on a GPU works in streams. Anything else of `torch.cuda` fails as without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from gpucoll.emulation import machine


def current_device() -> int:
    """Return the number of this thread's device."""
    return machine().cuda.runtime.getDevice()


def _ordinal(device: Any) -> int:
    """Return the number of a device, given by number, name or `torch.device`; None and -1 are the current one."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return current_device() if index is None or index < 0 else index


def on_device(device: Any = None) -> contextlib.AbstractContextManager[None]:
    """Return the context with a device."""
    return machine()._machine.on_device(_ordinal(device))


class TorchEvent:
    """An event of a stream."""

    own: Any = None  # CuPy's event, of the last record

    def __init__(self, enable_timing: bool = False, *_: Any, **__: Any) -> None:
        self.timed = enable_timing

    def record(self, stream: TorchStream | None = None) -> None:
        (stream or current_stream()).record_event(self)

    def query(self) -> bool:
        return self.own is None or self.own.done

    def wait(self, stream: TorchStream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        return self.own and self.own.synchronize()

    def elapsed_time(self, other: TorchEvent) -> float:
        return machine().cuda.get_elapsed_time(self.own, other.own)


def _there(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a stream that works with the stream's device current."""
    def method(self: TorchStream, *arguments: Any) -> Any:
        with on_device(self.device):
            return call(self, *arguments)

    return method


class TorchStream:
    """A stream of a device; `own` is CuPy's."""

    def __init__(self, device: Any = None, priority: int = 0, *, null: bool = False) -> None:
        self.device: Any = torch.device("cuda", _ordinal(device))
        with on_device(self.device):
            self.own: Any = machine().cuda.Stream(null=null, non_blocking=not null)
        self.cuda_stream = self.stream_id = self.own.ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    query, synchronize = _there(lambda self: self.own.done), _there(lambda self: self.own.synchronize())
    wait_event: Callable[..., Any] = _there(lambda self, event: event.own and self.own.wait_event(event.own))

    @_there
    def record_event(self, event: TorchEvent | None = None) -> TorchEvent:
        event = event or TorchEvent()
        event.own = self.own.record(machine().cuda.Event(disable_timing=not event.timed))
        return event

    def wait_stream(self, other: TorchStream) -> None:
        self.wait_event(other.record_event())


def _streams() -> dict[Any, TorchStream]:
    """Return this thread's current streams by device, and the null streams."""
    current = machine()._machine.MACHINE.current
    current.torch_streams = getattr(current, "torch_streams", {})
    return current.torch_streams


def default_stream(device: Any = None) -> TorchStream:
    """Return the null stream of a device."""
    place = "null", _ordinal(device)
    return _streams().get(place) or _streams().setdefault(place, TorchStream(device, null=True))


def current_stream(device: Any = None) -> TorchStream:
    """Return this thread's current stream of a device."""
    return _streams().get(_ordinal(device)) or default_stream(device)


def set_stream(stream: TorchStream | None) -> None:
    """Make a stream the current one of its device."""
    if stream is not None:
        _streams()[_ordinal(stream.device)] = stream


@contextlib.contextmanager
def in_stream(stream: TorchStream | None) -> Iterator[None]:
    """Make a stream, and its device, the current ones inside of the block; None changes nothing."""
    before = stream and current_stream(stream.device)
    set_stream(stream)
    try:
        with on_device(stream and stream.device):
            yield
    finally:
        set_stream(before)


def synchronize(device: Any = None) -> None:
    """Wait for all work of a device."""
    with on_device(device):
        machine().cuda.runtime.deviceSynchronize()


def names() -> dict[str, Any]:
    """Return the names of `torch.cuda`."""
    runtime = machine().cuda.runtime
    given = runtime.getDeviceProperties(0)
    properties = SimpleNamespace(**given | {"name": given["name"].decode(), "total_memory": given["totalGlobalMem"],
                                            "multi_processor_count": given["multiProcessorCount"]})
    return {"is_available": lambda: True, "is_initialized": lambda: True, "device_count": runtime.getDeviceCount,
            "current_device": current_device, "device": on_device, "synchronize": synchronize,
            "set_device": lambda device: runtime.setDevice(_ordinal(device)), "Stream": TorchStream,
            "Event": TorchEvent, "stream": in_stream, "set_stream": set_stream, "current_stream": current_stream,
            "default_stream": default_stream, "mem_get_info": lambda *_: runtime.memGetInfo(),
            "get_device_properties": lambda *_: properties, "get_device_name": lambda *_: properties.name,
            "get_device_capability": lambda *_: (properties.major, properties.minor)}
