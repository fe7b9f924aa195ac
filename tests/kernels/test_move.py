"""Copies, strided copies and scaling on the CPU, bit for bit as by NumPy."""


import checks
import grid
import numpy
import pytest
from emulation import device as compiled
from expected import NARROW

from gpucoll.device.launch import axes_of

pytestmark = pytest.mark.kernel

CHECKS = (checks.check_copy, checks.check_pack, checks.check_unpack, checks.check_far)


@pytest.mark.parametrize("check", CHECKS)
def test_bytes_go_where_the_strides_say(device, check):
    """The views include strides and offsets of more than 32 bits."""
    check(device)


def test_indices_may_take_more_than_32_bits():
    """The path for 2^32 units and more is taken for all sizes."""
    def always_long(source):
        assert source.count("a.count >> 32 == 0") == 2
        return source.replace("a.count >> 32 == 0", "false")

    long = compiled([grid.MOVES], always_long)
    checks.check_pack(long)
    checks.check_unpack(long)


@pytest.mark.parametrize(("what", "name"), grid.often(grid.CORE_SCALE, grid.SCALES))
def test_scaling_is_numpys(device, what, name):
    checks.check_scale(device, what, name)


@pytest.mark.parametrize("name", NARROW)
def test_all_values_are_converted_and_all_boundaries_rounded(device, name):
    checks.check_conversions(device, name)


def offsets(shape, strides):
    places = numpy.zeros(shape, numpy.int64)
    for axis, stride in enumerate(strides):
        places += (numpy.arange(shape[axis]) * stride).reshape([-1] + [1] * (len(shape) - axis - 1))
    return places.ravel()


def test_axes_are_joined_and_keep_the_addresses_and_their_order():
    assert axes_of((4, 2, 8), (64, 32, 4), 4, 0) == (16, (16,), (16,))  # the widest possible unit
    assert axes_of((4, 2, 8), (64, 32, 4), 4, 4) == (4, (64,), (4,))
    assert axes_of((5, 3), (48, 16), 16, 8) == (8, (30,), (8,))
    random = numpy.random.default_rng(3)
    for _ in range(300):
        shape = tuple(int(n) for n in random.integers(1, 5, random.integers(0, 5)))
        itemsize = int(random.choice([1, 2, 4, 8, 16]))
        strides = tuple(int(n) * itemsize for n in random.integers(-6, 7, len(shape)))
        if random.random() < 0.5:
            strides = numpy.empty(shape, f"V{itemsize}").strides
        address = int(random.integers(0, 16)) // itemsize * itemsize
        axes = axes_of(shape, strides, itemsize, address)
        found = offsets(axes.shape, axes.strides)
        plain = (offsets(shape, strides)[:, None] + numpy.arange(itemsize)).ravel()
        assert ((found[:, None] + numpy.arange(axes.unit)).ravel() == plain).all()
        assert not any(number % axes.unit for number in (address, *axes.strides))
