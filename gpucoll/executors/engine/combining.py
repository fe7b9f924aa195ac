"""Rows combined by an op on the host: by the engine, or by NumPy for an op written by the user."""

from __future__ import annotations

from collections.abc import Sequence

from gpucoll.arrays import Array
from gpucoll.arrays.reductions import combine_written
from gpucoll.core.dtypes import DTYPES, Dtype
from gpucoll.core.ops import EXACT_NAMES, Op
from gpucoll.executors.engine.extension import library
from gpucoll.executors.engine.tables import OP_NAMES


def numbers_of(op: Op, dtype: Dtype) -> tuple[int, int]:
    """Return dtype and op by the engine's numbers; the op is -1 if NumPy combines."""
    name = "sum" if op.factor is not None and op.name not in EXACT_NAMES else op.name
    return list(DTYPES).index(dtype.name), OP_NAMES.index(name) if name in OP_NAMES else -1


def combine(op: Op, dtype: Dtype, to: Array, rows: Sequence[Array]) -> None:
    """Write op(...op(rows[0], rows[1])..., rows[-1]) to `to`, which may be one of the rows; two rows or more.

    float16, bfloat16 and float8 are combined in float32 and rounded once. Integers wrap around; NaN propagates. The
    exact ops are rounded once.

    >>> import numpy
    >>> from gpucoll.core.dtypes import row_of
    >>> from gpucoll.core.ops import EXACT
    >>> rows = [numpy.array([x]) for x in (1.0, 1e100, -1e100)]
    >>> combine(EXACT["sum"], row_of("float64"), rows[0], rows)
    >>> rows[0]
    array([1.])
    """
    numbers = numbers_of(op, dtype)
    if numbers[1] < 0:
        combine_written(op, dtype, to, rows[0], rows[1:])
    else:
        library().combine(*numbers, to, (*rows,))
