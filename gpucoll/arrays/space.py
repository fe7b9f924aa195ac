"""A space: where the arrays of a call live, and what is done to them there besides moving them between ranks.

`Host` is NumPy's memory. A device's space is bound to a stream, and enqueues what it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy

from gpucoll.arrays.combine import fill_identity, finish, premultiplied
from gpucoll.arrays.memory import Array, on_gpu
from gpucoll.dtypes import Dtype, numpy_dtype
from gpucoll.errors import ArgumentError
from gpucoll.ops import Op


class Space(Protocol):
    """Where a call's arrays live. Rows are contiguous and one-dimensional."""

    device: str  # "cpu", "cuda" or "emulated"
    stream: Any  # on which work is enqueued; None where there is none

    @property
    def current(self) -> AbstractContextManager[object]:
        """Inside, `stream` is the current one: whoever is asked for an array by DLPack gives it in its order."""

    def check(self, name: str, what: str, array: Array) -> None:
        """Raise ArgumentError for an array that lives elsewhere."""

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype) -> Array:
        """Return a new array."""

    def works_on(self, x: Array) -> bool:
        """Return whether executors can work on the memory of `x` itself; else it goes by `pack` and `unpack`."""

    def pack(self, x: Array, row: Array) -> None:
        """Write the elements of `x`, in C order, into `row`."""

    def unpack(self, row: Array, out: Array) -> None:
        """Write `row` into `out`, in C order, leaving the gaps of a strided `out` alone."""

    def read_as(self, row: Array, dtype: Dtype) -> Array:
        """Return `row` in the form in which `dtype` is reduced here."""

    def premultiplied(self, op: Op, row: Array, dtype: Dtype) -> Array:
        """Return what a rank contributes: `row`, or its product with the factor of `gpucoll.premul_sum`."""

    def finish(self, op: Op, row: Array, dtype: Dtype, contributions: int) -> None:
        """Apply what an op does once, at the end."""

    def fill_identity(self, op: Op, row: Array, dtype: Dtype) -> None:
        """Write the op's identity, the result of reducing nothing."""

    def begin(self) -> None:
        """Do what was asked for while the call was prepared (`pack`, `premultiplied`), as far as it is still to do."""

    def completion(self) -> Any:
        """Return what tells the end of an operation that the host has only enqueued; None where it does it itself."""

    def end(self, keep: object) -> Iterator[Any]:
        """End an operation; `keep` lives until it has ended on its stream."""

    def abandon(self, keep: object) -> None:
        """Let go of an operation that has failed; what may still be written lives for ever."""


class Host:
    """NumPy's memory."""

    device = "cpu"
    stream = None
    current = nullcontext()

    def check(self, name: str, what: str, array: Array) -> None:
        if on_gpu(array):
            raise ArgumentError(f"{name}: {what} is on a GPU, other arrays of the call are on the host; pass all of "
                                "them there or here", code="GC-DEVICE")

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype) -> Array:
        return numpy.empty(shape, dtype)

    def works_on(self, x: Array) -> bool:
        return bool(x.flags.c_contiguous)

    def pack(self, x: Array, row: Array) -> None:
        numpy.copyto(row.reshape(x.shape), x)

    def unpack(self, row: Array, out: Array) -> None:
        numpy.copyto(out, row.view(out.dtype).reshape(out.shape))

    def read_as(self, row: Array, dtype: Dtype) -> Array:
        return row.view(numpy_dtype(dtype.name))

    def premultiplied(self, op: Op, row: Array, dtype: Dtype) -> Array:
        return premultiplied(op, row)

    def finish(self, op: Op, row: Array, dtype: Dtype, contributions: int) -> None:
        finish(op, row, contributions)

    def fill_identity(self, op: Op, row: Array, dtype: Dtype) -> None:
        fill_identity(op, row)

    def begin(self) -> None:
        """Nothing is left to do."""

    def completion(self) -> None:
        return None

    def end(self, keep: object) -> Iterator[Any]:
        return iter(())

    def abandon(self, keep: object) -> None:
        """Host executors have kept what MPI may still write."""


HOST = Host()
