"""Checks of kernels on the CPU against NumPy, for the real sources and for mutants."""

import itertools
import math

import numpy
from emulation import Memory, address
from expected import PAIRS, quiet, random_array, reduced, same, wide

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from oracles.oracle import kind

COUNTS = (0, 1, 7, 15, 16, 17, 255, 1000, 4097)
MANY = 40_000  # elements, so that every block iterates several times


def alignments(dtype):
    """Return an array's possible distances in bytes from a multiple of 16."""
    step = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return range(0, 16, step)


class Reduction:
    """Reductions by one launcher, in reused memory."""

    def __init__(self, launcher, arrays=20, nbytes=1 << 20):
        self._launcher = launcher
        self._memories = [Memory(nbytes) for _ in range(arrays)]

    def check(self, op, name, sources, count, misaligned, in_place=None, pair=None):
        """Check one reduction; `misaligned` has a number for each source, and the last for dst."""
        memories = self._memories[:sources + 1]
        arrays = [random_array(name, count, seed) for seed in range(sources)]
        held = [memory.hold(array, shift) for memory, array, shift in zip(memories, arrays, misaligned, strict=False)]
        target = memories[sources] if in_place is None else memories[in_place]
        dst = target.place(kind(name), count, misaligned[sources]) if in_place is None else held[in_place]
        self._launcher.reduce(op, DTYPES[name], [address(x) for x in held], address(dst), count, None)
        expected = reduced(pair or PAIRS[op.name], arrays)
        zeros_free = "min" in (op.name + op.expression) or "max" in (op.name + op.expression)
        assert same(dst, expected, zeros_free=zeros_free), (op.name, name, sources, count, misaligned)
        assert all(memory.is_clean() for memory in memories)
        assert all(same(x, array) for x, array in zip(held, arrays, strict=True) if x is not dst)


def check_reduce(launcher, op, name):
    """Check counts and numbers of sources, aligned; then equal misalignments, and an in-place reduction."""
    reduction, shifts = Reduction(launcher), alignments(kind(name))
    for count, sources in [*itertools.product(COUNTS, (2, 3)), (MANY, 2), (1000, 8)]:
        reduction.check(op, name, sources, count, [0] * 9)
    for shift in shifts:
        reduction.check(op, name, 3, 100, [shift] * 4)
    reduction.check(op, name, 3, MANY // 8, [shifts[-1]] * 3, in_place=1)


def check_misaligned(launcher, name):
    """Check every misalignment of either source against dst."""
    reduction, op = Reduction(launcher), OPS["sum" if "int" not in name and name != "bool" else "bxor"]
    for first, second in itertools.product(alignments(kind(name)), repeat=2):
        reduction.check(op, name, 2, 67, [first, second, 0])
        reduction.check(op, name, 2, 67, [0, first, second])


def check_expression(launcher, op, name, function):
    """Check a user's own op against the equivalent function of NumPy arrays."""
    for sources in (2, 5):
        Reduction(launcher).check(op, name, sources, 1000, [0] * 6, pair=function)


def check_copy(launcher):
    source, target = Memory(1 << 20), Memory(1 << 20)
    for width, count in itertools.product((1, 2, 4, 8, 16), (0, 1, 7, 16, 1000, MANY)):
        for src, dst in itertools.product(range(0, 16, min(width, 8)), repeat=2) if count == 1000 else [(0, 0), (8, 8)]:
            x = source.hold(random_array("uint8", width * count, count), src)
            y = target.place(numpy.dtype("u1"), x.size, dst)
            launcher.copy(address(x), address(y), count, width, None)
            assert (x == y).all(), (width, count, src, dst)
            assert target.is_clean()
            assert source.is_clean()


# Views of an array of the given shape, together covering all kinds of strides.
VIEWS = {
    "whole": ((8, 6, 4), lambda x: x),
    "transposed": ((5, 7, 3), lambda x: x.T),
    "backwards": ((6, 40), lambda x: x[::-1, ::-1]),
    "odd rows": ((64, 41), lambda x: x[::3, 1:]),
    "columns": ((33, 32), lambda x: x[:, ::5]),
    "scalar": ((), lambda x: x),
    "a long axis": ((4, 5000), lambda x: x[1:4:2, ::2]),
    "nine axes": ((2, 3) * 4 + (3,), lambda x: x.transpose(8, 1, 3, 0, 2, 5, 4, 7, 6)[:, ::2]),
    "nothing": ((4, 0, 3), lambda x: x.T),
}
REPEATED = {"repeated": ((7, 1, 5), lambda x: numpy.broadcast_to(x, (7, 6, 5))),
            "repeated inside": ((9, 1), lambda x: numpy.broadcast_to(x, (9, 17)))}
PACKED = ("uint8", "int16", "float32", "float64", "complex128")


def check_pack(launcher):
    source, target = Memory(1 << 20), Memory(1 << 20)
    for name, (shape, view), shift in itertools.product(PACKED, (VIEWS | REPEATED).values(), (0, 1)):
        values = random_array(name, math.prod(shape), 1)
        x = view(source.hold(values, shift * values.itemsize % 16).reshape(shape))
        y = target.place(x.dtype, x.size, (1 - shift) * values.itemsize % 16)
        launcher.pack(address(x), x.shape, x.strides, x.itemsize, address(y), None)
        assert y.tobytes() == x.tobytes(), (name, shape)
        assert target.is_clean()


def check_unpack(launcher):
    source, target = Memory(1 << 20), Memory(1 << 20)
    for name, (shape, view), shift in itertools.product(PACKED, VIEWS.values(), (0, 1)):
        before = random_array(name, math.prod(shape), 2)
        whole = target.hold(before, shift * before.itemsize % 16).reshape(shape)
        expected = before.copy().reshape(shape)
        x = source.hold(random_array(name, view(whole).size, 3))
        view(expected)[...] = x.reshape(view(expected).shape)
        y = view(whole)
        launcher.unpack(address(x), address(y), y.shape, y.strides, y.itemsize, None)
        assert whole.tobytes() == expected.tobytes(), (name, shape)
        assert target.is_clean()


def check_far(launcher):
    """Check strides, and offsets along any axis, of more than 32 bits; few pages of the memory are touched."""
    far, near = (5 << 30) + 64, Memory()
    whole = numpy.empty(2 * far + 64, numpy.uint8)
    rows = numpy.lib.stride_tricks.as_strided(whole[:16], (3, 16), (far, 1))
    rows[...] = numpy.arange(48).reshape(3, 16)
    for view in (rows, rows.T):
        packed = near.place(numpy.dtype("u1"), 48)
        launcher.pack(address(view), view.shape, view.strides, 1, address(packed), None)
        assert packed.tobytes() == view.tobytes()


@quiet
def scaled(what, array, factor):
    """Return values computed wide and rounded once."""
    if what == "truth":
        return (wide(array) != 0).astype(array.dtype)
    if array.dtype.kind == "c":
        factor = array.dtype.type(factor)
        return array / factor if what == "divide" else PAIRS["prod"](array, factor)
    values, factor = wide(array), wide(array).dtype.type(factor)
    return (values / factor if what == "divide" else values * factor).astype(array.dtype)


def check_scale(launcher, what, name):
    source, target = Memory(1 << 20), Memory(1 << 20)
    factor = 3 if "int" in name else 2.6 - 1.4j if name == "complex64" else 3.3  # not exact in narrow floats
    for count, (src, dst) in itertools.product((0, 1, 17, 1000, MANY), [(0, 0), (8, 8), (0, 8)]):
        values = random_array(name, count, 4)
        x, y = source.hold(values, src), target.place(values.dtype, count, dst)
        for out in (y, x):
            launcher.scale(what, DTYPES[name], address(x), address(out), count, factor, None)
            assert same(out, scaled(what, values, factor)), (what, name, count, src, dst)
        assert target.is_clean()
        assert source.is_clean()


@quiet
def check_conversions(launcher, name):
    """Check all values of a narrow float, converted up, and their products, which lie at all boundaries of rounding."""
    codes = numpy.arange(256 ** kind(name).itemsize).astype(f"u{kind(name).itemsize}").view(kind(name))
    *_, before, last = numpy.unique(wide(codes)[numpy.isfinite(wide(codes))]).tolist()
    ends = [end / 2.0 ** math.floor(math.log2(last)) for end in (last + (last - before) / 2, 1.03125 * last)]
    halves = [scale * half for half in (1, 1.5, 1.25, 1.75, 1.125) for scale in (1, 2, 0.5, 2.0**-6)]
    exact = numpy.array([*halves, *ends, *numpy.random.default_rng(7).standard_normal(30)], numpy.float32)
    given, found = Memory(codes.nbytes).hold(codes), Memory(codes.nbytes).place(codes.dtype, codes.size)
    for factor in (*exact, *numpy.nextafter(exact, numpy.float32(0)), *numpy.nextafter(exact, numpy.float32(9))):
        launcher.scale("multiply", DTYPES[name], address(given), address(found), found.size, factor, None)
        assert same(found, scaled("multiply", codes, factor)), (name, factor)
