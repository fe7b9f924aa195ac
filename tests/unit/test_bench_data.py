"""bench/'s data: exact in every order, different for each rank and repetition, and a check that finds wrong results."""

import numpy
import pytest
from gpucoll.bench import cases, operands
from gpucoll.bench.cases import Case
from gpucoll.bench.data import Data, Turn

from harness.grids import naming
from oracles import oracle

LEGAL = [(op, dtype) for op in oracle.OPS for dtype in oracle.DTYPES if oracle.legal(op, dtype)]
TESTS = [name for name in cases.TESTS if name != "barrier"]


def case(collective, ranks=4, dtype="float32", op="sum", root=0):
    return Case(collective, dtype, op, root, ranks)


def combined(op, dtype, rows):
    """Reduce the rows one after another and round every partial result to the dtype, as any algorithm may."""
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


@pytest.mark.parametrize("collective", TESTS)
def test_the_check_accepts_what_is_right_and_finds_what_is_wrong(collective):
    """Real collectives in tests/multirank/test_bench.py show the expected results to be right."""
    data, turn = Data(case(collective, 3, root=int(collective != "broadcast")), 1, 100), Turn(4)
    expected = data.expected(turn)
    data.prepare(turn, expected)
    returned = [one.copy() for one in expected]
    if data.outs[0] is not None:
        assert data.wrong(turn, None, expected) == expected[0].size, "not written"
        data.outs[0][...] = expected[0]
    assert data.wrong(turn, returned, expected) == 0
    assert data.wrong(turn, returned, data.expected(Turn(5))) > 50, "left from before"
    (returned[-1] if data.outs[0] is None else data.outs[0].reshape(-1))[-1] += 1
    assert data.wrong(turn, returned, expected) == 1
    if cases.TESTS[collective].ragged:
        elements = sum(map(len, expected))
        assert data.wrong(turn, [], expected) == elements, "missing"
        assert data.wrong(turn, [block[:-1] for block in returned], expected) == elements, "of another length"


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
