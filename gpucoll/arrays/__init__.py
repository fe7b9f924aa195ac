"""A call's arrays made ready: checked, flat, with the place where the result is formed.

    accept              what is accepted as an array, where its elements lie
    space               where a call's arrays live, reductions by NumPy
    segments            memory that other processes map; blocks that lie alike on all ranks

Nothing here communicates: a call that is refused here has moved and written nothing.
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

__all__ = ["HOST", "NOTHING", "Array", "BlockRoom", "Cut", "Prepared", "Sizes", "Space", "Target", "address",
           "as_array", "block_shape", "bounds", "carried_dtype", "check_blocks", "check_input", "check_op",
           "check_rows", "check_writable", "combiner", "flat", "form_blocks", "is_borrowed", "joined", "kind_of",
           "module_of", "on_gpu", "overlap", "prepare", "prepare_blocks", "prepare_scatter", "room_for", "same_memory",
           "split", "target", "torch_stream"]


class Target(NamedTuple):
    """Where a result is formed (`row`) and where it belongs (`out`)."""

    out: Array
    row: Array

    def deliver(self, space: Space) -> None:
        """Write the result into a strided `out`, leaving its gaps alone."""
        if not space.works_on(self.out):
            space.unpack(self.row, self.out)


class Targets(NamedTuple):
    """Where blocks are formed, one after another (`row`), and the arrays where they belong."""

    outs: Sequence[Array]
    row: Array

    def deliver(self, space: Space) -> None:
        """Write every block into its array, leaving the gaps of strided ones alone."""
        start = 0
        for out in self.outs:
            space.unpack(self.row[start:start + out.size], out)
            start += out.size


def target(out: Array, space: Space) -> Target:
    """Return the target for `out`: its own memory where executors can work on it."""
    return Target(out, out.reshape(-1) if space.works_on(out) else space.empty(out.size, out.dtype))


def flat(x: Array, space: Space) -> Array:
    """Return the elements of `x` in C order as one contiguous row; a view where executors can work on its memory."""
    return x.reshape(-1) if space.works_on(x) else joined([x], space)


def joined(xs: Sequence[Array], space: Space) -> Array:
    """Return the elements of all `xs`, which are of one dtype, as one new row."""
    row = space.empty(sum(x.size for x in xs), xs[0].dtype)
    start = 0
    for x in xs:
        space.pack(x, row[start:start + x.size])
        start += x.size
    return row


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
    """A call's arrays, checked: flat input, target of the result, what the caller gets, bytes of the larger side.

    `shape` is that of an array, or of a block where there is one for each rank, without the first axis where blocks
    differ in it: ranks compare it. `given` is what the input was packed from, which must live as long.
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
        """Whether the input is in the memory of the result: all of that, or this rank's block."""
        if self.input is None or self.target is None:
            return False
        first, begin = address(self.target.row), address(self.input)
        return first <= begin and begin + self.input.nbytes <= first + self.target.row.nbytes


NOTHING = Prepared(None, None, row_of("uint8"), Cut(0), 0, None, HOST, ())


class Sizes(NamedTuple):
    """Who is asking: this rank, how many there are, the root."""

    rank: int
    size: int
    root: int


def prepare(row: Collective, x: object, out: object, who: Sizes, dtype: object = None,
            space: Space = HOST) -> Prepared:
    """Check `x` and `out` for collective `row` and return what an executor needs; raise ArgumentError or DtypeError."""
    with space.current:
        source = check_input(row.name, x)
    space.check(row.name, "x", source)
    if row.name == "broadcast":
        return _prepare_broadcast(row, x, source, who, space)
    shape = block_shape(row.name, source, who.size) if row.input.blocks else source.shape
    kind = kind_of(row.name, source, carried_dtype(x) if dtype is None else dtype)
    formed, result = _prepare_output(row, source, out, _result_shapes(row, source.shape, shape, who.size), who, space)
    # Nothing on a device knows a block of `out` that is input, too, which may be written before all have read it
    aside = formed is not None and space is not HOST and _is_own_block(row, source, formed.out, who)
    given = space.read_as(joined([source], space) if aside else flat(source, space), kind)
    if formed is not None:
        formed = Target(formed.out, space.read_as(formed.row, kind))
    call = _prepared(row, given, formed, kind, shape, who.size, result, space)._replace(given=source)
    return call._replace(shape=_without_ones(shape)) if row.input.blocks else call


def _prepared(row: Collective, source: Array | None, formed: Target | None, kind: Dtype,
              shape: tuple[int, ...], size: int, result: Any, space: Space) -> Prepared:
    elements = math.prod(shape)
    nbytes = elements * (size if row.blocks else 1) * kind.itemsize
    return Prepared(source, formed, kind, Cut(elements), nbytes, result, space, shape)


def block_shape(name: str, x: Array, size: int) -> tuple[int, ...]:
    """Return the shape s of a block of `x`, which is (size, \\*s), or else has the blocks one after another.

    Raises ArgumentError.
    """
    if x.ndim == 0 or x.shape[0] % size:
        raise ArgumentError(f"{name}: x has shape {x.shape}; its first axis must be {size}, a block for each rank, or "
                            f"a multiple of it: (size, *s) or (size * s[0], *s[1:])", code="GC-SHAPE")
    return x.shape[1:] if x.shape[0] == size else (x.shape[0] // size, *x.shape[1:])


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return by what ranks compare a block that is read as (\\*s) by some of them, and by others as (1, \\*s)."""
    return tuple(itertools.dropwhile(lambda length: length == 1, shape))


def _result_shapes(row: Collective, given: tuple[int, ...], shape: tuple[int, ...],
                   size: int) -> list[tuple[int, ...]]:
    """Return the shapes that an `out` may have, first that of results that are allocated.

    `shape` is that of a block. An input (size, \\*s) may as well be concatenated blocks (1, \\*s).
    """
    is_both = row.input.blocks and given[:1] == (size,)
    if not row.output.blocks:
        return [shape, (1, *shape)] if is_both else [shape]
    concatenated = [(size * shape[0], *shape[1:])] if shape else []
    return [(size, *shape), *concatenated, *([(size, 1, *shape)] if is_both else [])]


def _is_own_block(row: Collective, x: Array | None, out: Array, who: Sizes) -> bool:
    """Return whether a gathering is in place: `x` is this rank's block of a longer `out`."""
    return x is not None and row.output.blocks and not row.input.blocks and who.size > 1 \
        and is_block_of(x, out, who.rank, who.size)


def _prepare_output(row: Collective, x: Array, out: object, shapes: Sequence[tuple[int, ...]], who: Sizes,
                    space: Space) -> tuple[Target | None, Any]:
    array = None if out is None else _checked_output(row, out, shapes, x.dtype, x, who, space)
    if not row.output.exists(who.rank, who.root):
        return None, None
    if array is None:
        array = out = space.empty(shapes[0], x.dtype)
    return target(array, space), out


def _checked_output(row: Collective, out: object, shapes: Sequence[tuple[int, ...]], dtype: numpy.dtype,
                    x: Array | None, who: Sizes, space: Space) -> Array:
    with space.current:
        array = as_array(row.name, "out", out)
        is_own = array.shape in shapes and _is_own_block(row, x, array, who)
        check_output(row.name, array, shapes, dtype, None if is_own else x)
    space.check(row.name, "out", array)
    return array


def _prepare_broadcast(row: Collective, x: object, array: Array, who: Sizes, space: Space) -> Prepared:
    """The others' `x` is only written, and the root's read: a schedule may write there what is there already.

    So a root's array that is read-only takes part as a copy.
    """
    kind = row_of(array.dtype)
    if who.rank == who.root:
        source = flat(array, space) if getattr(array.flags, "writeable", True) else joined([array], space)
        return _prepared(row, source, Target(source, source), kind, array.shape, 1, x, space)._replace(given=array)
    check_writable(row.name, "x", array)
    return _prepared(row, None, target(array, space), kind, array.shape, 1, x, space)


def prepare_scatter(x: Array | None, out: object, shape: tuple[int, ...], dtype: numpy.dtype, who: Sizes,
                    space: Space) -> Prepared:
    """Return what scatter needs, the root's `shape` (size, \\*s) and dtype being known; `x` is the root's array."""
    row = COLLECTIVES["scatter"]
    shapes = _result_shapes(row, shape, shape[1:], who.size)
    array = None if out is None else _checked_output(row, out, shapes, dtype, x, who, space)
    if array is None:
        array = out = space.empty(shape[1:], dtype)
    source = None if x is None else flat(x, space)
    formed = target(array, space)
    return _prepared(row, source, formed, row_of(dtype), shape[1:], who.size, out, space)._replace(given=x)


class BlockRoom(NamedTuple):
    """What a caller has given for the blocks of a result: one array for all of them, or a list with one for each."""

    out: Any
    arrays: list[Array]
    is_list: bool
    is_input: bool  # whether some of it is input too


def room_for(row: Collective, out: object, lengths: Sequence[int], tail: tuple[int, ...], dtype: numpy.dtype,
             given: Sequence[Array], rank: int, space: Space) -> BlockRoom:
    """Return `out`, for blocks of these lengths along the first axis; raise ArgumentError or DtypeError.

    `given` are the arrays of the input. A gathering is in place where its `x` is its own block of `out`.
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
    """Return where the blocks of a result are formed and what the caller gets; without `lengths` there is neither."""
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
    """Return what a v-variant needs: its flat input, and the lengths (along the first axis) of both sides' blocks.

    `most` is the length of the longest input or output of all ranks: what is chosen by it must be alike on all.
    """
    width = math.prod(tail)
    cut = Cut(0, (tuple(length * width for length in lengths[0]), tuple(length * width for length in lengths[1])))
    row_in = None if source is None else space.read_as(source, kind)
    return Prepared(row_in, formed, kind, cut, most * width * kind.itemsize, result, space, tail, given)


def split(row: Array, lengths: Sequence[int], tail: tuple[int, ...]) -> list[Array]:
    """Return views of one row: a block for each length along the first axis."""
    width, stops = math.prod(tail), itertools.accumulate(lengths)
    return [row[(stop - length) * width:stop * width].reshape(length, *tail)
            for length, stop in zip(lengths, stops, strict=True)]


def kind_of(name: str, x: Array, dtype: object) -> Dtype:
    """Return the dtype in which the elements of `x` are reduced.

    `dtype` reads the bytes of an unsigned carrier as another dtype of the same width, e.g.
    uint8 as float8_e4m3fn; None is the array's own. Raises DtypeError.
    """
    own = row_of(x.dtype)
    if dtype is None:
        return own
    row = row_of(dtype)
    carrier = x.dtype.kind == "u" and x.dtype.itemsize == row.itemsize
    if own != row and not carrier:
        raise DtypeError(f"{name}: dtype={row.name} cannot be read from an array of {x.dtype}; "
                         f"pass x.astype(...) or an unsigned array of {row.itemsize} bytes an element")
    return row
