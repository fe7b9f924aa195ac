"""bench/'s data: exact in every order, different everywhere, and a check that finds what is wrong."""

import numpy
import pytest

import oracle

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import cases, data, operands
from gpucoll.bench.cases import Case
from gpucoll.bench.data import Data, Turn

LEGAL = [(op, dtype) for op in oracle.OPS for dtype in oracle.DTYPES if oracle.legal(op, dtype)]
FIRST = Turn(0)
TESTS = [name for name in cases.TESTS if name != "barrier"]
ORDERED = [name for name in TESTS if name not in ("reduce", "broadcast", "sendrecv")]


def case(collective, ranks=4, dtype="float32", op="sum", root=0):
    return Case(collective, dtype, op, root, ranks)


def drawn(op, dtype, ranks):
    """The operands of every rank in the dtype itself."""
    return operands.operands(dtype, op, ranks).astype(oracle.kind(dtype))


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
@pytest.mark.parametrize(("op", "dtype"), LEGAL)
def test_results_are_exact_in_every_order(op, dtype, ranks):
    expected = operands.reduced(operands.operands(dtype, op, ranks), op, dtype)
    rows = drawn(op, dtype, ranks)
    assert expected.dtype == oracle.kind(dtype)
    for order in (rows, rows[::-1], numpy.roll(rows, ranks // 2, axis=0)):
        assert combined(op, dtype, order).tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("op", "dtype"), LEGAL)
def test_every_rank_decides_some_results(op, dtype, ranks):
    rows = drawn(op, dtype, ranks)
    for rank in range(ranks):
        others = numpy.delete(rows, rank, axis=0)
        assert (combined(op, dtype, others) != combined(op, dtype, rows)).any()


@pytest.mark.parametrize(("op", "dtype"), [(op, dtype) for op, dtype in LEGAL if op != "avg"])
def test_an_identity_changes_nothing(op, dtype):
    neutral = operands.identity(op, dtype)
    assert neutral.dtype == oracle.kind(dtype)
    rows = drawn(op, dtype, 2)
    alone = (rows[0] != 0).astype(rows.dtype) if op in ("land", "lor", "lxor") else rows[0]
    assert combined(op, dtype, [rows[0], numpy.broadcast_to(neutral, rows[0].shape)]).tobytes() == alone.tobytes()


@pytest.mark.parametrize("dtype", oracle.DTYPES)
def test_ranks_have_different_data(dtype):
    inputs = [Data(case("all_gather", 4, dtype), rank, 1000).arguments(Turn(0))[0] for rank in range(4)]
    for rank in range(4):
        assert all((inputs[rank] != inputs[other]).any() for other in range(rank))


def test_repetitions_and_aggregated_calls_have_different_data():
    ours = Data(case("all_reduce"), 0, 100, calls=2)
    inputs = [ours.arguments(Turn(repetition, call))[0].copy() for repetition in range(3) for call in range(2)]
    assert all((one != other).any() for number, one in enumerate(inputs) for other in inputs[:number])
    assert ours.outs[0] is not ours.outs[1]


def test_unalign_shifts_every_array():
    ours = Data(case("all_reduce"), 0, 100, shift=3)
    straight = Data(case("all_reduce"), 0, 100)
    places = [[array.ctypes.data - array.base.ctypes.data for array in each.arguments(Turn(0))]
              for each in (straight, ours)]
    assert places == [[0, 0], [12, 12]]


def test_fixed_inputs_stay_where_they_are_and_change_what_they_hold():
    ours = Data(case("all_reduce"), 0, 100, fixed=True)
    seen = []
    for repetition in range(2):
        ours.prepare(Turn(repetition), ours.expected(Turn(repetition)))
        seen.append((ours.arguments(Turn(repetition))[0].ctypes.data, ours.arguments(Turn(repetition))[0].copy()))
    assert seen[0][0] == seen[1][0]
    assert (seen[0][1] != seen[1][1]).any()


# What a collective gives to one rank, of all ranks' arguments, made here by other means than in the bench.


def firsts(inputs):
    return [given[0] for given in inputs]


def total(rows):
    return sum(rows[1:], rows[0].copy())


def row_of_counts(inputs, rank, root):
    rows, counts = firsts(inputs), inputs[0][1]
    start = sum(counts[:rank])
    return total(rows)[start:start + counts[rank]]


RESULTS = {
    "all_reduce": lambda inputs, rank, root: total(firsts(inputs)),
    "reduce": lambda inputs, rank, root: total(firsts(inputs)),
    "broadcast": lambda inputs, rank, root: inputs[root][0],
    "all_gather": lambda inputs, rank, root: numpy.array(firsts(inputs)),
    "hypercube": lambda inputs, rank, root: numpy.array(firsts(inputs)),
    "gather": lambda inputs, rank, root: numpy.array(firsts(inputs)),
    "scatter": lambda inputs, rank, root: inputs[root][0][rank],
    "reduce_scatter": lambda inputs, rank, root: total(firsts(inputs))[rank],
    "all_to_all": lambda inputs, rank, root: numpy.array([given[rank] for given in firsts(inputs)]),
    "scan": lambda inputs, rank, root: total(firsts(inputs)[:rank + 1]),
    "exscan": lambda inputs, rank, root: total(firsts(inputs)[:rank]) if rank else 0 * inputs[0][0],
    "sendrecv": lambda inputs, rank, root: inputs[rank - 1][0],
    "all_gather_v": lambda inputs, rank, root: [row.copy() for row in firsts(inputs)],
    "gather_v": lambda inputs, rank, root: [row.copy() for row in firsts(inputs)],
    "scatter_v": lambda inputs, rank, root: inputs[root][0][rank],
    "reduce_scatter_v": row_of_counts,
    "all_to_all_v": lambda inputs, rank, root: [given[rank] for given in firsts(inputs)],
}
WITHOUT = {"reduce": [0, 2], "gather": [0, 2], "gather_v": [0, 2], "broadcast": [1]}  # ranks that get nothing


def played(collective, ranks, count, turn=FIRST, root=1):
    """The data of every rank after a faultless collective, what it returned, and what is expected."""
    ours = [Data(case(collective, ranks, root=root), rank, count) for rank in range(ranks)]
    expected = [each.expected(turn) for each in ours]
    for each, wanted in zip(ours, expected, strict=True):
        each.prepare(turn, wanted)
    inputs = [[part.copy() if isinstance(part, numpy.ndarray) else part for part in each.arguments(turn)]
              for each in ours]
    found = [RESULTS[collective](inputs, rank, root) if expected[rank] else None for rank in range(ranks)]
    for each, result in zip(ours, found, strict=True):
        if each.outs[0] is not None:
            each.outs[0][...] = result
    return ours, found, expected


def wrong(ours, found, expected, turn=FIRST):
    return [each.wrong(turn, result, wanted) for each, result, wanted in zip(ours, found, expected, strict=True)]


@pytest.mark.parametrize("count", [0, 4, 100])
@pytest.mark.parametrize("turn", [Turn(0), Turn(1, 0, True), Turn(37)])
@pytest.mark.parametrize("collective", TESTS)
def test_the_check_accepts_what_is_right(collective, turn, count):
    assert wrong(*played(collective, 3, count, turn), turn) == [0, 0, 0]


@pytest.mark.parametrize("collective", TESTS)
def test_ranks_without_a_result_are_not_checked(collective):
    _, _, expected = played(collective, 3, 10)
    assert [rank for rank in range(3) if not expected[rank]] == WITHOUT.get(collective, [])


@pytest.mark.mutant
@pytest.mark.parametrize("collective", TESTS)
def test_the_check_finds_one_wrong_element(collective):
    ours, found, expected = played(collective, 3, 100)
    victim = next(rank for rank in (2, 1, 0) if expected[rank])
    if ours[victim].outs[0] is not None:
        ours[victim].outs[0].reshape(-1)[-1] += 1
    else:
        spoilt = found[victim][-1] if isinstance(found[victim], list) else found[victim]
        spoilt[-1] += 1
    assert sum(wrong(ours, found, expected)) == wrong(ours, found, expected)[victim] == 1


@pytest.mark.mutant
@pytest.mark.parametrize("collective", ["all_gather", "gather", "all_to_all", "hypercube", "all_to_all_v"])
def test_the_check_finds_blocks_in_the_wrong_order(collective):
    ours, found, expected = played(collective, 3, 120, root=0)
    if ours[0].outs[0] is not None:
        ours[0].outs[0][[0, 1]] = ours[0].outs[0][[1, 0]]
    else:
        found[0][0], found[0][1] = found[0][1], found[0][0]
    assert wrong(ours, found, expected)[0] > 100  # of those that changed places


@pytest.mark.mutant
@pytest.mark.parametrize("collective", ["scatter", "reduce_scatter", "scan"])
def test_the_check_finds_what_was_meant_for_another_rank(collective):
    ours, found, expected = played(collective, 3, 100, root=0)
    ours[0].outs[0][...] = expected[1][0]
    assert wrong(ours, found, expected)[0] > 50


@pytest.mark.mutant
@pytest.mark.parametrize("collective", TESTS)
def test_the_check_finds_what_was_left_from_before(collective):
    ours, found, _ = played(collective, 3, 100, Turn(4))
    assert sum(wrong(ours, found, [each.expected(Turn(5)) for each in ours])) > 50


@pytest.mark.mutant
@pytest.mark.parametrize("collective", [name for name in TESTS if cases.TESTS[name].ragged])
def test_the_check_finds_a_result_that_is_missing_or_of_another_length(collective):
    ours, found, expected = played(collective, 3, 100, root=0)
    elements = sum(map(len, expected[0]))
    assert ours[0].wrong(Turn(0), [], expected[0]) == elements
    shorter = found[0][:-1] if not isinstance(found[0], list) else [block[:-1] for block in found[0]]
    assert ours[0].wrong(Turn(0), shorter, expected[0]) == elements


@pytest.mark.mutant
@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_the_check_finds_what_was_not_written(collective, dtype):
    ours = Data(case(collective, 3, dtype), 0, 100)
    expected = ours.expected(Turn(0))
    ours.prepare(Turn(0), expected)
    assert ours.wrong(Turn(0), None, expected) == expected[0].size


@pytest.mark.mutant
def test_the_check_finds_that_nothing_was_done_in_place():
    ours = Data(case("all_reduce", 3), 1, 1000)
    turn = Turn(0, 0, True)
    x, out = ours.arguments(turn)
    assert x is out
    expected = ours.expected(turn)
    ours.prepare(turn, expected)
    assert ours.wrong(turn, None, expected) > 900


@pytest.mark.mutant
@pytest.mark.parametrize(("op", "dtype"), [("sum", "float32"), ("prod", "int8"), ("band", "uint8"), ("sum", "bool")])
def test_the_check_finds_a_contribution_that_counts_twice_or_not_at_all(op, dtype):
    ours = [Data(case("all_reduce", 4, dtype, op), rank, 1000) for rank in range(4)]
    rows = [each.arguments(Turn(0))[0] for each in ours]
    ours[0].outs[0][...] = combined(op, dtype, rows[:3])
    assert ours[0].wrong(Turn(0), None, ours[0].expected(Turn(0))) > 0
    if op == "sum" and dtype != "bool":
        ours[0].outs[0][...] = combined(op, dtype, [*rows, rows[0]])
        assert ours[0].wrong(Turn(0), None, ours[0].expected(Turn(0))) > 0


def test_look_up_goes_over_every_block():
    draws = operands.random_bytes(4 * operands.BLOCK + 4, seed=1).reshape(4, -1)
    values = numpy.arange(operands.DRAWS, dtype=numpy.int16)
    assert (operands.look_up(values, draws) == draws).all()


def test_blocks_lie_side_by_side():
    assert data.blocks(case("all_to_all_v", 3, "int8"), 10, 0) == [slice(0, 5), slice(5, 15), slice(15, 30)]


@pytest.mark.parametrize("dtype", oracle.DTYPES)
@pytest.mark.parametrize("collective", TESTS)
def test_the_check_of_the_check(collective, dtype):
    op = "sum" if oracle.legal("sum", dtype) else "max"
    assert all(data.check_works(case(collective, 3, dtype, op), rank, data.Host()) for rank in range(3))


@pytest.mark.mutant
def test_the_check_of_the_check_finds_a_check_that_counts_nothing(monkeypatch):
    monkeypatch.setattr(Data, "wrong", lambda *_: 0)
    assert not data.check_works(case("all_reduce", 3), 0, data.Host())


@pytest.mark.mutant
def test_the_check_of_the_check_finds_one_that_counts_what_is_right(monkeypatch):
    monkeypatch.setattr(Data, "wrong", lambda *_: 1)
    assert not data.check_works(case("all_reduce", 3), 0, data.Host())
