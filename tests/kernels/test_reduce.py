"""Reductions on the CPU, bit for bit those of NumPy: every op on every dtype."""

import checks
import expected
import numpy
import pytest
from emulation import Memory, address, kernels, launcher, shared_objects

from gpucoll.device import sources
from gpucoll.dtypes import DTYPES
from gpucoll.errors import ArgumentError, DtypeError
from gpucoll.ops import OPS, elementwise_op
from oracle import DTYPES as NAMES

pytestmark = pytest.mark.kernel

# What the user may write, on which dtypes, and what NumPy calls it.
EXPRESSIONS = {
    "a + b - a*b": (["int8", "uint16", "int64", "float16", "float64"], lambda a, b: a + b - a * b),
    "max(a + b, b)": (["int8", "int32", "uint8", "bfloat16"], lambda a, b: numpy.maximum(a + b, b)),
    "~(a ^ b)": (["bool", "int16", "uint64"], lambda a, b: ~(a ^ b)),
    "a << b | a >> b": (["int8", "uint8", "int32", "uint64"], lambda a, b: a << b | a >> b),
    "min(abs(a), -b) * 3": (["int8", "int64", "float32"], lambda a, b: numpy.minimum(numpy.abs(a), -b) * 3),
    "(a + b) * (1 / 2) + 0.1": (["float16", "float32", "float8_e5m2"], lambda a, b: (a + b) * 0.5 + 0.1),
    "sqrt(a*a + b*b)": (["float16", "float32", "float64"], lambda a, b: numpy.sqrt(a * a + b * b)),
    "a*b / (a + b)": (["float32", "float64"], lambda a, b: a * b / (a + b)),
    "(a - b) / a": (["complex64", "complex128"], lambda a, b: (a - b) / a),
    "pow(a, b & 15)": (["int16", "uint32"], lambda a, b: numpy.power(a, b & 15)),
    "a + b + 1e999": (["float32"], lambda a, b: a + b + numpy.inf),
}
WRITTEN = [(text, name) for text, (names, _) in EXPRESSIONS.items() for name in names]


def instances(name):
    own = [elementwise_op(text) for text, dtype in WRITTEN if dtype == name]
    built_in = [OPS[op] for op, dtype in expected.CASES if dtype == name]
    return [sources.reduce(op, DTYPES[name]) for op in (*built_in, *own)]


@pytest.fixture(scope="module")
def launchers():
    """One launcher for each dtype, which knows all its reductions."""
    libraries = shared_objects([sources.text(*instances(name), *map(sources.copy, (1, 2, 4, 8, 16))) for name in NAMES])
    return {name: launcher(library) for name, library in zip(NAMES, libraries, strict=True)}


@pytest.mark.parametrize(("op", "name"), expected.CASES)
def test_an_op_is_numpys(launchers, op, name):
    checks.check_reduce(launchers[name], OPS[op], name)


@pytest.mark.parametrize("name", NAMES)
def test_addresses_may_be_aligned_in_any_way(launchers, name):
    checks.check_misaligned(launchers[name], name)


@pytest.mark.parametrize(("text", "name"), WRITTEN)
def test_an_expression_is_numpys(launchers, text, name):
    checks.check_expression(launchers[name], elementwise_op(text), name, EXPRESSIONS[text][1])


@pytest.mark.parametrize(("text", "name"), [("exp(a) - log(b) + 5", "float32"), ("pow(abs(a), b)", "float64")])
def test_functions_that_no_standard_rounds_are_near_numpys(text, name):
    values = numpy.random.default_rng(1).uniform(0.1, 3, (2, 500)).astype(name)
    dst = numpy.empty(500, name)
    op = elementwise_op(text)
    kernels(sources.reduce(op, DTYPES[name])).reduce(op, DTYPES[name], [address(x) for x in values], address(dst), 500,
                                                     None)
    a, b = values
    exact = numpy.exp(a) - numpy.log(b) + 5 if "exp" in text else numpy.power(numpy.abs(a), b)
    numpy.testing.assert_allclose(dst, exact, rtol=8 * numpy.finfo(name).eps)


def test_a_function_of_complex_numbers_is_refused():
    with pytest.raises(DtypeError, match="complex64"):
        sources.reduce(elementwise_op("abs(a) + b"), DTYPES["complex64"])


def test_many_sources_are_reduced_in_passes(launchers):
    reduction = checks.Reduction(launchers["int32"])
    for count in (9, 15, 16, 17):
        reduction.check(OPS["sum"], "int32", count, 100, [0] * 18)
        reduction.check(OPS["sum"], "int32", count, 100, [0] * 18, in_place=3)


def test_a_late_source_cannot_be_the_destination(launchers):
    rows = numpy.ones((9, 4), numpy.int32)
    with pytest.raises(ArgumentError, match="source 8 of 9"):
        launchers["int32"].reduce(OPS["sum"], DTYPES["int32"], [address(x) for x in rows], address(rows[8]), 4, None)
    assert (rows == 1).all()


def test_a_lone_source_is_copied(launchers):
    checks.Reduction(launchers["int32"]).check(OPS["sum"], "int32", 1, 100, [0, 4])


@pytest.mark.parametrize(("threads", "processors"), [(64, 1), (128, 3), (256, 2)])
def test_any_grid_gives_the_same(threads, processors):
    own = kernels(sources.reduce(OPS["sum"], DTYPES["float16"]), threads=threads, processors=processors)
    reduction = checks.Reduction(own)
    for count in (1, 2047, 2048, 2049, 50_000):
        reduction.check(OPS["sum"], "float16", 3, count, [2] * 4)


def test_a_constant_without_value_is_refused():
    for text in ("a + b + 1/0", "a + b + (1 << -1)"):
        with pytest.raises(ArgumentError, match="has no value"):
            elementwise_op(text)


def test_memory_notices_what_is_written_beside_it():
    memory = Memory()
    array = memory.place(numpy.dtype("f4"), 5, 4)
    assert address(array) % 16 == 4
    array[:] = 1
    assert memory.is_clean()
    memory.bytes[memory.stop] = 0
    assert not memory.is_clean()
