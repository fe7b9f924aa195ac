"""The check of bench/: right results are accepted, and wrong ones found."""

import pytest
from gpucoll.bench import cases
from gpucoll.bench.cases import BenchCase
from gpucoll.bench.data import BenchTurn, Data

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
