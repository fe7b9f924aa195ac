"""bench/ without ranks: sizes, factors, the command line, exact data and their check, the lines of the table."""

import doctest
import importlib

import numpy
import pytest

import oracle
from gpucoll.errors import ArgumentError

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments, cases, data, table
from gpucoll.bench.cases import Case, Contestant
from gpucoll.bench.data import Data

# From nccl-tests' doc/PERFORMANCE.md, worked out by hand.
FACTORS = {
    "all_reduce": {2: 1.0, 4: 1.5, 8: 1.75},
    "reduce": {2: 1.0, 4: 1.0, 8: 1.0},
    "broadcast": {2: 1.0, 4: 1.0, 8: 1.0},
    "all_gather": {2: 0.5, 4: 0.75, 8: 0.875},
    "reduce_scatter": {2: 0.5, 4: 0.75, 8: 0.875},
}
LEGAL = [(op, dtype) for op in oracle.OPS for dtype in oracle.DTYPES if oracle.legal(op, dtype)]


def case(collective, ranks=4, dtype="float32", op="sum", root=0):
    return Case(collective, dtype, op, root, ranks)


@pytest.mark.parametrize("name", ["arguments", "cases", "data", "table"])
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(f"gpucoll.bench.{name}")).failed == 0


# Sizes and factors


@pytest.mark.parametrize(("text", "nbytes"), [
    ("0", 0), ("8", 8), ("1K", 1024), ("64k", 65536), ("1.5M", 1572864), ("16M", 16777216), ("2g", 2147483648),
    (" 8 K ", 8192), ("0.3", 0)])
def test_sizes_are_read_in_base_two(text, nbytes):
    assert cases.size_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "8X", "8KB", "-8", "1e3", "8 8", "0x8", "nan", "\N{ARABIC-INDIC DIGIT TWO}"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentError, match="GC-SIZE"):
        cases.size_of(text)


@pytest.mark.parametrize(("first", "last", "growth", "sizes"), [
    (8, 128, {"step": 1, "factor": 2}, [8, 16, 32, 64, 128]),
    (8, 16 << 20, {"step": 1, "factor": 4}, [8 * 4**power for power in range(11)]),
    (8, 100, {"step": 1, "factor": 100}, [8]),
    (1 << 20, 4 << 20, {"step": 1 << 20}, [1 << 20, 2 << 20, 3 << 20, 4 << 20]),
    (10, 25, {"step": 10}, [10, 20]),
    (0, 4, {"step": 2}, [0, 2, 4]),
    (32, 32, {"step": 1}, [32])])
def test_sizes_grow_as_in_nccl_tests(first, last, growth, sizes):
    assert list(cases.sizes(first, last, **growth)) == sizes


def test_a_fine_step_costs_no_memory():
    assert len(cases.sizes(0, 1 << 40, step=1)) == (1 << 40) + 1


@pytest.mark.parametrize(("collective", "ranks"), [(name, ranks) for name in FACTORS for ranks in (2, 4, 8)])
def test_bus_factors(collective, ranks):
    assert case(collective, ranks).factor == FACTORS[collective][ranks]


@pytest.mark.parametrize(("collective", "dtype", "count", "nbytes"), [
    ("all_reduce", "float32", 250, 1000), ("all_reduce", "float64", 125, 1000), ("all_reduce", "complex128", 62, 992),
    ("reduce", "int8", 1003, 1003), ("broadcast", "float16", 501, 1002),
    ("all_gather", "float32", 62, 992), ("reduce_scatter", "uint8", 250, 1000), ("reduce_scatter", "float64", 31, 992)])
def test_sizes_are_those_of_the_larger_side(collective, dtype, count, nbytes):
    found = case(collective, 4, dtype)
    assert (found.count(1003), found.nbytes(count)) == (count, nbytes)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_everyone_has_a_turn_in_every_repetition(number):
    orders = [list(cases.turns(number, repetition)) for repetition in range(2 * number)]
    assert all(sorted(order) == list(range(number)) for order in orders)
    assert {order[0] for order in orders} == set(range(number))


# The command line


def test_defaults_are_those_of_nccl_tests():
    found = arguments.parse(["all_reduce"])
    assert list(found.sizes) == [32 << 20]
    assert (found.dtype, found.op, found.root) == ("float32", "sum", 0)
    assert (found.iterations, found.warmups, found.checks) == (None, 1, 1)
    assert (found.algorithms, found.against, found.executor) == (("auto",), (), None)


def test_short_and_long_flags_mean_the_same():
    short = "-b 8 -e 1K -f 2 -n 7 -w 3 -c 2 -o max -d double -r 1".split()
    long = ("--minbytes 8 --maxbytes 1K --stepfactor 2 --iters 7 --warmup_iters 3 --check 2 --op max "
            "--datatype float64 --root 1").split()
    assert arguments.parse(["reduce", *short]) == arguments.parse(["reduce", *long])
    assert arguments.parse(["reduce", *short]).iterations == 7


@pytest.mark.parametrize(("given", "name"), [
    ("half", "float16"), ("float", "float32"), ("double", "float64"), ("char", "int8"), ("int", "int32"),
    ("f8e4m3", "float8_e4m3fn"), ("f8e5m2", "float8_e5m2"), *((name, name) for name in oracle.DTYPES)])
def test_dtypes_of_nccl_tests_and_numpy(given, name):
    assert arguments.parse(["broadcast", "-d", given]).dtype == name


WRONG = """
nothing
barrier
all_reduce -b 8X
all_reduce -b 64 -e 8
all_reduce -b 64M
all_reduce -b 0 -f 2
all_reduce -i 8 -f 2
all_reduce -i 0
all_reduce -f 0
all_reduce -n 0
all_reduce -n x
all_reduce -w -1
all_reduce -c -1
all_reduce -r -1
all_reduce -o summ
all_reduce -d flot
all_reduce -d float128
all_reduce -d int -o avg
all_reduce -d complex64 -o max
all_reduce --algorithm rng
all_reduce --algorithm ring,
all_gather --algorithm tree
all_reduce --executor none
all_reduce --against nothing
all_reduce --against mpi -d half
all_reduce --against mpi -o avg
all_reduce --iter 3
all_reduce reduce
"""


@pytest.mark.parametrize("line", ["", *WRONG.strip().splitlines()])
def test_wrong_arguments_end_in_one_line_and_code_2(line, capsys):
    with pytest.raises(SystemExit) as end:
        arguments.parse(line.split())
    output, errors = capsys.readouterr()
    assert (end.value.code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith("gpucoll bench: ")


def test_unknown_names_are_answered_with_the_nearest(capsys):
    for line, nearest in (("-d flot", "float"), ("-o summ", "sum"), ("--algorithm rng", "ring")):
        with pytest.raises(SystemExit):
            arguments.parse(["all_reduce", *line.split()])
        assert f"did you mean {nearest}?" in capsys.readouterr().err


def test_a_root_beyond_the_ranks_is_refused():
    found = arguments.parse(["broadcast", "-r", "4"])
    assert found.case(5).root == 4
    with pytest.raises(ArgumentError, match="GC-ROOT"):
        found.case(4)


# The data and their check


def operands(op, dtype, ranks):
    """The operands of every rank in the dtype itself."""
    return data.operands(dtype, op, ranks).astype(oracle.kind(dtype))


def combined(op, dtype, rows):
    """The reduction of rows one after another, every partial result rounded to the dtype, as any algorithm may."""
    total = rows[0]
    with numpy.errstate(all="raise"):
        for row in rows[1:]:
            total = data.UFUNCS[op](total, row).astype(oracle.kind(dtype))
    if op == "avg":
        total = (total.astype(numpy.result_type(total, numpy.float64)) / len(rows)).astype(oracle.kind(dtype))
    return (total != 0).astype(oracle.kind(dtype)) if op in ("land", "lor", "lxor") else total


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 64])
@pytest.mark.parametrize(("op", "dtype"), LEGAL)
def test_results_are_exact_in_every_order(op, dtype, ranks):
    expected = data.reduced(data.operands(dtype, op, ranks), op, dtype)
    rows = operands(op, dtype, ranks)
    assert expected.dtype == oracle.kind(dtype)
    for order in (rows, rows[::-1], numpy.roll(rows, ranks // 2, axis=0)):
        assert combined(op, dtype, order).tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("op", "dtype"), LEGAL)
def test_every_rank_decides_some_results(op, dtype, ranks):
    rows = operands(op, dtype, ranks)
    for rank in range(ranks):
        others = numpy.delete(rows, rank, axis=0)
        assert (combined(op, dtype, others) != combined(op, dtype, rows)).any()


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_ranks_have_different_data(dtype):
    inputs = [Data(case("all_gather", 4, dtype), rank, 1000).arguments(0)[0] for rank in range(4)]
    for rank in range(4):
        assert all((inputs[rank] != inputs[other]).any() for other in range(rank))


# What a collective gives to one rank, of all ranks' inputs, made here by other means than in the bench.
RESULTS = {
    "all_reduce": lambda inputs, rank, root: sum(inputs[1:], inputs[0]),
    "reduce": lambda inputs, rank, root: sum(inputs[1:], inputs[0]),
    "broadcast": lambda inputs, rank, root: inputs[root],
    "all_gather": lambda inputs, rank, root: numpy.array(inputs),
    "reduce_scatter": lambda inputs, rank, root: sum(inputs[1:], inputs[0])[rank],
}


def played(collective, ranks, count, repetition=0, root=1):
    """The data of every rank after a faultless collective, and what is expected of them."""
    ours = [Data(case(collective, ranks, root=root), rank, count) for rank in range(ranks)]
    expected = [each.expected(repetition) for each in ours]
    inputs = [each.arguments(repetition)[0] for each in ours]
    for rank, each in enumerate(ours):
        each.spoil(expected[rank])
        if each.out is not None:
            each.out[...] = RESULTS[collective](inputs, rank, root)
    return ours, expected


def wrong(ours, expected):
    return [each.wrong(wanted) for each, wanted in zip(ours, expected, strict=True)]


@pytest.mark.parametrize("count", [0, 1, 100])
@pytest.mark.parametrize("repetition", [0, 1, 37])
@pytest.mark.parametrize("collective", FACTORS)
def test_the_check_accepts_what_is_right(collective, repetition, count):
    assert wrong(*played(collective, 3, count, repetition)) == [0, 0, 0]


@pytest.mark.parametrize("collective", FACTORS)
def test_ranks_without_a_result_are_not_checked(collective):
    ours, _ = played(collective, 3, 10)
    without = {"reduce": [0, 2], "broadcast": [1]}.get(collective, [])
    assert [rank for rank in range(3) if ours[rank].out is None] == without


@pytest.mark.mutant
@pytest.mark.parametrize("collective", FACTORS)
def test_the_check_finds_one_wrong_element(collective):
    ours, expected = played(collective, 3, 100)
    victim = next(rank for rank in (2, 1) if ours[rank].out is not None)
    ours[victim].out.reshape(-1)[-1] += 1
    assert sum(wrong(ours, expected)) == wrong(ours, expected)[victim] == 1


@pytest.mark.mutant
def test_the_check_finds_blocks_in_the_wrong_order():
    ours, expected = played("all_gather", 3, 100)
    ours[0].out[[0, 1]] = ours[0].out[[1, 0]]
    assert wrong(ours, expected)[0] > 100  # of 200 elements that changed places
    ours, expected = played("reduce_scatter", 3, 100)
    ours[0].out[...] = expected[1]
    assert wrong(ours, expected)[0] > 50


@pytest.mark.mutant
@pytest.mark.parametrize("collective", FACTORS)
def test_the_check_finds_what_was_left_from_before(collective):
    ours, _ = played(collective, 3, 100, repetition=4)
    assert sum(wrong(ours, [each.expected(5) for each in ours])) > 50


@pytest.mark.mutant
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_the_check_finds_what_was_not_written(collective, dtype):
    ours = Data(case(collective, 3, dtype), 0, 100)
    expected = ours.expected(0)
    ours.spoil(expected)
    assert ours.wrong(expected) == expected.size


@pytest.mark.mutant
@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("prod", "int8"), ("band", "uint8"), ("sum", "bool")])
def test_the_check_finds_a_contribution_that_counts_twice_or_not_at_all(op, dtype):
    ours = [Data(case("all_reduce", 4, dtype, op), rank, 1000) for rank in range(4)]
    rows = [each.arguments(0)[0] for each in ours]
    ours[0].out[...] = combined(op, dtype, rows[:3])
    assert ours[0].wrong(ours[0].expected(0)) > 0
    if op == "sum" and dtype != "bool":
        ours[0].out[...] = combined(op, dtype, [*rows, rows[0]])
        assert ours[0].wrong(ours[0].expected(0)) > 0


def test_look_up_goes_over_every_block():
    draws = data.random_bytes(4 * data.BLOCK + 4, seed=1).reshape(4, -1)
    values = numpy.arange(data.DRAWS, dtype=numpy.int16)
    assert (data.look_up(values, draws) == draws).all()


# The table


def row(**changes):
    found = table.row(case("all_reduce", 4), 250, Contestant("ring", print), 12.5e-6, 0)
    return table.Row(**{**vars(found), **changes})


def test_a_line_of_data():
    assert table.line(row()) == (
        "        1000           250     float     sum      -1                  ring       12.50         0.08"
        "         0.12       0")
    assert table.line(row(wrong=None)).split()[-1] == "N/A"


def test_bandwidths_of_tiny_messages_keep_their_digits():
    found = table.row(case("all_reduce", 8), 2, Contestant("ring", print), 1234.5e-6, 0)
    algbw, busbw = map(float, table.line(found).split()[7:9])
    assert busbw / algbw == pytest.approx(1.75, rel=1e-3)
    assert algbw == pytest.approx(8 / 1234.5e-6 / 1e9, rel=1e-4)


@pytest.mark.parametrize(("collective", "redop", "root"), [
    ("all_reduce", "max", "-1"), ("reduce", "max", "2"), ("broadcast", "none", "2"), ("all_gather", "none", "-1"),
    ("reduce_scatter", "max", "-1")])
def test_op_and_root_stand_where_they_apply(collective, redop, root):
    found = table.row(case(collective, 4, "float16", "max", 2), 10, Contestant("ring", print), 1e-6, 0)
    assert table.line(found).split()[2:5] == ["half", redop, root]


def test_titles_stand_over_their_columns():
    options = arguments.parse("all_reduce -b 8 -e 64 -f 2".split())
    lines = table.header(options, {"gpucoll": "1.2", "MPI": "3"}, [table.Place(7, "here"), table.Place(8, "there")])
    assert all(line.startswith("#") for line in lines)
    assert lines[0] == "# gpucoll 1.2  MPI 3"
    assert "minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 1" in lines[2]
    assert lines[5:7] == ["#  Rank  0 Group  0 Pid      7 on       here device cpu",
                          "#  Rank  1 Group  0 Pid      8 on      there device cpu"]
    assert lines[-2].split()[1:] == "size count type redop root algorithm time algbw busbw #wrong".split()
    assert len(lines[-2]) == len(lines[-1]) == len(table.line(row()))


def test_ratios_are_the_peers_time_over_ours():
    rows = [row(algorithm="ring", time=10.0), row(algorithm="tree", time=40.0),
            row(algorithm="mpi", time=20.0, peer=True)]
    assert table.ratios(rows) == {"mpi": {"ring": 2.0, "tree": 0.5}}
    assert table.ratios(rows[:2]) == {}
    assert table.comparison("geomean", table.means([table.ratios(rows)] * 2)) == [
        "# against mpi       geomean  ring 2.000  tree 0.500"]


def test_footer_counts_what_is_wrong_and_averages_ours_only():
    rows = [row(busbw=1.0), row(busbw=2.0), row(busbw=90.0, peer=True)]
    assert table.footer(rows) == ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1.5", "#"]
    rows = [row(wrong=None), row(wrong=3), row(wrong=4, peer=True)]
    assert table.footer(rows)[0] == "# Out of bounds values : 7 FAILED"
