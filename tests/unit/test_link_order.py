"""Trees in the order of links: proved, within the links' bandwidths, in few rounds on meshes, exact on threads."""

import collections

import pytest

import gpucoll as gc
from gpucoll.analysis.graphs.link_graph import graph_of, load_graph
from gpucoll.analysis.graphs.link_order import METHODS, in_link_order
from gpucoll.analysis.graphs.synthesis import synthesis, trees_for
from gpucoll.cli.synthesize import Maker
from synthesised import check_on_threads, proved

pytestmark = pytest.mark.usefixtures("own_algorithms")
# Four ranks in a ring: links of 50 and 75 GB/s carry two and three pieces in a round.
UNLIKE = {"kind": "graph", "name": "unlike", "ranks": ["a", "b", "c", "d"], "switches": [], "links": [
    {"from": one, "to": other, "GBps": speed, "us": 1.0, "both": True}
    for one, other, speed in (("a", "b", 50.0), ("b", "c", 75.0), ("c", "d", 50.0), ("d", "a", 75.0))]}


def ordered(graph, name, nbytes=1 << 30):
    return in_link_order(graph, name, trees_for(graph, name), nbytes)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("graph", ["grid(2x3)", "ring(5)", "torus(3x3)", "dgx1", "unlike"])
def test_every_collective_is_proved_within_the_links(graph, name):
    graph = graph_of("unlike", UNLIKE) if graph == "unlike" else load_graph(graph)
    if name == "all_reduce" and trees_for(graph, name).method != name:
        assert ordered(graph, name) is None  # trees that carry sums and results at once have no order of links
        return
    made = ordered(graph, name)
    proved(name, made.size, made.chunks, made.rounds)
    slowest = min(edge.GBps for edge in graph.edges.values())
    most = 2 if graph.name == "unlike" else 1
    for step in made.steps:
        for link, count in collections.Counter(message[1:] for message in step).items():
            assert count <= most * graph.edges[link].GBps / slowest


@pytest.mark.parametrize(("graph", "rounds"), [("grid(5x5)", 12), ("grid(4x4)", 15), *(
    pytest.param(name, 59, marks=pytest.mark.slow) for name in ("torus(3x4x5)", "grid(3x4x5)"))])
def test_meshes_take_the_least_rounds(graph, rounds):
    """The links of the poorest rank are busy in every round: (P - 1) blocks over the links into a corner."""
    assert len(ordered(load_graph(graph), "all_gather").steps) == rounds


def test_few_bytes_are_cut_into_few_segments():
    mesh = load_graph("grid(3x3)")
    assert len(ordered(mesh, "broadcast", 64).steps) == 6
    assert len(ordered(mesh, "broadcast", 1 << 30).steps) > 100


@pytest.mark.parametrize(("graph", "name"), [("dgx_a100", "all_gather"), ("grid(5x5)", "all_reduce")])
def test_graphs_and_trees_without_an_order_of_links(graph, name):
    assert ordered(load_graph(graph), name) is None


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "broadcast", "reduce"])
def test_the_file_runs(tmp_path, name):
    graph, nbytes = load_graph("grid(2x3)"), 64 << 20
    maker = Maker(graph, name, nbytes)
    made = maker.steps(ordered(graph, name, nbytes))
    if name in ("all_gather", "reduce_scatter"):  # a single root fills its links by a pipeline as well
        found = synthesis(graph, name, nbytes)
        assert maker.best_trees(found).seconds == made.seconds < maker.trees(found).seconds
    check_on_threads(name, 6, gc.load(maker.written(made, str(tmp_path / "made.py"))))
