"""Reductions on the CPU, bit for bit as by NumPy: every op on every dtype."""

import checks
import emulation
import grid
import numpy
import pytest
from emulation import address
from expected import CASES

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS, elementwise_op
from gpucoll.device import sources
from gpucoll.device.launch import MOST_SOURCES
from gpucoll.errors import ArgumentError, DtypeError
from oracles.oracle import DTYPES as NAMES

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(("op", "name"), grid.often(grid.CORE_REDUCE, CASES))
def test_an_op_is_numpys(device, op, name):
    checks.check_reduce(device, OPS[op], name)


@pytest.mark.parametrize("name", grid.often([("float32",), ("float64",), ("int32",)], [(name,) for name in NAMES]))
def test_addresses_may_be_aligned_in_any_way(device, name):
    checks.check_misaligned(device, name)


@pytest.mark.parametrize(("text", "name"), grid.often(grid.CORE_WRITTEN, grid.WRITTEN))
def test_an_expression_is_numpys(device, text, name):
    checks.check_expression(device, elementwise_op(text), name, grid.EXPRESSIONS[text][1])


@pytest.mark.parametrize(("text", "name"), grid.NEAR)
def test_functions_that_no_standard_rounds_are_near_numpys(device, text, name):
    a, b = values = numpy.random.default_rng(1).uniform(0.1, 3, (2, 500)).astype(name)
    dst = numpy.empty(500, name)
    device.reduce(elementwise_op(text), DTYPES[name], [address(x) for x in values], address(dst), 500, None)
    exact = numpy.exp(a) - numpy.log(b) + 5 if "exp" in text else numpy.power(numpy.abs(a), b)
    numpy.testing.assert_allclose(dst, exact, rtol=8 * numpy.finfo(name).eps)


def test_sources_may_be_one_or_more_than_a_kernel_takes(device):
    """A lone source is copied; many sources are reduced in passes, and a late source cannot be the destination."""
    most = MOST_SOURCES
    reduction = checks.Reduction(device, 2 * most + 1, 1 << 12)
    reduction.check(OPS["sum"], "int32", 1, 100, [0, 4])
    for count in (9, most, most + 1, 2 * most - 1, 2 * most):
        reduction.check(OPS["sum"], "int32", count, 100, [0] * (count + 1))
        reduction.check(OPS["sum"], "int32", count, 100, [0] * (count + 1), in_place=3)
    rows = numpy.ones((most + 1, 4), numpy.int32)
    with pytest.raises(ArgumentError, match=f"source {most} of {most + 1}"):
        device.reduce(OPS["sum"], DTYPES["int32"], [address(x) for x in rows], address(rows[most]), 4, None)
    assert (rows == 1).all()


def test_any_launch_gives_the_same(device):
    for threads, processors in ((64, 1), (128, 3), (256, 2)):
        reduction = checks.Reduction(emulation.device(grid.UNITS, threads=threads, processors=processors))
        for count in (1, 2047, 2048, 2049, 50_000):
            reduction.check(OPS["sum"], "float16", 3, count, [2] * 4)


def test_what_no_kernel_can_be_made_of_is_refused():
    with pytest.raises(DtypeError, match="complex64"):
        sources.reducing("reduce", elementwise_op("abs(a) + b"), DTYPES["complex64"])
    for text in ("a + b + 1/0", "a + b + (1 << -1)"):
        with pytest.raises(ArgumentError, match="has no value"):
            elementwise_op(text)
