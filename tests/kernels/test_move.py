"""Copies, strided copies, scaling and casts on the CPU, bit for bit those of NumPy."""

import checks
import numpy
import pytest
from emulation import kernels, launcher, shared_objects
from expected import NARROW, REAL

from gpucoll.device import sources
from gpucoll.device.launch import axes_of
from gpucoll.dtypes import DTYPES
from oracle import DTYPES as NAMES

pytestmark = pytest.mark.kernel

WIDTHS = (1, 2, 4, 8, 16)
SCALES = [(what, name) for what in ("divide", "multiply", "truth") for name in NAMES
          if DTYPES[name].kind in {"divide": ("float", "complex"), "multiply": ("int", "float", "complex"),
                                   "truth": ("bool", "int", "float")}[what]]
MOVES = [make(width) for make in (sources.copy, sources.pack, sources.unpack) for width in WIDTHS]


@pytest.fixture(scope="module")
def move():
    return kernels(*MOVES)


@pytest.fixture(scope="module")
def scale():
    return kernels(*(sources.scale(what, DTYPES[name]) for what, name in SCALES))


@pytest.fixture(scope="module")
def casts():
    """One launcher for each source dtype, which knows all its targets."""
    libraries = shared_objects([sources.text(*(sources.cast(DTYPES[name], DTYPES[target]) for target in REAL))
                                for name in REAL])
    return {name: launcher(library) for name, library in zip(REAL, libraries, strict=True)}


def test_a_copy_is_the_same_bytes(move):
    checks.check_copy(move)


def test_strided_arrays_become_contiguous(move):
    checks.check_pack(move)


def test_contiguous_arrays_go_where_the_strides_say(move):
    checks.check_unpack(move)


def test_strides_may_take_more_than_32_bits(move):
    checks.check_far(move)


def test_indices_may_take_more_than_32_bits():
    """The path for 2^32 units and more, taken for all."""
    def always_long(source):
        assert source.count("a.count >> 32 == 0") == 2
        return source.replace("a.count >> 32 == 0", "false")

    long = kernels(*MOVES, change=always_long)
    checks.check_pack(long)
    checks.check_unpack(long)


@pytest.mark.parametrize(("what", "name"), SCALES)
def test_scaling_is_numpys(scale, what, name):
    checks.check_scale(scale, what, name)


@pytest.mark.parametrize("name", REAL)
def test_casts_are_numpys(casts, name):
    for target in REAL:
        checks.check_cast(casts[name], name, target)


@pytest.mark.parametrize("name", NARROW)
def test_all_values_are_converted_and_all_boundaries_rounded(name):
    row = DTYPES[name]
    checks.check_conversions(kernels(sources.cast(row, DTYPES["float32"]), sources.cast(DTYPES["float32"], row)), name)


def offsets(shape, strides):
    grid = numpy.zeros(shape, numpy.int64)
    for axis, stride in enumerate(strides):
        grid += (numpy.arange(shape[axis]) * stride).reshape([-1] + [1] * (len(shape) - axis - 1))
    return grid.ravel()


def test_axes_are_joined_and_units_as_wide_as_they_can_be():
    assert axes_of((4, 2, 8), (64, 32, 4), 4, 0) == (16, (16,), (16,))
    assert axes_of((4, 2, 8), (64, 32, 4), 4, 4) == (4, (64,), (4,))
    assert axes_of((5, 3), (24, 8), 8, 0) == (8, (15,), (8,))
    assert axes_of((5, 3), (-24, 4), 4, 8) == (4, (5, 3), (-24, 4))
    assert axes_of((5, 3), (48, 16), 16, 8) == (8, (30,), (8,))
    assert axes_of((2, 3), (0, 0), 4, 0) == (4, (6,), (0,))
    assert axes_of((), (), 2, 0) == (2, (1,), (2,))


def test_axes_keep_the_addresses_and_their_order():
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
