"""Memory that all ranks of a node map: collectives on arrays there copy nothing in between."""

from __future__ import annotations

import operator
from typing import Any

import numpy

from gpucoll.arrays.symmetric import Heap
from gpucoll.communicator.headers import Headers, News, check_alike
from gpucoll.dtypes import numpy_dtype, row_of
from gpucoll.errors import ArgumentError, BackendError, GpucollError, nearest

DEVICES = ("cpu", "cuda")


class Symmetric(Headers):
    """Methods of `Communicator`."""

    def empty(self, shape: Any, dtype: Any, device: str | None = None) -> Any:
        """Return an array of memory that all ranks of this node map; its elements are undefined. A collective call.

        `shape` and `dtype` are the same on all ranks, `device` is "cpu" or "cuda" (None: "cpu"). The memory is the
        communicator's: a block is used again by a later call once every rank has dropped its array, and `close` frees
        all. Raises ArgumentError, DtypeError, MismatchError (ranks differ), BackendError (no memory).
        """
        return self._symmetric("empty", shape, dtype, device)

    def zeros(self, shape: Any, dtype: Any, device: str | None = None) -> Any:
        """Return such an array, of zeros. A collective call."""
        array = self._symmetric("zeros", shape, dtype, device)
        array[...] = 0
        return array

    def _symmetric(self, name: str, shape: Any, dtype: Any, device: str | None) -> Any:
        self._check_usable()
        try:
            heap = self._heap(name, _device(name, device))
            wanted: News = {"shape": _lengths(name, shape), "dtype": row_of(dtype).name, "device": device or "cpu"}
        except GpucollError as error:
            self._told_by_all({"error": str(error)}, name, error)  # which raises it
        everyone = self._told_by_all(wanted | {"dropped": heap.news()}, name)
        for key, code in (("shape", "GC-SHAPE"), ("dtype", "GC-DTYPE"), ("device", "GC-DEVICE")):
            check_alike(name, everyone, key, code)
        heap.reclaim(number for one in everyone for number in one["dropped"])
        return self._allocate(name, heap, tuple(wanted["shape"]), numpy_dtype(wanted["dtype"]))

    def _allocate(self, name: str, heap: Heap, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        """Return the array; where a rank has no memory, no rank gets any."""
        if not heap.must_grow(shape, dtype):
            return heap.allocate(shape, dtype)
        array = error = None
        try:
            array = heap.allocate(shape, dtype)
        except (OSError, ValueError, OverflowError) as reason:
            error = BackendError(f"{name}: the system gives this rank no memory for {shape} {dtype}: {reason}",
                                 code="GC-MEMORY")
        self._told_by_all({} if error is None else {"error": str(error)}, name, error)
        return array

    def _heap(self, name: str, device: str) -> Heap:
        """Return the symmetric memory of a device."""
        if device == "cpu":
            return self._host.heap
        raise ArgumentError(f"{name}: there is no symmetric memory on {device} yet", code="GC-DEVICE")


def _lengths(name: str, shape: Any) -> list[int]:
    try:
        lengths = [operator.index(shape)] if hasattr(shape, "__index__") else [operator.index(one) for one in shape]
    except TypeError:
        raise ArgumentError(f"{name}: {shape!r} is no shape", code="GC-SHAPE") from None
    if any(length < 0 for length in lengths):
        raise ArgumentError(f"{name}: shape {shape!r} has a negative length", code="GC-SHAPE")
    return lengths


def _device(name: str, device: Any) -> str:
    if device is None:
        return "cpu"
    if device not in DEVICES:
        raise ArgumentError(f"{name}: no device is named {device!r}{nearest(device, DEVICES)}", code="GC-DEVICE")
    return str(device)
