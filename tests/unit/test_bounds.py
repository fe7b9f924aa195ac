"""What every schedule costs is counted: it is what the registry promises, and for some the least that there can be."""

import itertools
from fractions import Fraction

import pytest

from gpucoll.algorithms import find, registry
from gpucoll.analysis import count as counting
from gpucoll.analysis.count import count

SIZES = (*range(1, 14), 16, 17, 31, 32, 33, 64)
ROWS = sorted(registry())
POWERS = [2**k for k in range(7)]
ONE = Fraction(1)


def counted(collective, algorithm, size, segments=1, nodes=None):
    return count(collective, algorithm, size, segments=segments, nodes=nodes)


def log2(size):
    """The logarithm, rounded up: a rank can at most double what is known in a round."""
    return (size - 1).bit_length()


def share(size):
    return Fraction(size - 1, size)


@pytest.mark.parametrize("sizes", [pytest.param((1, 2, 3, 4, 5, 7, 8, 13, 16, 17), id="few"),
                                   pytest.param(range(18, 65), id="many", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_counted_costs_equal_the_formulas(collective, algorithm, sizes):
    found = registry()[collective, algorithm]
    for size, segments in itertools.product(sizes, (1, 2, 5) if "segments" in found.options else (1,)):
        assert counted(collective, algorithm, size, segments)._asdict() == found.cost.price(size, ONE, segments), size


@pytest.mark.parametrize(("collective", "algorithm"), [
    ("all_reduce", "hierarchical(ring,ring)"), ("all_reduce", "hierarchical(two_shot,one_shot)"),
    ("all_reduce", "hierarchical(ring,tree)"), ("reduce_scatter", "hierarchical(ring,direct)"),
    ("all_gather", "hierarchical(direct,ring)"), ("all_to_all", "hierarchical(bruck,pairwise)")])
def test_costs_with_parameters(collective, algorithm):
    found = find(collective, algorithm)
    for size in range(1, 18):
        assert counted(collective, algorithm, size)._asdict() == found.cost.price(size, ONE), size
    for nodes in ([0] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [*range(6)]):
        assert counted(collective, algorithm, 6, nodes=nodes)._asdict() == found.cost.price(6, ONE, nodes=nodes), nodes


@pytest.mark.parametrize(("sides", "hops"), [("4x2", 4), ("2x2x2", 3), ("8", 7), ("2x4", 4), ("1x8x1", 7)])
def test_a_torus_has_as_many_rounds_as_its_sides_say(sides, hops):
    found = find("all_reduce", f"torus({sides})")
    costs = counted("all_reduce", f"torus({sides})", 8)
    assert costs.rounds == 2 * hops == found.cost.price(8, ONE)["rounds"]
    assert costs.sent == costs.received == 2 * share(8)


# --- lower bounds: rounds where a rank deals with one other at a time, bytes of one rank -----------------------------

FEWEST_ROUNDS = {  # log2 P, rounded up
    "for every size": [("broadcast", "binomial"), ("reduce", "binomial"), ("gather", "binomial"),
                       ("scatter", "binomial"), ("all_gather", "bruck"), ("all_gather", "circulant"),
                       ("reduce_scatter", "circulant"), ("all_to_all", "bruck"), ("scan", "recursive_doubling"),
                       ("exscan", "recursive_doubling"), ("barrier", "dissemination")],
    "for powers of two": [("all_reduce", "recursive_doubling"), ("all_gather", "recursive_doubling"),
                          ("reduce_scatter", "recursive_halving")],
}


def test_the_fewest_rounds():
    for sizes, rows in FEWEST_ROUNDS.items():
        for size, row in itertools.product(SIZES if sizes == "for every size" else POWERS, rows):
            assert counted(*row, size).rounds == log2(size), (size, row)


FEWEST_BYTES = {
    "for every size": [("all_gather", "ring"), ("all_gather", "circulant"), ("all_gather", "bruck"),
                       ("reduce_scatter", "ring"), ("reduce_scatter", "circulant"), ("reduce_scatter", "direct"),
                       ("all_to_all", "pairwise"), ("all_to_all", "direct"), ("all_reduce", "ring"),
                       ("all_reduce", "bidirectional_ring"), ("all_reduce", "circulant"), ("all_reduce", "two_shot"),
                       ("all_reduce", "torus"), ("all_reduce", "hierarchical")],
    "for powers of two": [("all_gather", "recursive_doubling"), ("reduce_scatter", "recursive_halving"),
                          ("all_reduce", "halving_doubling"), ("all_reduce", "swing")],
}


def test_the_fewest_bytes():
    """(P - 1) / P N out of, into and combined on every rank; an all-reduce twice that, but for what is combined."""
    for sizes, rows in FEWEST_BYTES.items():
        for size, row in itertools.product(SIZES if sizes == "for every size" else POWERS, rows):
            costs = counted(*row, size)
            assert costs.sent == costs.received == (2 if row[0] == "all_reduce" else 1) * share(size), (size, row)
            assert costs.reduced == (share(size) if "reduce" in row[0] else 0), (size, row)


def test_rounds_and_bytes_at_once():
    """Circulant: both bounds of a reduce-scatter and an all-gather for every P; halving_doubling for powers of two."""
    for size in SIZES:
        for algorithm in ("circulant", *(["halving_doubling", "swing"] if size in POWERS else [])):
            costs = counted("all_reduce", algorithm, size)
            assert costs.rounds == 2 * log2(size)
            assert costs.path == costs.sent == costs.received == 2 * share(size)
            assert costs.reduced == share(size)


def test_a_binomial_scatter_and_gather_meet_both_bounds():
    for size in SIZES:
        for collective in ("scatter", "gather"):
            costs = counted(collective, "binomial", size)
            assert (costs.rounds, costs.path) == (log2(size), share(size))


def test_two_trees_use_the_full_bandwidth():
    """N bytes each way at most on every rank, where the inner ranks of one tree move 2 N one way."""
    for size, collective, segments in itertools.product(SIZES[1:], ("broadcast", "reduce"), (1, 4)):
        costs = counted(collective, "double_tree", size, segments)
        assert costs.sent == costs.received == 1
        assert costs.rounds == log2(size) + segments - 1
    assert counted("broadcast", "tree", 8).sent == counted("reduce", "tree", 8).received == 2


def test_nothing_is_below_the_bounds():
    """All ranks together must move so much that one of them moves this; a count below it would be a wrong count."""
    for row, size in itertools.product(ROWS, (2, 3, 8, 15)):
        if row[0] in ("all_reduce", "reduce_scatter", "all_gather"):
            costs, least = counted(*row, size), (2 if row[0] == "all_reduce" else 1) * share(size)
            assert min(costs.sent, costs.received) >= least
            assert costs.reduced >= (share(size) if "reduce" in row[0] else 0)


def test_both_ways_of_counting_agree(monkeypatch):
    """All ranks at once, or one message after another."""
    for few in (0, 99):
        monkeypatch.setattr(counting, "FEW", few)
        found = [counted(*row, size, segments) for row in ROWS for size in (2, 7, 8) for segments in (1, 3)]
        if few == 0:
            at_once = found
    assert found == at_once


@pytest.mark.mutant
@pytest.mark.parametrize("field", ["rounds", "path", "sent", "received", "reduced"])
def test_a_wrong_formula_is_found(monkeypatch, field):
    whole = registry()["all_reduce", "circulant"]
    wrong = whole._replace(cost=whole.cost._replace(**{field: f"{getattr(whole.cost, field)} + (P == 37)"}))
    monkeypatch.setitem(registry(), ("all_reduce", "circulant"), wrong)
    with pytest.raises(AssertionError):
        test_counted_costs_equal_the_formulas("all_reduce", "circulant", [37])
