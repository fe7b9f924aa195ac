"""Symmetric memory, mapped by all ranks of a node: collectives on its arrays need no intermediate copy."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy

from gpucoll.arrays.segments import Heap
from gpucoll.communicator.core import Core
from gpucoll.communicator.metadata import Metadata, check_alike
from gpucoll.core.dtypes import numpy_dtype, row_of
from gpucoll.errors import ArgumentError, BackendError, DtypeError, GpucollError, nearest
from gpucoll.progress.operations import keep_for_ever

HEAP_KINDS = ("cpu", "cuda")


class SymmetricHeaps:
    """The symmetric memory of a communicator, by kind of memory."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heaps: dict[str, Heap] = {"cpu": core.host.heap}  # in use
        self._own_heaps: dict[str, Heap] = {}  # closed here: executors and windows do not close these
        core.life.releases.append(self._release)

    def _release(self, failed: bool) -> None:
        for where, heap in self._own_heaps.items():
            gpu = self._core.gpu(where)
            if gpu.windows is not None and (failed or gpu.order.has_captured):
                keep_for_ever(heap)  # NCCL may still use its windows
            else:
                heap.close()

    def empty(self, name: str, shape: Any, dtype: Any, device: str | None) -> Any:
        self._core.waits.check_usable()
        try:
            where = self._where(name, device)
            wanted: Metadata = {"shape": _lengths(name, shape), "dtype": row_of(dtype).name, "device": where}
            _check_cupy(name, wanted)
            large = math.prod(max(1, length) for length in wanted["shape"]) * numpy_dtype(wanted["dtype"]).itemsize
            if 0 in wanted["shape"] and large >> 63:  # no memory needed, but NumPy refuses the shape
                raise ArgumentError(f"{name}: shape {shape!r} is too large for any memory", code="GC-SHAPE")
        except GpucollError as error:
            self._core.metadata.all_gather({}, name, error)  # raises `error`
        dropped = self._heaps[where].dropped() if where in self._heaps else []
        everyone = self._core.metadata.all_gather(wanted | {"dropped": dropped}, name)
        for key, code in (("shape", "GC-SHAPE"), ("dtype", "GC-DTYPE"), ("device", "GC-DEVICE")):
            check_alike(name, everyone, key, code)
        heap, shared = self._memory(where)
        # Heaps must stay alike: a block is free once all ranks have reported its drop, in the same call.
        heap.reclaim(dropped, (number for one in everyone for number in one["dropped"]))
        length = tuple(wanted["shape"]), numpy_dtype(wanted["dtype"])
        if heap.must_grow(*length):
            self._grow(name, heap, shared, *length)
        return heap.allocate(*length)

    def _grow(self, name: str, heap: Heap, shared: Any, shape: tuple[int, ...], dtype: numpy.dtype) -> None:
        """Add a slab for an array; if a rank has no memory, no rank gets a slab."""
        slab: Any = None
        facts: Metadata = {}
        error = None
        try:
            slab = heap.grow(shape, dtype)
            facts = {"slab": shared.export(slab) if shared is not None else slab.key}
        except (OSError, ValueError, OverflowError) as reason:
            error = BackendError(f"{name}: the system refuses to give this rank memory for {shape} {dtype}: {reason}",
                                 code="GC-MEMORY")
        try:
            everyone = self._core.metadata.all_gather(facts, name, error)
        except GpucollError:
            # Another rank has no memory: undo, so that all heaps stay alike.
            if slab is not None:
                heap.shrink()
            raise
        if shared is not None:
            try:
                shared.reach(slab, [one["slab"] for one in everyone])
            except GpucollError as failure:  # other ranks may have mapped the slab: no way back
                self._core.waits.broken(failure, name)
                raise
        elif heap is self._core.host.heap:
            self._reach_on_host(name, slab, [one["slab"] for one in everyone])

    def _reach_on_host(self, name: str, slab: Any, keys: list[int]) -> None:
        """Map the other ranks' new slabs; if a rank cannot, all ranks raise, and the communicator has failed."""
        failure: BackendError | None = None
        try:
            self._core.host.reach(slab, keys)
        except (BackendError, OSError, ValueError) as error:
            failure = BackendError(f"{name}: another rank's memory cannot be accessed: {error}", code="GC-MEMORY")
        try:
            self._core.metadata.all_gather({}, name, failure)
        except GpucollError as error:
            self._core.waits.broken(error, name)
            raise

    def _where(self, name: str, device: Any) -> str:
        """Return the kind of memory asked for: cpu, emulated or cuda."""
        if device not in (None, *HEAP_KINDS):
            raise ArgumentError(f"{name}: no device is named {device!r}{nearest(device, HEAP_KINDS)}", code="GC-DEVICE")
        if device == "cuda" and self._core.device is None:
            raise BackendError(f"{name}: CuPy finds no GPU in this process", code="GC-NO-GPU")
        return "cuda" if device == "cuda" else "emulated" if self._core.emulated else "cpu"

    def _memory(self, where: str) -> tuple[Heap, Any]:
        """Return the heap of a device, and the object giving kernels access to it; a collective call at first.

        The object is the peer executor's symmetric memory, else NCCL's windows, else None: without it, the memory is
        out of reach of other ranks' kernels.
        """
        host = self._core.host.heap
        if where == "cpu":
            return host, None
        gpu = self._core.gpu(where)
        shared = gpu.windows if gpu.peer is None else gpu.peer.symmetric
        if where not in self._heaps:
            heap = shared.heap if shared else gpu.new_heap(self._core.size) if where == "cuda" else host
            self._heaps[where] = heap
            if heap is not host and (gpu.peer is None or not shared):
                self._own_heaps[where] = heap
        return self._heaps[where], shared


def _check_cupy(name: str, wanted: Metadata) -> None:
    """Raise DtypeError for a dtype without arrays in CuPy."""
    if wanted["device"] == "cuda":
        import cupy

        try:
            cupy.ndarray((0,), numpy_dtype(wanted["dtype"]))
        except (TypeError, ValueError) as error:
            raise DtypeError(f"{name}: CuPy has no {wanted['dtype']}; use an unsigned integer of the same width, and "
                             "pass dtype= to the reductions", code="GC-DTYPE") from error


def _lengths(name: str, shape: Any) -> list[int]:
    try:
        lengths = [operator.index(shape)] if hasattr(shape, "__index__") else [operator.index(one) for one in shape]
    except TypeError:
        raise ArgumentError(f"{name}: {shape!r} is not a shape", code="GC-SHAPE") from None
    if any(length < 0 for length in lengths):
        raise ArgumentError(f"{name}: shape {shape!r} has a negative length", code="GC-SHAPE")
    return lengths
