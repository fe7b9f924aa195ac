"""Kernels converting gradients and Adam's moments to 16 bits.

A host without a compiler computes the same bits by NumPy. All arrays of a call are contiguous, and all on the host or
all on the same GPU. Residuals (the parts lost by rounding) that are not finite are written as 0.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy

from gpucoll.block_scaled.conversion import keep_finite, total_of
from gpucoll.internal import MOMENTS, Array, Dtype, address, kernels_of, magnitudes, nearest_code, row_of


def shorten(x: Array, before: Array, after: Array, out: Array) -> None:
    """Write out = x + before, in the dtype of `out`, and the residuals after = x + before - out."""
    kernels, stream = kernels_of(x)
    if kernels is not None:
        kernels.shorten(row_of(x.dtype), row_of(out.dtype), address(x), address(before), address(after), address(out),
                        x.size, stream)
        return
    with numpy.errstate(all="ignore"):
        total = total_of(x, before)
        out[...] = total
        keep_finite(after, total - out.astype(total.dtype))


def pack_moment(kind: str, x: Array, out: Array) -> None:
    """Write `x` as 16-bit words: "mean16" (sign, 6 bits of exponent, 9 of mantissa) or "square16" (6 and 10 bits)."""
    _convert(row_of(x.dtype), MOMENTS[kind], x, out)


def unpack_moment(kind: str, x: Array, out: Array) -> None:
    """Write the values of the words of `pack_moment`, in the dtype of `out`."""
    _convert(MOMENTS[kind], row_of(out.dtype), x, out)


def _convert(source: Dtype, target: Dtype, x: Array, out: Array) -> None:
    kernels, stream = kernels_of(x)
    if kernels is not None:
        kernels.cast(source, target, address(x), address(out), x.size, stream)
    elif source.name in MOMENTS:
        out[...] = _values(source.name)[x]
    else:  # round to the nearest value in the table of all values, ties to the even code
        with numpy.errstate(all="ignore"):
            values = _values(target.name)
            sign = numpy.signbit(x).astype("u2") << 15 if target.name == "mean16" else numpy.uint16(0)
            largest = numpy.isnan(values).argmax()  # the code of the first NaN; the code before is infinity
            amounts = values[:largest - 1]
            exact = numpy.abs(x.astype("f4")).astype("f8")
            code = numpy.where(exact >= amounts[-1] + (amounts[-1] - amounts[-2]) / 2, len(amounts),
                               nearest_code(amounts, exact))
            out[...] = numpy.where(numpy.isnan(exact), 0x7FFF if target.name == "mean16" else 0xFFFF, code) | sign


@functools.cache
def _values(kind: str) -> numpy.ndarray[Any, Any]:
    """Return the values of all 65,536 codes of a moment."""
    # Exponents are biased by 46 and 54; the bias of `magnitudes` for 6 bits is 31.
    mantissa, scale = (9, 2.0**-15) if kind == "mean16" else (10, 2.0**-23)
    values = magnitudes(6, mantissa, numpy.inf) * scale
    infinity = 63 << mantissa
    values[infinity], values[infinity + 1:] = numpy.inf, numpy.nan
    return numpy.concatenate([values, -values]) if kind == "mean16" else values
