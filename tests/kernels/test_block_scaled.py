"""Block-scaled formats: on a GPU's grid, on one CPU thread, and by NumPy, against an oracle of looked up values."""

import itertools

import ml_dtypes
import numpy
import pytest
from emulation import Memory
from expected import kept, quiet, same, total_of, wide

from gpucoll.block_scaled import conversion
from gpucoll.core.formats import FORMATS
from gpucoll.device.launch import Quantised
from harness.grids import often
from oracles.oracle import kind
from oracles.scaled_oracle import ELEMENTS, quantised, values_of

pytestmark = pytest.mark.kernel

REAL = ("float32", "float64", "float16", "bfloat16")
COUNTS = (1, 7, 64, 700)
SHAPES = [(name, rows, block) for name in FORMATS for rows in (1, 3)
          for block in ((1, 7, 16, 256) if name == "int8" else (FORMATS[name].block,))]


def formed(name, rows, block, count):
    return Quantised(rows, -(-count // (rows * block)) * block, FORMATS[name]._replace(block=block))


@quiet
def by_blocks(form, x, before):
    """Return codes, stored scales, scales of rows, and residuals."""
    total = wide(x) if before is None else total_of(x, before)
    full = numpy.zeros(form.rows * form.share, total.dtype)
    full[:x.size] = total
    codes, scales, of_rows, values = quantised(form.format.name, form.format.block, full.reshape(form.rows, -1))
    return codes.ravel(), scales, of_rows, kept((full - values.ravel())[:x.size], x.dtype)


def given(name, count, seed):
    """Return numbers of many magnitudes, zeros, ties, subnormal numbers, and sometimes an infinity or a NaN."""
    random = numpy.random.default_rng([seed, count])
    x = random.standard_normal(count) * 2.0 ** random.integers(-12, 12, count)
    ties = random.integers(-512, 512, count) * 2.0 ** random.integers(-10, 5, count)
    ties *= 1 + random.integers(-1, 2, count) * 2.0**-40  # in float32 these are ties, in float64 only nearly
    x = numpy.where(random.random(count) < 0.3, ties, x)
    x[:count // 10] = 0
    x[count // 10:count // 5] *= 2.0**-20 if name == "float16" else 2.0**-140
    x[count // 2] = (numpy.inf, numpy.nan, 2)[seed % 3 if count > 300 else 2]
    with numpy.errstate(all="ignore"):
        return x.astype(kind(name))


def read(form, out):
    """Return the codes, the stored scales and the scales of rows that a call has written."""
    table, row = out.reshape(form.rows, form.stride), form.format
    codes = table[:, :form.share * row.bits // 8]
    if row.bits == 4:
        codes = numpy.stack([codes & 15, codes >> 4], -1)
    scales = table[:, form.scales:][:, :row.scale_bytes * form.share // row.block]
    scales = numpy.ascontiguousarray(scales).view("f4" if row.scale_bytes == 4 else "u1")
    of_rows = numpy.ascontiguousarray(table[:, form.tail:][:, :4]).view("f4") if row.name == "nvfp4" else None
    return codes.ravel(), scales.ravel(), None if of_rows is None else of_rows.ravel()


@pytest.mark.parametrize("name", often(REAL, "float32", "bfloat16"))
def test_elements_scales_and_what_is_lost(way, name):
    memories = [Memory() for _ in range(4)]
    misaligned = ("int8", 2, 16), 100, kind(name).itemsize
    unaligned = ("mxfp4", 2, 32), 100, kind(name).itemsize
    for turn, (shape, count, shift) in enumerate([*itertools.product(SHAPES, COUNTS, (0,)), misaligned, unaligned]):
        form = formed(*shape, count)
        x, before = given(name, count, turn), given(name, count, turn + 1)
        for lost in (before, None):
            held = memories[0].hold(x, shift), None if lost is None else memories[1].hold(lost, shift)
            after = memories[2].place(x.dtype, count, shift)
            out = memories[3].place(numpy.dtype("u1"), form.rows * form.stride)
            out[:] = 0
            conversion.quantise(form, *held, after, out)
            codes, scales, of_rows, missing = by_blocks(form, x, lost)
            found = read(form, out)
            assert (found[0] == codes).all(), (shape, count)
            assert same(found[1], numpy.array(scales, found[1].dtype)), (shape, count)
            assert found[2] is None or same(found[2], numpy.array(of_rows)), (shape, count)
            assert same(after, missing, zeros_free=True), (shape, count)
            again = numpy.zeros_like(out)
            conversion.quantise(form, *held, None, again)
            assert (again == out).all()
            assert all(memory.is_clean() for memory in memories)


@pytest.mark.parametrize("name", REAL)
def test_elements_become_numbers_again_and_the_mean_of_ranks(way, name):
    memory = Memory()
    for (what, rows, block), count in itertools.product(SHAPES, COUNTS):
        form = formed(what, rows, block, count)
        random = numpy.random.default_rng([rows, block, count])
        packed = random.integers(0, 256, (rows, form.stride), "u1")
        # Codes that no conversion writes may become anything.
        writes = packed[:, :form.share * form.format.bits // 8]
        largest = {"mxfp8_e4m3": 0x7E, "mxfp8_e5m2": 0x7B}.get(what, 0x7F)
        if form.format.bits == 8:
            writes[...] = random.integers(0, largest + 1, writes.shape) | random.integers(0, 2, writes.shape) << 7
        scales = packed[:, form.scales:][:, :form.format.scale_bytes * form.share // block]
        if what == "int8":
            scales[...] = random.standard_normal((rows, form.share // block)).astype("f4").view("u1")
        elif what == "nvfp4":
            scales[...] = random.integers(0, 127, scales.shape)
            packed[:, form.tail:][:, :4] = random.random((rows, 1)).astype("f4").view("u1")
        else:
            scales[...] = random.integers(100, 140, scales.shape)
        scales[:, -1:] = 255 if what.startswith("mx") else scales[:, -1:]
        dtype = wide(numpy.zeros(1, kind(name))).dtype
        codes, stored, of_rows = read(form, packed)
        factors = stored if what == "int8" else \
            values_of(ml_dtypes.float8_e4m3fn)[stored].astype("f4") * numpy.repeat(of_rows, form.share // block) \
            if what == "nvfp4" else numpy.where(stored == 255, numpy.nan, numpy.ldexp(1.0, stored.astype(int) - 127))
        values = values_of(ELEMENTS[what], form.format.bits)[codes].astype(dtype)
        values = (values * numpy.repeat(factors.astype("f4").astype(dtype), block)).reshape(rows, -1)
        with numpy.errstate(all="ignore"):
            for expected, terms in ((values.ravel()[:count], 1), (values.sum(axis=0) / dtype.type(rows), rows)):
                out = memory.place(kind(name), expected.size)
                conversion.dequantise(form, packed, out, terms, terms)
                assert same(out, expected.astype(dtype).astype(kind(name)), zeros_free=True), (what, rows, count, terms)
                assert memory.is_clean()


def test_the_largest_of_long_rows_is_found_in_parts(way):
    """A row of nvfp4 longer than `PART` is read in parts, by many blocks of threads."""
    for place in (0, 3 * conversion.ROW_PART + 5, 9 * conversion.ROW_PART - 1):
        x = numpy.ones(9 * conversion.ROW_PART, "f4")
        x[place] = -2688
        form = formed("nvfp4", 1, 16, x.size)
        out, after = numpy.zeros(form.stride, "u1"), numpy.empty_like(x)
        conversion.quantise(form, x, None, after, out)
        assert read(form, out)[2] == 1
        again = numpy.empty_like(x)
        conversion.dequantise(form, out, again)
        assert again[place] == -2688
        assert (x - again == after).all()
