"""Conversion to and from block-scaled formats, and the bound of the error, from the scales alone.

The kernels are compiled by g++ for the host and by NVRTC for GPUs. A host without a compiler computes the same bits by
NumPy. All arrays of a call are contiguous, and all on the host or all on the same GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy

from gpucoll.internal import (
    FORMATS,
    Array,
    Format,
    Quantised,
    Values,
    address,
    kernels_of,
    magnitudes,
    module_of,
    nearest_code,
    numpy_dtype,
    row_of,
)

ROW_PART, MOST_ROW_PARTS = 4096, 64  # elements of a row per block of threads, to find the largest; most blocks
NORMAL = numpy.finfo("f4").smallest_normal
# The scale of a row in nvfp4: the block with the row's largest magnitude has the largest float8, 448, as scale.
LARGEST_PRODUCT = 6 * 448
STEP = 2.0**-9  # the smallest float8_e4m3fn


def quantise(form: Quantised, x: Array, before: Array | None, after: Array | None, out: Array) -> None:
    """Write out = x + before, as elements and scales in the layout `form`, and the residuals `after`, if given.

    Without `before`, out = x. Residuals that are not finite are written as 0.
    """
    kernels, stream = kernels_of(x)
    if kernels is not None:
        maxima = _maxima(form, x, before) if form.format.scale == "e4m3" else None
        added, lost, most = (0 if one is None else address(one) for one in (before, after, maxima))
        kernels.quantise(row_of(x.dtype), form, address(x), added, lost, address(out), most, x.size, stream)
        return
    with numpy.errstate(all="ignore"):
        total = x.astype(wide_dtype(x.dtype)) if before is None else total_of(x, before)
        full = numpy.zeros(form.rows * form.share, total.dtype)
        full[:x.size] = total
        blocks = full.reshape(form.rows, -1, form.format.block)
        elements, scales, of_rows = _parts(form, out)
        most = numpy.abs(blocks).max(axis=2)
        if of_rows is not None:
            of_rows[...] = numpy.maximum((most.max(axis=1, keepdims=True) / LARGEST_PRODUCT).astype("f4"), NORMAL)
        scales[...] = _scales(form.format, most, of_rows)
        factors = _factors(form, out).astype(total.dtype)[..., None]
        values = _encode(form.format, blocks / numpy.where(factors > 0, factors, 1).astype(total.dtype), elements)
        if after is not None:
            keep_finite(after, (blocks - values.astype(total.dtype) * factors).reshape(-1)[:x.size])


def dequantise(form: Quantised, rows: Array, out: Array, terms: int = 1, divisor: int = 1) -> None:
    """Write the values of quantised rows to `out`: sums of `terms` consecutive rows each, divided by `divisor`."""
    kernels, stream = kernels_of(out)
    if kernels is not None:
        kernels.dequantise(row_of(out.dtype), form, address(rows), address(out), out.size, terms, divisor, stream)
        return
    with numpy.errstate(all="ignore"):
        wide, form = wide_dtype(out.dtype), form._replace(rows=rows.size // form.stride)
        elements, _, _ = _parts(form, rows)
        values = _decode(form.format, elements).astype(wide).reshape(form.rows, -1, form.format.block)
        values = (values * _factors(form, rows).astype(wide)[..., None]).reshape(-1, terms, form.share)
        total = values[:, 0]
        for term in range(1, terms):
            total = total + values[:, term]
        out[...] = (total / wide.type(divisor)).reshape(-1)[:out.size]


def largest_and_errors(form: Quantised, rows: Array) -> tuple[Any, Any]:
    """Return bounds of the magnitudes and of the errors of quantised values, one for each block, as float64.

    Both are NaN for a block with a NaN or an infinity.
    """
    factors = _factors(form, rows).astype("f8")
    errors = factors * (form.format.error * (1 + 2.0**-12))  # the scale itself and its products are rounded
    if form.format.scale == "float32":
        errors = errors + 127 * 2.0**-150  # a subnormal scale
    elif form.format.scale == "e4m3":
        errors = errors + 3 * STEP * _parts(form, rows)[2].astype("f8")  # a subnormal scale
    return factors * form.format.largest, errors


def largest_magnitude(x: Array) -> Any:
    """Return the largest magnitude in `x`, of one axis, as a float64 array of one element; NaN if there is a NaN."""
    if kernels_of(x)[0] is None:
        return numpy.abs(x.astype(wide_dtype(x.dtype))).max().astype("f8").reshape(1)
    return _maxima(Quantised(1, x.size, FORMATS["int8"]), x, None).astype("f8")


def _maxima(form: Quantised, x: Array, before: Array | None) -> Array:
    """Return the largest magnitude of each row of x + before, by kernels: of many parts of a row, then of these parts.
    """
    kernels, stream = kernels_of(x)
    assert kernels is not None
    parts = max(1, min(MOST_ROW_PARTS, form.share // ROW_PART))
    partial, maxima = (module_of(x).empty(form.rows * count, wide_dtype(x.dtype)) for count in (parts, 1))
    kernels.maxima(row_of(x.dtype), form, address(x), 0 if before is None else address(before), address(partial), parts,
                   x.size, stream)
    kernels.maxima(row_of(partial.dtype), form._replace(share=parts), address(partial), 0, address(maxima), 1,
                   partial.size, stream)
    return maxima


def total_of(x: Array, before: Array) -> Array:
    """Return x + before rounded to the dtype of `x`, converted to the wide dtype."""
    wide = wide_dtype(x.dtype)
    return (x.astype(wide) + before.astype(wide)).astype(x.dtype).astype(wide)


def keep_finite(after: Array, lost: Array) -> None:
    """Write the residuals `lost` into `after`, with 0 for values not finite: an infinite residual would never end."""
    xp = module_of(lost)
    after[...] = xp.where(xp.isfinite(lost), lost, lost.dtype.type(0))


def wide_dtype(dtype: numpy.dtype) -> numpy.dtype:
    """Return the dtype of sums: float32 for narrower floats."""
    return numpy_dtype(row_of(dtype).wide or row_of(dtype).name)


def _parts(form: Quantised, rows: Array) -> tuple[Array, Array, Any]:
    """Return views of the elements and the scales in quantised rows, and of the rows' scales, None without these."""
    table, row = rows.reshape(form.rows, form.stride), form.format
    scales = table[:, form.scales:form.scales + row.scale_bytes * form.share // row.block]
    return (table[:, :form.share * row.bits // 8], scales.view("f4") if row.scale == "float32" else scales,
            table[:, form.tail:form.tail + 4].view("f4") if row.scale == "e4m3" else None)


def _factors(form: Quantised, rows: Array) -> Any:
    """Return the values of all scales, as float32: a row for each row, NaN for blocks of NaN."""
    _, scales, of_rows = _parts(form, rows)
    if form.format.scale == "float32":
        return module_of(rows).where(scales < numpy.inf, scales, numpy.float32(numpy.nan))
    values = module_of(rows).asarray(_scale_values(form.format.scale))[scales]
    return values if of_rows is None else values * of_rows


@functools.cache
def _scale_values(kind: str) -> Any:
    """Return the values of the codes of a scale, as float32."""
    if kind == "e8m0":
        return numpy.array([*numpy.ldexp(1.0, numpy.arange(-127, 128)), numpy.nan], "f4")
    return numpy.array([*_scales_of_nvfp4(), numpy.nan], "f4")


def _scales_of_nvfp4() -> Values:
    return magnitudes(4, 3, 448)


def _scales(row: Format, most: Array, of_rows: Any) -> Any:
    """Return the scales of blocks with these largest magnitudes, in their stored form."""
    if row.scale == "float32":
        return (most / 127).astype("f4")
    if row.scale == "e4m3":
        number = most / most.dtype.type(6) / of_rows.reshape(-1, 1).astype(most.dtype)
        # NaN becomes 0, as in a kernel's comparisons: the scale of the row is NaN already.
        return nearest_code(_scales_of_nvfp4(), numpy.where(number > 0, number, 0))
    power = numpy.frexp(most)[1] - 1 - (int(row.largest).bit_length() - 1) + 127
    return numpy.where(~numpy.isfinite(most) | (power > 254), 255, numpy.where(most > 0, power, 0).clip(0, 255))


def _encode(row: Format, numbers: Array, elements: Array) -> Array:
    """Write the codes of the elements nearest to `numbers`, at most the largest; return their values. NaN: -largest."""
    most = row.largest
    numbers = numpy.where(numbers > most, most, numpy.where(numbers > -most, numbers, -most)).astype("f8")
    amounts = magnitudes(row.exponent, row.mantissa, most)
    code, is_negative = nearest_code(amounts, numpy.abs(numbers)), numpy.signbit(numbers)
    values = numpy.where(is_negative, -amounts[code], amounts[code])
    codes = (numpy.where(is_negative, -code, code) if row.exponent == 0 else code | is_negative << (row.bits - 1))
    codes = codes.astype("i8").astype("u1").reshape(len(numbers), -1)
    elements[...] = codes if row.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    return values + 0.0 if row.exponent == 0 else values  # integers have no -0


def _decode(row: Format, elements: Array) -> Any:
    """Return the elements of these codes as float64."""
    if row.exponent == 0:
        return elements.view("i1").astype("f8")
    codes = elements
    if row.bits == 4:
        codes = numpy.stack([elements & 15, elements >> 4], axis=-1).reshape(len(elements), -1)
    amounts = magnitudes(row.exponent, row.mantissa, row.largest)
    sign = 1 << (row.bits - 1)
    amounts = numpy.concatenate([amounts, numpy.full(sign - len(amounts), numpy.nan)])  # codes that are never written
    return numpy.where(codes & sign, -amounts[codes & (sign - 1)], amounts[codes & (sign - 1)])
