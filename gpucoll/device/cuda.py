"""A GPU through CuPy: memory, streams, events, and gpucoll's kernels loaded as cubins; memory for other processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.segments import Heap, Slab
from gpucoll.device import Waiting, gpus
from gpucoll.device.gpus import cupy, describe_gpu, library
from gpucoll.device.launch import Kernels, Launch, StreamOrder
from gpucoll.device.nvrtc import compile_cubin, recipe
from gpucoll.device.sources import Instance, text
from gpucoll.device.store import user_store
from gpucoll.errors import BackendError, UsageError
from gpucoll.transport.rendezvous import becomes

# Handles of CUDA's predefined streams: the null stream has two, the per-thread default stream has the third.
NULL_STREAM, PER_THREAD = (0, 1), 2
NOT_READY, CAPTURED = 600, 907  # cudaErrorNotReady for an incomplete event, cudaErrorCapturedEvent for a captured event
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: calls of the thread never invalidate a capture
MOST_CHANNELS = 32
FILLING = 4  # streams of `fill_with_nan`
MOMENT = 1.0  # upper bound in seconds for the wait in `fill_with_nan`
_loading = threading.Lock()
_SERIALS = itertools.count(1)  # of slabs
_HANDLE = struct.Struct("=8q")  # the words of a CUDA IPC handle
# With the process number, identifies this process: containers may repeat process numbers, a fork repeats this number.
PROCESS_ID = secrets.randbits(62)
_slabs: weakref.WeakValueDictionary[int, CudaSlab] = weakref.WeakValueDictionary()  # of this process, by address
# Loaded kernels of all communicators, never unloaded: unloading code may wait for all work on the GPU.
_functions: dict[tuple[int, str, str], Any] = {}


class CudaDevice:
    """The GPU `ordinal` of this process, as used by one communicator.

    The emulation has a subclass for NumPy arrays, with another name: the host waits for each call, so this device is
    not `asynchronous`.
    """

    name = "cuda"
    most_threads = 512  # of a block: the bound compiled into the kernels
    warp = 32
    # Ranks without direct access to each other's arrays copy an array through shared memory, in sections of so many
    # bytes.
    staging = 1 << 24
    asynchronous = True  # whether enqueued work continues after the enqueuing call has returned
    # Returns the current device of the calling thread.
    active: Callable[[], Any] = staticmethod(cupy.cuda.runtime.getDevice)
    # Returns a new array of a shape and a dtype, on the current device and in the order of the current stream.
    new_array: Callable[..., Any] = staticmethod(cupy.empty)
    place: Callable[[Any], int] = staticmethod(operator.attrgetter("data.ptr"))  # the address of an array

    def __init__(self, ordinal: int) -> None:
        device = cupy.cuda.Device(ordinal)
        self.ordinal: int = ordinal
        self.current: CurrentDevice = CurrentDevice(ordinal)
        self._exchange_mode = library("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        self._arch = f"sm_{device.compute_capability}"
        self._processors = device.attributes["MultiProcessorCount"]
        self.kernels: Kernels = Kernels(self._load, self._processors)
        self._filling, self._probe = _filling_streams(ordinal)
        self.current_stream: Callable[[], Any] = functools.partial(cupy.cuda.get_current_stream, ordinal)

    @property
    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """A context with this device as the thread's current device, and with the thread's capture mode relaxed.

        A capture in CUDA's default mode becomes invalid when any thread queries an event. Calls of a thread in relaxed
        mode do not affect captures.
        """
        mode = ctypes.c_int(RELAXED)
        with self.current:
            self._exchange_mode(ctypes.byref(mode))  # from here on `mode` is the former mode
            try:
                yield
            finally:
                self._exchange_mode(ctypes.byref(mode))

    def channels(self, ranks: int) -> int:
        """Return the number of blocks per rank that run at the same time if `ranks` ranks share this device."""
        return max(1, min(MOST_CHANNELS, self._processors // ranks))

    @functools.cached_property
    def linked_gpu(self) -> tuple[int, int]:
        """The GPU as a pair for `moves_rows`."""
        gpu = describe_gpu(self.ordinal)
        return gpus.numbered(gpu.pci), gpu.capability

    moves_rows: Callable[[Sequence[tuple[int, int]]], bool] = staticmethod(gpus.moves_rows)

    def owns(self, array: Any) -> str | None:
        """Return None for an array in this device's memory, else the location of the array, as text."""
        if not isinstance(array, cupy.ndarray):
            return "on the host"
        other = array.device.id
        return None if other == self.ordinal else f"on GPU {other}"

    def stream(self, given: Any) -> Any:
        """Return the stream of a call: `given`, see `as_stream`, or the current stream if `given` is None.

        The handle of the null stream means the null stream of the current device, in a call this GPU.
        """
        stream = cupy.cuda.get_current_stream(self.ordinal) if given is None else as_stream(given)
        # Only CUDA's predefined streams have such small handles.
        if stream.ptr <= PER_THREAD:
            self._check_own(stream)
        return stream

    def _check_own(self, stream: Any) -> None:
        # Helper threads of gpucoll enqueue, too, and would use their own streams under the same handle.
        if stream.ptr == PER_THREAD:
            raise UsageError("the per-thread default stream is a different stream in each thread, and gpucoll's "
                             "threads also enqueue; pass stream=cupy.cuda.Stream(non_blocking=True), or make it "
                             "current",
                             code="GC-STREAM")
        # CUDA refuses any use of the null stream during a capture of a blocking stream: give a clear error early.
        try:
            with self.current:
                stream.is_capturing()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise UsageError("no call can use the null stream while a blocking stream is being captured, because "
                             f"the call would wait for the capture; capture on Stream(non_blocking=True) ({error})",
                             code="GC-STREAM") from error

    def is_current(self, stream: Any) -> bool:
        """Return whether `stream` is the calling thread's current stream, so that freed memory is reused in its order.
        """
        return bool(cupy.cuda.get_current_stream(self.ordinal) == stream)

    def within(self, stream: Any) -> CurrentStream:
        """Return a context with this device and `stream` as the current device and stream of the calling thread."""
        return CurrentStream(self.current, stream)

    def is_blocking(self, stream: Any) -> bool:
        """Return whether `stream` and the null stream wait for each other; False during a capture of `stream`."""
        runtime = cupy.cuda.runtime
        with self.current:
            # CUDA does not report the flags of a stream during a capture, and a graph may run on any stream anyway.
            if stream.is_capturing():
                return False
            return not runtime.streamGetFlags(stream.ptr) & runtime.streamNonBlocking

    def lasts(self, stream: Any) -> bool:
        """Return whether `stream` was created by CuPy or is the null stream, and so exists as long as the object."""
        # CuPy knows the device of its own streams only; other streams have a negative `device_id`.
        return isinstance(stream, cupy.cuda.Stream) and (stream.device_id >= 0 or stream.ptr in NULL_STREAM)

    def new_stream(self) -> Any:
        """Return a new stream independent of all other streams."""
        with self.current:
            return cupy.cuda.Stream(non_blocking=True)

    def new_event(self, *, timed: bool = False) -> Any:
        """Return a new event; `nanoseconds` needs `timed` events, which are slower."""
        with self.current:
            return CudaEvent(disable_timing=not timed)

    def nanoseconds(self, first: Any, last: Any) -> int:
        """Return the time from one completed event to another."""
        return round(1e6 * cupy.cuda.get_elapsed_time(first, last))

    def mark(self, stream: Any) -> Any:
        """Return an event that completes with all work enqueued on `stream` so far."""
        event = self.new_event()
        event.record(stream)
        return event

    def settle(self, stream: Any) -> Waiting:
        """Wait until the host may read the results of `stream`; on a GPU do nothing, since streams order all work."""
        return iter(())

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype, stream: Any) -> Any:
        """Return a new array from CuPy's memory pool; the pool reuses freed memory in the order of `stream`."""
        with self.within(stream):
            return self.new_array(shape, dtype)

    def array_on(self, block: Any, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        """Return an array on a block of memory."""
        memory = cupy.cuda.UnownedMemory(block.address, block.nbytes, block, self.ordinal)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def new_heap(self, ranks: int, order: StreamOrder, make: Callable[[int], Slab] | None = None) -> Heap:
        """Return symmetric memory for the calls in `order`, in slabs from CUDA or another function."""
        return Heap(ranks, make or self.new_slab, self.array_on, StreamUses(self, order) if self.asynchronous else None)

    def new_slab(self, nbytes: int, malloc: Callable[[int], int] | None = None,
                 free: Callable[[int], object] | None = None) -> Slab:
        """Return memory of zeros from CUDA, or from another pair of functions."""
        return CudaSlab(self, nbytes, malloc, free)

    def clear(self, start: int, nbytes: int) -> None:
        """Set new memory to zero.

        Another rank of this GPU may already wait, in a kernel, for this rank: only the own work may be awaited.
        """
        with self.current, _as_os_error():
            stream = self.new_stream()
            cupy.cuda.runtime.memsetAsync(start, 0, nbytes, stream.ptr)
            stream.synchronize()

    def after_all(self, unmap: Callable[[], object]) -> None:
        """Unmap memory once all work on the GPU has ended: CUDA waits for the work to free its own memory alone."""
        with self.relaxed:
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(1))
            unmap()

    def fill(self, row: Any, value: numpy.ndarray[Any, Any], stream: Any) -> None:
        """Set every element of `row` to the single element of `value`, of the same width in bytes."""
        with self.within(stream):
            # Real numbers are filled as integers of the same width, because CuPy lacks some of gpucoll's dtypes.
            if value.dtype.kind == "c":
                row.fill(value[0])
            else:
                row.view(f"u{value.itemsize}").fill(value.view(f"u{value.itemsize}")[0])

    def fill_with_nan(self, places: Iterable[tuple[int, int]]) -> None:
        """Set all bits of the memory `places`, pairs of address and bytes: NaN in every floating-point format.

        Kernels waiting on other streams do not delay this work of CUDA's memset. No kernel is used, because loading a
        kernel may wait for all running kernels. A stream may share a hardware queue with a stream blocked by the failed
        call, so a stream is used that completes work now. The wait is at most a second, because all queues may be
        blocked.
        """
        memset = cupy.cuda.runtime.memsetAsync
        with self.current:
            for one in self._filling:
                memset(self._probe.data.ptr, 255, self._probe.nbytes, one.ptr)
            becomes(lambda: any(one.done for one in self._filling), MOMENT)
            stream = next((one for one in self._filling if one.done), self._filling[0])
            for address, nbytes in places:
                memset(address, 255, nbytes, stream.ptr)
            becomes(lambda: bool(stream.done), MOMENT)

    def compiled(self, instance: Instance) -> str:
        """Return the path of the file with the compiled kernel."""
        source, major = text(instance), cupy.cuda.runtime.runtimeGetVersion() // 1000  # loads cubins of its CUDA only
        return str(user_store().path(source, ".cubin", lambda: compile_cubin(source, self._arch, major=major)[0],
                                     flags=recipe(self._arch, major=major)))

    def _load(self, instance: Instance) -> Launch:
        path = self.compiled(instance)
        try:
            # The lock keeps two threads from loading one module: CuPy would unload one of the two.
            with self.current, _loading:
                key = self.ordinal, path, instance.entry
                if key not in _functions:
                    _functions[key] = cupy.RawModule(path=path).get_function(instance.entry).kernel
                function = _functions[key]
        except cupy.cuda.driver.CUDADriverError as error:
            raise BackendError(f"kernel {instance.entry} does not load on {self._arch}: {error}",
                               code="GC-CUDA") from error

        return lambda blocks, threads, arguments: functools.partial(function, (blocks,), (threads,), (arguments,), 0)


@functools.cache
def _filling_streams(ordinal: int) -> tuple[list[Any], Any]:
    """Return the streams of `fill_with_nan` on a GPU, made before any call, and memory for probes of these streams.

    While a thread copies to ordinary host memory, CUDA makes no stream until the end of the copy. CUDA deals out its
    hardware queues to streams in turn, so streams made one after the other have several queues.
    """
    with CurrentDevice(ordinal):
        return [cupy.cuda.Stream(non_blocking=True) for _ in range(FILLING)], cupy.empty(16, numpy.uint8)


class CurrentDevice(threading.local):
    """A context manager making a GPU the calling thread's current device; at exit the former device is current again.

    From CUDA 12 on, `cudaSetDevice` creates a CUDA context of hundreds of MiB on the GPU. A thread without a CUDA
    context reports device 0, although the program has never chosen device 0. Restoring device 0 would give every rank
    a CUDA context on GPU 0, and would fail if GPU 0 is in exclusive mode. So a thread without a CUDA context keeps
    this GPU.

    `cupy.cuda.Device` is no substitute, because CuPy keeps the former devices of all threads in one list.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._before: list[int] = []

    def __enter__(self) -> None:
        # Ask for the context first. A garbage collection between the two questions may run a finalizer that uses the
        # GPU: the thread would then have a context, but an answer from before.
        has_context = cupy.cuda.driver.ctxGetCurrent() != 0
        before = cupy.cuda.runtime.getDevice()
        if before != self._ordinal:
            cupy.cuda.runtime.setDevice(self._ordinal)
        self._before.append(before if has_context else self._ordinal)

    def __exit__(self, *_: object) -> None:
        before = self._before.pop()
        if cupy.cuda.runtime.getDevice() != before:
            cupy.cuda.runtime.setDevice(before)


class CurrentStream:
    """A context manager making a stream and the stream's GPU current in the calling thread."""

    def __init__(self, device: CurrentDevice, stream: Any) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        self._device.__enter__()
        try:
            self._stream.__enter__()
        # CuPy refuses a stream of another GPU: restore the former device.
        except BaseException:
            self._device.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)


class CudaEvent(cupy.cuda.Event):
    """CuPy's event with a correct `done`: CuPy reports every error, even a fault of the GPU, as "not done yet"."""

    @property
    def done(self) -> bool:
        code = cupy.cuda.runtime.eventQuery(self.ptr)
        if code == CAPTURED:
            raise UsageError("a call in a CUDA graph ends when a launch of the graph ends: query the stream of the "
                             "launch",
                             code="GC-STREAM")
        # Any other code is an error of the GPU, and the event will never complete.
        if code not in (0, NOT_READY):
            raise BackendError(f"the GPU has failed: {cupy.cuda.runtime.CUDARuntimeError(code)}", code="GC-CUDA")
        return bool(code == 0)


class _Foreign:
    """A stream's handle in the form expected by CuPy; keeps the stream's `owner` alive."""

    def __init__(self, address: int, owner: Any) -> None:
        self._address, self._owner = address, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def as_stream(given: Any) -> Any:
    """Return a CuPy stream for a CuPy stream, an object with ``__cuda_stream__``, or a `cudaStream_t` as a number."""
    if isinstance(given, cupy.cuda.Stream | cupy.cuda.ExternalStream):
        return given
    # PyTorch's streams have the handle in the attribute `cuda_stream`.
    address = given.__cuda_stream__()[1] if hasattr(given, "__cuda_stream__") else given
    return cupy.cuda.Stream.from_external(_Foreign(int(getattr(address, "cuda_stream", address)), given))


class CudaSlab:
    """GPU memory of zeros, from CUDA or another pair of functions, that other processes can open."""

    def __init__(self, device: CudaDevice, nbytes: int, malloc: Callable[[int], int] | None = None,
                 free: Callable[[int], object] | None = None) -> None:
        self.nbytes: int = nbytes
        self.key: int = next(_SERIALS)
        with device.current, _as_os_error():
            self.start: Any = (malloc or cupy.cuda.runtime.malloc)(nbytes)
            self.free: Any = weakref.finalize(self, _free, device, self.start, free or cupy.cuda.runtime.free)
            self.free.atexit = False  # at exit CUDA may have ended already
        device.clear(self.start, nbytes)

    def close(self) -> None:
        """Do nothing: the last array on the slab frees the memory."""


class StreamUses:
    """The work of a communicator's calls, and of the program, on arrays in blocks of a GPU's memory.

    The program's own work is known on three streams: those current for the new and the dropped array, and that of the
    last call.
    """

    def __init__(self, device: CudaDevice, order: StreamOrder) -> None:
        self._device, self._order = device, order

    def here(self) -> Any:
        """Return the current stream; an event in place of a foreign stream, which may be destroyed at any time."""
        stream = cupy.cuda.get_current_stream(self._device.ordinal)
        if self._device.lasts(stream):
            return stream
        return None if stream.is_capturing() else self._device.mark(stream)

    def ends(self, places: Sequence[Any]) -> list[Any]:
        """Return events at the end of all calls so far, and of all present work at `places`, results of `here`."""
        known = [one for one in places if isinstance(one, CudaEvent)]
        with self._device.current:
            return self._order.awaited() + known + [
                self._device.mark(one) for one in places if not isinstance(one, CudaEvent | None)
                and not one.is_capturing()]

    def follow(self, events: Sequence[Any]) -> None:
        """Let the current stream wait for the events."""
        stream = cupy.cuda.get_current_stream(self._device.ordinal)
        with self._device.current:
            # The program is responsible for the order of a CUDA graph.
            for event in () if stream.is_capturing() else events:
                stream.wait_event(event)


def _free(device: CudaDevice, pointer: int, free: Callable[[int], object]) -> None:
    # A garbage collection may drop the slab while the program captures a graph, with this thread or another one.
    with device.relaxed:
        free(pointer)


class PeerMemory:
    """A rank's slab, opened by other processes through CUDA's IPC handles, and access to the others' slabs.

    `control` is a record of a dtype, written by a kernel that gives up.
    """

    def __init__(self, device: CudaDevice, nbytes: int, control: numpy.dtype) -> None:
        self._device = device
        self.slab: CudaSlab = CudaSlab(device, nbytes)
        self._opened: list[int] = []
        self._pointed_to: list[Slab] = []
        self._uploads = device.new_stream()  # one stream, so that uploads reuse memory of CuPy's pool
        # The host must be able to set `aborted` while a kernel runs: so the record is in pinned host memory.
        with device.current:
            self._pinned = cupy.cuda.alloc_pinned_memory(control.itemsize)
        self.control: Any = numpy.frombuffer(self._pinned, control, 1).reshape(())
        self.control[...] = numpy.zeros((), control)

    def export(self, slab: CudaSlab) -> list[int]:
        """Return the words that `reach` needs on another rank; raise OSError if the system forbids access."""
        _slabs[slab.start] = slab
        with _as_os_error():
            return [PROCESS_ID, os.getpid(), slab.start, *_HANDLE.unpack(cupy.cuda.runtime.ipcGetMemHandle(slab.start))]

    def reach(self, exported: Sequence[int]) -> int:
        """Return the address of another rank's slab, given the result of `export`; raise OSError if out of reach."""
        process, number, start, *handle = exported
        # A rank of this process: a thread. CUDA does not open a handle in the process of its origin; the address is
        # valid as it is. Keep a reference, since the other rank may release its slab sooner.
        if (process, number) == (PROCESS_ID, os.getpid()):
            self._pointed_to.append(_slabs[start])
            return start
        with self._device.current, _as_os_error():
            self._opened.append(cupy.cuda.runtime.ipcOpenMemHandle(_HANDLE.pack(*handle[:8])))
        return self._opened[-1]

    def upload(self, row: Array) -> Any:
        """Return a copy of the bytes in memory readable by kernels."""
        with self._device.current, self._uploads:
            there = cupy.asarray(row)
            self._uploads.synchronize()
        return there

    def download(self, row: Any) -> Array:
        """Return the bytes in memory readable by the host; no enqueued kernel may still write them."""
        with self._device.current, self._uploads:
            found: Array = cupy.asnumpy(row)
        return found

    def unmap(self) -> None:
        """Unmap the others' slabs; before any slab is freed."""
        self._pointed_to.clear()
        with self._device.current:
            for pointer in self._opened:
                cupy.cuda.runtime.ipcCloseMemHandle(pointer)
        self._opened.clear()

    def free(self) -> None:
        """Free the slab, once no other rank maps the slab."""
        self.slab.free()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn a refusal by CUDA into OSError: not a fault of the program, the ranks do without peer memory."""
    try:
        yield
    except (cupy.cuda.runtime.CUDARuntimeError, BackendError) as error:
        raise OSError(str(error)) from error
