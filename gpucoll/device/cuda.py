"""A GPU by CuPy: its memory, streams and events, and our kernels as cubins made for it."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy

from gpucoll.device import Waiting
from gpucoll.device.launch import Kernels, Launch
from gpucoll.device.nvrtc import compile_cubin, recipe
from gpucoll.device.sources import Instance, text
from gpucoll.device.store import user_store
from gpucoll.errors import BackendError

CUDAS_OWN = (0, 1, 2)  # the null stream, by two names, and a thread's own


class CudaDevice:
    """The GPU `ordinal` of this process."""

    name = "cuda"
    asynchronous = True

    def __init__(self, ordinal: int) -> None:
        device = cupy.cuda.Device(ordinal)
        self.ordinal = ordinal
        self._arch = f"sm_{device.compute_capability}"
        self.kernels = Kernels(self._load, device.attributes["MultiProcessorCount"])

    def use(self) -> None:
        if cupy.cuda.runtime.getDevice() != self.ordinal:
            cupy.cuda.runtime.setDevice(self.ordinal)

    def owns(self, array: Any) -> str | None:
        if not isinstance(array, cupy.ndarray):
            return "on the host"
        other = array.device.id
        return None if other == self.ordinal else f"on GPU {other}"

    def stream(self, given: Any) -> Any:
        """A stream of CuPy's, an object with ``__cuda_stream__``, as PyTorch's, or the address of a `cudaStream_t`.

        The null stream has one address on every GPU: which one it is the current device says, from here on this one.
        """
        self.use()
        if given is None:
            return cupy.cuda.get_current_stream()
        if isinstance(given, cupy.cuda.Stream | cupy.cuda.ExternalStream):
            return given
        address = given.__cuda_stream__()[1] if hasattr(given, "__cuda_stream__") else given
        return _foreign_stream(int(getattr(address, "cuda_stream", address)), given)

    def lasts(self, stream: Any) -> bool:
        """CuPy's own know their device; of the others only the three that CUDA itself has are without one."""
        return isinstance(stream, cupy.cuda.Stream) and (stream.device_id >= 0 or stream.ptr in CUDAS_OWN)

    def new_stream(self) -> Any:
        return cupy.cuda.Stream(non_blocking=True)

    def new_event(self) -> Any:
        return cupy.cuda.Event(disable_timing=True)

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype, stream: Any) -> Any:
        """CuPy's pool hands memory out again in the order of the stream that it was allocated on."""
        with stream:
            return cupy.empty(shape, dtype)

    def fill(self, row: Any, value: numpy.ndarray[Any, Any], stream: Any) -> None:
        with stream:
            if value.dtype.kind == "c":
                row.fill(value[0])
            else:  # as integers: CuPy knows not every dtype of ours
                row.view(f"u{value.itemsize}").fill(value.view(f"u{value.itemsize}")[0])

    def settle(self, stream: Any) -> Waiting:
        return iter(())

    def abandon(self) -> None:
        """What runs on a GPU cannot be called back but by its transport."""

    def _load(self, instance: Instance) -> Launch:
        """Return the kernel, compiled for this GPU at its first use."""
        source = text(instance)
        build = functools.partial(_cubin, source, self._arch)
        path = user_store().loadable(source, ".cubin", build, flags=recipe(self._arch, major=_major()))
        self.use()
        try:
            function = cupy.RawModule(path=path).get_function(instance.entry).kernel
        except cupy.cuda.driver.CUDADriverError as error:
            raise BackendError(f"kernel {instance.entry} does not load on {self._arch}: {error}",
                               code="GC-KERNEL") from error

        def launch(blocks: int, threads: int, arguments: numpy.ndarray[Any, Any], stream: Any) -> None:
            function((blocks,), (threads,), (arguments,), 0, stream)

        return launch


class _Foreign:
    """The address of a stream as CuPy 14 takes it; `owner` lives as long."""

    def __init__(self, address: int, owner: Any) -> None:
        self._address, self._owner = address, owner

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _foreign_stream(address: int, owner: Any) -> Any:
    """Return another library's stream as one of CuPy's; from 14 on CuPy warns of its class for them."""
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(address, owner))
    return cupy.cuda.ExternalStream(address)


def _cubin(source: str, arch: str) -> bytes:
    return compile_cubin(source, arch, major=_major())[0]


def _major() -> int:
    """Return the major version of the CUDA that CuPy was built for, whose cubins its driver loads."""
    return cupy.cuda.runtime.runtimeGetVersion() // 1000
