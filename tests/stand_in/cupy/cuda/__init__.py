"""The parts of `cupy.cuda` used by gpucoll. As in CuPy, the module `nccl` needs an import of its own.

Without NCCL's library, `nccl` is a stub like CuPy's, with `available` and nothing else.
"""

import sys
import types

from .. import hostile
from .._ipc import alloc_pinned_memory
from .._memory import MemoryPointer, UnownedMemory
from . import driver, runtime
from .stream import Event, ExternalStream, Graph, Stream, get_current_stream, get_elapsed_time

__all__ = ["Device", "Event", "ExternalStream", "Graph", "MemoryPointer", "Stream", "UnownedMemory",
           "alloc_pinned_memory", "driver", "get_current_stream", "get_elapsed_time", "runtime"]


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

    mem_info = 1 << 29, 1 << 30


if hostile.nccl_version() is None:
    nccl = sys.modules[f"{__name__}.nccl"] = types.ModuleType(f"{__name__}.nccl")
    nccl.available = False
