"""bench/ without ranks: sizes, factors, the command line; what is measured from when to when is in test_bench_text."""

import doctest
import importlib

import pytest

import oracle
from gpucoll.errors import ArgumentError

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments, cases, summary
from gpucoll.bench.cases import Case

# From nccl-tests' doc/PERFORMANCE.md and its sources, worked out by hand: busbw over algbw.
SHARE, TWO_SHARES, ONE = {2: 0.5, 4: 0.75, 8: 0.875}, {2: 1.0, 4: 1.5, 8: 1.75}, {2: 1.0, 4: 1.0, 8: 1.0}
FACTORS = {
    "all_reduce": TWO_SHARES, "reduce": ONE, "broadcast": ONE, "all_gather": SHARE, "reduce_scatter": SHARE,
    "gather": SHARE, "scatter": SHARE, "all_to_all": SHARE, "all_to_all_v": SHARE, "sendrecv": ONE, "hypercube": ONE,
    # not nccl-tests': those of their kind
    "all_gather_v": SHARE, "gather_v": SHARE, "scatter_v": SHARE, "reduce_scatter_v": SHARE,
    "scan": ONE, "exscan": ONE, "barrier": ONE,
}
MODULES = ("arguments cases compare data document findings flags machine measure operands osu overlap pairs peers "
           "progress readme records summary table").split()


def case(collective, ranks=4, dtype="float32", op="sum", root=0):
    return Case(collective, dtype, op, root, ranks)


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    assert doctest.testmod(importlib.import_module(f"gpucoll.bench.{name}")).failed == 0


# Sizes and factors


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


def test_every_test_has_a_factor():
    assert set(FACTORS) == set(cases.TESTS)


@pytest.mark.parametrize(("collective", "ranks"), [(name, ranks) for name in FACTORS for ranks in (2, 4, 8)])
def test_bus_factors(collective, ranks):
    assert case(collective, ranks).factor == FACTORS[collective][ranks]


# Elements of 1003 bytes on four ranks, bytes of the larger side, and the bytes that algbw counts, by nccl-tests'
# GetCollByteCount and GetBw: blocks are whole multiples of 16 bytes, and hypercube leaves out a rank's own block.
@pytest.mark.parametrize(("collective", "dtype", "count", "nbytes", "moved"), [
    ("all_reduce", "float32", 250, 1000, 1000), ("all_reduce", "float64", 125, 1000, 1000),
    ("all_reduce", "complex128", 62, 992, 992), ("reduce", "int8", 1003, 1003, 1003),
    ("broadcast", "float16", 501, 1002, 1002), ("sendrecv", "float32", 250, 1000, 1000),
    ("all_gather", "float32", 60, 960, 960), ("reduce_scatter", "uint8", 240, 960, 960),
    ("gather", "float64", 30, 960, 960), ("scatter", "float16", 120, 960, 960), ("all_to_all", "float32", 60, 960, 960),
    ("all_gather", "complex128", 15, 960, 960), ("hypercube", "float32", 60, 960, 720),
    ("barrier", "float32", 0, 0, 0)])
def test_sizes_and_bytes_are_those_of_nccl_tests(collective, dtype, count, nbytes, moved):
    found = case(collective, 4, dtype)
    assert (found.count(1003), found.nbytes(count), found.moved(count)) == (count, nbytes, moved)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("collective", [name for name, row in cases.TESTS.items() if row.ragged])
def test_ragged_blocks_differ_and_every_rank_moves_as_much(collective, ranks):
    found = case(collective, ranks, "int8")
    if found.row.ragged == "pair":
        sent = [sum(found.length(100, rank, peer) for peer in range(ranks)) for rank in range(ranks)]
        got = [sum(found.length(100, peer, rank) for peer in range(ranks)) for rank in range(ranks)]
        assert set(sent) == set(got) == {found.nbytes(100)}
    assert len(set(found.lengths(100))) == ranks
    assert abs(found.nbytes(100) - 100 * ranks) < ranks


@pytest.mark.parametrize(("collective", "traffic"), [
    ("all_reduce", 12), ("reduce", 5), ("broadcast", 4), ("all_gather", 5), ("reduce_scatter", 5), ("gather", 2),
    ("scatter", 2), ("all_to_all", 8), ("scan", 8), ("exscan", 8), ("sendrecv", 8), ("hypercube", 5),
    ("all_to_all_v", 8), ("gather_v", 2), ("barrier", 0)])
def test_the_least_bytes_that_memory_moves_on_four_ranks(collective, traffic):
    assert cases.least_traffic(collective, 4) == traffic


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_everyone_has_a_turn_in_every_repetition(number):
    orders = [list(cases.turns(number, repetition)) for repetition in range(2 * number)]
    assert all(sorted(order) == list(range(number)) for order in orders)
    assert {order[0] for order in orders} == set(range(number))


# The command line


def test_defaults_are_those_of_nccl_tests():
    found = arguments.parse(["all_reduce"], {})
    flags = found.flags
    assert list(found.sizes) == [32 << 20]
    assert (found.dtypes, found.ops, found.roots) == (("float32",), ("sum",), (0,))
    assert (found.iterations, flags.warmup_iters, flags.check, flags.agg_iters, flags.run_cycles) == (None, 1, 1, 1, 1)
    assert (flags.average, flags.blocking, found.launches, flags.report_cputime, flags.unalign) == (1, 0, 0, 0, 0)
    assert (flags.per_iter_timing, flags.per_iter_skip, flags.timeout, flags.output_file) == (0, 0, 0, None)
    assert (found.algorithms, found.against, found.executor, found.device) == (("auto",), (), None, "cpu")


def test_short_and_long_flags_mean_the_same():
    short = ("-b 8 -e 1K -f 2 -n 7 -w 3 -m 2 -N 2 -a 3 -c 2 -o max -d double -r 1 -z 1 -C 1 -J x.json -T 9 -I 1 -K 1 "
             "-u 3 -S 1 -t 1 -g 1").split()
    long = ("--minbytes 8 --maxbytes 1K --stepfactor 2 --iters 7 --warmup_iters 3 --agg_iters 2 --run_cycles 2 "
            "--average 3 --check 2 --op max --datatype float64 --root 1 --blocking 1 --report_cputime 1 "
            "--output_file x.json --timeout 9 --per_iter_timing 1 --per_iter_skip 1 --unalign 3 "
            "--report_timestamps 1 --nthreads 1 --ngpus 1").split()
    one, other = arguments.parse(["reduce", *short], {}), arguments.parse(["reduce", *long], {})
    given = [{**vars(found.flags), "datatype": None} for found in (one, other)]
    assert given[0] == given[1]
    assert one._replace(flags=None) == other._replace(flags=None)
    assert (one.iterations, one.flags.agg_iters) == (7, 2)


def test_graph_is_one_launch():
    line = "all_reduce --device cuda".split()
    assert arguments.parse([*line, "--graph"]).launches == arguments.parse([*line, "-G", "1"]).launches == 1


@pytest.mark.parametrize(("given", "name"), [
    ("half", "float16"), ("float", "float32"), ("double", "float64"), ("char", "int8"), ("int", "int32"),
    ("f8e4m3", "float8_e4m3fn"), ("f8e5m2", "float8_e5m2"), *((name, name) for name in oracle.DTYPES)])
def test_dtypes_of_nccl_tests_and_numpy(given, name):
    assert arguments.parse(["broadcast", "-d", given]).dtypes == (name,)


@pytest.mark.parametrize(("given", "name"), [
    ("all_reduce_perf", "all_reduce"), ("alltoall", "all_to_all"), ("alltoall_perf", "all_to_all"),
    ("alltoallv", "all_to_all_v"), ("hypercube", "hypercube")])
def test_tests_by_the_names_of_nccl_tests(given, name):
    assert arguments.parse([given]).tests == (name,)


def test_all_stands_for_all_that_the_contract_defines():
    found = arguments.parse("all -o all -d all -r all".split())
    assert found.tests == tuple(cases.TESTS)
    assert found.dtypes == tuple(oracle.DTYPES)
    for dtype in oracle.DTYPES:
        assert set(found.ops_of("all_reduce", dtype)) == {op for op in oracle.OPS if oracle.legal(op, dtype)}
    assert "avg" not in found.ops_of("scan", "float32")
    assert found.ops_of("all_gather", "bool") == ("sum",)  # of no meaning
    assert list(found.roots_of("broadcast", 3)) == [0, 1, 2]
    assert list(found.roots_of("all_reduce", 3)) == [0]


WRONG = """
nothing
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
all_reduce -m 0
all_reduce -a 4
all_reduce -z 4
all_reduce -I 2
all_reduce -G 1
all_reduce --graph --device emulated
all_reduce --graph --device cuda -I 1
all_reduce --stream null
all_reduce -t 2
all_reduce -g 2
all_reduce -K 1
all_reduce -T x
all_reduce -o summ
all_reduce -d flot
all_reduce -d float128
all_reduce -d int -o avg
all_reduce -d complex64 -o max
scan -o avg
all_reduce --algorithm rng
all_reduce --algorithm ring,
all_gather --algorithm tree
sendrecv --algorithm ring
all --algorithm rng
all_reduce --executor none
all_reduce --device gpu
all_reduce --memory shared
all_reduce --against nothing
all_reduce --against mpi,
all_reduce --min-bw x
all_reduce --min-bw nan
all_reduce --pairs
all_reduce --overlap --against mpi
all_reduce --plot x.pdf
all_reduce --plot x.svg --overlap
all_reduce --compare no/such/file.json
all_reduce --style imb
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
    assert found.roots_of("broadcast", 5) == (4,)
    with pytest.raises(ArgumentError, match="GC-ROOT"):
        found.roots_of("broadcast", 4)


def test_the_least_bandwidth_is_ours_or_nine_tenths_of_nccl_tests_variable(capsys):
    variables = {"NCCL_TESTS_MIN_BW": "10"}
    assert arguments.parse(["all_reduce"], variables).floor == 9.0
    assert arguments.parse(["all_reduce", "--min-bw", "4"], variables).floor == 4.0
    assert arguments.parse(["all_reduce"], {}).floor is None
    with pytest.raises(SystemExit):
        arguments.parse(["all_reduce"], {"NCCL_TESTS_MIN_BW": "much"})
    assert "NCCL_TESTS_MIN_BW" in capsys.readouterr().err


# What comes of the seconds


def test_a_time_is_the_median_over_repetitions_of_what_a_says():
    seconds = summary.numpy.array([[1.0, 2.0, 30.0], [3.0, 6.0, 50.0]])
    assert [summary.reported(seconds, average) for average in range(4)] == [2.0, 4.0, 2.0, 6.0]


def test_statistics_are_those_of_nccl_tests():
    seconds = summary.numpy.array([[9.0, 1.0, 2.0, 4.0], [1.0, 3.0, 2.0, 1.0]]) * 1e-6
    found = summary.per_iteration(seconds, skipped=1)
    assert found["times_us"] == [9.0, 3.0, 2.0, 4.0]
    assert (found["min_us"], found["p50_us"], found["p95_us"], found["p99_us"], found["max_us"]) == pytest.approx(
        (2.0, 3.0, 4.0, 4.0, 4.0))
    assert found["avg_us"] == pytest.approx(3.0)
    assert found["stdev_us"] == pytest.approx((2 / 3) ** 0.5)
    assert found["per_process_max_times_us"] == [[9.0, 1.0, 2.0, 4.0], [1.0, 3.0, 2.0, 1.0]]


def test_percentiles_are_nearest_ranks():
    row = summary.numpy.arange(1.0, 201.0)
    assert (summary.percentile(row, 95), summary.percentile(row, 99)) == (190.0, 198.0)


def test_skew_and_the_late_rank():
    found = summary.skew(summary.numpy.array([[1.0, 2.0, 1.0], [4.0, 4.0, 4.0], [1.0, 9.0, 1.0]]))
    assert found == (3.0, 1)


def test_an_interval_holds_its_ratio_and_shrinks_with_the_spread():
    noisy = summary.ratio([2.0, 2.2, 1.8, 2.1, 1.9] * 4, [1.0, 1.1, 0.9, 1.05, 0.95] * 4)
    assert noisy.low < noisy.ratio < noisy.high
    assert noisy.ratio == pytest.approx(2.0)
    quiet = summary.ratio([2.0] * 20, [1.0] * 20)
    assert quiet.low == quiet.high == 2.0
