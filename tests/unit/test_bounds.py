"""Counted costs of every schedule equal the registry's formulas."""

import itertools
from fractions import Fraction

import pytest

from gpucoll.algorithms import find, registry
from harness.grids import naming
from oracles.counting import count

ONE = Fraction(1)


@pytest.mark.parametrize("sizes", [pytest.param((1, 2, 3, 4, 5, 7, 8, 13, 16, 17), id="few"),
                                   pytest.param(range(18, 65), id="many", marks=pytest.mark.nightly)])
def test_counted_costs_equal_the_formulas(sizes):
    for row, size in itertools.product(sorted(registry()), sizes):
        found = registry()[row]
        for segments in (1, 2, 5) if "segments" in found.options else (1,):
            with naming((*row, size, segments)):
                counts, cost = count(*row, size, segments=segments), found.cost.price(size, ONE, segments)
                # Segments of hierarchical share rounds: the path may be shorter than the formula.
                if row[1] == "hierarchical" and segments > 1:
                    assert counts.path <= cost["path"]
                    counts = counts._replace(path=cost["path"])
                assert same(counts, cost)


def same(counts, cost):
    return counts._asdict() | {"gaps": cost["gaps"]} == cost


def test_costs_with_parameters():
    for row in (("all_reduce", "hierarchical(ring,ring)"), ("all_reduce", "hierarchical(two_shot,one_shot)"),
                ("all_reduce", "hierarchical(ring,tree)"), ("reduce_scatter", "hierarchical(ring,direct)"),
                ("all_gather", "hierarchical(direct,ring)"), ("all_to_all", "hierarchical(bruck,pairwise)")):
        cases = [(size, None) for size in range(1, 18)]
        cases += [(6, nodes) for nodes in ([0] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [*range(6)])]
        for size, nodes in cases:
            with naming((*row, size, nodes)):
                assert same(count(*row, size, nodes=nodes), find(*row).cost.price(size, ONE, nodes=nodes))
    for sides, hops in (("4x2", 4), ("2x2x2", 3), ("8", 7), ("1x8x1", 7)):
        costs = count("all_reduce", f"torus({sides})", 8)
        assert costs.rounds == 2 * hops == find("all_reduce", f"torus({sides})").cost.price(8, ONE)["rounds"]
        assert costs.sent == costs.received == Fraction(7, 4)
