"""A GPU by CuPy: its memory, streams and events, and our kernels as cubins made for it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import cupy
import numpy

from gpucoll.device import Device, driver
from gpucoll.device.launch import Kernels, Launch
from gpucoll.device.nvrtc import compile_cubin, recipe
from gpucoll.device.sources import Instance, text
from gpucoll.device.store import user_store
from gpucoll.errors import BackendError, UsageError
from gpucoll.transport.rendezvous import becomes

NULL_STREAM, PER_THREAD = (0, 1), 2  # CUDA's own streams: the null stream by two names, and a thread's
NOT_READY, CAPTURED = 600, 907  # CUDA's codes for an event that has not come, and for one that was captured
MOST_CHANNELS = 32
MOMENT = 1.0  # seconds that `fill_with_nan` takes at most
_loading = threading.Lock()
_functions: dict[tuple[int, str, str], Any] = {}  # of all communicators: to unload code may wait for the whole GPU


class CudaDevice(Device):
    """The GPU `ordinal` of this process."""

    name = "cuda"
    most_threads = 512  # as the kernels are compiled for
    warp = 32
    staging = 1 << 24
    asynchronous = True

    def __init__(self, ordinal: int) -> None:
        device = cupy.cuda.Device(ordinal)
        self.ordinal, self.current = ordinal, CurrentDevice(ordinal)
        self.relaxed = RelaxedCapture(self.current)
        self._arch = f"sm_{device.compute_capability}"
        self._processors = device.attributes["MultiProcessorCount"]
        self.kernels = Kernels(self._load, self._processors)

    def channels(self, ranks: int) -> int:
        return max(1, min(MOST_CHANNELS, self._processors // ranks))

    def owns(self, array: Any) -> str | None:
        if not isinstance(array, cupy.ndarray):
            return "on the host"
        other = array.device.id
        return None if other == self.ordinal else f"on GPU {other}"

    def stream(self, given: Any) -> Any:
        """Return the stream of a call; see `as_stream`.

        The null stream has one address on every GPU: which one it is the current device says, in a call this one.
        """
        stream = cupy.cuda.get_current_stream(self.ordinal) if given is None else as_stream(given)
        if stream.ptr <= PER_THREAD:
            self._check_own(stream)
        return stream

    def _check_own(self, stream: Any) -> None:
        if stream.ptr == PER_THREAD:
            raise UsageError("the per-thread default stream is another stream in each thread, and gpucoll's threads "
                             "enqueue as well; pass stream=cupy.cuda.Stream(non_blocking=True), or be in one",
                             code="GC-STREAM")
        try:
            with self.current:
                stream.is_capturing()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise UsageError("the null stream serves nobody while a blocking stream is being captured, since it would "
                             f"wait for that; capture on Stream(non_blocking=True) ({error})",
                             code="GC-STREAM") from error

    def within(self, stream: Any) -> CurrentStream:
        return CurrentStream(self.current, stream)

    def is_open(self, stream: Any) -> bool:
        return cupy.cuda.runtime.getDevice() == self.ordinal and not stream.is_capturing()

    def is_blocking(self, stream: Any) -> bool:
        """Whether the null stream and `stream` wait for each other; not what is captured, which runs on any stream."""
        runtime = cupy.cuda.runtime
        with self.current:
            if stream.is_capturing():  # whose flags CUDA does not tell
                return False
            return not runtime.streamGetFlags(stream.ptr) & runtime.streamNonBlocking

    def lasts(self, stream: Any) -> bool:
        """CuPy's own know their device; of the others only CUDA's null stream is without one."""
        return isinstance(stream, cupy.cuda.Stream) and (stream.device_id >= 0 or stream.ptr in NULL_STREAM)

    def new_stream(self) -> Any:
        with self.current:
            return cupy.cuda.Stream(non_blocking=True)

    def new_event(self) -> Any:
        with self.current:
            return CudaEvent(disable_timing=True)

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype, stream: Any) -> Any:
        """CuPy's pool hands memory out again in the order of the stream that it was allocated on."""
        with self.within(stream):
            return cupy.empty(shape, dtype)

    def fill(self, row: Any, value: numpy.ndarray[Any, Any], stream: Any) -> None:
        with self.within(stream):
            if value.dtype.kind == "c":
                row.fill(value[0])
            else:  # as integers: CuPy knows not every dtype of ours
                row.view(f"u{value.itemsize}").fill(value.view(f"u{value.itemsize}")[0])

    def fill_with_nan(self, places: Iterable[tuple[int, int]]) -> None:
        """Set all bits of memory by CUDA's memset: to load a kernel may have to wait for those that run.

        The stream may share a hardware queue with one that waits for ever, so that the caller waits for a moment only.
        """
        with self.current:
            stream = cupy.cuda.Stream(non_blocking=True)
            for address, nbytes in places:
                cupy.cuda.runtime.memsetAsync(address, 255, nbytes, stream.ptr)
            becomes(lambda: bool(stream.done), MOMENT)

    def _load(self, instance: Instance) -> Launch:
        source = text(instance)
        build = functools.partial(_cubin, source, self._arch)
        path = str(user_store().path(source, ".cubin", build, flags=recipe(self._arch, major=_major())))
        try:
            with self.current, _loading:  # CuPy lets threads load a module side by side, and unloads all but one
                key = self.ordinal, path, instance.entry
                if key not in _functions:
                    _functions[key] = cupy.RawModule(path=path).get_function(instance.entry).kernel
                function = _functions[key]
        except cupy.cuda.driver.CUDADriverError as error:
            raise BackendError(f"kernel {instance.entry} does not load on {self._arch}: {error}",
                               code="GC-KERNEL") from error

        def launch(blocks: int, threads: int, arguments: numpy.ndarray[Any, Any], stream: Any) -> None:
            function((blocks,), (threads,), (arguments,), 0, stream)

        return launch


class CurrentDevice(threading.local):
    """A context in which a GPU is the calling thread's current device; the former device is current again afterwards.

    From CUDA 12 on, `cudaSetDevice` creates a context, which takes hundreds of MiB of that GPU. A thread without a
    context reports device 0, although its program has never chosen one. To restore that device would give every rank a
    context on GPU 0, and would fail where GPU 0 is in exclusive mode. So a thread without a context keeps this GPU.

    CuPy's own context keeps the former devices of all threads in one list.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._before: list[int] = []

    def __enter__(self) -> None:
        before = cupy.cuda.runtime.getDevice()
        if before != self._ordinal:
            has_context = cupy.cuda.driver.ctxGetCurrent() != 0  # asked first: setDevice makes one
            cupy.cuda.runtime.setDevice(self._ordinal)
            before = before if has_context else self._ordinal
        self._before.append(before)

    def __exit__(self, *_: object) -> None:
        before = self._before.pop()
        if cupy.cuda.runtime.getDevice() != before:
            cupy.cuda.runtime.setDevice(before)


class RelaxedCapture:
    """A context in which a GPU is the thread's current device, and the thread's capture mode is the relaxed one.

    A capture in CUDA's default mode breaks when any thread queries an event. The relaxed mode excepts a thread: CUDA
    then takes its calls to have nothing to do with captures.
    """

    def __init__(self, device: CurrentDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._device.__enter__()
        self._before = driver.exchange_capture_mode(driver.RELAXED)

    def __exit__(self, *error: object) -> None:
        driver.exchange_capture_mode(self._before)
        self._device.__exit__(*error)


class CurrentStream:
    """A stream is the thread's current one inside, and its GPU is."""

    def __init__(self, device: CurrentDevice, stream: Any) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        self._device.__enter__()
        try:
            self._stream.__enter__()
        except BaseException:  # one of another GPU's
            self._device.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)


class CudaEvent(cupy.cuda.Event):
    """CuPy's, which takes every code of CUDA's but success for "not yet", a fault's too."""

    @property
    def done(self) -> bool:
        code = cupy.cuda.runtime.eventQuery(self.ptr)
        if code == CAPTURED:
            raise UsageError("a call in a CUDA graph ends when the graph is launched: ask the stream of that",
                             code="GC-CAPTURED")
        if code not in (0, NOT_READY):
            raise BackendError(f"the GPU has failed: {cupy.cuda.runtime.CUDARuntimeError(code)}", code="GC-CUDA")
        return bool(code == 0)


class _Foreign:
    """The address of a stream as CuPy takes it; `owner` lives as long."""

    def __init__(self, address: int, owner: Any) -> None:
        self._address, self._owner = address, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def as_stream(given: Any) -> Any:
    """Return one of CuPy's streams for one, an object with ``__cuda_stream__``, or the address of a `cudaStream_t`."""
    if isinstance(given, cupy.cuda.Stream | cupy.cuda.ExternalStream):
        return given
    address = given.__cuda_stream__()[1] if hasattr(given, "__cuda_stream__") else given
    return cupy.cuda.Stream.from_external(_Foreign(int(getattr(address, "cuda_stream", address)), given))


def _cubin(source: str, arch: str) -> bytes:
    return compile_cubin(source, arch, major=_major())[0]


def _major() -> int:
    """Return the major version of the CUDA that CuPy was built for, whose cubins its driver loads."""
    return cupy.cuda.runtime.runtimeGetVersion() // 1000
