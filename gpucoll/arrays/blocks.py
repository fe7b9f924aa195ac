"""The blocks of the v-variants: arrays that differ in the first axis, their checks, and memory for a result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
from numpy.lib.array_utils import byte_bounds

from gpucoll.arrays import (
    Array,
    Cut,
    Prepared,
    Space,
    Target,
    Targets,
    bounds,
    check_input,
    check_output,
    overlap,
    same_memory,
    target,
)
from gpucoll.core.collectives import Collective
from gpucoll.core.dtypes import Dtype
from gpucoll.errors import ArgumentError, DtypeError


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
