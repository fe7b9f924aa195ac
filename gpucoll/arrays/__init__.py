"""The arrays of a call: check them, make them flat, and allocate the result.

    accept              objects accepted as arrays, and the addresses of their elements
    space               the memory of a call's arrays, reductions by NumPy
    segments            memory mapped by other processes, and blocks at the same position on all ranks

Nothing here communicates: a call refused here has sent and written nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.arrays.accept import (
    Array,
    address,
    as_array,
    bounds,
    carried_dtype,
    check_apart,
    check_blocks,
    check_input,
    check_output,
    check_rows,
    check_writable,
    is_alike,
    is_block_of,
    is_borrowed,
    module_of,
    on_gpu,
    overlap,
    same_memory,
    torch_stream,
)
from gpucoll.arrays.space import HOST, Space, check_op, combiner
from gpucoll.core.chunks import Layout, Ragged
from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.core.dtypes import Dtype, row_of
from gpucoll.errors import ArgumentError, DtypeError


class Target(NamedTuple):
    """The memory where a result is formed (`row`) and the array of the caller (`out`)."""

    out: Array
    row: Array

    def deliver(self, space: Space) -> None:
        """Write the result into a strided `out`, leaving the gaps unchanged."""
        if not space.works_on(self.out):
            space.unpack(self.row, self.out)


class Targets(NamedTuple):
    """The memory where blocks are formed, block after block (`row`), and the arrays of the caller (`outs`)."""

    outs: Sequence[Array]
    row: Array

    def deliver(self, space: Space) -> None:
        """Write every block into its array, leaving the gaps of strided arrays unchanged."""
        start = 0
        for out in self.outs:
            space.unpack(self.row[start:start + out.size], out)
            start += out.size


def target(out: Array, space: Space) -> Target:
    """Return the target for `out`: the memory of `out` itself where executors can work on it, else a new row."""
    return Target(out, out.reshape(-1) if space.works_on(out) else space.empty(out.size, out.dtype))


def flat(x: Array, space: Space) -> Array:
    """Return the elements of `x` in C order as a contiguous row: a view where possible, see `Space.works_on`."""
    return x.reshape(-1) if space.works_on(x) else joined([x], space)


def joined(xs: Sequence[Array], space: Space) -> Array:
    """Return the elements of all `xs`, arrays of the same dtype, as a new row."""
    row = space.empty(sum(x.size for x in xs), xs[0].dtype)
    start = 0
    for x in xs:
        space.pack(x, row[start:start + x.size])
        start += x.size
    return row


class Cut(NamedTuple):
    """The number of elements in a block; for unequal blocks the lengths of the blocks of input and output.

    `digest` tells the lengths of all ranks' blocks apart, where this rank took these from an earlier call.
    """

    elements: int
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    digest: str = ""

    def layouts(self, per_block: int) -> tuple[Layout | Ragged, Layout | Ragged]:
        """Return the layouts of input and output for `per_block` chunks a block."""
        if self.lengths is None:
            return (Layout(self.elements, per_block),) * 2
        return Ragged.of(self.lengths[0]), Ragged.of(self.lengths[1])


class Prepared(NamedTuple):
    """The checked arrays of a call: flat input, target and result for the caller, bytes of the larger side.

    `shape` is compared between ranks: the shape of the array, or of a block, without the first axis where blocks may
    differ in the first axis. `given` is the array behind the input, kept alive as long as the call.
    """

    input: Array | None
    target: Target | Targets | None
    dtype: Dtype
    cut: Cut
    nbytes: int
    result: Any
    space: Space
    shape: tuple[int, ...]
    given: Any = None

    @property
    def in_place(self) -> bool:
        """Whether the input lies within the memory of the result: the whole result or this rank's block."""
        if self.input is None or self.target is None:
            return False
        first, begin = address(self.target.row), address(self.input)
        return first <= begin and begin + self.input.nbytes <= first + self.target.row.nbytes


NOTHING = Prepared(None, None, row_of("uint8"), Cut(0), 0, None, HOST, ())


class RankInfo(NamedTuple):
    """The place of the caller: its rank, the number of ranks, and the root."""

    rank: int
    size: int
    root: int


def prepare(row: Collective, x: object, out: object, rank_info: RankInfo, dtype: object = None,
            space: Space = HOST) -> Prepared:
    """Check the arrays of a call of collective `row`, and return the prepared call.

    Raises ArgumentError or DtypeError.
    """
    with space.current:
        source = check_input(row.name, x)
    space.check(row.name, "x", source)
    if row.name == "broadcast":
        return _prepare_broadcast(row, x, source, rank_info, space)
    shape = block_shape(row.name, source, rank_info.size) if row.input.blocks else source.shape
    kind = kind_of(row.name, source, carried_dtype(x) if dtype is None else dtype)
    shapes = _result_shapes(row, source.shape, shape, rank_info.size)
    formed, result = _prepare_output(row, source, source.dtype, out, shapes, rank_info, space)
    # Device executors do not recognize an input inside `out`: copy it, or peers may read the block after its overwrite.
    copies = formed is not None and space is not HOST and _is_own_block(row, source, formed.out, rank_info)
    given = space.read_as(joined([source], space) if copies else flat(source, space), kind)
    if formed is not None:
        formed = Target(formed.out, space.read_as(formed.row, kind))
    call = _prepared(row, given, formed, kind, shape, rank_info.size, result, space)._replace(given=source)
    return call._replace(shape=_without_ones(shape)) if row.input.blocks else call


def _prepared(row: Collective, source: Array | None, formed: Target | None, kind: Dtype,
              shape: tuple[int, ...], size: int, result: Any, space: Space) -> Prepared:
    elements = math.prod(shape)
    nbytes = elements * (size if row.blocks else 1) * kind.itemsize
    return Prepared(source, formed, kind, Cut(elements), nbytes, result, space, shape)


def block_shape(name: str, x: Array, size: int) -> tuple[int, ...]:
    """Return the shape s of a block of `x`: `x` is (size, \\*s), or has the blocks one after another.

    Raises ArgumentError where the first axis of `x` is no multiple of `size`.
    """
    if x.ndim == 0 or x.shape[0] % size:
        raise ArgumentError(f"{name}: x has shape {x.shape}; the first axis must be {size}, a block for each rank, or "
                            f"a multiple of {size}: (size, *s) or (size * s[0], *s[1:])", code="GC-SHAPE")
    return x.shape[1:] if x.shape[0] == size else (x.shape[0] // size, *x.shape[1:])


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a block without leading ones: a rank may read (\\*s) where another rank reads (1, \\*s)."""
    return tuple(itertools.dropwhile(lambda length: length == 1, shape))


def _result_shapes(row: Collective, given: tuple[int, ...], shape: tuple[int, ...],
                   size: int) -> list[tuple[int, ...]]:
    """Return the shapes allowed for `out`; the first is the shape of allocated results.

    `shape` is the shape of a block. An input (size, \\*s) may also mean concatenated blocks (1, \\*s).
    """
    is_both = row.input.blocks and given[:1] == (size,)
    if not row.output.blocks:
        return [shape, (1, *shape)] if is_both else [shape]
    concatenated = [(size * shape[0], *shape[1:])] if shape else []
    return [(size, *shape), *concatenated, *([(size, 1, *shape)] if is_both else [])]


def _is_own_block(row: Collective, x: Array | None, out: Array, rank_info: RankInfo) -> bool:
    """Return whether a gathering call is in place: `x` is this rank's block of a longer `out`."""
    return x is not None and row.output.blocks and not row.input.blocks and rank_info.size > 1 \
        and is_block_of(x, out, rank_info.rank, rank_info.size)


def _prepare_output(row: Collective, x: Array | None, dtype: numpy.dtype, out: Any, shapes: Sequence[tuple[int, ...]],
                    rank_info: RankInfo, space: Space) -> tuple[Target | None, Any]:
    """Return the target and the result for the caller: `out`, once checked, or a new array; (None, None) off root."""
    exists, array = row.output.exists(rank_info.rank, rank_info.root), out
    if out is not None:
        with space.current:
            array = as_array(row.name, "out", out)
            is_own = array.shape in shapes and _is_own_block(row, x, array, rank_info)
            check_output(row.name, array, shapes, dtype, None if is_own else x)
        space.check(row.name, "out", array)
    elif exists:
        array = out = space.empty(shapes[0], dtype)
    return (target(array, space), out) if exists else (None, None)


def _prepare_broadcast(row: Collective, x: object, array: Array, rank_info: RankInfo, space: Space) -> Prepared:
    """Return the prepared broadcast: `x` is read on the root and written on the other ranks.

    A schedule may write the same values to the root's array, so a read-only array of the root takes part as a copy.
    """
    kind = row_of(array.dtype)
    if rank_info.rank == rank_info.root:
        source = flat(array, space) if getattr(array.flags, "writeable", True) else joined([array], space)
        return _prepared(row, source, Target(source, source), kind, array.shape, 1, x, space)._replace(given=array)
    check_writable(row.name, "x", array)
    return _prepared(row, None, target(array, space), kind, array.shape, 1, x, space)


def prepare_scatter(x: Array | None, out: object, shape: tuple[int, ...], dtype: numpy.dtype, rank_info: RankInfo,
                    space: Space) -> Prepared:
    """Return the prepared scatter; `shape` (size, \\*s) and `dtype` are the root's, `x` is None on other ranks."""
    row = COLLECTIVES["scatter"]
    shapes = _result_shapes(row, shape, shape[1:], rank_info.size)
    formed, result = _prepare_output(row, x, dtype, out, shapes, rank_info, space)
    source = None if x is None else flat(x, space)
    return _prepared(row, source, formed, row_of(dtype), shape[1:], rank_info.size, result, space)._replace(given=x)


class BlockRoom(NamedTuple):
    """The caller's memory for the blocks of a result: a single array for all blocks, or a list of arrays."""

    out: Any
    arrays: list[Array]
    is_list: bool
    is_input: bool  # whether part of this memory is also input


def room_for(row: Collective, out: object, lengths: Sequence[int], tail: tuple[int, ...], dtype: numpy.dtype,
             given: Sequence[Array], rank: int, space: Space) -> BlockRoom:
    """Return the room in `out` for blocks with these lengths along the first axis; raise ArgumentError or DtypeError.

    `given` are the arrays of the input. A gathering call is in place where `x` is the rank's own block of `out`.
    """
    is_list = row.output.blocks and isinstance(out, Sequence)
    outs: Sequence[Any] = out if isinstance(out, Sequence) and is_list else [out]
    if is_list and len(outs) != len(lengths):
        raise ArgumentError(f"{row.name}: out has {len(outs)} arrays, expected {len(lengths)}, one for each rank, or "
                            "one array for all", code="GC-COUNTS")
    shapes = [(length, *tail) for length in (lengths if is_list else [sum(lengths)])]
    with space.current:
        arrays = [check_output(row.name, one, [shape], dtype, None, f"out[{index}]" if is_list else "out")
                  for index, (one, shape) in enumerate(zip(outs, shapes, strict=True))]
    for array in arrays:
        space.check(row.name, "out", array)
    if not is_list and row.output.blocks and not row.input.blocks:
        first = sum(lengths[:rank])
        if same_memory(given[0], arrays[0][first:first + lengths[rank]]):
            return BlockRoom(out, arrays, is_list, True)
    return BlockRoom(out, arrays, is_list, check_apart(row.name, given, arrays))


def form_blocks(row: Collective, lengths: Sequence[int], tail: tuple[int, ...], dtype: numpy.dtype, kind: Dtype,
                space: Space, room: BlockRoom | None) -> tuple[Target | Targets | None, Any]:
    """Return the memory for the blocks of a result, and the result for the caller; (None, None) without `lengths`."""
    if not lengths:
        return None, None
    if room is None:
        array = space.empty(sum(lengths) * math.prod(tail), dtype)
        blocks = split(array, lengths, tail)
        return Target(array, space.read_as(array, kind)), blocks if row.output.blocks else blocks[0]
    if room.is_list:
        array = space.empty(sum(lengths) * math.prod(tail), dtype)
        return Targets(room.arrays, space.read_as(array, kind)), room.out
    formed = target(room.arrays[0], space)
    return formed._replace(row=space.read_as(formed.row, kind)), room.out


def prepare_blocks(source: Array | None, lengths: tuple[Sequence[int], Sequence[int]], most: int, tail: tuple[int, ...],
                   kind: Dtype, space: Space, formed: Target | Targets | None, result: Any, given: Any) -> Prepared:
    """Return the prepared call of a v-variant; `lengths` are the blocks of both sides, along the first axis.

    `most` is the length of the longest input or output of all ranks. Choices made by `most` are equal on all ranks.
    """
    width = math.prod(tail)
    cut = Cut(0, (tuple(length * width for length in lengths[0]), tuple(length * width for length in lengths[1])))
    row_in = None if source is None else space.read_as(source, kind)
    return Prepared(row_in, formed, kind, cut, most * width * kind.itemsize, result, space, tail, given)


def split(row: Array, lengths: Sequence[int], tail: tuple[int, ...]) -> list[Array]:
    """Return views of a row: a block for each length along the first axis."""
    width, stops = math.prod(tail), itertools.accumulate(lengths)
    return [row[(stop - length) * width:stop * width].reshape(length, *tail)
            for length, stop in zip(lengths, stops, strict=True)]


def kind_of(name: str, x: Array, dtype: object) -> Dtype:
    """Return the dtype used to reduce the elements of `x`.

    `dtype` reads the bytes of an unsigned carrier as another dtype of the same width, e.g. uint8 as float8_e4m3fn; None
    means the array's own dtype. Raises DtypeError.
    """
    own = row_of(x.dtype)
    if dtype is None:
        return own
    row = row_of(dtype)
    carrier = x.dtype.kind == "u" and x.dtype.itemsize == row.itemsize
    if own != row and not carrier:
        raise DtypeError(f"{name}: dtype={row.name} cannot be read from an array of {x.dtype}; "
                         f"pass x.astype(...) or an unsigned array of {row.itemsize} bytes per element")
    return row
