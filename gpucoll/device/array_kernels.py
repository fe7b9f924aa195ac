"""The kernels for an array, wherever the array lies: compiled by g++ for the host, by NVRTC for a GPU.

The host's kernels run in the calling thread. A host without a compiler has none: callers then compute the same bits by
NumPy.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import Any

from gpucoll.arrays import Array, on_gpu
from gpucoll.core.dtypes import DTYPES
from gpucoll.device.launch import Kernels, Launch
from gpucoll.device.sources import Instance, family, instance, text
from gpucoll.device.store import compile_shared, recipe, user_store
from gpucoll.errors import BackendError

# Vectorise the loops for this CPU. None of these options changes a bit of a result.
OPTIONS = ("-O3", "-march=native", "-fno-trapping-math")


def kernels_of(x: Array) -> tuple[Kernels | None, Any]:
    """Return the kernels for the host or the GPU of `x` (None: use NumPy), and the stream for launches."""
    if not on_gpu(x):
        return _on_host(), None
    device = _device(x.device.id)  # type: ignore[attr-defined]
    return device.kernels, device.stream(None)


@functools.cache
def _device(ordinal: int) -> Any:
    from gpucoll.device.cuda import CudaDevice

    return CudaDevice(ordinal)


def _processor() -> str:
    """Return the CPU's features, a part of the cache key, since different hosts may share a cache."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


@functools.cache
def _on_host() -> Kernels | None:
    """Return the host kernels, run by a single thread; None without a compiler."""
    try:
        _load(instance("maxima", DTYPES["float32"]))  # a small family: can it be compiled and loaded?
    except (BackendError, OSError):
        return None
    return Kernels(_load, 1)


def _load(one: Instance) -> Launch:
    function = getattr(_library(family(one)), one.entry)
    function.restype = ctypes.c_char_p

    def run(arguments: Any, stream: Any) -> None:
        fault = function(1, 1, ctypes.c_void_p(arguments.ctypes.data))
        if fault is not None:
            raise BackendError(f"kernel {one.entry}: {fault.decode()}", code="GC-CUDA")

    return lambda blocks, threads, arguments: functools.partial(run, arguments)


@functools.cache
def _library(kernels: tuple[Instance, ...]) -> ctypes.CDLL:
    source = text(*kernels)
    path = user_store().path(source, ".so", functools.partial(compile_shared, source, *OPTIONS),
                             flags="\n".join([recipe(), *OPTIONS, _processor()]))
    return ctypes.CDLL(str(path))
