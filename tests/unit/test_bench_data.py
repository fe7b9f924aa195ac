"""bench/'s data: exact in every order, different everywhere, and a check that finds what is wrong."""

import numpy
import pytest

import oracle
from grids import naming

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import cases, operands
from gpucoll.bench.cases import Case
from gpucoll.bench.data import Data, Turn

LEGAL = [(op, dtype) for op in oracle.OPS for dtype in oracle.DTYPES if oracle.legal(op, dtype)]
TESTS = [name for name in cases.TESTS if name != "barrier"]


def case(collective, ranks=4, dtype="float32", op="sum", root=0):
    return Case(collective, dtype, op, root, ranks)


def combined(op, dtype, rows):
    """The reduction of rows one after another, every partial result rounded to the dtype, as any algorithm may."""
    total = rows[0]
    with numpy.errstate(all="raise"):
        for row in rows[1:]:
            total = operands.UFUNCS[op](total, row).astype(oracle.kind(dtype))
    if op == "avg":
        total = (total.astype(numpy.result_type(total, numpy.float64)) / len(rows)).astype(oracle.kind(dtype))
    return (total != 0).astype(oracle.kind(dtype)) if op in ("land", "lor", "lxor") else total


@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 64])
def test_results_are_exact_in_every_order_and_every_rank_decides_some(ranks):
    for op, dtype in LEGAL:
        with naming((op, dtype)):
            given = operands.operands(dtype, op, ranks)
            expected, rows = operands.reduced(given, op, dtype), given.astype(oracle.kind(dtype))
            assert expected.dtype == oracle.kind(dtype)
            for order in (rows, rows[::-1], numpy.roll(rows, ranks // 2, axis=0)):
                assert combined(op, dtype, order).tobytes() == expected.tobytes()
            for rank in range(ranks) if 1 < ranks < 10 else ():
                assert (combined(op, dtype, numpy.delete(rows, rank, axis=0)) != expected).any()


def test_ranks_repetitions_and_aggregated_calls_have_different_data():
    for dtype in oracle.DTYPES:
        inputs = [Data(case("all_gather", 4, dtype), rank, 1000).arguments(Turn(0))[0] for rank in range(4)]
        for rank in range(4):
            assert all((inputs[rank] != inputs[other]).any() for other in range(rank)), dtype
    data = Data(case("all_reduce"), 0, 100, calls=2)
    inputs = [data.arguments(Turn(repetition, call))[0].copy() for repetition in range(3) for call in range(2)]
    assert all((one != other).any() for number, one in enumerate(inputs) for other in inputs[:number])
    assert data.outs[0] is not data.outs[1]


def test_unalign_shifts_every_array():
    places = [[array.ctypes.data - array.base.ctypes.data for array in each.arguments(Turn(0))]
              for each in (Data(case("all_reduce"), 0, 100), Data(case("all_reduce"), 0, 100, shift=3))]
    assert places == [[0, 0], [12, 12]]


# What a collective gives to one rank, of all ranks' arguments, made here by other means than in the bench.


def row_of_counts(given, rank, root):
    rows, counts = [arguments[0] for arguments in given], given[0][1]
    start = sum(counts[:rank])
    return sum(rows)[start:start + counts[rank]]


def summed(given, rank, root):
    return sum(each[0] for each in given)


RESULTS = {
    **dict.fromkeys(("all_reduce", "reduce"), summed),
    **dict.fromkeys(("all_gather", "hypercube", "gather"),
                    lambda given, rank, root: numpy.array([each[0] for each in given])),
    **dict.fromkeys(("all_gather_v", "gather_v"), lambda given, rank, root: [each[0].copy() for each in given]),
    **dict.fromkeys(("scatter", "scatter_v"), lambda given, rank, root: given[root][0][rank]),
    "broadcast": lambda given, rank, root: given[root][0],
    "reduce_scatter": lambda given, rank, root: summed(given, rank, root)[rank],
    "reduce_scatter_v": row_of_counts,
    "all_to_all": lambda given, rank, root: numpy.array([each[0][rank] for each in given]),
    "all_to_all_v": lambda given, rank, root: [each[0][rank] for each in given],
    "scan": lambda given, rank, root: sum(each[0] for each in given[:rank + 1]),
    "exscan": lambda given, rank, root: sum((each[0] for each in given[:rank]), 0 * given[0][0]),
    "sendrecv": lambda given, rank, root: given[rank - 1][0],
}
WITHOUT = {"reduce": [0, 2], "gather": [0, 2], "gather_v": [0, 2], "broadcast": [1]}  # ranks that get nothing


def played(collective, ranks=3, count=100, turn=None, root=1):
    """The data of every rank after a faultless collective, what it returned, and what is expected."""
    turn = turn or Turn(0)
    ours = [Data(case(collective, ranks, root=root), rank, count) for rank in range(ranks)]
    expected = [each.expected(turn) for each in ours]
    for each, wanted in zip(ours, expected, strict=True):
        each.prepare(turn, wanted)
    given = [[part.copy() if isinstance(part, numpy.ndarray) else part for part in each.arguments(turn)]
             for each in ours]
    returned = [RESULTS[collective](given, rank, root) if expected[rank] else None for rank in range(ranks)]
    for each, result in zip(ours, returned, strict=True):
        if each.outs[0] is not None:
            each.outs[0][...] = result
    return ours, returned, expected


def wrong(ours, returned, expected, turn=None):
    return [each.wrong(turn or Turn(0), result, wanted)
            for each, result, wanted in zip(ours, returned, expected, strict=True)]


@pytest.mark.parametrize("collective", TESTS)
def test_the_check_accepts_what_is_right_and_finds_what_is_wrong(collective):
    for turn in (Turn(0), Turn(1, 0, True), Turn(37)):
        for count in (0, 4, 100):
            assert wrong(*played(collective, count=count, turn=turn), turn) == [0, 0, 0]
    ours, returned, expected = played(collective)
    assert [rank for rank in range(3) if not expected[rank]] == WITHOUT.get(collective, [])
    victim = next(rank for rank in (2, 1, 0) if expected[rank])
    if ours[victim].outs[0] is not None:
        ours[victim].outs[0].reshape(-1)[-1] += 1
    else:
        (returned[victim][-1] if isinstance(returned[victim], list) else returned[victim])[-1] += 1
    assert sum(wrong(ours, returned, expected)) == wrong(ours, returned, expected)[victim] == 1, "one element"
    ours, returned, _ = played(collective, turn=Turn(4))
    assert sum(wrong(ours, returned, [each.expected(Turn(5)) for each in ours])) > 50, "left from before"
    if cases.TESTS[collective].ragged:
        ours, returned, expected = played(collective, root=0)
        elements = sum(map(len, expected[0]))
        assert ours[0].wrong(Turn(0), [], expected[0]) == elements, "missing"
        result = returned[0]
        shorter = [block[:-1] for block in result] if isinstance(result, list) else result[:-1]
        assert ours[0].wrong(Turn(0), shorter, expected[0]) == elements, "of another length"


@pytest.mark.mutant
def test_the_check_finds_a_contribution_that_counts_twice_and_what_was_not_done_in_place():
    for op, dtype in [("sum", "float32"), ("prod", "int8"), ("sum", "uint8")]:
        ours = [Data(case("all_reduce", 4, dtype, op), rank, 1000) for rank in range(4)]
        rows = [each.arguments(Turn(0))[0] for each in ours]
        ours[0].outs[0][...] = combined(op, dtype, [*rows, rows[0]])
        assert ours[0].wrong(Turn(0), None, ours[0].expected(Turn(0))) > 0, (op, dtype)
    data, turn = Data(case("all_reduce", 3), 1, 1000), Turn(0, 0, True)
    expected = data.expected(turn)
    data.prepare(turn, expected)
    assert data.wrong(turn, None, expected) > 900


def test_look_up_goes_over_every_block():
    draws = operands.random_bytes(4 * operands.BLOCK + 4, seed=1).reshape(4, -1)
    values = numpy.arange(operands.DRAWS, dtype=numpy.int16)
    assert (operands.look_up(values, draws) == draws).all()
