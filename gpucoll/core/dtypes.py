"""The table of dtypes: for each dtype the names in NumPy, CUDA, NCCL and MPI.

Names are strings, and the modules using NCCL, MPI or CUDA resolve the names. Reading the table imports none of these
libraries.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy

from gpucoll.errors import DtypeError

Array: TypeAlias = numpy.ndarray[Any, Any]  # NumPy's array, or CuPy's with the same interface
Kind = Literal["bool", "int", "float", "complex"]


class Dtype(NamedTuple):
    """A row of the table.

    Sums of a dtype with a `wide` dtype are formed in `wide`, and rounded once in each reduction of a schedule. `cuda`
    is the name of the type in ``kernels/device/number.h``. `nccl` and `mpi` are None where the library has no type for
    the dtype.
    """

    name: str
    kind: Kind
    itemsize: int
    cuda: str
    nccl: str | None
    mpi: str | None
    wide: str | None = None


DTYPES: dict[str, Dtype] = {
    row.name: row
    for row in (
        Dtype("bool", "bool", 1, "Bool", "ncclUint8", "C_BOOL"),
        Dtype("int8", "int", 1, "i8", "ncclInt8", "INT8_T"),
        Dtype("int16", "int", 2, "i16", None, "INT16_T"),
        Dtype("int32", "int", 4, "i32", "ncclInt32", "INT32_T"),
        Dtype("int64", "int", 8, "i64", "ncclInt64", "INT64_T"),
        Dtype("uint8", "int", 1, "u8", "ncclUint8", "UINT8_T"),
        Dtype("uint16", "int", 2, "u16", None, "UINT16_T"),
        Dtype("uint32", "int", 4, "u32", "ncclUint32", "UINT32_T"),
        Dtype("uint64", "int", 8, "u64", "ncclUint64", "UINT64_T"),
        Dtype("float16", "float", 2, "Float16", "ncclFloat16", None, "float32"),
        Dtype("bfloat16", "float", 2, "Bfloat16", "ncclBfloat16", None, "float32"),
        Dtype("float32", "float", 4, "float", "ncclFloat32", "FLOAT"),
        Dtype("float64", "float", 8, "double", "ncclFloat64", "DOUBLE"),
        Dtype("complex64", "complex", 8, "Complex<float>", None, "C_FLOAT_COMPLEX"),
        Dtype("complex128", "complex", 16, "Complex<double>", None, "C_DOUBLE_COMPLEX"),
        Dtype("float8_e4m3fn", "float", 1, "Float8E4m3fn", "ncclFloat8e4m3", None, "float32"),
        Dtype("float8_e5m2", "float", 1, "Float8E5m2", "ncclFloat8e5m2", None, "float32"),
    )
}
# Numbers of the dtypes in messages between two ranks: a receive of another dtype must not take a message.
# Code 0 means bytes of any dtype, code 1 a message of the library itself (gpucoll.distributed).
CODES = {name: code for code, name in enumerate(DTYPES, 2)}
# A sum in these dtypes may overflow although the mean is representable: see `gpucoll.arrays.scaled_mean`.
SMALL_RANGE = ("float16", "float8_e4m3fn", "float8_e5m2")
EXTENDED = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
ROWS = {numpy.dtype(name): row for name, row in DTYPES.items() if name not in EXTENDED}  # of NumPy's own dtypes


@functools.lru_cache(maxsize=64)
def code_of(dtype: numpy.dtype[Any]) -> int:
    """Return the number identifying a dtype in a message.

    >>> code_of(numpy.dtype("int64"))
    6
    """
    return CODES[row_of(dtype).name]


def row_of(dtype: object) -> Dtype:
    """Return the row of `dtype`: a NumPy dtype, a scalar type or a name.

    Raises DtypeError for a dtype outside the table and for foreign byte order.

    >>> row_of(numpy.float32).mpi
    'FLOAT'
    """
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    try:
        return _row_of(numpy.dtype(dtype))  # type: ignore[call-overload]
    except TypeError as error:
        if isinstance(error, DtypeError):
            raise
        raise DtypeError(f"{dtype!r} is not a dtype; supported: {', '.join(DTYPES)}") from None


@functools.lru_cache(maxsize=64)
def _row_of(dtype: numpy.dtype) -> Dtype:
    if not dtype.isnative:
        raise DtypeError(f"dtype {dtype.str} has foreign byte order; pass x.astype(x.dtype.newbyteorder('='))")
    # Integers go by width, so an 8-byte C long long is int64. Other kinds go by name: long double and datetime fail.
    name = f"{'u' * (dtype.kind == 'u')}int{8 * dtype.itemsize}" if dtype.kind in "iu" else dtype.name
    if name not in DTYPES:
        raise DtypeError(f"dtype {dtype} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


@functools.cache
def numpy_dtype(name: str) -> numpy.dtype[Any]:
    """Return the NumPy dtype of a row; bfloat16 and float8 need ml_dtypes, else DtypeError.

    >>> numpy_dtype("int8")
    dtype('int8')
    """
    if name not in EXTENDED:
        return numpy.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise DtypeError(f"dtype {name} needs ml_dtypes: pip install 'gpucoll[dtypes]'") from None
    return numpy.dtype(getattr(ml_dtypes, name))


def is_whole(number: object) -> TypeGuard[int]:
    """Return whether `number` is an integer of Python or NumPy; True and False are not.

    >>> is_whole(numpy.int8(3)), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    return isinstance(number, int | numpy.integer) and not isinstance(number, bool)


def are_whole(numbers: object) -> bool:
    """Return whether `numbers` is a list, a tuple or an array of integers; see `is_whole`."""
    return isinstance(numbers, Sequence | numpy.ndarray) and all(map(is_whole, numbers))
