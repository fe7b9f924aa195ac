"""The tables: every dtype's row complete, refusals, and the rounding of ops."""

import ast
import collections
import sys
from types import SimpleNamespace

import numpy
import pytest

from gpucoll.arrays import HOST, check_op
from gpucoll.core.dtypes import DTYPES, numpy_dtype, row_of
from gpucoll.core.ops import OPS, ReduceOp, elementwise_op, op_of, premul_sum
from gpucoll.errors import ArgumentError, DtypeError
from gpucoll.executors.engine.instructions import combine
from harness.sources import files, tree_of
from oracles import oracle


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
    for wrong in ("summ", 3, None, len):
        with pytest.raises(ArgumentError):
            op_of(wrong)
    assert op_of(ReduceOp.MAX) is op_of("max") is OPS["max"]
    assert {member.value for member in ReduceOp} == set(OPS)


@pytest.mark.parametrize("constant", [None, "HYPOT"])
def test_mpis_ops_are_read_beside_an_op_that_mpi_lacks(monkeypatch, constant):
    kind = type("Op", (), {"__module__": "mpi4py.MPI"})
    constants = {row.mpi: kind() for row in OPS.values()}
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(**constants))
    monkeypatch.setitem(OPS, "hypot", OPS["sum"]._replace(name="hypot", mpi=constant))
    assert op_of(constants["LXOR"]) is OPS["lxor"]
    with pytest.raises(ArgumentError, match="GC-OP"):
        op_of(kind())


def test_half_precision_is_rounded_once_per_reduction():
    """1 + 2^-11 + 2^-11 is 1 when rounded after each addition, and 1 + 2^-10 when rounded once."""
    one, half_step = numpy.ones(40000, numpy.float16), numpy.full(40000, 2.0**-11, numpy.float16)
    for op in (OPS["sum"], elementwise_op("a + b")):
        result = numpy.zeros_like(one)
        combine(op, DTYPES["float16"], result, (one, half_step, half_step))
        assert (result == numpy.float16(1 + 2.0**-10)).all()


def test_nan_wins_min_and_max_avg_is_divided_and_integers_wrap():
    nan = numpy.array([numpy.nan, 1, numpy.nan], numpy.float32)
    result = numpy.empty(3, numpy.float32)
    for op in ("min", "max"):
        combine(OPS[op], DTYPES["float32"], result, (nan, numpy.array([1, numpy.nan, 2], numpy.float32)))
        assert numpy.isnan(result).all()
    for op, ranks, given, finished in (("avg", 3, [3, 6], [1, 2]), ("lor", 1, [0, 7], [0, 1])):
        row = numpy.array(given, numpy.float32)
        HOST.finish(OPS[op], row, DTYPES["float32"], ranks)
        assert row.tolist() == finished
    small = numpy.array([100], numpy.int8)
    combine(OPS["sum"], DTYPES["int8"], small, (small, numpy.array([100], numpy.int8)))
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
    combine(elementwise_op("max(a, b) + (a & b) - -1"), DTYPES["int64"], a, (a, b))
    assert a.tolist() == [4 + 0 + 1, 5 + 1 + 1]
    with pytest.raises(DtypeError, match="does not give int64"):
        check_op("all_reduce", elementwise_op("a / b"), DTYPES["int64"])
    check_op("all_reduce", elementwise_op("sqrt(a * a + b * b)"), DTYPES["float16"])


def test_a_word_names_one_thing():
    """A constant, type or class of one name in two folders is the same; a member of an enumeration is in one file."""
    found = collections.defaultdict(set)
    for path in (path for path in files("gpucoll", "bench") if "_faces" not in path.parts):
        for node in tree_of(path).body:
            is_class = isinstance(node, ast.ClassDef)
            owner = node.name if is_class and any("enum." in ast.unparse(base) for base in node.bases) else ""
            if is_class:
                found[node.name].add((path.parent, path, str(path), ""))
            for one in node.body if owner else [node]:
                if isinstance(one, ast.Assign | ast.AnnAssign):
                    for name in ast.walk(one.targets[0] if isinstance(one, ast.Assign) else one.target):
                        word = getattr(name, "id", "_")
                        found[word].add((path.parent, path, ast.unparse(one.value or one), owner))
    columns = {word: [*zip(*places, strict=True)] for word, places in found.items() if word[0] != "_"}
    assert {word: paths for word, (folders, paths, meanings, owners) in columns.items()
            if (len({*paths}) if any(owners) else min(len({*folders}), len({*meanings}))) > 1} == {}
