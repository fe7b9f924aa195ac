"""Rotations of graphs, compared link by link; trees of rank 0, turned, against the exact bounds."""

import collections
from fractions import Fraction

import pytest

from gpucoll.core.forest import SpanningTree, turned
from gpucoll.lab.graphs.bounds import bound
from gpucoll.lab.graphs.link_graph import load_graph
from gpucoll.lab.graphs.symmetry import rotations
from gpucoll.lab.graphs.synthesis import synthesis, trees_for
from programs.synthesised import proved

SIDES = {"ring(5)": (5,), "torus(3x4)": (3, 4), "torus(2x3x4)": (2, 3, 4), "crossbar(6)": (6,), "dgx_a100": (8,),
         "dgx_a100(3)": (3, 8), "dgx_h100_nvls(2)": (2, 8), "dgx2(2)": (2, 8, 2), "fat_tree(3x4x2)": (3, 4)}


@pytest.mark.parametrize("name", SIDES)
def test_a_rotation_takes_every_link_to_an_equal_link(name):
    graph = load_graph(name)
    turns = rotations(graph)
    assert turns.sides == SIDES[name]
    for image in turns.images:
        assert sorted(image) == [*range(graph.size)]
        assert {(image[src], image[dst]): edge for (src, dst), edge in graph.edges.items()} == graph.edges
    reached = {0}
    for _ in range(graph.ranks):
        reached |= {image[rank] for rank in reached for image in turns.images}
    assert reached == {*range(graph.ranks)}


@pytest.mark.parametrize("name", SIDES)
def test_one_unlike_link_ends_the_symmetry(name):
    graph = load_graph(name)
    for key in [*graph.edges][::7]:
        for other in (graph.edges[key]._replace(us=Fraction(9)), graph.edges[key]._replace(GBps=Fraction(9))):
            assert rotations(graph._replace(edges=graph.edges | {key: other})) is None
        fewer = {one: edge for one, edge in graph.edges.items() if one != key}
        assert rotations(graph._replace(edges=fewer)) is None
    if graph.size > graph.ranks + 1:
        assert rotations(graph._replace(multicast=frozenset((graph.ranks,)))) is None


@pytest.mark.parametrize(("name", "within", "across"), [("dgx_a100(3)", 300, 25), ("dgx_h100(2)", 450, 50),
                                                        ("dgx2(2)", 150, Fraction(25, 4))])
def test_turned_trees_stay_within_the_links_of_boxes(name, within, across):
    """A GPU sends at most the bandwidth of its NIC to other boxes (its share of a NIC), and all it has in all."""
    graph = load_graph(name)
    found = trees_for(graph, "all_gather")
    sides, share = rotations(graph).sides, sum(tree.share for tree in found.trees if tree.root == 0)
    gpus = graph.ranks // sides[0]
    out, into, everywhere = collections.Counter(), collections.Counter(), collections.Counter()
    for tree in found.trees:
        for parent, child in tree.edges:
            everywhere[parent] += tree.share
            everywhere[-1 - child] += tree.share
            if parent // gpus != child // gpus:
                out[parent] += tree.share
                into[child] += tree.share
    rate = found.algbw / graph.ranks / share
    assert found.algbw == bound(graph, "all_gather").algbw
    assert all(rate * load <= across for load in (*out.values(), *into.values()))
    total = within + (Fraction(25, 2) if name == "dgx2(2)" else across)
    assert all(rate * load <= total for load in everywhere.values())


@pytest.mark.parametrize("graph", ["ring(5)", "torus(3x4)", "torus(2x2x3)", "crossbar(6)", "dgx_a100(2)", "dgx2(2)",
                                   "fat_tree(3x2)"])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_turned_trees_reach_the_bound_and_are_proved(graph, name):
    graph = load_graph(graph)
    made = synthesis(graph, name, 1 << 16)
    assert made.found.sides == rotations(graph).sides
    assert made.found.algbw == made.limit.algbw == bound(graph, name).algbw
    proved(name, graph.ranks, made.forest.chunks, getattr(made.forest, made.found.method))


def test_a_tree_is_turned_to_every_rank_by_adding_digits():
    trees = turned([SpanningTree(0, 2, ((0, 1), (1, 4))), SpanningTree(0, 1, ((0, 3),))], [2, 3])
    assert trees[2:4] == [SpanningTree(1, 2, ((1, 2), (2, 5))), SpanningTree(1, 1, ((1, 4),))]
    assert trees[-2:] == [SpanningTree(5, 2, ((5, 3), (3, 0))), SpanningTree(5, 1, ((5, 2),))]
    assert [tree.root for tree in trees] == [rank for rank in range(6) for _ in range(2)]
