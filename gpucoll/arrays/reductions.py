"""Reductions by NumPy: a function for each op and dtype, the same for every executor.

The engine and the kernels have the exact sums in C++ (``kernels/device/exact.h``); those here serve ranks without the
engine. A sum of float64 keeps the rounding errors of its additions. Where no bit is lost, the sum is exact; all other
elements are added as fractions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy

from gpucoll.core import parsing
from gpucoll.core.dtypes import EXTENDED, Array, Dtype, numpy_dtype, row_of
from gpucoll.core.ops import EXACT, EXACT_NAMES, FUNCTIONS, OPS, Op

Combine: TypeAlias = Callable[[Array, Array, Sequence[Array]], None]
Combiner: TypeAlias = Callable[..., Any]
# Ops whose bits in NumPy depend on the place of an element, because NumPy has other loops for whole registers than for
# the rest: min and max of 0 and -0, and complex products, fused or not. In `_uniform`, the engine and the kernels the
# place makes no difference.
UNIFORM = {name: OPS[name]._replace(numpy=f"uniform {OPS[name].numpy}") for name in ("min", "max", "prod")}
WIDE = numpy.dtype(numpy.float64)
WIDENED = 1 << 14  # elements widened at a time: a block stays in the nearest cache


@functools.lru_cache(maxsize=256)
def combiner(op: Op, dtype: Dtype) -> Combine:
    """Return ``combine(dst, base, operands)``: dst = op(...op(base, operands[0])..., operands[-1]).

    float16, bfloat16 and float8 are combined in float32 and rounded once. Integers wrap around; NaN propagates. The
    exact ops are rounded once.
    """
    if op.name in EXACT_NAMES:
        return functools.partial(combine_exactly, dtype, op.name == EXACT["avg"].name)
    pair = _expression(op.expression) if op.expression else _uniform(op.numpy) if op.numpy.startswith("uniform ") else \
        getattr(numpy, op.numpy)
    if dtype.wide is None:
        return functools.partial(_combine, pair)
    return functools.partial(_combine_wide, pair, numpy.dtype(dtype.wide))


def _expression(text: str) -> Combiner:
    """Return the checked expression of `gpucoll.elementwise_op` in the form of a binary NumPy function with `out`."""
    code = parsing.code_of(text, "<elementwise_op>", "eval")
    known = {name: getattr(numpy, function) for name, (function, _) in FUNCTIONS.items()}
    # Without builtins an expression reaches no other function; NumPy needs __import__ when raising errors.
    known["__builtins__"] = {"__import__": __import__}

    def pair(a: Array, b: Array, out: Array) -> None:
        numpy.copyto(out, eval(code, known, {"a": a, "b": b}), casting="same_kind")

    return pair


def _uniform(name: str) -> Combiner:
    """Return the function of an op in `UNIFORM`, in the form of a binary NumPy function with `out`."""
    plain = getattr(numpy, name.removeprefix("uniform "))

    def extreme(a: Array, b: Array, out: Array) -> None:
        alike = a == b
        first = a[alike]  # before the call: `a` may be `out`
        plain(a, b, out=out)
        out[alike] = first

    def product(a: Array, b: Array, out: Array) -> None:
        if a.dtype.kind != "c":
            plain(a, b, out=out)
        else:
            real, imaginary = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
            out.real, out.imag = real, imaginary

    return product if plain is numpy.multiply else extreme


def _combine(pair: Combiner, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    # Overflow and NaN are defined results here: no warnings.
    with numpy.errstate(all="ignore"):
        for operand in operands:
            pair(base, operand, out=dst)
            base = dst


def _combine_wide(pair: Combiner, wide: numpy.dtype, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    with numpy.errstate(all="ignore"):
        for start in range(0, len(dst), WIDENED):
            block = slice(start, start + WIDENED)
            total = base[block].astype(wide)
            for operand in operands:
                pair(total, operand[block].astype(wide), out=total)
            dst[block] = total.astype(dst.dtype)


def extreme_of(dtype: numpy.dtype, *, highest: bool) -> Any:
    """Return the highest or the lowest value of a dtype."""
    if dtype.kind == "b":
        return highest
    if row_of(dtype).kind == "int":
        return numpy.iinfo(dtype).max if highest else numpy.iinfo(dtype).min
    limit = numpy.float32(numpy.inf if highest else -numpy.inf).astype(dtype)
    if numpy.isinf(limit.astype(numpy.float32)):
        return limit
    # float8_e4m3fn has no infinity
    return numpy.array(0x7E if highest else 0xFE, numpy.uint8).view(dtype)


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
