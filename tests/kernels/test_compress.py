"""Compressed gradients and 16-bit moments: on a GPU's grid, on one CPU thread, and by NumPy, against one oracle."""

import itertools
from fractions import Fraction

import numpy
import pytest
from emulation import Memory
from emulation import device as emulated
from expected import quiet, random_array, same, wide

from gpucoll.device.launch import Quantised
from gpucoll.device.sources import compressing
from gpucoll.training import packing
from grids import often
from oracle import kind

pytestmark = pytest.mark.kernel

REAL = ("float32", "float64", "float16", "bfloat16")
COUNTS = (0, 1, 7, 64, 1000, 4099)
MOMENTS = {"mean16": (True, 9, 46), "square16": (False, 10, 54)}  # signed, bits of mantissa, bias


@pytest.fixture(params=["grid", "alone", "numpy"])
def way(request, monkeypatch):
    """Choose the place of computing: the emulated grid, one CPU thread, or NumPy."""
    if request.param == "grid":
        kernels = emulated([compressing()])
        monkeypatch.setattr(packing, "_kernels", lambda x: (kernels, None))
    elif request.param == "numpy":
        monkeypatch.setattr(packing, "_on_host", lambda: None)
    else:
        assert packing._on_host() is not None
    return request.param


@quiet
def total_of(x, before):
    return wide((wide(x) + wide(before)).astype(x.dtype))


@quiet
def kept(lost, dtype):
    return numpy.where(numpy.isfinite(lost), lost, 0).astype(dtype)


@pytest.mark.parametrize(("name", "target"), list(itertools.product(REAL, REAL[2:])))
def test_what_is_sent_and_what_is_lost_are_the_sum(way, name, target):
    memories = [Memory() for _ in range(4)]
    for count, shift in [*itertools.product(COUNTS, (0,)), (100, kind(name).itemsize)]:
        x, before = random_array(name, count, 1), random_array(name, count, 2)
        held = memories[0].hold(x, shift), memories[1].hold(before, shift)
        after, out = memories[2].place(kind(name), count, shift), memories[3].place(kind(target), count)
        packing.shorten(*held, after, out)
        total = total_of(x, before)
        with numpy.errstate(all="ignore"):
            expected = total.astype(kind(target))
            lost = kept(total - expected.astype(total.dtype), kind(name))
        assert same(out, expected), (count, shift)
        assert same(after, lost, zeros_free=True), (count, shift)
        assert all(memory.is_clean() for memory in memories)


def by_blocks(form, x, before):
    """Return the elements, the scales and the lost parts, block by block."""
    total = wide(x) if before is None else total_of(x, before)
    full = numpy.zeros(form.rows * form.share, total.dtype)
    full[:x.size] = total
    codes, scales = numpy.zeros(full.size, "i1"), numpy.zeros(full.size // form.block, "f4")
    with numpy.errstate(all="ignore"):
        for number in range(scales.size):
            block = slice(number * form.block, (number + 1) * form.block)
            scales[number] = numpy.abs(full[block]).max() / 127
            factor = scales[number].astype(total.dtype)
            whole = numpy.rint(full[block] / (factor if factor > 0 else 1))
            codes[block] = numpy.where(numpy.isnan(whole), -127, numpy.clip(whole, -127, 127)).astype("i1")
            full[block] -= codes[block] * factor
    return codes, scales, kept(full[:x.size], x.dtype)


FORMS = [(rows, block) for block in (1, 7, 16, 256) for rows in (1, 3)]


def formed(rows, block, count):
    return Quantised(rows, -(-count // (rows * block)) * block, block)


@pytest.mark.parametrize("name", often(REAL, "float32", "bfloat16"))
def test_eight_bits_and_a_scale_for_each_block(way, name):
    memories = [Memory() for _ in range(4)]
    misaligned = (2, 16), 100, kind(name).itemsize
    for (rows, block), count, shift in [*itertools.product(FORMS, COUNTS[1:], (0,)), misaligned]:
        form = formed(rows, block, count)
        random = numpy.random.default_rng([rows, block, count])
        x, before = (random.standard_normal((2, count)) * 10.0 ** random.integers(-3, 3, (2, 1))).astype(kind(name))
        x[:count // 10] = before[:count // 10] = 0
        x[count // 2] = numpy.inf if count > 300 else 2
        for lost in (before, None):
            held = memories[0].hold(x, shift), None if lost is None else memories[1].hold(lost, shift)
            after = memories[2].place(x.dtype, count, shift)
            out = memories[3].place(numpy.dtype("u1"), form.rows * form.stride)
            out[:] = 0
            packing.quantise(form, *held, after, out)
            codes, scales, missing = by_blocks(form, x, lost)
            table = out.reshape(form.rows, form.stride)
            assert same(table[:, :form.share].view("i1").ravel(), codes), (form, count)
            found = numpy.ascontiguousarray(table[:, form.scales:][:, :4 * form.share // block]).view("f4").ravel()
            assert same(found, scales), (form, count)
            assert same(after, missing, zeros_free=True), (form, count)
            assert all(memory.is_clean() for memory in memories)


@pytest.mark.parametrize("name", REAL)
def test_eight_bits_become_numbers_again_and_the_mean_of_ranks(way, name):
    memory = Memory()
    for (rows, block), count in itertools.product(FORMS, COUNTS[1:]):
        form = formed(rows, block, count)
        random = numpy.random.default_rng([rows, block, count])
        packed = numpy.zeros((rows, form.stride), "u1")
        codes = random.integers(-127, 128, (rows, form.share))
        packed[:, :form.share] = codes.astype("i1").view("u1")
        scales = random.standard_normal((rows, form.share // block)).astype("f4")
        packed[:, form.scales:form.scales + 4 * scales.shape[1]] = scales.view("u1")
        dtype = wide(numpy.zeros(1, kind(name))).dtype
        values = codes.astype(dtype) * numpy.repeat(scales.astype(dtype), block, axis=1)
        for expected, terms in ((values.ravel()[:count], 1), (values.sum(axis=0) / rows, rows)):
            out = memory.place(kind(name), expected.size)
            packing.dequantise(form, packed, out, terms, terms)
            assert same(out, expected.astype(dtype).astype(kind(name)), zeros_free=True), (form, count, terms)
            assert memory.is_clean()


def exact(code, signed, mantissa, bias):
    """Return the value of a code of a non-negative number, as a fraction."""
    exponent, rest = code >> mantissa & 63, code & ((1 << mantissa) - 1)
    return Fraction(rest + (exponent > 0) * (1 << mantissa)) * Fraction(2) ** (max(exponent, 1) - bias - mantissa)


@pytest.mark.parametrize(("moment", "name"), list(itertools.product(MOMENTS, REAL[:2])))
def test_moments_are_the_nearest_of_their_format(way, moment, name):
    """All codes survive a round trip; halfway values go to the even code, and values just beside do not."""
    signed, mantissa, _ = MOMENTS[moment]
    codes = numpy.arange(63 << mantissa, dtype="u2")
    values = numpy.array([float(exact(int(code), *MOMENTS[moment])) for code in codes])  # exact in float32
    out = numpy.empty(codes.size, name)
    packing.unpack_moment(moment, codes, out)
    assert (out == values).all()
    halves = ((values[1:] + values[:-1]) / 2).astype("f4")  # float64 is converted through float32
    below, above = (numpy.nextafter(halves, numpy.float32(end)) for end in (0, 1e9))
    for given, expected in ((values, codes), (halves, codes[:-1] + codes[:-1] % 2), (above, codes[1:]),
                            (below, codes[:-1])):
        packed = numpy.empty(given.size, "u2")
        packing.pack_moment(moment, given.astype(name), packed)
        assert (packed == expected).all()
        if signed:
            packing.pack_moment(moment, -given.astype(name), packed)
            assert (packed == expected | 0x8000).all()
    packed, large = numpy.empty(3, "u2"), numpy.empty(3, name)
    packing.pack_moment(moment, numpy.array([1e9, numpy.inf, numpy.nan], name), packed)
    packing.unpack_moment(moment, packed, large)
    assert numpy.isinf(large[:2]).all()
    assert numpy.isnan(large[2])
