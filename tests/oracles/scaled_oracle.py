"""Block-scaled formats by looking up every value: ml_dtypes has the elements, the rules stand here once more."""

import itertools
import math

import ml_dtypes
import numpy

ELEMENTS = {"int8": "i1", "mxfp8_e4m3": ml_dtypes.float8_e4m3fn, "mxfp8_e5m2": ml_dtypes.float8_e5m2,
            "mxfp4": ml_dtypes.float4_e2m1fn, "nvfp4": ml_dtypes.float4_e2m1fn}
TOP = {"mxfp8_e4m3": 8, "mxfp8_e5m2": 15, "mxfp4": 2}  # the exponent of the largest element


def values_of(dtype, bits=8):
    """Return the finite values of all codes, by code, with NaN for codes that no conversion writes."""
    codes = numpy.arange(1 << bits, dtype="u1").view(dtype)
    values = codes.astype("f8")
    return numpy.where(numpy.isfinite(values), values, numpy.nan)


def nearest(numbers, values):
    """Return the codes of the values nearest to `numbers`; of two the even code, of two zeros the one of this sign."""
    numbers = numpy.asarray(numbers, "f8").reshape(-1, 1)
    away = numpy.abs(values - numbers.clip(numpy.nanmin(values), numpy.nanmax(values)))
    is_nearest = away == numpy.fmin.reduce(away, axis=1, keepdims=True)
    order = 2 * (numpy.arange(len(values)) % 2) + (numpy.signbit(values) != numpy.signbit(numbers))
    codes = numpy.where(is_nearest, order, 9).argmin(axis=1)
    return numpy.where(numpy.isnan(numbers[:, 0]), numpy.nanargmin(values), codes)


def scale_of(name, most, of_row):
    """Return the stored scale of a block and the scale's value, as float32."""
    if name == "int8":
        scale = numpy.float32(most / 127)
        return scale, scale if scale < numpy.inf else numpy.float32("nan")
    if name == "nvfp4":
        scales = values_of(ml_dtypes.float8_e4m3fn)[:127]
        number = most / most.dtype.type(6) / most.dtype.type(of_row)
        (code,) = nearest(numpy.nan_to_num(number), scales)
        return code, numpy.float32(scales[code]) * of_row
    power = math.frexp(float(most))[1] - 1 - TOP[name] if 0 < most < math.inf else -127
    if not most < math.inf or power > 127:
        return 255, numpy.float32("nan")
    power = max(power, -127)
    return power + 127, numpy.float32(math.ldexp(1, power))


@numpy.errstate(all="ignore")
def quantised(name, block, rows):
    """Return codes, stored scales, scales of rows, and values in the dtype of `rows`, float32 or float64."""
    dtype, bits = rows.dtype, 4 if name in ("mxfp4", "nvfp4") else 8
    values = values_of(ELEMENTS[name], bits)
    if name == "int8":
        values[0x80] = numpy.nan  # -128 is never written
    of_rows = [numpy.maximum(numpy.float32(numpy.abs(row).max() / dtype.type(2688)), numpy.float32(2.0**-126))
               for row in rows]
    codes, found, scales = numpy.zeros(rows.shape, "u1"), numpy.zeros_like(rows), []
    for row, start in itertools.product(range(len(rows)), range(0, rows.shape[1], block)):
        here = rows[row, start:start + block]
        stored, factor = scale_of(name, numpy.abs(here).max(), of_rows[row])
        scales.append(stored)
        factor = factor.astype(dtype)
        some = nearest(here / (factor if factor > 0 else dtype.type(1)), values)
        codes[row, start:start + block] = some
        found[row, start:start + block] = values[some].astype(dtype) * factor
    return codes, scales, of_rows, found
