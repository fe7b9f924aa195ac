"""Graphs of links: faults of files, bounds against all cuts, trees that reach the bounds, predictions by hand."""

import itertools
import json
import math
import random
import re
from fractions import Fraction

import pytest

import gpucoll as gc
from gpucoll.cli import main
from gpucoll.core import toml
from gpucoll.errors import ArgumentError
from gpucoll.lab.graphs.bounds import BOUNDED, bound
from gpucoll.lab.graphs.link_graph import Edge, LinkGraph, load_graph, parse_graph
from gpucoll.lab.graphs.synthesis import SCHEDULES, synthesis, trees_for
from gpucoll.lab.sweep import load_links
from gpucoll.simulator import simulate
from harness.refusals import refused
from programs.synthesised import check_on_threads, proved

PAIR = """
kind = "graph"
name = "a pair"
ranks = ["a", "b"]
[[links]]
from = "a"
to = "b"
GBps = 25.0
us = 0.7
both = true
"""
pytestmark = pytest.mark.usefixtures("own_algorithms")
KNOWN = [  # graph, collective, GB/s; by hand, and SCCL's bound of 7/6 for DGX-1's six links
    ("ring(4, GBps=25, us=0.7)", "all_gather", "200/3"), ("ring(4, GBps=25, us=0.7)", "all_reduce", "100/3"),
    ("dgx1", "all_gather", "1200/7"), ("dgx1", "broadcast", "150"), ("dgx_a100", "reduce_scatter", "2400/7"),
    ("dgx_a100(2)", "all_gather", "1040/3"), ("dgx_a100(4)", "all_reduce", "400/3"), ("crossbar(8)", "gather", "400/7"),
    ("grid(5)", "all_reduce", "50"), ("grid(3x3)", "all_reduce", "75"), ("ndv2", "all_gather", "25"),
    ("fat_tree(4x4x2)", "all_gather", "160/3"), ("dgx_h100_nvls", "all_reduce", "1800/7"),
    ("ring(3, GBps=0.1)", "broadcast", "1/5"),
    # as ForestColl's own program prints them
    ("dgx_a100(4)", "all_gather", "800/3"), ("mi250", "all_gather", "2400/7"), ("mi250(2)", "all_gather", "5312/15")]


@pytest.mark.parametrize(("graph", "name", "algbw"), KNOWN)
def test_known_bounds(graph, name, algbw):
    assert bound(load_graph(graph), name).algbw == Fraction(algbw)


def drawn(number, *, is_balanced=False):
    """Return a small random graph of links whose ranks all reach each other."""
    draw = random.Random(number)
    ranks, switches = draw.randint(2, 5), draw.randint(0, 2)
    size, edges = ranks + switches, {}
    ways = [(src, dst) for src, dst in itertools.permutations(range(size), 2) if not is_balanced or src < dst]
    for src, dst in ways:
        if draw.random() < 0.6:
            edge = Edge(Fraction(draw.choice([1, 2, 3, 5]), draw.choice([1, 2])), Fraction(1, 2))
            edges[src, dst] = edge
            if is_balanced:
                edges[dst, src] = edge
    names = tuple(f"n{node}" for node in range(size))
    graph = LinkGraph("drawn", names, ranks, edges)
    reached = [min(one.hops(0)) for one in (graph, graph.reversed())]
    return graph if min(reached) >= 0 else None


GRAPHS = [graph for graph in map(drawn, range(70)) if graph is not None]
BALANCED = [graph for graph in (drawn(number, is_balanced=True) for number in range(70)) if graph is not None]


def subsets(nodes):
    nodes = [*nodes]
    return itertools.chain.from_iterable(itertools.combinations(nodes, count) for count in range(len(nodes) + 1))


def by_all_cuts(graph, name, root=0):
    """Return the bound by looking at every set of nodes."""
    graph = graph.reversed() if name in ("reduce_scatter", "reduce", "scatter") else graph
    best = math.inf
    for cut in subsets(range(graph.size)):
        ranks = sum(node < graph.ranks for node in cut)
        if not ranks or ranks == graph.ranks:
            continue
        if name in ("all_gather", "reduce_scatter"):
            best = min(best, graph.ranks * graph.leaving(cut) / ranks)
        elif name in ("broadcast", "reduce") and root in cut:
            best = min(best, graph.leaving(cut))
        elif name in ("gather", "scatter") and root not in cut:
            best = min(best, graph.ranks * graph.leaving(cut) / ranks)
    return best


def by_all_partitions(graph):
    """Return the bound of an all-reduce by looking at all partitions of the ranks, each part with any switches."""
    best = math.inf
    for parts in itertools.product(range(graph.ranks), repeat=graph.ranks):
        used = {*parts}
        if len(used) < 2:
            continue
        for one in (graph, graph.reversed()):
            total = sum(min(one.leaving([*(rank for rank in range(graph.ranks) if parts[rank] == part), *switches])
                            for switches in subsets(range(graph.ranks, graph.size))) for part in used)
            best = min(best, total / (2 * (len(used) - 1)))
    return best


@pytest.mark.parametrize("name", [name for name in BOUNDED if name != "all_reduce"])
def test_bounds_are_those_of_the_tightest_cut(name):
    for graph in GRAPHS:
        found = bound(graph, name)
        assert found.algbw == by_all_cuts(graph, name), graph
        assert 0 < len(found.parts[0]) < graph.size


def by_the_certificate(graph, name, found, root=0):
    """Return the bound that the named sets prove, by the bandwidth of the links out of them or into them."""
    one = graph.reversed() if found.inward else graph
    total = sum(one.leaving(part) for part in found.parts)
    inside = [node for node in found.parts[0] if node < graph.ranks]
    return {"all_reduce": total / (2 * (len(found.parts) - 1) or 1), "broadcast": total, "reduce": total,
            **dict.fromkeys(("all_gather", "reduce_scatter"), graph.ranks * total / len(inside)),
            **dict.fromkeys(("gather", "scatter"), graph.ranks * total / len(inside))}[name]


@pytest.mark.parametrize("name", BOUNDED)
def test_the_named_links_prove_the_bound(name):
    assert any(graph.edges.keys() != graph.reversed().edges.keys() for graph in GRAPHS)
    for graph in GRAPHS:
        found = bound(graph, name)
        assert by_the_certificate(graph, name, found) == found.algbw, graph


def test_the_bound_of_an_all_reduce_is_that_of_the_tightest_partition():
    for graph in [one for one in GRAPHS if one.ranks <= 4]:
        assert bound(graph, "all_reduce").algbw == by_all_partitions(graph), graph


def test_halves_of_odd_bandwidths_are_exact():
    speeds = {(0, 1): 5, (1, 0): 5, (1, 2): 7, (2, 1): 7}
    edges = {key: Edge(Fraction(speed), Fraction(1)) for key, speed in speeds.items()}
    graph = LinkGraph("line", ("a", "b", "c"), 3, edges)
    assert bound(graph, "all_reduce").algbw == 5 == by_all_partitions(graph)


@pytest.mark.parametrize("name", SCHEDULES)
def test_trees_reach_the_bound_within_the_links(name):
    """Where as much enters every switch as leaves it; an all-reduce through switches may fall short."""
    for graph in BALANCED:
        found, best = trees_for(graph, name, most=200), bound(graph, name).algbw
        assert found.algbw == best if name != "all_reduce" or graph.size == graph.ranks else best / 2 <= found.algbw
        made = synthesis(graph, name, 1 << 16)
        proved(name, graph.ranks, made.forest.chunks, getattr(made.forest, made.found.method))
        assert made.found.algbw <= best


@pytest.mark.parametrize("graph", ["fat_tree(3x2)", "dragonfly(4x3x1)", "dgx_a100(2)", "ndv2"])
def test_switches_behind_switches_cost_nothing(graph):
    graph = load_graph(graph)
    assert trees_for(graph, "all_gather").algbw == bound(graph, "all_gather").algbw


@pytest.mark.parametrize("graph", ["ring(5)", "dgx1", "torus(3x3)"])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "broadcast", "reduce"])
def test_no_link_carries_more_than_its_bandwidth(graph, name):
    graph = load_graph(graph)
    found = trees_for(graph, name)
    forest = synthesis(graph, name, 1 << 20).forest
    blocks = graph.ranks if found.has_blocks else 1
    for (parent, child), shares in forest.links.items():
        link = (child, parent) if name in ("reduce_scatter", "reduce") else (parent, child)
        assert found.algbw / blocks * shares / forest.shares <= graph.edges[link].GBps


@pytest.mark.parametrize("name", ["broadcast", "gather", "scatter", "all_gather"])
@pytest.mark.parametrize("graph", ["ring(5)", "grid(2x3)", "dgx1", "torus(3x3)"])
def test_the_least_rounds_are_those_of_data_that_spread_over_all_links(graph, name):
    graph = load_graph(graph)
    near = {(src, dst) for src, dst in graph.edges if max(src, dst) < graph.ranks}
    known, rounds = [{rank} for rank in range(graph.ranks)], 0
    while not {"broadcast": all(0 in data for data in known), "gather": len(known[0]) == graph.ranks,
               "scatter": all(0 in data for data in known),
               "all_gather": all(len(data) == graph.ranks for data in known)}[name]:
        known = [data.union(*(known[src] for src, dst in near if dst == rank)) for rank, data in enumerate(known)]
        rounds += 1
    assert bound(graph, name).rounds == rounds


def test_bandwidths_without_a_common_divisor_are_rounded_down():
    edges = {}
    for rank, speed in enumerate((Fraction(1234567, 10000), Fraction(7654321, 100000), Fraction(3141592, 100000))):
        edges[rank, (rank + 1) % 3] = edges[(rank + 1) % 3, rank] = Edge(speed, Fraction(1))
    graph = LinkGraph("odd", ("a", "b", "c"), 3, edges)
    found, best = trees_for(graph, "all_gather"), bound(graph, "all_gather").algbw
    assert Fraction(98, 100) * best < found.algbw <= best
    with pytest.raises(gc.ArgumentError, match=r"GC-SYNTHESIS.*within the time limit"):
        trees_for(graph, "all_gather", seconds=-1)


@pytest.mark.parametrize(("name", "method"), [("all_reduce", "all_reduce"), ("all_reduce", "tree_all_reduce")])
def test_results_are_exact_on_threads(tmp_path, monkeypatch, capsys, name, method):
    graph = "crossbar(4)" if method == "all_reduce" else "grid(4)"
    monkeypatch.chdir(tmp_path)
    assert main(["synthesize", graph, name, "--size", "1M", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert f"forest().{method}(" in (tmp_path / made["algorithm"].partition(":")[0]).read_text()
    assert main(["verify", made["algorithm"], "--ranks", "4"]) == 0
    check_on_threads(name, 4, made["algorithm"].partition(":")[2])  # registered by the command


def test_a_file_of_a_graph(tmp_path, capsys):
    file = tmp_path / "pair.toml"
    file.write_text(PAIR)
    assert main(["bound", str(file), "all_gather", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"collective": "all_gather", "graph": "a pair", "algbw_GBps": 50.0, "fraction": "50/1",
                     "cut": found["cut"], "parts": [found["cut"]], "inward": False, "least_rounds": 1}
    assert found["cut"] in (["a"], ["b"])
    assert main(["simulate", "all_gather", "1M", "--topology", str(file), "--algorithm", "direct", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["predictions"]
    assert row["us"] == pytest.approx(0.7 + (1 << 19) / 25e3)
    assert row["algbw_GBps"] == pytest.approx((1 << 20) / row["us"] / 1e3)
    assert row["ranks"] == 2


@pytest.mark.parametrize("ending", ["py", "xml"])
def test_a_synthesised_file_serves_every_command(tmp_path, capsys, ending):
    path = tmp_path / f"made.{ending}"
    assert main(["synthesize", "dgx1", "all_gather", "--size", "16M", "--json", "-o", str(path)]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["bound_GBps"] == row["trees_GBps"] == pytest.approx(1200 / 7)
    assert (row["proved"], row["chunks"]) == (True, 48)
    words = ["simulate", "all_gather", "16M", "--topology", "dgx1", "--algorithm", row["algorithm"], "--json"]
    assert main(words) == 0
    (predicted,) = json.loads(capsys.readouterr().out)["predictions"]
    assert predicted["algbw_GBps"] == pytest.approx(row["algbw_GBps"])
    assert main(["verify", row["algorithm"], "--ranks", "8"]) == 0
    assert "1 schedules of 1 algorithms" in capsys.readouterr().out


def test_an_algorithm_of_a_graph_has_a_name_of_python(tmp_path, capsys):
    """The name of the graph begins with a digit."""
    file = tmp_path / "pair.toml"
    file.write_text(PAIR.replace("a pair", "1 x a pair"))
    assert main(["synthesize", str(file), "all_gather", "--json", "-o", str(tmp_path / "made.py")]) == 0
    assert json.loads(capsys.readouterr().out)["algorithm"].endswith("made.py:graph_1_x_a_pair_all_gather")


def changed(old, new):
    assert old in PAIR
    return PAIR.replace(old, new, 1)


@pytest.mark.parametrize(("text", "said"), [
    (changed('"graph"', '"tree"'), "kind is 'tree', not \"graph\""),
    (changed('["a", "b"]', '["a"]'), "a graph needs two ranks or more"),
    (changed('["a", "b"]', '["a", "a"]'), "two nodes are named 'a'"),
    (changed('["a", "b"]', '"ab"'), "ranks 'ab' is no list"),
    (changed('to = "b"', 'to = "bb"'), "no node is named, as in to 'bb'"),
    (changed('to = "b"', 'to = "a"'), "a link from 'a' to itself"),
    (changed("GBps = 25.0", "GBps = 0"), "GBps 0 is no bandwidth: leave the link out"),
    (changed("GBps = 25.0", "GBps = -1"), "GBps -1 is not a number, 0 to 1e+09"),
    (changed("GBps = 25.0", ""), "GBps is missing"),
    (changed("us = 0.7", "us = nan"), "us nan is not a number"),
    (changed("both = true", "both = 1"), "both 1 is not true or false"),
    (changed("both = true", ""), "no path leads from rank 'b' to rank 'a'"),
    (changed("us = 0.7", "us = 0.7\nwidth = 4"), "unknown key 'width'"),
    (changed('ranks = ["a", "b"]', 'ranks = ["a", "b", "c"]'), "no path leads from rank 'a' to rank 'c'"),
    ("kind = [", "not TOML")])
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path, capsys, text, said):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(gc.ArgumentError, match=re.escape(said)) as caught:
        parse_graph("wrong", text.encode())
    assert caught.value.code == "GC-TOPOLOGY"
    assert said in refused(capsys, main, ["bound", str(file), "all_gather"], "gpucoll bound: ")


def test_messages_on_one_link_share_it_and_equal_ways_share_the_bytes():
    crossbar, square = load_links("crossbar(3, GBps=1, us=1)"), load_links("ring(4, GBps=1, us=1)")
    assert simulate("all_gather", "direct", 3, 3 * 10**6, crossbar).seconds == pytest.approx(2e-3 + 1e-6)
    # A link carries a block of its own ends, and half of the blocks of two ranks that face each other.
    assert simulate("all_gather", "direct", 4, 4 * 10**6, square).seconds == pytest.approx(2e-3 + 2e-6)


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\x01b"])
def test_a_name_that_would_end_a_text_of_python_is_refused(tmp_path, name):
    file = tmp_path / "graph.toml"
    file.write_text(f'kind = "graph"\nranks = ["a", "b"]\nname = {json.dumps(name)}\n'
                    '[[links]]\nfrom = "a"\nto = "b"\nGBps = 1.0\nus = 1.0\nboth = true\n')
    with pytest.raises(ArgumentError, match=r"GC-TOPOLOGY.*a quote, a backslash or a control character"):
        load_graph(str(file))


@pytest.mark.parametrize("text", ["a." * 20000 + "a = 1", "[" + "a." * 20000 + "a]", '"=" . ' * 20000 + "a = 1",
                                  "'=' . " * 20000 + "a = 1", "x = {" + "a." * 20000 + "a = 1}"])
def test_a_key_of_many_parts_is_refused_unread(text, monkeypatch):
    monkeypatch.setattr("tomllib.loads", lambda text: pytest.fail("parsed"))
    with pytest.raises(gc.ArgumentError, match="a key has more than 64 parts"):
        toml.TomlFile("graph", "GC-TOPOLOGY").read(text.encode(), None)


def test_dots_elsewhere_are_no_key():
    text = f'a.b.c = [{"0.5, " * 999}]\nwords = "{"one. " * 999}"\n# {"a." * 999}\nescaped = "{chr(92)}"{"a." * 999}"\n'
    assert [*toml.TomlFile("graph", "GC-TOPOLOGY").read(text.encode(), None)] == ["a", "words", "escaped"]
