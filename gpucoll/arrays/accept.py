"""Objects accepted as arrays, and the errors for all others; addresses and overlaps of arrays."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy
from numpy.lib.array_utils import byte_bounds

from gpucoll.arrays.dlpack import of_dlpack
from gpucoll.core.dtypes import numpy_dtype, row_of
from gpucoll.core.ops import op_of
from gpucoll.errors import ArgumentError, DtypeError

Array: TypeAlias = numpy.ndarray[Any, Any]  # NumPy's array, or CuPy's with the same interface

# An exact answer on overlap can take exponential time; beyond this work the arrays count as overlapping.
OVERLAP_WORK = 100_000
CUDA_MEMORY = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged


def on_gpu(x: Any) -> bool:
    """Return whether `x` is an array in GPU memory, without importing a GPU library."""
    if type(x) is numpy.ndarray:
        return False
    if isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ())):  # quick: the attribute is made anew each time
        return True
    if has(x, "__cuda_array_interface__"):  # PyTorch's host tensors lack this attribute
        return True
    try:
        return has(x, "__dlpack_device__") and not isinstance(x, type) and x.__dlpack_device__()[0] in CUDA_MEMORY
    # A foreign object may raise any error here; `as_array` reports the error when opening the object.
    except Exception:
        return False


def has(x: Any, name: str) -> bool:
    """Return whether `x` has an attribute; an attribute raising another error counts as present.

    PyTorch raises another error for a tensor requiring grad.
    """
    try:
        getattr(x, name)
    except Exception as error:
        return not isinstance(error, AttributeError)
    return True


def torch_stream(arrays: Iterable[object]) -> Callable[[], Any]:
    """Return a function giving PyTorch's current stream, or without a PyTorch GPU tensor None, for CuPy's.

    PyTorch and CuPy have different current streams, and both may change between a call and its wait.
    """
    torch = sys.modules.get("torch")
    tensors = [x for x in arrays if torch is not None and isinstance(x, torch.Tensor) and on_gpu(x)]
    if torch is None or not tensors:
        return lambda: None
    return functools.partial(torch.cuda.current_stream, tensors[0].device)


def is_borrowed(x: Any) -> bool:
    """Return whether `x` is GPU memory outside CuPy's pool: its owner may reuse the memory at any time.

    The pool reuses memory in the same stream only; other owners regard no stream of this library.
    """
    return on_gpu(x) and not isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ()))


def module_of(x: Any) -> Any:
    return numpy if isinstance(x, numpy.ndarray) else sys.modules["cupy"]


def address(x: Any) -> int:
    """Return the address of the first element, 0 for None."""
    if x is None:
        return 0
    return x.__array_interface__["data"][0] if isinstance(x, numpy.ndarray) else x.data.ptr


def bounds(x: Any) -> Array:
    """Return an array with the same addresses for NumPy's arithmetic; its elements are unreadable for a GPU array."""
    if isinstance(x, numpy.ndarray):
        return x
    return numpy.asarray(SimpleNamespace(__array_interface__={
        "version": 3, "shape": x.shape, "strides": x.strides, "data": (x.data.ptr, True),
        "typestr": f"|V{x.dtype.itemsize}"}))


def same_memory(x: Any, out: Any) -> bool:
    """Return whether both arrays are the same elements in the same order: the call is in place."""
    if x is out:
        return True
    if x.size != out.size or address(x) != address(out):
        return False
    both_flat = x.flags.c_contiguous and out.flags.c_contiguous
    return both_flat or x.strides == out.strides


def is_block_of(x: Any, out: Any, rank: int, size: int) -> bool:
    """Return whether `x` is block `rank` of the `size` blocks of `out`, stacked or concatenated."""
    if x.size * size != out.size or (x.size and not numpy.may_share_memory(bounds(x), bounds(out))):
        return False
    rows = out.shape[0] // size
    block = out[rank * rows:(rank + 1) * rows]
    return same_memory(x, block.reshape(x.shape) if out.ndim > x.ndim else block)


def overlap(x: Any, out: Any) -> bool:
    """Return whether two arrays share an element; True also where the exact answer takes too long."""
    if on_gpu(x) != on_gpu(out):
        return False
    try:
        return numpy.shares_memory(bounds(x), bounds(out), max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True


def overlaps_itself(array: Any) -> bool:
    """Return whether an axis steps by less than the extent of the inner axes; False for an empty array."""
    if array.flags.c_contiguous:
        return False
    reach = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach and array.size:
            return True
        reach += stride * (length - 1)
    return False


def as_array(name: str, what: str, x: object) -> Array:
    """Return `x` as a NumPy or CuPy array on the memory of `x`; raise ArgumentError where the memory is inaccessible.

    Accepted are NumPy and CuPy arrays, PyTorch tensors, and objects with DLPack, ``__array_interface__`` or
    ``__cuda_array_interface__``.
    """
    if type(x) is numpy.ndarray:
        return x
    if on_gpu(x):
        return _gpu_array(name, what, x)
    if isinstance(x, numpy.ma.MaskedArray):
        raise ArgumentError(f"{name}: {what} is a masked array, and its mask would be lost; pass x.filled(value)",
                            code="GC-ARRAY")
    if isinstance(x, numpy.ndarray):
        return x.view(numpy.ndarray)  # numpy.matrix stays 2-D when reshaped
    if isinstance(x, numpy.generic) or not (has(x, "__dlpack__") or has(x, "__array_interface__")):
        raise ArgumentError(f"{name}: {what} is a {type(x).__name__}, not an array{_advice(what, x)}", code="GC-ARRAY")
    return _opened(name, what, x, "NumPy", lambda tensor: tensor.numpy(),
                   numpy.asarray if has(x, "__array_interface__") else of_dlpack)


def _advice(what: str, x: object) -> str:
    """Return the end of an error message for a non-array: a guess at the intended argument, or ""."""
    if type(x).__name__ == "InPlaceType":  # mpi4py's MPI.IN_PLACE
        return "; out=x works in place"
    if what == "out" and _is_op(x):
        return "; pass the op as op="
    if isinstance(x, list | tuple) and any(isinstance(one, numpy.ndarray) for one in x):
        return "; pass one array, its dtype and length are known"
    is_data = isinstance(x, bool | int | float | complex | list | tuple | numpy.generic)
    return f"; pass numpy.asarray({what})" if is_data and what != "out" else ""


def _is_op(x: object) -> bool:
    try:
        op_of(x)
    except ArgumentError:
        return False
    return True


def _gpu_array(name: str, what: str, x: Any) -> Array:
    """Return a GPU array as CuPy's; raise ArgumentError.

    DLPack is preferred: DLPack orders streams by an event, while CuPy's import by the CUDA array interface waits on the
    host.
    """
    try:
        import cupy
    except ImportError as error:
        raise ArgumentError(f"{name}: {what} is a GPU array ({type(x).__module__}) and needs CuPy: {error}",
                            code="GC-ARRAY") from error
    if isinstance(x, cupy.ndarray):
        return x
    return _opened(name, what, x, "CuPy", cupy.from_dlpack,
                   cupy.from_dlpack if has(x, "__dlpack__") else cupy.asarray)


def _opened(name: str, what: str, x: Any, library: str, of_tensor: Callable[[Any], Any],
            of_others: Callable[[Any], Any]) -> Array:
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(x, torch.Tensor):
            return _tensor(torch, x, of_tensor)
        return of_others(x)
    # A foreign object may raise any error.
    except Exception as error:
        raise ArgumentError(f"{name}: {what}, a {type(x).__name__}, gives {library} no access to the memory: {error}",
                            code="GC-ARRAY") from error


def _tensor(torch: Any, x: Any, opened: Callable[[Any], Any]) -> Array:
    """Return a PyTorch tensor as an array.

    NumPy has no names for PyTorch's bfloat16 and float8, so these are opened as integers of the same width. On a GPU
    float8 stays an integer, because CuPy has no float8.
    """
    x = x.detach()
    own = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
    if x.dtype not in own:
        return opened(x)
    carrier = opened(x.view(torch.int16 if x.element_size() == 2 else torch.uint8))
    return carrier if on_gpu(carrier) and x.element_size() == 1 else carrier.view(numpy_dtype(own[x.dtype]))


def carried_dtype(x: object) -> str | None:
    """Return the name of the dtype behind a GPU array of integers: float8 of PyTorch, missing in CuPy; else None."""
    name = str(getattr(x, "dtype", "")).removeprefix("torch.")
    return name if name.startswith("float8") and on_gpu(x) else None


def check_input(name: str, x: object, what: str = "x") -> Array:
    """Return `x` as an array of a supported dtype; raise ArgumentError or DtypeError."""
    array = as_array(name, what, x)
    row_of(array.dtype)
    return array


def check_output(name: str, out: object, shapes: Sequence[tuple[int, ...]], dtype: numpy.dtype,
                 x: Array | None, what: str = "out") -> Array:
    """Return `out` as an array of one of `shapes` (of any shape without them), writable by the call.

    Raises ArgumentError or DtypeError.
    """
    array = as_array(name, what, out)
    if shapes and array.shape not in shapes:
        raise ArgumentError(f"{name}: {what} has shape {array.shape}, expected {' or '.join(map(str, shapes))}; "
                            "out=None allocates it", code="GC-SHAPE")
    if array.dtype != dtype:
        raise DtypeError(f"{name}: {what} has dtype {array.dtype}, expected {dtype}")
    check_writable(name, what, array)
    if x is not None and not same_memory(x, array) and overlap(x, array):
        raise ArgumentError(f"{name}: x and out overlap partly; pass the same array for in place, or a copy",
                            code="GC-OVERLAP")
    return array


def check_apart(name: str, given: Sequence[Array], outs: Sequence[Array], what: str = "out") -> bool:
    """Return whether an array of `outs` is an array of `given`.

    Raises ArgumentError where an array of `outs` shares only a part of its elements with an array of `given`, or any
    element with another array of `outs`.
    """
    found, arrays = False, [*given, *outs]
    for one, other in neighbours(arrays):
        is_written = other >= len(given), one >= len(given)
        if any(is_written) and overlap(arrays[one], arrays[other]):
            if all(is_written):
                raise ArgumentError(f"{name}: arrays of {what} overlap; each array needs separate memory",
                                    code="GC-OVERLAP")
            if not same_memory(arrays[one], arrays[other]):
                raise ArgumentError(f"{name}: input and out overlap partly; pass the same array for in place, or a "
                                    "copy", code="GC-OVERLAP")
            found = True
    return found


def neighbours(arrays: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of all pairs of arrays with overlapping byte ranges; n log n for disjoint arrays."""
    near: list[tuple[int, int]] = []  # end and number of earlier arrays that reach into the present array
    for low, high, number in sorted((*byte_bounds(bounds(array)), number) for number, array in enumerate(arrays)
                                    if array.size):
        near = [(end, other) for end, other in near if end > low]
        yield from ((other, number) for _, other in near)
        near.append((high, number))


def check_writable(name: str, what: str, array: Array) -> None:
    """Raise ArgumentError for a read-only array, and for an array with elements sharing memory."""
    if not getattr(array.flags, "writeable", True):  # CuPy has no read-only arrays
        raise ArgumentError(f"{name}: {what} is read-only; pass a writable array or a copy", code="GC-READONLY")
    if overlaps_itself(array):
        raise ArgumentError(f"{name}: {what} has elements that share memory (strides {array.strides} for shape "
                            f"{array.shape}); pass a copy", code="GC-OVERLAP")


def check_blocks(name: str, xs: object, size: int) -> list[Array]:
    """Return a list of `size` arrays differing in the first axis only; raise ArgumentError or DtypeError."""
    if not isinstance(xs, Sequence) or isinstance(xs, str | bytes) or len(xs) != size:
        given = f"{len(xs)} of them" if isinstance(xs, Sequence) else f"a {type(xs).__name__}"
        raise ArgumentError(f"{name}: expected a list of {size} arrays, one for each rank, not {given}",
                            code="GC-COUNTS")
    blocks = [check_rows(name, x) for x in xs]
    for index, block in enumerate(blocks):
        if block.shape[1:] != blocks[0].shape[1:]:
            raise ArgumentError(f"{name}: array {index} has shape {block.shape}; after the first axis the shape must "
                                f"be {blocks[0].shape[1:]} as for array 0", code="GC-SHAPE")
        if block.dtype != blocks[0].dtype:
            raise DtypeError(f"{name}: array {index} has dtype {block.dtype}, array 0 has {blocks[0].dtype}")
    return blocks


def check_rows(name: str, x: object) -> Array:
    """Return `x` as an array with a first axis, the axis allowed to differ between ranks; raise ArgumentError."""
    array = check_input(name, x)
    if array.ndim == 0:
        raise ArgumentError(f"{name}: x is 0-dimensional; x needs a first axis, the only axis in which ranks may "
                            "differ", code="GC-SHAPE")
    return array


def is_alike(array: Array, like: Array, shape: tuple[int, ...], dtype: object) -> bool:
    """Return whether `array` has this shape and dtype, and is on the host or a GPU as `like` is."""
    return array.shape == shape and array.dtype == dtype and module_of(array) is module_of(like)
