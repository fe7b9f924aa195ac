"""Ops written by the user (`gpucoll.elementwise_op`), carried out by NumPy on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy

from gpucoll.core import parsing
from gpucoll.core.dtypes import Array, Dtype, row_of
from gpucoll.core.ops import FUNCTIONS, Op

Combine: TypeAlias = Callable[[Array, Array, Array], None]
WIDENED = 1 << 14  # elements widened at a time: a block stays in the nearest cache


def combine_written(op: Op, dtype: Dtype, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    """Write op(...op(base, operands[0])..., operands[-1]) to `dst`, for an op of the user.

    float16, bfloat16 and float8 are combined in float32 and rounded once.
    """
    pair = _expression(op.expression)
    # Overflow and NaN are defined results here: no warnings.
    with numpy.errstate(all="ignore"):
        if dtype.wide is None:
            for operand in operands:
                pair(base, operand, dst)
                base = dst
            return
        for start in range(0, len(dst), WIDENED):
            block = slice(start, start + WIDENED)
            total = base[block].astype(dtype.wide)
            for operand in operands:
                pair(total, operand[block].astype(dtype.wide), total)
            dst[block] = total.astype(dst.dtype)


@functools.lru_cache(maxsize=256)
def _expression(text: str) -> Combine:
    """Return the checked expression as a function that writes the result for two arrays to a third."""
    code = parsing.code_of(text, "<elementwise_op>", "eval")
    known = {name: getattr(numpy, function) for name, (function, _) in FUNCTIONS.items()}
    # Without builtins an expression reaches no other function; NumPy needs __import__ when raising errors.
    known["__builtins__"] = {"__import__": __import__}

    def pair(a: Array, b: Array, out: Array) -> None:
        numpy.copyto(out, eval(code, known, {"a": a, "b": b}), casting="same_kind")

    return pair


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
