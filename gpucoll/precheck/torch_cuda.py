"""torch.cuda with tensors in host memory: PyTorch's programs for GPUs run on a machine without any.

Tensors wanted on a device of CUDA are made on the CPU. `torch.cuda` tells of as many devices as asked for, and each
thread has a current one. Streams and events order nothing, because each operation ends at once. Anything else of
`torch.cuda` fails as without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.jit import _builtins
from torch.utils import _device

from gpucoll.emulation import is_installed

MEMORY = 80 << 30  # bytes of a device
CPU = torch.device("cpu")
MEMORY_FUNCTIONS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
NOTHING = ("synchronize", "empty_cache", "init", "manual_seed", "manual_seed_all", "seed", "ipc_collect",
           "reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction", "set_stream")
METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "type")


def on_host(value: Any) -> Any:
    """Return the CPU for a device of CUDA, and any other value itself."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class TorchEvent:
    """An event, always past."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", current_device())

    def query(self) -> bool:
        """Return True: all work has ended."""
        return True

    def synchronize(self, *_: Any) -> None:
        """Wait for nothing."""

    wait = record = synchronize

    def elapsed_time(self, other: TorchEvent) -> float:
        """Return 0."""
        return 0.0


class TorchStream(TorchEvent, contextlib.nullcontext[None]):
    """A stream; its operations have ended when they are enqueued."""

    cuda_stream = stream_id = 0
    enter_result = None
    wait_event = wait_stream = TorchEvent.synchronize

    def record_event(self, event: TorchEvent | None = None) -> TorchEvent:
        """Return an event, past already."""
        return event or TorchEvent()


_current = threading.local()


def current_device() -> int:
    """Return the number of this thread's device."""
    return getattr(_current, "device", 0)


def set_device(device: Any) -> None:
    """Make a device the current one of this thread, for an emulated CuPy too."""
    _current.device = _ordinal(device)
    cupy: Any = sys.modules.get("cupy")
    if cupy is not None and is_installed():
        cupy.cuda.Device(_current.device).use()


class TorchDevice:
    """The context with a device, by its number, name or `torch.device`."""

    def __init__(self, device: Any = None) -> None:
        self.idx = _ordinal(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        set_device(self.before)


def _ordinal(device: Any) -> int:
    """Return the number of a device."""
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


@functools.cache  # TorchScript knows functions by their number, which must not pass to another function
def _hosted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that takes the CPU for each device of CUDA among its arguments."""

    @functools.wraps(function)
    def hosted(*arguments: Any, **options: Any) -> Any:
        return function(*map(on_host, arguments), **{name: on_host(value) for name, value in options.items()})

    operator = _builtins._find_builtin(function)
    if operator is not None:
        _builtins._register_builtin(hosted, operator)
    return hosted


def _without(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return a function that drops the options `names`, which tell it of GPUs."""

    @functools.wraps(function)
    def without(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **{name: value for name, value in options.items() if name not in names})

    return without


def _names(devices: int) -> dict[str, Any]:
    """Return the names of `torch.cuda` on a machine with that many devices."""
    stream = TorchStream()
    properties = SimpleNamespace(name="virtual", major=9, minor=0, total_memory=MEMORY,
                                 multi_processor_count=132)
    # torch._dynamo wants an object of its own for each name.
    return {**{name: lambda *_, **__: None for name in NOTHING}, **{name: lambda *_: 0 for name in MEMORY_FUNCTIONS},
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: devices,
            "current_device": current_device, "device": TorchDevice, "Stream": TorchStream,
            "set_device": set_device, "Event": TorchEvent,
            "stream": lambda given: given or contextlib.nullcontext(), "current_stream": lambda *_: stream,
            "default_stream": lambda *_: stream, "mem_get_info": lambda *_: (MEMORY, MEMORY),
            "get_device_properties": lambda *_: properties, "get_device_name": lambda *_: properties.name,
            "get_device_capability": lambda *_: (properties.major, properties.minor),
            "is_bf16_supported": lambda *_, **__: True, "memory_summary": lambda *_, **__: ""}


def replacements(devices: int) -> list[tuple[Any, str, Any]]:
    """Return the functions of torch to be replaced: owner, name and replacement."""
    constructors = [function.__name__ for function in _device._device_constructors()] + [
        "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "randint_like", "zeros_like", "load"]
    parallel = torch.nn.parallel.DistributedDataParallel
    hosted = [*((torch, name) for name in constructors if hasattr(torch, name)),
              *((torch.Tensor, name) for name in METHODS), (_device.DeviceContext, "__init__"),
              (DeviceMesh, "__init__"), (torch, "set_default_device")]
    return [
        *((owner, name, _hosted(getattr(owner, name))) for owner, name in hosted),
        *((torch.cuda, name, value) for name, value in _names(devices).items()),
        *((owner, name, lambda self, *_, **__: self)
          for owner, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (torch.nn.Module, "cuda"))),
        (torch.Tensor, "record_stream", lambda *_: None),
        (parallel, "__init__", _without(parallel.__init__, "device_ids", "output_device")),
        (distributed_c10d, "_get_default_timeout", lambda _: distributed_c10d.default_pg_timeout),
        *((module, "init_process_group", _without(distributed_c10d.init_process_group, "device_id"))
          for module in (torch.distributed, distributed_c10d))]
