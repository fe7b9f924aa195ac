"""Calls of virtual ranks on arrays of emulated GPUs: the memory is host memory, and all work ends at once."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import numpy

from gpucoll.emulation import is_installed, on_host
from gpucoll.errors import ArgumentError, UsageError
from gpucoll.internal import Array, Heap, Space, on_gpu
from gpucoll.precheck.turns import refusal

PACKAGES = ("cupy", "cupyx")


class DeviceMemory(Space):
    """The space of calls on arrays of emulated GPUs: NumPy works on the memory."""

    device = "cuda"

    def check(self, name: str, what: str, array: Array) -> None:
        if not on_gpu(array):
            raise ArgumentError(f"{name}: {what} is on the host, other arrays of the call are on a GPU; pass all "
                                "arrays on the GPU or all on the host", code="GC-DEVICE")

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype) -> Array:
        found: Array = sys.modules["cupy"].empty(shape, dtype)
        return found


def _hosted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def hosted(self: Any, *given: Any) -> Any:
        return method(self, *map(on_host, given))

    return hosted


for _name in ("pack", "unpack", "read_as", "premultiplied", "finish", "fill_identity"):
    setattr(DeviceMemory, _name, _hosted(getattr(Space, _name)))


class OwnSlab:
    """Symmetric memory of one rank alone."""

    key = 0

    def __init__(self, nbytes: int) -> None:
        self._memory = sys.modules["cupy"].zeros(nbytes, "u1")
        self.start: Any = self._memory.data.ptr
        self.nbytes: int = nbytes

    def close(self) -> None:
        """Do nothing: the memory is freed with the last array on the slab."""


def _on_block(block: Any, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
    cupy = sys.modules["cupy"]
    memory = cupy.cuda.UnownedMemory(block.address, block.nbytes, block, cupy.cuda.Device().id)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class VirtualGpu:
    """The device of a virtual rank: memory alone."""

    peer = windows = None

    def space(self, stream: Any) -> Space:
        """Return the space of a call on `stream`."""
        return DeviceMemory()

    def new_heap(self, ranks: int) -> Heap:
        """Return symmetric memory."""
        return Heap(ranks, OwnSlab, _on_block)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown("a kernel of gpucoll on arrays outside of a call")


GPU = VirtualGpu()


def is_followed() -> bool:
    """Return whether the program under way has imported an emulated CuPy."""
    return "cupy" in sys.modules and is_installed()


def after_imports(follow: Callable[..., None], seed: int) -> dict[str, Callable[[], None]]:
    """Return the functions called after the import of a module of CuPy; see `ProcessState.follow` for `follow`."""
    seeds = itertools.count(seed)

    def import_cupy() -> None:
        cupy = sys.modules["cupy"]
        cupy.cuda.Stream.begin_capture = _refused("cupy.cuda.Stream.begin_capture")
        follow(cupy.random, lambda: {"_state": cupy.random.RandomState(next(seeds))})
        limit()

    def limit() -> None:
        for name, module in [*sys.modules.items()]:
            if name.partition(".")[0] in PACKAGES and not hasattr(module, "is_limited"):
                vars(module).update(__getattr__=_missing(module), is_limited=True)

    return {"cupy": import_cupy, "cupyx": limit, "cupy.cuda.nccl": _refused("cupy.cuda.nccl")}


def _missing(module: ModuleType) -> Callable[[str], Any]:
    """Return a function that refuses the names that a module of the emulated CuPy lacks: CuPy may have them."""
    known = vars(module).get("__getattr__")

    def missing(name: str) -> Any:
        try:
            if known is not None:
                return known(name)
        except AttributeError:
            pass
        full = f"{module.__name__}.{name}"
        if name.startswith("_") or (full != "cupy.cuda.nccl" and hasattr(module, "__path__")
                                    and importlib.util.find_spec(full)):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        raise _unknown(full)

    return missing


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise _unknown(name)

    return refuse


def _unknown(name: str) -> UsageError:
    return refusal(f"precheck: {name} is not followed on virtual ranks; the limits are on the page of precheck")
