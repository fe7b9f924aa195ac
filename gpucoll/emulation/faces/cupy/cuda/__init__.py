"""The parts of `cupy.cuda` used by gpucoll. As in CuPy, the module `nccl` needs an import of its own.

Without NCCL's library, `nccl` is a stub like CuPy's, with `available` and nothing else.
"""

import contextlib
import sys
import types

from .. import hostile
from .._ipc import alloc_pinned_memory
from .._memory import (
    Memory,
    MemoryPointer,
    MemoryPool,
    OutOfMemoryError,
    PinnedMemoryPool,
    UnownedMemory,
    alloc,
    malloc_managed,
    set_allocator,
    using_allocator,
)
from . import compiler, device, driver, memory, nvtx, profiler, runtime, stream, texture
from .stream import Event, ExternalStream, Graph, Stream, get_current_stream, get_elapsed_time

__all__ = ["Device", "Event", "ExternalStream", "Graph", "Memory", "MemoryPointer", "MemoryPool", "OutOfMemoryError",
           "PinnedMemoryPool", "Stream", "UnownedMemory", "alloc", "alloc_pinned_memory", "compiler", "device",
           "driver", "get_current_stream", "get_elapsed_time", "malloc_managed", "memory", "nvtx", "profiler",
           "runtime", "set_allocator", "set_pinned_memory_allocator", "stream", "texture", "using_allocator"]


def set_pinned_memory_allocator(allocator=None):
    """Accept a pool for pinned memory, which is ordinary memory here."""

profile = contextlib.nullcontext  # no profiler listens


def get_device_id():
    return runtime.getDevice()


def is_available():
    return runtime.MACHINE.devices > 0


def get_cuda_path():
    return None


class Device:
    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)
        self._entered = []

    def __enter__(self):
        self._entered.append(runtime.getDevice())
        return self.use()

    def __exit__(self, *_):
        runtime.setDevice(self._entered.pop())

    def use(self):
        runtime.setDevice(self.id)
        return self

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return self.id

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    @property
    def pci_bus_id(self):
        return runtime.deviceGetPCIBusId(self.id)

    def synchronize(self):
        with self:
            runtime.deviceSynchronize()

    @property
    def compute_capability(self):
        runtime.deviceGetPCIBusId(self.id)  # raises error 101 for an unknown device
        return hostile.capability()

    @property
    def attributes(self):
        return {"MultiProcessorCount": hostile.processors()}

    @property
    def mem_info(self):
        with self:
            return runtime.memGetInfo()


if hostile.nccl_version() is None:
    nccl = sys.modules[f"{__name__}.nccl"] = types.ModuleType(f"{__name__}.nccl")
    nccl.available = False
