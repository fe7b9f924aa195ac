"""bench/ without ranks: sizes, factors, the command line, statistics, the check of results; not the printed text."""

import numpy
import pytest
from gpucoll.bench import arguments, cases, summary
from gpucoll.bench.cases import BenchCase
from gpucoll.bench.data import BenchTurn, Data

from harness.grids import naming
from harness.refusals import refused

# busbw divided by algbw on 2, 4 and 8 ranks, worked out by hand from nccl-tests' doc/PERFORMANCE.md and sources.
SHARE, TWO_SHARES, ONE = (0.5, 0.75, 0.875), (1.0, 1.5, 1.75), (1.0, 1.0, 1.0)
FACTORS = {
    "all_reduce": TWO_SHARES, "reduce": ONE, "broadcast": ONE, "all_gather": SHARE, "reduce_scatter": SHARE,
    "gather": SHARE, "scatter": SHARE, "all_to_all": SHARE, "all_to_all_v": SHARE, "sendrecv": ONE, "hypercube": ONE,
    # absent from nccl-tests: the factors of the related collectives
    "all_gather_v": SHARE, "gather_v": SHARE, "scatter_v": SHARE, "reduce_scatter_v": SHARE,
    "scan": ONE, "exscan": ONE, "barrier": ONE,
}
# The elements of 1003 bytes on four ranks, the bytes of the larger side, and the bytes counted by algbw, as in
# nccl-tests' GetCollByteCount and GetBw: blocks are multiples of 16 bytes; hypercube leaves out a rank's own block.
BYTES = [("all_reduce", "float32", 250, 1000, 1000), ("all_reduce", "complex128", 62, 992, 992),
         ("reduce", "int8", 1003, 1003, 1003), ("broadcast", "float16", 501, 1002, 1002),
         ("all_gather", "float32", 60, 960, 960), ("reduce_scatter", "uint8", 240, 960, 960),
         ("gather", "float64", 30, 960, 960), ("scatter", "float16", 120, 960, 960),
         ("all_gather", "complex128", 15, 960, 960), ("hypercube", "float32", 60, 960, 720),
         ("barrier", "float32", 0, 0, 0)]
TRAFFIC = {"all_reduce": 12, "reduce": 5, "broadcast": 4, "all_gather": 5, "reduce_scatter": 5, "gather": 2,
           "scatter": 2, "all_to_all": 8, "scan": 8, "exscan": 8, "sendrecv": 8, "hypercube": 5, "gather_v": 2,
           "barrier": 0}


def test_factors_bytes_and_traffic_are_those_of_nccl_tests():
    assert set(FACTORS) == set(cases.TESTS)
    for name, factors in FACTORS.items():
        assert tuple(BenchCase(name, "float32", "sum", 0, ranks).factor for ranks in (2, 4, 8)) == factors, name
    for name, dtype, count, nbytes, moved in BYTES:
        case = BenchCase(name, dtype, "sum", 0, 4)
        assert (case.count(1003), case.nbytes(count), case.moved(count)) == (count, nbytes, moved), name
    assert {name: cases.least_traffic(name, 4) for name in TRAFFIC} == TRAFFIC


def test_defaults_are_those_of_nccl_tests():
    options = arguments.parse(["all_reduce"], {})
    flags = options.flags
    assert list(options.sizes) == [32 << 20]
    assert (options.dtypes, options.ops, options.roots) == (("float32",), ("sum",), (0,))
    assert (flags.warmup_iters, flags.check, flags.agg_iters, flags.run_cycles, flags.average) == (1,) * 5
    assert (flags.blocking, flags.report_cputime, flags.unalign, flags.per_iter_timing, flags.timeout) == (0,) * 5


# Wrong words after `all_reduce`.
WRONG = """
-b 8X | -b 64 -e 8 | -b 64M -e 32M | -b 0 -f 2 | -i 8 -f 2 | -i 0 | -f 0 | -n 0 | -n x | -w -1 | -r -1 | -a 4 | -z 4 |
-I 2 | -G 1 | --graph --device cuda -I 1 | --stream null | -t 2 | -K 1 | -o summ | -d flot | -d int -o avg |
-d complex64 -o max | --algorithm rng | --algorithm ring, | --executor none | --device gpu | --against nothing |
--against mpi, | --min-bw nan | --plot x.pdf | --compare no/such/file.json | --iter 3 | reduce
"""
OTHERS = ("", "nothing", "scan -o avg", "all_gather --algorithm tree", "sendrecv --algorithm ring",
          "all --algorithm rng")


def test_wrong_arguments_end_in_one_line_and_code_2(capsys):
    pytest.importorskip("matplotlib", reason="--plot needs matplotlib")
    for line in (*OTHERS, *(f"all_reduce {line}" for line in WRONG.split("|"))):
        with naming(line):
            refused(capsys, arguments.parse, line.split(), "gpucoll bench")
    for line, nearest in (("-d flot", "float"), ("-o summ", "sum"), ("--algorithm rng", "ring")):
        assert f"did you mean {nearest}?" in refused(capsys, arguments.parse, ["all_reduce", *line.split()],
                                                     "gpucoll bench")


def test_statistics_are_those_of_nccl_tests_and_an_interval_holds_its_ratio():
    seconds = numpy.array([[9.0, 1.0, 2.0, 4.0], [1.0, 3.0, 2.0, 1.0]]) * 1e-6
    found = summary.per_iteration(seconds, skipped=1)
    assert found["times_us"] == [9.0, 3.0, 2.0, 4.0]
    assert [found[key] for key in ("min_us", "p50_us", "p95_us", "p99_us", "max_us", "avg_us", "stdev_us")] == (
        pytest.approx([2.0, 3.0, 4.0, 4.0, 4.0, 3.0, (2 / 3) ** 0.5]))
    assert found["per_process_max_times_us"] == [[9.0, 1.0, 2.0, 4.0], [1.0, 3.0, 2.0, 1.0]]
    row = numpy.arange(1.0, 201.0)
    assert (summary.percentile(row, 95), summary.percentile(row, 99)) == (190.0, 198.0)
    times = numpy.array([[1.0, 2.0, 30.0], [3.0, 6.0, 50.0]])
    assert [summary.reported(times, average) for average in range(4)] == [2.0, 4.0, 2.0, 6.0]
    assert summary.skew(numpy.array([[1.0, 2.0, 1.0], [4.0, 4.0, 4.0], [1.0, 9.0, 1.0]])) == (3.0, 1)
    noisy = summary.ratio([2.0, 2.2, 1.8, 2.1, 1.9] * 4, [1.0, 1.1, 0.9, 1.05, 0.95] * 4)
    assert noisy.low < 2.0
    assert noisy.ratio == pytest.approx(2.0)
    assert noisy.high > 2.0
    assert summary.ratio([2.0] * 20, [1.0] * 20) == (2.0, 2.0, 2.0)


TESTS = [name for name in cases.TESTS if name != "barrier"]


def case(collective, ranks=4, dtype="float32", op="sum", root=0):
    return BenchCase(collective, dtype, op, root, ranks)


@pytest.mark.parametrize("collective", TESTS)
def test_the_check_accepts_what_is_right_and_finds_what_is_wrong(collective):
    """Real collectives in tests/multirank/test_bench.py show the expected results to be right."""
    data, turn = Data(case(collective, 3, root=int(collective != "broadcast")), 1, 100), BenchTurn(4)
    expected = data.expected(turn)
    data.prepare(turn, expected)
    returned = [one.copy() for one in expected]
    if data.outs[0] is not None:
        assert data.wrong(turn, None, expected) == expected[0].size, "not written"
        data.outs[0][...] = expected[0]
    assert data.wrong(turn, returned, expected) == 0
    assert data.wrong(turn, returned, data.expected(BenchTurn(5))) > 50, "left from before"
    (returned[-1] if data.outs[0] is None else data.outs[0].reshape(-1))[-1] += 1
    assert data.wrong(turn, returned, expected) == 1
    if cases.TESTS[collective].ragged:
        elements = sum(map(len, expected))
        assert data.wrong(turn, [], expected) == elements, "missing"
        assert data.wrong(turn, [block[:-1] for block in returned], expected) == elements, "of another length"
