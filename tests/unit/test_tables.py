"""The tables: every op against NumPy, every dtype's row complete, chunk arithmetic."""

import itertools

import numpy
import pytest

from gpucoll.arrays.space import HOST, check_op, combiner
from gpucoll.core.chunks import Layout, bound
from gpucoll.core.dtypes import DTYPES, numpy_dtype, row_of
from gpucoll.core.ops import OPS, ReduceOp, elementwise_op, op_of, premul_sum
from gpucoll.errors import ArgumentError, DtypeError
from oracles import oracle


def test_chunks_cover_every_element_once():
    for elements, chunks in itertools.product((0, 1, 7, 8, 9, 65537), (1, 3, 8, 1001)):
        ends = [bound(elements, chunks, index) for index in range(chunks + 1)]
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        assert (ends[0], ends[-1]) == (0, elements)
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)
    layout = Layout(elements=10, chunks=4)  # every block is cut alike
    assert [layout.span(chunk, 1) for chunk in (0, 3, 8, 11)] == [(0, 3), (8, 10), (20, 23), (28, 30)]


def test_the_dtypes_are_the_contracts():
    assert sorted(DTYPES) == sorted(oracle.DTYPES)
    for name, row in DTYPES.items():
        dtype = numpy_dtype(name)
        assert row_of(dtype) is row_of(name) is row
        assert dtype.itemsize == row.itemsize
    assert row_of(numpy.longlong).name == "int64"


def test_other_dtypes_and_ops_are_refused():
    for wrong in (object, "U3", "M8[s]", numpy.longdouble, ">f4", [("a", "f4")], "nonsense"):
        with pytest.raises(DtypeError):
            row_of(wrong)
    for wrong in ("summ", 3, None, sum):
        with pytest.raises(ArgumentError):
            op_of(wrong)
    assert op_of(ReduceOp.MAX) is op_of("max") is OPS["max"]
    assert {member.value for member in ReduceOp} == set(OPS)


def python_value(op, a, b):
    """Combine two values by plain Python on plain numbers, an oracle sharing nothing with the library."""
    return {"sum": lambda: a + b, "avg": lambda: a + b, "prod": lambda: a * b, "min": lambda: min(a, b),
            "max": lambda: max(a, b), "band": lambda: a & b, "bor": lambda: a | b, "bxor": lambda: a ^ b,
            "land": lambda: bool(a) and bool(b), "lor": lambda: bool(a) or bool(b),
            "lxor": lambda: bool(a) != bool(b)}[op]()


@pytest.mark.parametrize("op", OPS)
def test_every_op_on_every_dtype_is_pythons(op):
    for dtype, row in DTYPES.items():
        kind = numpy_dtype(dtype)
        if row.kind not in OPS[op].kinds:
            with pytest.raises(DtypeError):
                check_op("all_reduce", OPS[op], row)
            continue
        check_op("all_reduce", OPS[op], row)
        a, b = numpy.array([0, 1, 2, 3, 0, 1]).astype(kind), numpy.array([0, 0, 1, 2, 3, 1]).astype(kind)
        result = numpy.empty_like(a)
        combiner(OPS[op], row)(result, a, [b])
        expected = numpy.array([python_value(op, x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
        assert result.tobytes() == expected.astype(kind).tobytes(), dtype
        if op == "avg":
            continue
        values = numpy.array([0, 1, 1, 0]).astype(kind)
        identity, result = numpy.empty_like(values), numpy.empty_like(values)
        HOST.fill_identity(OPS[op], identity, row)
        combiner(OPS[op], row)(result, values, [identity])
        assert result.tobytes() == values.tobytes(), dtype


def test_half_precision_is_rounded_once_per_reduction():
    """1 + 2^-11 + 2^-11 is 1 when rounded after each addition, and 1 + 2^-10 when rounded once."""
    one, half_step = numpy.array([1], numpy.float16), numpy.array([2.0**-11], numpy.float16)
    result = numpy.empty_like(one)
    combiner(OPS["sum"], DTYPES["float16"])(result, one, [half_step, half_step])
    assert result[0] == numpy.float16(1 + 2.0**-10)


def test_nan_wins_min_and_max_avg_is_divided_and_integers_wrap():
    nan = numpy.array([numpy.nan, 1, numpy.nan], numpy.float32)
    result = numpy.empty(3, numpy.float32)
    for op in ("min", "max"):
        combiner(OPS[op], DTYPES["float32"])(result, nan, [numpy.array([1, numpy.nan, 2], numpy.float32)])
        assert numpy.isnan(result).all()
    for op, ranks, given, finished in (("avg", 3, [3, 6], [1, 2]), ("lor", 1, [0, 7], [0, 1])):
        row = numpy.array(given, numpy.float32)
        HOST.finish(OPS[op], row, DTYPES["float32"], ranks)
        assert row.tolist() == finished
    small = numpy.array([100], numpy.int8)
    combiner(OPS["sum"], DTYPES["int8"])(small, small, [numpy.array([100], numpy.int8)])
    assert small[0] == -56


def test_a_factor_is_applied_once_and_rounded_once():
    row = numpy.array([1, 3], numpy.float16)
    half, thirds = DTYPES["float16"], (numpy.float32([1, 3]) / 3).astype("f2")
    assert HOST.premultiplied(premul_sum(1 / 3), row, half).tolist() == thirds.tolist()
    assert HOST.premultiplied(OPS["sum"], row, half) is row
    with pytest.raises(DtypeError):
        check_op("all_reduce", premul_sum(0.5), DTYPES["int32"])
    check_op("all_reduce", premul_sum(2), DTYPES["int32"])
    with pytest.raises(ArgumentError):
        premul_sum("two")


def test_an_expression_is_evaluated_and_refused_where_it_means_something_else_in_cuda():
    for expression in ("a", "a ** b", "a % b", "a // b", "a if b else a", "a and b", "a < b", "a.real + b",
                       "open(a, b)", "max(a)", "c + a + b", "a + b; a", "(lambda: a)() + b", "a + b + 1j",
                       "a + b + True", "", "__import__('os')", 3):
        with pytest.raises(ArgumentError, match=r"GC-OP\]"):
            elementwise_op(expression)
    a, b = numpy.array([3, 5]), numpy.array([4, 1])
    combiner(elementwise_op("max(a, b) + (a & b) - -1"), DTYPES["int64"])(a, a, [b])
    assert a.tolist() == [4 + 0 + 1, 5 + 1 + 1]
    with pytest.raises(DtypeError, match="does not give int64"):
        check_op("all_reduce", elementwise_op("a / b"), DTYPES["int64"])
    check_op("all_reduce", elementwise_op("sqrt(a * a + b * b)"), DTYPES["float16"])
