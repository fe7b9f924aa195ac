"""Arrays as the executors need them: checked, flat, and combined by NumPy.

Nothing here communicates: a call that is refused here has moved and written nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.collectives import COLLECTIVES, Collective
from gpucoll.dtypes import Dtype, numpy_dtype, row_of
from gpucoll.errors import ArgumentError, DtypeError
from gpucoll.ops import LOGICAL, Op

Array: TypeAlias = numpy.ndarray[Any, Any]
Combine: TypeAlias = Callable[[Array, Array, Sequence[Array]], None]

OVERLAP_WORK = 100_000  # the exact answer can take exponential time; from there on: they overlap
BLOCK = 1 << 14  # elements that are widened at a time, so that they stay in the nearest cache


def check_input(name: str, x: object) -> Array:
    """Return `x` if it is a host array of a supported dtype; raise ArgumentError or DtypeError."""
    if hasattr(x, "__cuda_array_interface__"):
        raise ArgumentError(f"{name}: x is a GPU array ({type(x).__module__}), for which there is no executor yet; "
                            "pass a copy on the host, cupy.asnumpy(x)", code="GC-ARRAY")
    if isinstance(x, numpy.ma.MaskedArray):
        raise ArgumentError(f"{name}: x is a masked array, whose mask would be lost; pass x.filled(value)",
                            code="GC-ARRAY")
    if not isinstance(x, numpy.ndarray):
        raise ArgumentError(f"{name}: x is a {type(x).__name__}, not an array; pass numpy.asarray(x)", code="GC-ARRAY")
    row_of(x.dtype)
    return x


def check_output(name: str, out: object, shape: tuple[int, ...], dtype: numpy.dtype, x: Array | None) -> Array:
    """Return `out` if the result may be written there; raise ArgumentError or DtypeError."""
    if not isinstance(out, numpy.ndarray):
        raise ArgumentError(f"{name}: out is a {type(out).__name__}, not an array", code="GC-ARRAY")
    if out.shape != shape:
        raise ArgumentError(f"{name}: out has shape {out.shape}, expected {shape}; "
                            f"out=None allocates it", code="GC-SHAPE")
    if out.dtype != dtype:
        raise DtypeError(f"{name}: out has dtype {out.dtype}, expected {dtype}")
    if not out.flags.writeable:
        raise ArgumentError(f"{name}: out is read-only; pass a writable array or a copy", code="GC-READONLY")
    if out.size and any(stride == 0 and length > 1 for stride, length in zip(out.strides, out.shape, strict=True)):
        raise ArgumentError(f"{name}: out has elements that share memory (a stride of 0); pass out.copy()",
                            code="GC-OVERLAP")
    if x is not None and not same_memory(x, out) and _overlap(x, out):
        raise ArgumentError(f"{name}: x and out overlap in part; pass the same array for in place, or a copy",
                            code="GC-OVERLAP")
    return out


def same_memory(x: Array, out: Array) -> bool:
    """Return whether both are the same elements in the same order: the call is in place."""
    same_place = x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
    both_flat = x.flags.c_contiguous and out.flags.c_contiguous
    return x is out or (same_place and x.size == out.size and (both_flat or x.strides == out.strides))


def _overlap(x: Array, out: Array) -> bool:
    try:
        return numpy.shares_memory(x, out, max_work=OVERLAP_WORK)  # type: ignore[arg-type] # any number is allowed
    except numpy.exceptions.TooHardError:
        return True


def flat(x: Array) -> Array:
    """Return the elements of `x` in C order as one contiguous row; a view where `x` is contiguous."""
    return numpy.ascontiguousarray(x).reshape(-1)


class Target(NamedTuple):
    """Where a result is formed (`row`) and where it belongs (`out`)."""

    out: Array
    row: Array

    def deliver(self) -> None:
        """Write the result into a strided `out`, leaving its gaps alone."""
        if not self.out.flags.c_contiguous:
            numpy.copyto(self.out, self.row.reshape(self.out.shape))


def target(out: Array) -> Target:
    """Return the target for `out`: its own memory where it is contiguous."""
    return Target(out, out.reshape(-1) if out.flags.c_contiguous else numpy.empty(out.size, out.dtype))


def view_as(x: Array, dtype: object, name: str) -> numpy.dtype:
    """Return the dtype in which the elements of `x` are reduced.

    `dtype` reads the bytes of an unsigned carrier as another dtype of the same width, e.g.
    uint8 as float8_e4m3fn; None is the array's own. Raises DtypeError.
    """
    if dtype is None:
        return x.dtype
    row = row_of(dtype)
    carrier = x.dtype.kind == "u" and x.dtype.itemsize == row.itemsize
    if row_of(x.dtype) != row and not carrier:
        raise DtypeError(f"{name}: dtype={row.name} cannot be read from an array of {x.dtype}; "
                         f"pass x.astype(...) or an unsigned array of {row.itemsize} bytes an element")
    return numpy_dtype(row.name)


def check_op(name: str, op: Op, dtype: Dtype) -> None:
    """Raise DtypeError where `op` is not defined for `dtype`."""
    if dtype.kind not in op.kinds:
        raise DtypeError(f"{name}: op {op.name} is not defined for {dtype.name}, only for {', '.join(op.kinds)}",
                         code="GC-OP-DTYPE")


@functools.lru_cache(maxsize=256)
def combiner(op: Op, dtype: Dtype) -> Combine:
    """Return ``combine(dst, base, operands)``: dst = op(...op(base, operands[0])..., operands[-1]).

    float16, bfloat16 and float8 are combined in float32 and rounded once. Integers wrap, NaN wins.
    """
    ufunc = getattr(numpy, op.numpy)
    if dtype.wide is None:
        return functools.partial(_combine, ufunc)
    return functools.partial(_combine_wide, ufunc, numpy.dtype(dtype.wide))


def _combine(ufunc: numpy.ufunc, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    with numpy.errstate(all="ignore"):  # overflow and NaN are the contract's, not a surprise
        for operand in operands:
            ufunc(base, operand, out=dst)
            base = dst


def _combine_wide(ufunc: numpy.ufunc, wide: numpy.dtype, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    with numpy.errstate(all="ignore"):
        for start in range(0, len(dst), BLOCK):
            block = slice(start, start + BLOCK)
            total = base[block].astype(wide)
            for operand in operands:
                ufunc(total, operand[block].astype(wide), out=total)
            dst[block] = total.astype(dst.dtype)


def finish(op: Op, row: Array, contributions: int) -> None:
    """Apply what an op does once, at the end: avg divides; a lone logical contribution becomes 0 or 1."""
    if op.name == "avg":
        wide = row_of(row.dtype).wide
        with numpy.errstate(all="ignore"):
            row[...] = ((row if wide is None else row.astype(wide)) / contributions).astype(row.dtype)
    elif op.name in LOGICAL and contributions == 1:
        row[...] = (row != 0).astype(row.dtype)


class Prepared(NamedTuple):
    """A call's arrays, checked: flat input, target of the result, elements of a block, bytes of the larger side."""

    input: Array | None
    target: Target | None
    dtype: Dtype
    elements: int
    nbytes: int

    @property
    def in_place(self) -> bool:
        """Whether input and result are the same memory."""
        return self.input is not None and self.target is not None and same_memory(self.input, self.target.row)


def prepare(row: Collective, x: object, out: object, *, rank: int, size: int, root: int,
            dtype: object = None) -> Prepared:
    """Check `x` and `out` for collective `row` and return what an executor needs; raise ArgumentError or DtypeError."""
    source = check_input(row.name, x)
    if row.name == "broadcast":
        return _prepare_broadcast(source, is_root=rank == root)
    shape = _block_shape(row, source, size)
    kind = view_as(source, dtype, row.name)
    target = _prepare_target(row, source, out, (size, *shape) if row.output.blocks else shape, rank == root)
    if target is not None and kind != source.dtype:
        target = Target(target.out, target.row.view(kind))
    return _prepared(row, flat(source).view(kind), target, math.prod(shape), size)


def _prepared(row: Collective, source: Array | None, target: Target | None, elements: int, size: int) -> Prepared:
    some = source if source is not None else target.row  # type: ignore[union-attr]
    blocks = size if row.blocks else 1
    return Prepared(source, target, row_of(some.dtype), elements, elements * blocks * some.dtype.itemsize)


def _block_shape(row: Collective, x: Array, size: int) -> tuple[int, ...]:
    if not row.input.blocks:
        return x.shape
    if x.ndim == 0 or x.shape[0] != size:
        raise ArgumentError(f"{row.name}: x has shape {x.shape}; its first axis must be {size}, a block for each rank",
                            code="GC-SHAPE")
    return x.shape[1:]


def _prepare_target(row: Collective, x: Array, out: object, shape: tuple[int, ...], is_root: bool) -> Target | None:
    result = None if out is None else check_output(row.name, out, shape, x.dtype, x)
    if row.output.where == "root" and not is_root:
        return None
    return target(numpy.empty(shape, x.dtype) if result is None else result)


def _prepare_broadcast(x: Array, *, is_root: bool) -> Prepared:
    """The root's `x` is only read, the others' only written."""
    if is_root:
        row = flat(x)
        return _prepared(COLLECTIVES["broadcast"], row, Target(row, row), x.size, 1)
    check_output("broadcast", x, x.shape, x.dtype, None)
    return _prepared(COLLECTIVES["broadcast"], None, target(x), x.size, 1)
