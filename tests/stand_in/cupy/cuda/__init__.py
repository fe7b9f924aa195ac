"""What `cupy.cuda` has, as far as we use it. As there, `nccl` is a module that must be imported."""

from .._ipc import alloc_pinned_memory
from .._machine import MACHINE
from .._memory import Memory, MemoryPointer, UnownedMemory, alloc
from . import driver, runtime
from .graph import Graph
from .stream import Event, ExternalStream, Stream, get_current_stream, get_elapsed_time

__all__ = ["Device", "Event", "ExternalStream", "Graph", "Memory", "MemoryPointer", "Stream", "UnownedMemory",
           "alloc", "alloc_pinned_memory", "driver", "get_current_stream", "get_elapsed_time", "is_available",
           "runtime"]


def is_available():
    return MACHINE.devices > 0


class Device:
    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)
        self._entered = []

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def __enter__(self):
        self._entered.append(runtime.getDevice())
        return self.use()

    def __exit__(self, *_):
        runtime.setDevice(self._entered.pop())

    def use(self):
        runtime.setDevice(self.id)
        return self

    def synchronize(self):
        before = runtime.getDevice()
        try:
            self.use()
            runtime.deviceSynchronize()
        finally:
            runtime.setDevice(before)

    @property
    def compute_capability(self):
        runtime.deviceGetPCIBusId(self.id)  # which refuses what is no device
        return "90"

    @property
    def attributes(self):
        runtime.deviceGetPCIBusId(self.id)
        return {"MultiProcessorCount": 2, "WarpSize": 32, "L2CacheSize": 1 << 22}

    @property
    def mem_info(self):
        return runtime.memGetInfo()

    @property
    def pci_bus_id(self):
        return runtime.deviceGetPCIBusId(self.id)
