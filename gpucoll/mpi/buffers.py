"""mpi4py's buffer specifications (an array, [data, count, type], ...) read as one-dimensional arrays: rows.

Specifications not served by gpucoll, such as user-defined datatypes, raise `NotOurs`. The call then goes to mpi4py,
which also reports errors in the specification.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Sequence
from typing import Any

import numpy
from mpi4py import MPI
from numpy import ndarray

from gpucoll.arrays import Array, as_array, on_gpu
from gpucoll.core.dtypes import row_of
from gpucoll.core.ops import op_of
from gpucoll.errors import ArgumentError, DtypeError

FAST_DTYPES = frozenset("?bhilqBHILQefdFD")  # dtypes for the fast path, as characters
BYTE_OBJECTS = frozenset((bytearray, bytes, mmap.mmap))  # elements are bytes unless a datatype is given
BYTE = numpy.dtype("u1")
INTEGERS = (int, numpy.integer)
MPI_OPS: dict[int, Any] = {id(getattr(MPI, name)): name.lower() for name in
       ("SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR")}


def _spelled() -> dict[int, tuple[MPI.Datatype, numpy.dtype]]:
    """Return by handle the predefined MPI datatypes with a dtype in `FAST_DTYPES`, and it; characters are bytes."""
    found = {}
    for one in map(MPI.__dict__.get, dir(MPI)):
        if isinstance(one, MPI.Datatype) and one != MPI.DATATYPE_NULL and one.typestr[0] in "biufcS":
            dtype = numpy.dtype("u1" if one.typestr == "S1" else one.typestr)
            if dtype.char in FAST_DTYPES:
                found[one.handle] = one, dtype
    return found


MPI_DTYPES = _spelled()
SPELLED = {id(one): dtype for one, dtype in MPI_DTYPES.values()}  # by object identity, quicker than the handle


class NotOurs(Exception):
    """The call goes to mpi4py, on all ranks."""


class Derived(NotOurs):
    """A datatype without a dtype. Other ranks may pass the same data by another datatype, which gpucoll serves."""


def op_name(op: Any) -> str:
    """Return gpucoll's name of a predefined op; raise `NotOurs` for others."""
    try:
        return op_of(op).name
    except ArgumentError:
        raise NotOurs from None


def plain(spec: Any, blocks: int = 1) -> Array | None:
    """Return the elements of a frequent kind of buffer as a row; None for other kinds, handled by `row`.

    The row has `blocks` times the count in `spec`. The memory of a bytearray, bytes or mmap is opened anew in each call
    (0.2 us), since a cached array would prevent the owner from resizing or closing the object.
    """
    data, count, dtype = spec, None, None
    if type(spec) is list or type(spec) is tuple:
        if len(spec) == 2:
            data, datatype = spec
        elif len(spec) == 3:
            data, count, datatype = spec
        else:
            return None
        dtype = SPELLED.get(id(datatype))
        if dtype is None or (type(count) is not int and count is not None):
            return None
    if type(data) is not ndarray:
        return _bytes(data, count, dtype, blocks)
    if data.dtype.char not in FAST_DTYPES or (dtype is not None and dtype != data.dtype):
        return None
    if data.ndim != 1:
        if not data.flags.c_contiguous:
            return None
        data = data.reshape(-1)
    if count is None:
        return data
    return data[:count * blocks] if 0 <= count * blocks <= len(data) else None


def _bytes(data: Any, count: int | None, dtype: numpy.dtype | None, blocks: int) -> Array | None:
    """Return the elements of bytes as a row; None for other objects, and if count and length do not fit."""
    if type(data) not in BYTE_OBJECTS:
        return None
    dtype = dtype or BYTE
    try:
        length, rest = divmod(len(data), dtype.itemsize) if count is None else (count * blocks, 0)
        return None if rest or length < 0 else ndarray(length, dtype, data)
    except (TypeError, ValueError):  # too short, or closed
        return None


def row(spec: Any, blocks: int = 1) -> Array:
    """Return the first `blocks` times the count in `spec` elements as a row; all elements without a count."""
    data, count, start, datatype = _items(spec)
    if isinstance(count, list):
        count, start = count
    whole = _opened(data, datatype)
    if start is not None:
        whole = whole[_whole(start, len(whole)):]
    if count is None:
        if len(whole) % blocks:
            raise ArgumentError(f"a buffer of {len(whole)} elements cannot be divided into {blocks} equal "
                                "blocks", code="GC-COUNTS")
        return whole
    return whole[:_whole(count, len(whole), blocks) * blocks]


def parts(spec: Any, size: int) -> list[Array]:
    """Return views of the elements of each of `size` ranks, by the counts and displacements of `spec`.

    Without counts the elements are divided evenly, longer parts first; without displacements the parts are contiguous.
    """
    data, counts, starts, datatype = _items(spec)
    whole = _opened(data, datatype)
    if counts is None:
        counts = [len(whole) // size + (len(whole) % size > rank) for rank in range(size)]
    counts = [counts] * size if isinstance(counts, INTEGERS) else [*counts]
    if starts is None:
        starts = [0, *itertools.accumulate(counts)][:size]
    starts = [rank * starts for rank in range(size)] if isinstance(starts, INTEGERS) else [*starts]
    if len(counts) != size or len(starts) != size:
        raise ArgumentError(f"{len(counts)} counts and {len(starts)} displacements are not {size} numbers, one for "
                            "each rank",
                            code="GC-COUNTS")
    for count, start in zip(counts, starts, strict=True):
        _whole(count, len(whole) - _whole(start, len(whole)))
    return [whole[start:start + count] for count, start in zip(counts, starts, strict=True)]


def _whole(count: Any, most: int, blocks: int = 1) -> int:
    if not isinstance(count, INTEGERS) or not 0 <= count * blocks <= most:
        raise ArgumentError(f"{count!r} is not a valid count or displacement in a buffer of {most} "
                            "elements", code="GC-COUNTS")
    return int(count)


def _items(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return data, count, displacement and datatype of `spec`; None for missing entries."""
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    if len(spec) == 4:
        return spec[0], spec[1], spec[2], spec[3]
    if not 2 <= len(spec) <= 3:
        raise NotOurs
    data, count, datatype = (*spec, None)[:3]
    if isinstance(count, MPI.Datatype | str):
        return data, None, None, count
    if isinstance(count, tuple) and len(count) == 2:
        return data, *count, datatype
    return data, count, None, datatype


def _opened(data: Any, datatype: Any) -> Array:
    """Return `data` as a row of elements of `datatype`, without a copy."""
    if data is MPI.BOTTOM:
        raise ArgumentError("BOTTOM names no array; pass the array itself", code="GC-ARRAY")
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    dtype = None if datatype is None else MPI_DTYPES.get(datatype.handle, (None, None))[1]
    if datatype is not None and dtype is None:
        raise Derived
    known = plain(data)
    if known is not None and (dtype is None or dtype == known.dtype):
        return known
    try:
        array = numpy.empty(0, dtype) if data is None and dtype is not None else _array(data)
        if dtype is None:
            row_of(array.dtype)
    except (ArgumentError, DtypeError, TypeError, ValueError, BufferError):
        raise NotOurs from None
    if not array.flags.c_contiguous:
        array = array.T  # Fortran order: take the elements in memory order, as mpi4py does
        if not array.flags.c_contiguous:
            raise NotOurs
    elements = array.reshape(-1)
    if dtype is None or elements.dtype == dtype:
        return elements
    if elements.nbytes % dtype.itemsize:
        raise NotOurs
    return elements.view(dtype)


def _array(data: Any) -> Array:
    if not isinstance(data, ndarray) and not on_gpu(data):
        try:
            return numpy.asarray(memoryview(data))
        except TypeError:
            pass
    return as_array("", "a buffer", data)


def gpu_array(*specs: Any) -> Any:
    """Return the first GPU array among the buffers; None without one, or if CuPy cannot open the array."""
    for spec in specs:
        data = spec[0] if isinstance(spec, list | tuple) and spec else spec
        if type(data) is not ndarray and type(data) not in BYTE_OBJECTS and on_gpu(data):
            try:
                as_array("", "a buffer", data)
            except ArgumentError:
                return None
            return data
    return None


def blocks_of(x: Array, given: int, taken: int, size: int) -> Array:
    """Return the first `given` elements of each of `size` blocks of `taken` elements, for use as `out`."""
    if given > taken:
        raise ArgumentError(f"{given} elements come from each rank, but the buffer has room for {taken}",
                            code="GC-COUNTS")
    return x if given == taken else x.reshape(size, taken)[:, :given]


def fill(places: Sequence[Array], came: Sequence[Array]) -> None:
    """Copy the block received from each rank to the start of the rank's place; raise ArgumentError if too long."""
    for rank, (place, block) in enumerate(zip(places, came, strict=True)):
        if len(block) > len(place):
            raise ArgumentError(f"{len(block)} elements came from rank {rank}; the buffer has room for {len(place)}",
                                code="GC-COUNTS")
        place[:len(block)] = block
