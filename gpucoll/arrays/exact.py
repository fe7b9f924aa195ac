"""The exact sum of arrays, or their exact mean, rounded once, with NumPy: the bits depend on no order.

The engine and the kernels have the same sums in C++ (``kernels/device/exact.h``); this module serves ranks without the
engine. A sum of float64 keeps the rounding errors of its additions. Where no bit is lost, the sum is exact; all other
elements are added as fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy

from gpucoll.core.dtypes import EXTENDED, Array, Dtype, numpy_dtype

WIDE = numpy.dtype(numpy.float64)


def combine_exactly(dtype: Dtype, is_mean: bool, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    """Write the exact sum, or mean, of `base` and `operands` to `dst`, rounded once to `dtype`.

    Zero is -0 if all contributions are -0, else +0. A NaN, or infinities of both signs, give NaN.
    """
    kind = numpy_dtype(f"float{4 * dtype.itemsize}" if dtype.kind == "complex" else dtype.name)
    rows = [row.view(kind) for row in (base, *operands)]
    with numpy.errstate(all="ignore"):
        total, is_known = _fast(rows, kind, is_mean)
        for place in numpy.flatnonzero(~is_known):
            total[place] = _value([float(row[place]) for row in rows], is_mean, is_last=kind == WIDE)
        dst.view(kind)[...] = _narrowed(total, kind)


def _fast(rows: Sequence[Array], kind: numpy.dtype, is_mean: bool) -> tuple[Array, Array]:
    """Return the sums or means as float64, and where these are right: exact, or rounded once for float64."""
    total, parts = rows[0].astype(WIDE), len(rows)
    rest, is_known = numpy.zeros_like(total), numpy.ones(total.shape, bool)
    for row in rows[1:]:
        total, error = _two_sum(total, row.astype(WIDE))
        rest, error = _two_sum(rest, error)
        is_known &= error == 0  # false for a NaN, also from infinities
    is_exact = rest == 0
    if is_mean:
        is_known &= is_exact & (kind != WIDE)
        total = _odd_quotient(total, parts)
    elif kind == WIDE:
        total = numpy.where(is_exact, total, total + rest)  # adding +0 would lose the sign of -0
    else:
        is_known &= is_exact
    return total, is_known


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b rounded, and the rounding error (Knuth's TwoSum)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _odd_quotient(total: Array, parts: int) -> Array:
    """Return total / parts where exact, else the neighbouring float64 with an odd last bit; `parts` is below 2^26."""
    quotient: Array = total / parts
    bits = quotient.view(numpy.int64)
    # Either half of the quotient's bits times `parts` is exact, and so is the remainder.
    high = (bits & ~0x7FFFFFF).view(WIDE)
    left = (total - high * parts) - (quotient - high) * parts
    step = numpy.where((left > 0) == (quotient > 0), 1, -1)
    return numpy.where((left == 0) | (bits & 1 == 1), bits, bits + step).view(WIDE)


def _value(values: Sequence[float], is_mean: bool, *, is_last: bool) -> float:
    """Return the exact sum or mean: rounded to nearest where float64 `is_last`, else to odd, to be rounded again.

    A value rounded to odd has an odd last bit if inexact: no later rounding takes it for a tie.
    """
    infinities = {one for one in values if math.isinf(one)}
    if len(infinities) == 2 or any(map(math.isnan, values)):
        return math.nan
    if infinities:
        return infinities.pop()
    exact = sum(map(Fraction, values)) / (len(values) if is_mean else 1)
    if not exact:
        return -0.0 if all(math.copysign(1, one) < 0 for one in values) else 0.0
    try:
        value = float(exact)
    except OverflowError:
        return math.copysign(math.inf, exact)
    if is_last or Fraction(value) == exact or numpy.float64(value).view(numpy.uint64) & 1:
        return value
    return math.nextafter(value, math.inf if exact > value else -math.inf)


def _narrowed(total: Array, kind: numpy.dtype) -> Array:
    """Return `total` rounded once to `kind`."""
    if kind.name in EXTENDED:  # ml_dtypes rounds float64 twice, through float32: round to odd first
        near = total.astype(numpy.float32)
        is_even = near.view(numpy.uint32) & 1 == 0
        odd = numpy.nextafter(near, numpy.where(total > near, numpy.float32(math.inf), numpy.float32(-math.inf)))
        total = numpy.where((near != total) & is_even & ~numpy.isnan(total), odd, near)
    return total.astype(kind)
