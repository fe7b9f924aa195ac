"""The memory of the arrays and the clock: the host, with or without the emulated device, or a rank's GPU.

On the host a call is timed by the monotonic clock, from just before the call to the return. On a GPU a call is timed
by two events of the stream. A kernel holds the stream until all ranks have enqueued the events and the call. So the
time includes neither Python nor the wait for a rank with slower Python.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.core.dtypes import DTYPES, EXTENDED, numpy_dtype
from gpucoll.errors import BackendError

from .summary import Array

Timed = tuple[float, Any]  # seconds, and the result of the call
HOLD_NANOSECONDS = 50_000_000  # at most: a call waiting on the host for the stream must not hang
HOLD = """extern "C" __global__ void hold(const volatile unsigned int* opened, unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (*opened == 0 && now - start < nanoseconds);
}"""


class Host:
    """NumPy arrays; `name` is "cpu", or "emulated" if the library uses the device path for host arrays."""

    def __init__(self, name: str = "cpu", allocate: Callable[..., Any] | None = None) -> None:
        self.name, self.is_symmetric = name, allocate is not None
        self._allocate = allocate or numpy.empty

    def carrier(self, dtype: str) -> numpy.dtype[Any]:
        """Return the dtype of arrays holding `dtype`."""
        return numpy_dtype(dtype)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an uninitialised array."""
        return self._allocate(shape, self.carrier(dtype))

    def write(self, target: Any, values: Array) -> None:
        """Copy the NumPy array `values` into the array `target`."""
        numpy.copyto(target, values.reshape(target.shape))

    def read(self, array: Any, dtype: str) -> Array:
        """Return the content of an array as a NumPy array of `dtype`."""
        return numpy.asarray(array)

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array, as for measuring the copy bandwidth of the machine."""
        numpy.copyto(target, source)

    def synchronize(self) -> None:
        """Wait for all started work; on the host, nothing to do."""

    def host_timed(self, call: Callable[[], Any]) -> Timed:
        """Return the seconds spent by the host in `call`, and the result of the call."""
        started = time.perf_counter()
        returned = call()
        return time.perf_counter() - started, returned

    timed = host_timed

    def measuring(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for all work on this device."""
        return contextlib.nullcontext()


class Cuda(Host):
    """CuPy arrays of one GPU, on a separate stream or on the null stream."""

    def __init__(self, ordinal: int | None, stream: str, allocate: Callable[..., Any] | None = None,
                 meet: Callable[[], object] = lambda: None) -> None:
        try:
            import cupy
        except ImportError as error:
            raise BackendError("--device cuda needs CuPy: pip install 'gpucoll[cuda12]' or 'gpucoll[cuda13]'",
                               code="GC-NO-GPU") from error
        if ordinal is None:
            raise BackendError("--device cuda: this rank sees no CUDA device", code="GC-NO-GPU")
        super().__init__("cuda", allocate)
        self.cupy, self._allocate = cupy, allocate or cupy.empty
        cupy.cuda.Device(ordinal).use()
        self.stream: Any = cupy.cuda.Stream(non_blocking=True) if stream == "own" else cupy.cuda.Stream.null
        self._hold, self._meet = cupy.RawKernel(HOLD, "hold"), meet
        self._pinned = cupy.cuda.alloc_pinned_memory(4)  # written by the host while the kernel reads
        self._opened = numpy.frombuffer(self._pinned, numpy.uint32, 1)

    def carrier(self, dtype: str) -> numpy.dtype[Any]:
        """Return the carrier dtype: an unsigned integer of the same size for dtypes unknown to CuPy."""
        return numpy.dtype(f"u{DTYPES[dtype].itemsize}") if dtype in EXTENDED else numpy.dtype(dtype)

    def write(self, target: Any, values: Array) -> None:
        """Copy from the host and wait for the end of the copy."""
        target[...] = self.cupy.asarray(numpy.ascontiguousarray(values).view(target.dtype).reshape(target.shape))
        self.synchronize()

    def read(self, array: Any, dtype: str) -> Array:
        """Copy to the host."""
        content: Array = self.cupy.asnumpy(array).view(numpy_dtype(dtype))
        return content

    def copy(self, target: Any, source: Any) -> None:
        """Copy within the GPU's memory."""
        self.cupy.copyto(target, source)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.stream.synchronize()

    def timed(self, call: Callable[[], Any]) -> Timed:
        """Return the seconds between two stream events around `call`, and the result. A collective call."""
        # Order matters: hold the stream, enqueue everything, wait for all ranks, then release the stream.
        first, last = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        self._opened[0] = 0
        self._hold((1,), (1,), (numpy.uint64(self._opened.ctypes.data), numpy.uint64(HOLD_NANOSECONDS)))
        first.record(self.stream)
        returned = call()
        last.record(self.stream)
        self._meet()
        self._opened[0] = 1
        last.synchronize()
        return self.cupy.cuda.get_elapsed_time(first, last) / 1e3, returned

    def captured(self, call: Callable[[], Any], launches: int) -> Callable[[], Any]:
        """Capture `call` as a CUDA graph; return a function replaying the graph `launches` times."""
        self.stream.begin_capture()
        try:
            returned = call()
        finally:
            graph = self.stream.end_capture()

        def replay() -> Any:
            for _ in range(launches):
                graph.launch(self.stream)
            return returned

        return replay

    def measuring(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the stream as CuPy's current stream."""
        return self.stream


BenchDevice = Any  # a `Host`; only `Cuda` has graphs and a stream


def of(comm: Any, name: str, *, stream: str = "own", memory: str = "ordinary") -> BenchDevice:
    """Return the device `name` of this rank; raise BackendError without a GPU."""
    kind = "cuda" if name == "cuda" else "cpu"
    allocate = functools.partial(comm.empty, device=kind) if memory == "symmetric" else None
    return Cuda(comm.device, stream, allocate, comm.barrier) if name == "cuda" else Host(name, allocate)
