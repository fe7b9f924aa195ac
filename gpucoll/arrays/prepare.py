"""A call's arrays made ready: checked, flat, with the place where the result is formed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.arrays.accept import Array, check_input, check_output, check_writable, same_memory
from gpucoll.chunks import Layout, Ragged
from gpucoll.collectives import COLLECTIVES, Collective
from gpucoll.dtypes import Dtype, numpy_dtype, row_of
from gpucoll.errors import ArgumentError, DtypeError


class Target(NamedTuple):
    """Where a result is formed (`row`) and where it belongs (`out`)."""

    out: Array
    row: Array

    def deliver(self) -> None:
        """Write the result into a strided `out`, leaving its gaps alone."""
        if not self.out.flags.c_contiguous:
            numpy.copyto(self.out, self.row.view(self.out.dtype).reshape(self.out.shape))


def target(out: Array) -> Target:
    """Return the target for `out`: its own memory where it is contiguous."""
    return Target(out, out.reshape(-1) if out.flags.c_contiguous else numpy.empty(out.size, out.dtype))


def flat(x: Array) -> Array:
    """Return the elements of `x` in C order as one contiguous row; a view where `x` is contiguous."""
    return numpy.ascontiguousarray(x).reshape(-1)


class Cut(NamedTuple):
    """How many elements a block has; where blocks are not alike, the lengths of those of each side."""

    elements: int
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def layouts(self, per_block: int) -> tuple[Layout | Ragged, Layout | Ragged]:
        """Return the layouts of input and output for `per_block` chunks a block."""
        if self.lengths is None:
            return (Layout(self.elements, per_block),) * 2
        return Ragged.of(self.lengths[0]), Ragged.of(self.lengths[1])


class Prepared(NamedTuple):
    """A call's arrays, checked: flat input, target of the result, what the caller gets, bytes of the larger side."""

    input: Array | None
    target: Target | None
    dtype: Dtype
    cut: Cut
    nbytes: int
    result: Any

    @property
    def in_place(self) -> bool:
        """Whether input and result are the same memory."""
        return self.input is not None and self.target is not None and same_memory(self.input, self.target.row)


NOTHING = Prepared(None, None, row_of("uint8"), Cut(0), 0, None)


class Sizes(NamedTuple):
    """Who is asking: this rank, how many there are, the root."""

    rank: int
    size: int
    root: int


def prepare(row: Collective, x: object, out: object, who: Sizes, dtype: object = None) -> Prepared:
    """Check `x` and `out` for collective `row` and return what an executor needs; raise ArgumentError or DtypeError."""
    if row.name == "broadcast":
        return _prepare_broadcast(row, x, who)
    source = check_input(row.name, x)
    shape = _block_shape(row, source, who.size)
    kind = _view_as(source, dtype, row.name)
    found, result = _prepare_output(row, source, out, (who.size, *shape) if row.output.blocks else shape, who)
    if found is not None and kind != source.dtype:
        found = Target(found.out, found.row.view(kind))
    return _prepared(row, flat(source).view(kind), found, math.prod(shape), who.size, result)


def _prepared(row: Collective, source: Array | None, found: Target | None, elements: int, size: int,
              result: Any) -> Prepared:
    some = source if source is not None else found.row  # type: ignore[union-attr]
    nbytes = elements * (size if row.blocks else 1) * some.dtype.itemsize
    return Prepared(source, found, row_of(some.dtype), Cut(elements), nbytes, result)


def _block_shape(row: Collective, x: Array, size: int) -> tuple[int, ...]:
    if not row.input.blocks:
        return x.shape
    if x.ndim == 0 or x.shape[0] != size:
        raise ArgumentError(f"{row.name}: x has shape {x.shape}; its first axis must be {size}, a block for each rank",
                            code="GC-SHAPE")
    return x.shape[1:]


def _prepare_output(row: Collective, x: Array, out: object, shape: tuple[int, ...],
                    who: Sizes) -> tuple[Target | None, Any]:
    array = None if out is None else check_output(row.name, out, shape, x.dtype, x)
    if not row.output.exists(who.rank, who.root):
        return None, None
    if array is None:
        array = out = numpy.empty(shape, x.dtype)
    return target(array), out


def _prepare_broadcast(row: Collective, x: object, who: Sizes) -> Prepared:
    """The root's `x` is only read, the others' only written."""
    array = check_input(row.name, x)
    if who.rank == who.root:
        source = flat(array)
        return _prepared(row, source, Target(source, source), array.size, 1, x)
    check_writable(row.name, "x", array)
    return _prepared(row, None, target(array), array.size, 1, x)


def prepare_scatter(x: Array | None, out: object, shape: tuple[int, ...], dtype: numpy.dtype, who: Sizes) -> Prepared:
    """Return what scatter needs, the root's `shape` (size, \\*s) and dtype being known; `x` is the root's array."""
    row = COLLECTIVES["scatter"]
    array = None if out is None else check_output(row.name, out, shape[1:], dtype, x)
    if array is None:
        array = out = numpy.empty(shape[1:], dtype)
    source = None if x is None else flat(x)
    return _prepared(row, source, target(array), math.prod(shape[1:]), who.size, out)


def prepare_blocks(row: Collective, source: Array | None, lengths: tuple[Sequence[int], Sequence[int]],
                   tail: tuple[int, ...], dtype: numpy.dtype, *, has_output: bool = True) -> Prepared:
    """Return what a v-variant needs: its flat input, and the lengths (along the first axis) of both sides' blocks."""
    width = math.prod(tail)
    given, taken = tuple(length * width for length in lengths[0]), tuple(length * width for length in lengths[1])
    array = numpy.empty(sum(taken), dtype) if has_output else None
    blocks = None if array is None else _blocks(array, lengths[1], tail)
    result = blocks[0] if blocks is not None and not row.output.blocks else blocks
    nbytes = max(sum(given), sum(taken)) * dtype.itemsize
    found = None if array is None else Target(array, array)
    return Prepared(source, found, row_of(dtype), Cut(0, (given, taken)), nbytes, result)


def _blocks(row: Array, lengths: Sequence[int], tail: tuple[int, ...]) -> list[Array]:
    """Return views of one row: a block for each length."""
    layout = Ragged.of(length * math.prod(tail) for length in lengths)
    return [row[slice(*layout.span(index, 1))].reshape(length, *tail) for index, length in enumerate(lengths)]


def _view_as(x: Array, dtype: object, name: str) -> numpy.dtype:
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
