"""Gradients and moments in 16 bits: on a GPU's grid, on one CPU thread, and by NumPy, against one oracle."""

import itertools
from fractions import Fraction

import numpy
import pytest
from emulation import Memory
from expected import kept, random_array, same, total_of

from gpucoll.training import packing
from oracles.oracle import kind

pytestmark = pytest.mark.kernel

REAL = ("float32", "float64", "float16", "bfloat16")
COUNTS = (0, 1, 7, 64, 1000, 4099)
MOMENTS = {"mean16": (True, 9, 46), "square16": (False, 10, 54)}  # signed, bits of mantissa, bias


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
