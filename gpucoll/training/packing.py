"""Kernels converting gradients and moments to fewer bits: compiled by g++ on the host, by NVRTC on a GPU.

A host without a compiler computes the same bits by NumPy. All arrays of a call are contiguous, and all on the host or
all on the same GPU. Residuals (the parts lost by rounding) that are not finite are written as 0.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path
from typing import Any

import numpy

from gpucoll.arrays import Array, address, on_gpu
from gpucoll.core.dtypes import Dtype, numpy_dtype, row_of
from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.launch import Kernels, Quantised
from gpucoll.device.sources import MOMENTS, Instance, compressing, text
from gpucoll.device.store import user_store
from gpucoll.errors import BackendError

# Vectorise the loops for this CPU. None of these options changes a bit of a result.
OPTIONS = ("-O3", "-march=native", "-fno-trapping-math")


def shorten(x: Array, before: Array, after: Array, out: Array) -> None:
    """Write out = x + before, in the dtype of `out`, and the residuals after = x + before - out."""
    kernels, stream = _kernels(x)
    if kernels is not None:
        kernels.shorten(row_of(x.dtype), row_of(out.dtype), address(x), address(before), address(after), address(out),
                        x.size, stream)
        return
    with numpy.errstate(all="ignore"):
        total = _sum(x, before)
        out[...] = total
        _keep(after, total - out.astype(total.dtype))


def quantise(form: Quantised, x: Array, before: Array | None, after: Array, out: Array) -> None:
    """Write out = x + before as bytes and scales in the layout `form`, and the residuals `after`.

    Each block of elements is divided by its scale, the largest magnitude / 127, and rounded. Without `before`, out = x.
    """
    kernels, stream = _kernels(x)
    if kernels is not None:
        kernels.quantise(row_of(x.dtype), form, address(x), 0 if before is None else address(before), address(after),
                         address(out), x.size, stream)
        return
    with numpy.errstate(all="ignore"):
        total = x.astype(_wide(x.dtype)) if before is None else _sum(x, before)
        full = numpy.zeros(form.rows * form.share, total.dtype)
        full[:x.size] = total
        blocks = full.reshape(form.rows, -1, form.block)
        scales = (numpy.abs(blocks).max(axis=2) / 127).astype("f4")
        divisors = numpy.where(scales > 0, scales, numpy.float32(1)).astype(total.dtype)[..., None]
        whole = numpy.rint(blocks / divisors) + 0.0  # + 0.0 turns -0.0 into 0.0, as the rounding of the kernels does
        whole = numpy.where(whole > 127, 127, numpy.where(whole > -127, whole, -127)).astype(total.dtype)
        elements, factors = _parts(form, out)
        elements[...] = whole.astype("i1").reshape(form.rows, -1)
        factors[...] = scales
        _keep(after, (blocks - whole * scales[..., None].astype(total.dtype)).reshape(-1)[:x.size])


def dequantise(form: Quantised, rows: Array, out: Array, terms: int = 1, divisor: int = 1) -> None:
    """Write the values of quantised rows to `out`: sums of `terms` consecutive rows each, divided by `divisor`."""
    kernels, stream = _kernels(out)
    if kernels is not None:
        kernels.dequantise(row_of(out.dtype), form, address(rows), address(out), out.size, terms, divisor, stream)
        return
    with numpy.errstate(all="ignore"):
        wide = _wide(out.dtype)
        elements, factors = _parts(form._replace(rows=rows.size // form.stride), rows)
        values = elements.reshape(len(elements), -1, form.block) * factors[..., None].astype(wide)
        values = values.reshape(-1, terms, form.share)
        total = values[:, 0]
        for term in range(1, terms):
            total = total + values[:, term]
        out[...] = (total / wide.type(divisor)).reshape(-1)[:out.size]


def pack_moment(kind: str, x: Array, out: Array) -> None:
    """Write `x` as 16-bit words: "mean16" (sign, 6 bits of exponent, 9 of mantissa) or "square16" (6 and 10 bits)."""
    _convert(row_of(x.dtype), MOMENTS[kind], x, out)


def unpack_moment(kind: str, x: Array, out: Array) -> None:
    """Write the values of the words of `pack_moment`, in the dtype of `out`."""
    _convert(MOMENTS[kind], row_of(out.dtype), x, out)


def _convert(source: Dtype, target: Dtype, x: Array, out: Array) -> None:
    kernels, stream = _kernels(x)
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
            after = numpy.searchsorted(amounts, exact).clip(1, len(amounts) - 1)
            low, high = amounts[after - 1], amounts[after]
            up = (exact - low > high - exact) | ((exact - low == high - exact) & (after % 2 == 0))
            code = numpy.where(exact >= amounts[-1] + (amounts[-1] - amounts[-2]) / 2, len(amounts), after - 1 + up)
            out[...] = numpy.where(numpy.isnan(exact), 0x7FFF if target.name == "mean16" else 0xFFFF, code) | sign


@functools.cache
def _values(kind: str) -> numpy.ndarray[Any, Any]:
    """Return the values of all 65,536 codes of a moment."""
    sign, mantissa, bias = (1, 9, 46) if kind == "mean16" else (0, 10, 54)
    codes = numpy.arange(1 << 16)
    exponent, rest = codes >> mantissa & 63, codes & ((1 << mantissa) - 1)
    values = numpy.ldexp(rest + (exponent > 0) * 2.0**mantissa, numpy.maximum(exponent, 1) - bias - mantissa)
    values[(exponent == 63)] = numpy.inf
    values[(exponent == 63) & (rest > 0)] = numpy.nan
    return numpy.where(codes >> 15, -values, values) if sign else values


def _wide(dtype: numpy.dtype) -> numpy.dtype:
    return numpy_dtype(row_of(dtype).wide or row_of(dtype).name)


def _sum(x: Array, before: Array) -> Array:
    """Return x + before rounded to the dtype of `x`, converted to the wide dtype."""
    wide = _wide(x.dtype)
    return (x.astype(wide) + before.astype(wide)).astype(x.dtype).astype(wide)


def _keep(after: Array, lost: Array) -> None:
    after[...] = numpy.where(numpy.isfinite(lost), lost, lost.dtype.type(0))


def _parts(form: Quantised, rows: Array) -> tuple[Array, Array]:
    """Return views of the elements and of the scales in quantised rows."""
    table = rows.reshape(form.rows, form.stride)
    scales = table[:, form.scales:form.scales + 4 * form.share // form.block]
    return table[:, :form.share].view("i1"), scales.view("f4")


def _kernels(x: Array) -> tuple[Kernels | None, Any]:
    """Return the kernels for the host or the GPU of `x` (None: use NumPy), and the stream for launches."""
    if not on_gpu(x):
        return _on_host(), None
    device = _device(x.device.id)  # type: ignore[attr-defined]
    return device.kernels, device.stream(None)


@functools.cache
def _device(ordinal: int) -> Any:
    from gpucoll.device.cuda import CudaDevice

    return CudaDevice(ordinal)


def _processor() -> str:
    """Return the CPU's features, a part of the cache key, since different hosts may share a cache."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


@functools.cache
def _on_host() -> Kernels | None:
    """Return the host kernels, run by a single thread; None without a compiler."""
    source = text(*compressing())
    try:
        path = user_store().path(source, ".so", functools.partial(compile_shared, source, *OPTIONS),
                                 flags="\n".join([recipe(), *OPTIONS, _processor()]))
        library = ctypes.CDLL(str(path))
    except (BackendError, OSError):
        return None

    def load(instance: Instance) -> Any:
        function = getattr(library, instance.entry)
        function.restype = ctypes.c_char_p

        def launch(blocks: int, threads: int, arguments: Any, stream: Any) -> None:
            fault = function(1, 1, ctypes.c_void_p(arguments.ctypes.data))
            if fault is not None:
                raise BackendError(f"kernel {instance.entry}: {fault.decode()}", code="GC-KERNEL")

        return launch

    return Kernels(load, 1)
