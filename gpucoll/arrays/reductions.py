"""Reductions by NumPy: a function for each op and dtype, the same for every executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy

from gpucoll.arrays.exact import combine_exactly
from gpucoll.core import parsing
from gpucoll.core.dtypes import Array, Dtype, row_of
from gpucoll.core.ops import EXACT, EXACT_NAMES, FUNCTIONS, OPS, Op

Combine: TypeAlias = Callable[[Array, Array, Sequence[Array]], None]
Combiner: TypeAlias = Callable[..., Any]
# Ops whose bits in NumPy depend on the place of an element, because NumPy has other loops for whole registers than for
# the rest: min and max of 0 and -0, and complex products, fused or not. In `_uniform`, the engine and the kernels the
# place makes no difference.
UNIFORM = {name: OPS[name]._replace(numpy=f"uniform {OPS[name].numpy}") for name in ("min", "max", "prod")}
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
