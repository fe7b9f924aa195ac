"""What is accepted as an array, and every reason why not."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy

from gpucoll.dtypes import numpy_dtype, row_of
from gpucoll.errors import ArgumentError, DtypeError

Array: TypeAlias = numpy.ndarray[Any, Any]

OVERLAP_WORK = 100_000  # the exact answer can take exponential time; from there on: they overlap


def as_array(name: str, what: str, x: object) -> Array:
    """Return `x` as a NumPy array on its own memory; raise ArgumentError where it has none on the host.

    NumPy arrays, PyTorch tensors on the CPU, and whatever has ``__array_interface__`` or DLPack.
    """
    if isinstance(x, numpy.ndarray):
        if isinstance(x, numpy.ma.MaskedArray):
            raise ArgumentError(f"{name}: {what} is a masked array, whose mask would be lost; pass x.filled(value)",
                                code="GC-ARRAY")
        return x if type(x) is numpy.ndarray else x.view(numpy.ndarray)  # a matrix would not become a row
    if hasattr(x, "__cuda_array_interface__"):
        raise ArgumentError(f"{name}: {what} is a GPU array ({type(x).__module__}), for which there is no executor "
                            "yet; pass a copy on the host, cupy.asnumpy(x)", code="GC-ARRAY")
    if isinstance(x, numpy.generic) or not (hasattr(x, "__dlpack__") or hasattr(x, "__array_interface__")):
        raise ArgumentError(f"{name}: {what} is a {type(x).__name__}, not an array; pass numpy.asarray(x)",
                            code="GC-ARRAY")
    return _foreign(name, what, x)


def _foreign(name: str, what: str, x: Any) -> Array:
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(x, torch.Tensor):
            return _tensor(torch, x)
        return numpy.asarray(x) if hasattr(x, "__array_interface__") else numpy.from_dlpack(x)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentError(f"{name}: {what}, a {type(x).__name__}, gives NumPy no access to its memory: {error}",
                            code="GC-ARRAY") from error


def _tensor(torch: Any, x: Any) -> Array:
    """PyTorch's own dtypes have no name in NumPy: they travel as integers of their width."""
    x = x.detach()
    own = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
    if x.dtype in own:
        carrier = torch.int16 if x.element_size() == 2 else torch.uint8
        return x.view(carrier).numpy().view(numpy_dtype(own[x.dtype]))
    return x.numpy()


def check_input(name: str, x: object) -> Array:
    """Return `x` as a host array of a supported dtype; raise ArgumentError or DtypeError."""
    array = as_array(name, "x", x)
    row_of(array.dtype)
    return array


def check_output(name: str, out: object, shape: tuple[int, ...], dtype: numpy.dtype, x: Array | None) -> Array:
    """Return `out` if the result may be written there; raise ArgumentError or DtypeError."""
    array = as_array(name, "out", out)
    if array.shape != shape:
        raise ArgumentError(f"{name}: out has shape {array.shape}, expected {shape}; out=None allocates it",
                            code="GC-SHAPE")
    if array.dtype != dtype:
        raise DtypeError(f"{name}: out has dtype {array.dtype}, expected {dtype}")
    check_writable(name, "out", array)
    if x is not None and not same_memory(x, array) and _overlap(x, array):
        raise ArgumentError(f"{name}: x and out overlap in part; pass the same array for in place, or a copy",
                            code="GC-OVERLAP")
    return array


def check_writable(name: str, what: str, array: Array) -> None:
    """Raise ArgumentError for a read-only array, and for one whose elements share memory."""
    if not array.flags.writeable:
        raise ArgumentError(f"{name}: {what} is read-only; pass a writable array or a copy", code="GC-READONLY")
    if _overlaps_itself(array):
        raise ArgumentError(f"{name}: {what} has elements that share memory (strides {array.strides} for shape "
                            f"{array.shape}); pass a copy", code="GC-OVERLAP")


def _overlaps_itself(array: Array) -> bool:
    """Return whether an axis steps by less than the axes inside it take; an empty array never does."""
    reach = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach and array.size:
            return True
        reach += stride * (length - 1)
    return False


def same_memory(x: Array, out: Array) -> bool:
    """Return whether both are the same elements in the same order: the call is in place."""
    if x is out:
        return True
    same_place = x.ctypes.data == out.ctypes.data
    both_flat = x.flags.c_contiguous and out.flags.c_contiguous
    return same_place and x.size == out.size and (both_flat or x.strides == out.strides)


def _overlap(x: Array, out: Array) -> bool:
    try:
        return numpy.shares_memory(x, out, max_work=OVERLAP_WORK)  # type: ignore[arg-type] # any number is allowed
    except numpy.exceptions.TooHardError:
        return True


def check_blocks(name: str, xs: object, size: int) -> list[Array]:
    """Return the arrays of a list of `size` that differ in their first axis only; raise ArgumentError or DtypeError."""
    if not isinstance(xs, Sequence) or isinstance(xs, str | bytes) or len(xs) != size:
        found = f"{len(xs)} of them" if isinstance(xs, Sequence) else f"a {type(xs).__name__}"
        raise ArgumentError(f"{name}: expected a list of {size} arrays, one for each rank, not {found}",
                            code="GC-COUNTS")
    blocks = [check_rows(name, x) for x in xs]
    for index, block in enumerate(blocks):
        if block.shape[1:] != blocks[0].shape[1:]:
            raise ArgumentError(f"{name}: array {index} has shape {block.shape}; beyond the first axis it must be "
                                f"{blocks[0].shape[1:]} as array 0 has", code="GC-SHAPE")
        if block.dtype != blocks[0].dtype:
            raise DtypeError(f"{name}: array {index} has dtype {block.dtype}, array 0 has {blocks[0].dtype}")
    return blocks


def check_rows(name: str, x: object) -> Array:
    """Return `x` if it has a first axis that may differ from rank to rank."""
    array = check_input(name, x)
    if array.ndim == 0:
        raise ArgumentError(f"{name}: x is 0-dimensional; its first axis is what may differ from rank to rank",
                            code="GC-SHAPE")
    return array
