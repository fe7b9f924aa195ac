"""Arrays and lists of arrays as accepted by torch.distributed: checked before data is sent, filled afterwards.

In all checks `name` is the function called, and `what` the argument's name, for messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy

from gpucoll.arrays import Array, check_input, check_output, overlap
from gpucoll.arrays.blocks import check_apart
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, DtypeError, MismatchError


def list_of(name: str, what: str, xs: Any, size: int) -> Sequence[Any]:
    """Return `xs`, a list or tuple of `size` arrays; raise ArgumentError for other values."""
    if not isinstance(xs, list | tuple) or len(xs) != size:
        raise _not_a_list(name, what, xs, f"{size} arrays, one for each rank of the group")
    return xs


def check_list(name: str, what: str, values: Any, least: int) -> list[Any]:
    """Return `values`, a list of at least `least` objects; raise ArgumentError for other values."""
    if not isinstance(values, list) or len(values) < least:
        raise _not_a_list(name, what, values, f"at least {least} objects")
    return values


def _not_a_list(name: str, what: str, given: Any, wanted: str) -> ArgumentError:
    found = f"has {len(given)}" if isinstance(given, list | tuple) else f"is a {type(given).__name__}"
    return ArgumentError(f"{name}: {what} must be a list of {wanted}, but {found}", code="GC-COUNTS")


def check_absent(name: str, what: str, root: str, given: Any) -> None:
    """Raise ArgumentError for a list passed on a rank other than the root; None and empty lists are accepted."""
    if given is not None and not (isinstance(given, list | tuple) and not given):
        raise ArgumentError(f"{name}: {what} was passed on another rank than {root}; pass {what} on rank {root} only",
                            code="GC-ROOT")


def inputs(name: str, what: str, xs: Any, size: int) -> list[Array]:
    """Return the `size` arrays of a list, all of one dtype; raise ArgumentError or DtypeError."""
    arrays = [check_input(name, x, f"{what}[{index}]") for index, x in enumerate(list_of(name, what, xs, size))]
    for index, array in enumerate(arrays):
        if array.dtype != arrays[0].dtype:
            raise DtypeError(f"{name}: {what}[{index}] has dtype {array.dtype}, {what}[0] has {arrays[0].dtype}")
    return arrays


def outputs(name: str, what: str, xs: Any, size: int, dtype: numpy.dtype) -> list[Array]:
    """Return the `size` arrays of a list, writable and without shared memory; raise ArgumentError or DtypeError."""
    arrays = [check_output(name, x, (), dtype, None, f"{what}[{index}]")
              for index, x in enumerate(list_of(name, what, xs, size))]
    check_apart(name, (), arrays, what)
    return arrays


def apart(x: Array, out: Array) -> Array:
    """Return `x`, or a copy if `x` may share memory with `out`: torch allows the output as a slot of the input."""
    return x.copy() if overlap(x, out) else x


def alike(arrays: Sequence[Array]) -> bool:
    return all(array.shape == arrays[0].shape for array in arrays)


def check_shape(name: str, what: str, array: Array, other: str, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless `array` has `shape`, the shape of the argument named `other`."""
    if array.shape != shape:
        raise ArgumentError(f"{name}: {what} has shape {array.shape}, {other} has {shape}; the shapes must be equal",
                            code="GC-SHAPE")


def check_blocks(name: str, what: str, whole: Array, other: str, block: Array, size: int) -> None:
    """Raise ArgumentError unless `whole` consists of `size` blocks: concatenated, stacked, or in one row."""
    shape, rows = block.shape, block.shape[:1] or (1,)
    known = ((size * rows[0], *shape[1:]), (size, *shape), (size * block.size,))
    if whole.shape not in known:
        raise ArgumentError(f"{name}: {what} has shape {whole.shape}; for {other} of shape {shape} and {size} ranks it "
                            f"must be {known[0]}, concatenated, or {known[1]}, stacked", code="GC-SHAPE")


def splits_of(name: str, what: str, sizes: Any, array: Array, size: int) -> list[Array]:
    """Return `size` pieces of `array` along the first axis, with lengths `sizes`; None means equal lengths."""
    if not array.ndim:
        raise ArgumentError(f"{name}: a 0-dimensional array cannot be divided; reshape the array to (1,)",
                            code="GC-SHAPE")
    rows = array.shape[0]
    if sizes is None and rows % size == 0:
        sizes = [rows // size] * size
    given = list(sizes) if isinstance(sizes, Sequence | numpy.ndarray) else []
    if not all(is_whole(one) and one >= 0 for one in given) or len(given) != size or sum(given) != rows:
        raise ArgumentError(f"{name}: {what} {sizes!r} must be {size} whole numbers with the sum {rows}, the length of "
                            "the array's first axis; None stands for equal parts", code="GC-COUNTS")
    ends = numpy.cumsum([0, *given])
    return [array[first:last] for first, last in itertools.pairwise(ends)]


def fill(name: str, what: str, outs: Sequence[Array], blocks: Sequence[Array]) -> None:
    """Write block i into output i, reshaped; raise MismatchError, with no output written, if lengths differ."""
    for rank, (out, block) in enumerate(zip(outs, blocks, strict=True)):
        if out.size != block.size:
            raise MismatchError(f"{name}: rank {rank} of the group sent {block.size} elements, but {what}[{rank}] has "
                                f"{out.size}", code="GC-SHAPE", ranks=(rank,))
    for out, block in zip(outs, blocks, strict=True):
        out[...] = block.reshape(out.shape)
