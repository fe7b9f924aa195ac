"""Where an array's elements lie: on the host or on a GPU, at which addresses, and whether two arrays share any."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy

Array: TypeAlias = numpy.ndarray[Any, Any]  # NumPy's, or CuPy's, whose interface is the same

OVERLAP_WORK = 100_000  # the exact answer can take exponential time; from there on: they overlap
CUDA_MEMORY = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged


def on_gpu(x: Any) -> bool:
    """Return whether `x` is an array in GPU memory; imports nothing."""
    if isinstance(x, numpy.ndarray):
        return False
    if has(x, "__cuda_array_interface__"):  # PyTorch's tensors have it on a GPU only
        return True
    try:
        return has(x, "__dlpack_device__") and not isinstance(x, type) and x.__dlpack_device__()[0] in CUDA_MEMORY
    except Exception:  # the object's own; whoever opens it says why it cannot be opened
        return False


def has(x: Any, name: str) -> bool:
    """Return whether `x` has an attribute: one that raises is there, as PyTorch's on a tensor that requires grad."""
    try:
        getattr(x, name)
    except Exception as error:
        return not isinstance(error, AttributeError)
    return True


def stream_of(arrays: Iterable[object]) -> Any:
    """Return the current stream of PyTorch's where one of the arrays is its; None leaves CuPy's."""
    torch = sys.modules.get("torch")
    tensors = [x for x in arrays if torch is not None and isinstance(x, torch.Tensor) and on_gpu(x)]
    return torch.cuda.current_stream(tensors[0].device) if torch is not None and tensors else None


def is_borrowed(x: Any) -> bool:
    """Return whether `x` is in GPU memory that CuPy's pool does not know: who gives it out again asks no stream."""
    return on_gpu(x) and not isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ()))


def module_of(x: Any) -> Any:
    """Return the array module of `x`: numpy or cupy."""
    return numpy if isinstance(x, numpy.ndarray) else sys.modules["cupy"]


def address(x: Any) -> int:
    """Return the address of the first element, 0 of None."""
    if x is None:
        return 0
    return x.__array_interface__["data"][0] if isinstance(x, numpy.ndarray) else x.data.ptr


class _Bounds:
    """The addresses of a GPU array's elements, for NumPy to compare."""

    def __init__(self, x: Any) -> None:
        self.__array_interface__ = {"version": 3, "shape": x.shape, "strides": x.strides, "data": (x.data.ptr, True),
                                    "typestr": f"|V{x.dtype.itemsize}"}


def bounds(x: Any) -> Array:
    """Return an array of the same addresses for NumPy's arithmetic on them; of a GPU's it must not be read."""
    return x if isinstance(x, numpy.ndarray) else numpy.asarray(_Bounds(x))


def same_memory(x: Any, out: Any) -> bool:
    """Return whether both are the same elements in the same order: the call is in place."""
    if x is out:
        return True
    if x.size != out.size or address(x) != address(out):
        return False
    both_flat = x.flags.c_contiguous and out.flags.c_contiguous
    return both_flat or x.strides == out.strides


def overlap(x: Any, out: Any) -> bool:
    """Return whether two arrays share an element, or whether that is too hard to tell."""
    if on_gpu(x) != on_gpu(out):
        return False
    try:
        return numpy.shares_memory(bounds(x), bounds(out), max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True


def overlaps_itself(array: Any) -> bool:
    """Return whether an axis steps by less than the axes inside it take; an empty array never does."""
    if array.flags.c_contiguous:
        return False
    reach = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach and array.size:
            return True
        reach += stride * (length - 1)
    return False
