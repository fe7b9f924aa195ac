"""The parts of `cupy.cuda` used by gpucoll. As in CuPy, the module `nccl` needs an import of its own.

Without NCCL's library, `nccl` is a stub like CuPy's, with `available` and nothing else.
"""

import contextlib
import functools
import sys
import types

from .. import _memory as memory
from .. import _source as compiler
from .. import hostile
from .._ipc import alloc_pinned_memory
from .._memory import MemoryPointer, MemoryPool, PinnedMemoryPool, UnownedMemory, alloc, set_allocator, using_allocator
from . import driver, runtime, stream
from .stream import Event, ExternalStream, Graph, Stream, get_current_stream, get_elapsed_time

Memory, OutOfMemoryError, malloc_managed = memory.Memory, memory.OutOfMemoryError, memory.malloc_managed
MemoryAsyncPool, PythonFunctionAllocator = memory.MemoryAsyncPool, memory.PythonFunctionAllocator
malloc_async, get_allocator, device = memory.malloc_async, memory.get_allocator, sys.modules[__name__]
sys.modules |= {f"{__name__}.{name}": one for name, one in (
    ("memory", memory), ("compiler", compiler), ("device", device))}


def _without_effect(*args, **options):
    """Accept a pool for pinned memory, which is ordinary memory here, or a mark for a profiler that does not listen."""


def _refuse(name, *args, **options):
    raise compiler.no_counterpart(f"cupy.cuda.{name}")


set_pinned_memory_allocator = get_cuda_path = _without_effect
get_device_id = runtime.getDevice
profile = contextlib.nullcontext  # no profiler listens


def is_available():
    return runtime.MACHINE.devices > 0


@functools.total_ordering
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

    def __lt__(self, other):
        return self.id < other.id if isinstance(other, Device) else NotImplemented

    def __hash__(self):
        return self.id

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    pci_bus_id = property(lambda self: runtime.deviceGetPCIBusId(self.id))

    def synchronize(self):
        with self:
            runtime.deviceSynchronize()

    @property
    def compute_capability(self):
        runtime.deviceGetPCIBusId(self.id)  # raises error 101 for an unknown device
        return hostile.capability()

    @property
    def attributes(self):
        found = runtime.getDeviceProperties(self.id)
        return {name[0].upper() + name[1:]: one for name, one in found.items() if isinstance(one, int)} | {
            "MultiProcessorCount": found["multiProcessorCount"]}

    @classmethod
    def from_pci_bus_id(cls, pci_bus_id):
        known = [runtime.deviceGetPCIBusId(one) for one in range(runtime.getDeviceCount())]
        runtime.check(pci_bus_id in known, 1, f"no GPU has the bus {pci_bus_id}")
        return cls(known.index(pci_bus_id))

    @property
    def mem_info(self):
        with self:
            return runtime.memGetInfo()


def _module(name, names):
    """Make a module of few names."""
    module = sys.modules[f"{__name__}.{name}"] = types.ModuleType(f"{__name__}.{name}")
    vars(module).update(names)
    return module


nvtx = _module("nvtx", {"available": True, **dict.fromkeys(
    "Mark MarkC RangePush RangePushC RangePop RangeStart RangeEnd".split(), _without_effect)})
profiler = _module("profiler", {"start": _without_effect, "stop": _without_effect})
texture = _module("texture", {name: functools.partial(_refuse, f"texture.{name}") for name in """
    ChannelFormatDescriptor CUDAarray ResourceDescriptor SurfaceObject TextureDescriptor TextureObject""".split()})
if hostile.nccl_version() is None:
    nccl = _module("nccl", {"available": False})
