"""CuPy for virtual ranks, with arrays in host memory: a program for GPUs is checked on a machine without any.

The calls of a program depend on shapes, dtypes and often values, not on the memory of the arrays. NumPy computes for
the functions that CuPy shares with NumPy. Streams and events order nothing, because each operation ends at once. A
kernel of the program itself is not run: its outputs are zero, or keep their values. Anything else of CuPy raises
UsageError, so no part of a program is skipped in silence.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy

from gpucoll.errors import ArgumentError, UsageError
from gpucoll.internal import Array, Heap, Segment, Space, on_gpu, on_host
from gpucoll.precheck.turns import refusal

PACKAGES = ("cupy", "cupyx")
MEMORY = 80 << 30  # bytes of a device, for programs that ask


class ndarray(numpy.ndarray):
    """An array of CuPy for the program and for gpucoll; a view of host memory. Results are no scalars, as in CuPy."""

    # The rule by which `gpucoll.arrays.on_gpu` knows arrays in GPU memory.
    __cuda_array_interface__ = property(operator.attrgetter("__array_interface__"))
    device = property(lambda self: VirtualDevice())

    @property
    def data(self) -> Any:
        """The memory, as the pointer of CuPy."""
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0, mem=self)

    def get(self, stream: Any = None, order: Any = "C", out: Any = None, blocking: bool = True) -> Any:
        """Return a copy as an array of NumPy."""
        if out is None:
            return numpy.array(self, order=order, subok=False)
        out[...] = self
        return out

    def set(self, values: Any, stream: Any = None) -> None:
        """Copy an array of NumPy into this array."""
        self[...] = values

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array.view(ndarray)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return found if type(found) is ndarray else on_device(found)


for _name in ("argmax", "argmin", "dot", "trace"):
    setattr(ndarray, _name, functools.partialmethod(lambda self, name, *arguments, **options: on_device(
        getattr(numpy.ndarray, name)(self, *arguments, **options)), _name))


class DeviceMemory(Space):
    """The space of calls on these arrays."""

    device = "cuda"

    def check(self, name: str, what: str, array: Array) -> None:
        if not on_gpu(array):
            raise ArgumentError(f"{name}: {what} is on the host, other arrays of the call are on a GPU; pass all "
                                "arrays on the GPU or all on the host", code="GC-DEVICE")

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype) -> Array:
        return ndarray(shape, dtype)


class VirtualGpu:
    """The device of a virtual rank: memory alone."""

    peer = windows = None

    def __init__(self, space: Space) -> None:
        self._space = space

    def space(self, stream: Any) -> Space:
        """Return the space of a call on `stream`."""
        return self._space

    def new_heap(self, ranks: int) -> Heap:
        """Return symmetric memory: host memory of this rank alone."""
        return Heap(ranks, functools.partial(Segment, shared=False),
                    lambda block, shape, dtype: on_device(on_host(block, shape, dtype)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown("a kernel of gpucoll on arrays outside of a call")


def on_device(value: Any) -> Any:
    """Return what CuPy would return for a result of NumPy: arrays of `ndarray`, also in tuples and lists."""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return numpy.asarray(value).view(ndarray)
    if isinstance(value, tuple | list):
        return type(value)(map(on_device, value)) if type(value) in (tuple, list) else value
    return NumpyPart("cupy.random", value) if isinstance(value, numpy.random.Generator | numpy.random.RandomState) \
        else value


class NumpyPart(ModuleType):
    """A module of CuPy whose functions are those of `part`, a module or an object of NumPy; `own` comes first."""

    def __init__(self, name: str, part: Any = None, **own: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._part = part
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._part, name, None)
        if found is None and not hasattr(self._part, name):
            raise _unknown(f"{self.__name__}.{name}")
        if not callable(found) or isinstance(found, type):
            return found

        @functools.wraps(found)
        def computed(*arguments: Any, **options: Any) -> Any:
            options.pop("stream", None)
            return on_device(found(*arguments, **options))

        vars(self)[name] = computed  # the next access finds it without this method
        return computed


class VirtualDevice:
    """A device; every rank thinks that it has as many as the node has ranks."""

    compute_capability = "90"
    mem_info = MEMORY, MEMORY

    def __init__(self, device: Any = None) -> None:
        self.id = getattr(_CURRENT, "device", 0) if device is None else int(getattr(device, "id", device))

    def use(self) -> VirtualDevice:
        """Make this device the current one of the rank."""
        _CURRENT.device = self.id
        return self

    def synchronize(self) -> None:
        """Wait for nothing: all operations have ended."""

    def __enter__(self) -> VirtualDevice:
        self._before = VirtualDevice()
        return self.use()

    def __exit__(self, *_: Any) -> None:
        self._before.use()

    def __int__(self) -> int:
        return int(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualDevice) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


class VirtualEvent:
    """An event, always past."""

    ptr = 0
    done = True

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Record nothing."""

    synchronize = record


class VirtualStream(contextlib.AbstractContextManager["VirtualStream"]):
    """A stream; its operations have ended when they are enqueued."""

    null: VirtualStream
    ptds: VirtualStream
    ptr = 0
    done = True

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def use(self) -> VirtualStream:
        """Return this stream."""
        return self

    def synchronize(self, *_: Any) -> None:
        """Wait for nothing."""

    wait_event = synchronize

    def record(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Return an event, past already."""
        return event or VirtualEvent()

    def launch_host_func(self, callback: Callable[[Any], None], argument: Any) -> None:
        """Call ``callback(argument)``."""
        callback(argument)

    def begin_capture(self, mode: Any = None) -> None:
        """Refuse: the calls of a captured graph would be matched once only."""
        raise _unknown("cupy.cuda.Stream.begin_capture")

    def __exit__(self, *_: Any) -> None:
        pass


GPU = VirtualGpu(DeviceMemory())
VirtualStream.null = VirtualStream.ptds = VirtualStream()
_CURRENT = threading.local()


class VirtualKernel:
    """A kernel of the program: not run. Its outputs are zero, or keep their values if the program passes them."""

    def __init__(self, in_params: str, out_params: str, *_: Any, **options: Any) -> None:
        self._ins, self._outs = ([text.rsplit(None, 1)[0].removeprefix("raw ").strip()
                                  for text in given.split(",") if text.strip()] for given in (in_params, out_params))

    def __call__(self, *arguments: Any, size: int | None = None, axis: Any = None, keepdims: bool = False,
                 stream: Any = None, **_: Any) -> Any:
        given, outs = arguments[:len(self._ins)], arguments[len(self._ins):]
        if not outs:
            arrays = [numpy.asarray(one) for one in given]
            kinds = dict(zip(self._ins, (one.dtype for one in arrays), strict=False))
            shape = self._shape(arrays, size, axis, keepdims)
            outs = tuple(numpy.zeros(shape, kinds.get(kind) or kind).view(ndarray) for kind in self._outs)
        return outs[0] if len(outs) == 1 else outs

    def _shape(self, arrays: list[Any], size: int | None, axis: Any, keepdims: bool) -> tuple[int, ...]:
        return (size,) if size is not None else numpy.broadcast_shapes(*(one.shape for one in arrays))


class VirtualReduction(VirtualKernel):
    """A kernel that reduces over axes."""

    def _shape(self, arrays: list[Any], size: int | None, axis: Any, keepdims: bool) -> tuple[int, ...]:
        reduced: tuple[int, ...] = numpy.empty(super()._shape(arrays, size, axis, keepdims), bool).any(
            axis, keepdims=keepdims).shape
        return reduced


class VirtualRawKernel:
    """A kernel in CUDA C++: not run, and its arrays keep their values."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, grid: Any, block: Any, arguments: Any, **_: Any) -> None:
        pass

    def get_function(self, name: str) -> VirtualRawKernel:
        """Return the kernel with this name, of a module of CUDA C++."""
        return VirtualRawKernel()

    def compile(self, *_: Any) -> None:
        """Compile nothing."""


class VirtualPool:
    """A pool of memory: empty."""

    def __init__(self, *_: Any) -> None:
        pass

    def malloc(self, nbytes: int) -> Any:
        """Return host memory."""
        return bytearray(nbytes)

    def free_all_blocks(self, *_: Any, **__: Any) -> None:
        """Free nothing."""

    set_limit = free_all_blocks

    def used_bytes(self) -> int:
        """Return 0."""
        return 0

    total_bytes = free_bytes = n_free_blocks = used_bytes


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _unknown(name: str) -> UsageError:
    return refusal(f"precheck: {name} is not followed on virtual ranks; the limits are on the page of precheck")


def _fuse(*functions: Any, **_: Any) -> Any:
    return functions[0] if functions and callable(functions[0]) else lambda function: function


@contextlib.contextmanager
def _range(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _scattered(a: Any, index: Any, values: Any) -> None:
    numpy.add.at(a, index, values)


def _modules(devices: int) -> dict[str, ModuleType]:
    """Return the modules of CuPy by name, on a machine with that many devices."""
    ids = {"getDevice": lambda: VirtualDevice().id, "setDevice": lambda number: _nothing(VirtualDevice(number).use())}
    runtime = NumpyPart(
        "cupy.cuda.runtime", getDeviceCount=lambda: devices, **ids, deviceSynchronize=_nothing,
        streamSynchronize=_nothing, memGetInfo=lambda: VirtualDevice.mem_info, profilerStart=_nothing,
        getDeviceProperties=lambda _: {"name": b"virtual", "major": 9, "minor": 0}, profilerStop=_nothing,
        eventDisableTiming=2, CUDARuntimeError=RuntimeError, deviceCanAccessPeer=lambda *_: 1,
        runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13000)
    nvtx = NumpyPart("cupy.cuda.nvtx", **dict.fromkeys(("RangePush", "RangePop", "Mark"), _nothing))
    streams = {"Stream": VirtualStream, "Event": VirtualEvent, "ExternalStream": VirtualStream,
               "get_current_stream": lambda *_: VirtualStream.null}
    stream = NumpyPart("cupy.cuda.stream", **streams)
    pools = dict.fromkeys(("MemoryPool", "PinnedMemoryPool", "MemoryAsyncPool"), VirtualPool)
    cuda = NumpyPart(
        "cupy.cuda", Device=VirtualDevice, **streams, **pools, runtime=runtime, nvtx=nvtx, stream=stream,
        get_elapsed_time=lambda *_: 0.0, is_available=lambda: True, set_allocator=_nothing,
        set_pinned_memory_allocator=_nothing, alloc_pinned_memory=bytearray, using_allocator=_range, profile=_range)
    parts = {f"cupy.{name}": NumpyPart(f"cupy.{name}", getattr(numpy, name)) for name in ("random", "linalg", "fft")}
    profiler = NumpyPart("cupyx.profiler", time_range=_range, profile=_range)
    kernels = {"ElementwiseKernel": VirtualKernel, "ReductionKernel": VirtualReduction, "RawKernel": VirtualRawKernel,
               "RawModule": VirtualRawKernel, "fuse": _fuse}
    pools = dict.fromkeys(("get_default_memory_pool", "get_default_pinned_memory_pool"), VirtualPool)
    cupy: ModuleType = NumpyPart(
        "cupy", numpy, ndarray=ndarray, cuda=cuda, asnumpy=lambda a, *_, **__: numpy.array(a, subok=False),
        get_array_module=lambda *arrays: cupy if any(isinstance(one, ndarray) for one in arrays) else numpy,
        is_available=lambda: True, __version__="14", **kernels, **pools,
        **{name.partition(".")[2]: part for name, part in parts.items()})
    cupyx = NumpyPart("cupyx", profiler=profiler, scatter_add=_scattered)
    return {one.__name__: one for one in (cupy, cuda, runtime, nvtx, stream, cupyx, profiler, *parts.values())}


class Finder:
    """Finds the modules of CuPy for the import statements of virtual ranks."""

    def __init__(self, devices: int) -> None:
        self._known = _modules(devices)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of a module of CuPy; None for any other name."""
        if name.partition(".")[0] not in PACKAGES:
            return None
        if name not in self._known:
            raise _unknown(name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type] # two methods of it

    def create_module(self, spec: Any) -> ModuleType:
        """Return the module: the same for all ranks."""
        return self._known[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


def is_followed() -> bool:
    """Return whether the program under way has imported this CuPy."""
    return isinstance(sys.modules.get("cupy"), NumpyPart)


@contextlib.contextmanager
def in_place_of_cupy(devices: int) -> Iterator[None]:
    """Let ``import cupy`` find this CuPy, with that many devices, until the end of the block."""
    names = re.compile(rf"({'|'.join(PACKAGES)})(\..*)?").fullmatch
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if names(name)}
    finder: Any = Finder(devices)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in filter(names, [*sys.modules]):
            del sys.modules[name]
        sys.modules.update(before)
