"""Drawings of graphs of links: places, the load of links by hand and by counting, and the links that limit."""

import itertools
import json
import math
import sys
import xml.etree.ElementTree as ET

import pytest

import gpucoll as gc
from gpucoll.cli import main
from gpucoll.lab.draw import view
from gpucoll.lab.draw.graph_places import placed
from gpucoll.lab.draw.placement import SIDE
from gpucoll.lab.graphs.bounds import bound
from gpucoll.lab.graphs.link_graph import load_graph
from harness.refusals import refused

pytest.importorskip("networkx", reason='pip install "gpucoll[plot]"')
SVG = "{http://www.w3.org/2000/svg}"
GRAPHS = ["dgx1", "torus(4x4)", "torus(3x3x2)", "dgx_a100(2)", "ring(8)", "grid(3x3)", "grid(5)", "ndv2", "dgx2",
          "fat_tree(4x4x2)", "dragonfly(3x3x2)", "crossbar(2)", "dgx_h100_nvls(4)"]


@pytest.mark.parametrize("name", GRAPHS)
def test_nodes_and_numbers_keep_apart_within_the_picture(name):
    graph = load_graph(name)
    drawn = placed(graph)
    assert placed(graph) == drawn
    assert len(drawn.places) == graph.size
    assert [(lane.src, lane.dst) for lane in drawn.lanes] == [*graph.edges]
    middles = [lane.at(0.5) for lane in drawn.lanes]
    assert len({*middles}) == len(middles), "both directions of a link are seen"
    top, bottom = drawn.span
    for (x, y), (z, w) in itertools.combinations(drawn.places, 2):
        assert math.dist((x, y), (z, w)) > 2.4 * drawn.radius > 0
    for x, y in drawn.places:
        assert drawn.radius <= x <= SIDE - drawn.radius
        assert top + drawn.radius <= y <= bottom - drawn.radius
    labels = [place for place in drawn.labels() if place is not None]
    assert len(labels) >= min(len(drawn.lanes), 12)
    for one, other in itertools.combinations(labels, 2):
        assert abs(one[0] - other[0]) > 25 or abs(one[1] - other[1]) > 13
    assert all(math.dist(label, place) > drawn.radius + 8 for label in labels for place in drawn.places)


@pytest.mark.parametrize("name", ["dgx1", "torus(4x4)", "ring(8)", "grid(3x3)", "grid(5)", "dgx2", "fat_tree(4x4x2)"])
def test_no_line_passes_behind_a_node_that_is_not_its_end(name):
    drawn = placed(load_graph(name))
    for lane in drawn.lanes:
        others = [place for node, place in enumerate(drawn.places) if node not in (lane.src, lane.dst)]
        assert all(math.dist(lane.at(part / 20), place) > drawn.radius for part in range(21) for place in others)


def test_without_networkx_the_error_names_the_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "networkx", None)
    words = ["draw", "ring", "--topology", "ring(8)", "-o", str(tmp_path / "x.svg")]
    assert "pip install gpucoll[plot]" in refused(capsys, main, words, "gpucoll draw: ")
    with pytest.raises(gc.UsageError, match="GC-DRAW"):
        placed(load_graph("ring(8)"))


def test_loads_by_hand():
    """On a path of three ranks the links to the middle carry what goes beyond, too."""
    loads = view("direct", "all_gather", size=3, graph=load_graph("grid(3)")).graph
    named = [{(loads.places.lanes[lane].src, loads.places.lanes[lane].dst): load for lane, load in one.items()}
             for one in loads.loads]
    assert named == [{(0, 1): 2, (1, 0): 2, (1, 2): 2, (2, 1): 2}]
    square = view("direct", "all_gather", size=4, graph=load_graph("ring(4)"))
    assert {*square.graph.loads[0].values()} == {2}  # a neighbour's chunk, and half of two chunks for ranks opposite
    assert square.busiest == (2,)
    slow = view("direct", "all_gather", size=16, graph=load_graph("dgx_a100(2)")).graph
    slowest = max(slow.loads[0].items(), key=lambda item: slow.share(*item))
    assert (slow.places.lanes[slowest[0]].GBps, slow.share(*slowest)) == (25, 1)  # 8 chunks over the network


@pytest.mark.parametrize(("graph", "name", "count"), [
    ("dgx1", "all_gather", 4), ("grid(3x3)", "reduce_scatter", 2), ("dgx1", "reduce", 4),
    ("dgx_a100(4)", "all_reduce", 32)])
def test_the_picture_of_a_cut_shows_the_links_that_limit(tmp_path, capsys, graph, name, count):
    path = tmp_path / "cut.svg"
    assert main(["bound", graph, name, "-o", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    root = ET.fromstring(path.read_text())
    limits = [one.get("d") for one in root.iter(f"{SVG}path") if one.get("class") == "s-idle"]
    graph = load_graph(graph)
    drawn, parts = placed(graph), bound(graph, name).parts
    wanted = [lane.path for lane in drawn.lanes for src, dst in [
        (lane.dst, lane.src) if found["inward"] else (lane.src, lane.dst)]
        if any(src in part and dst not in part for part in parts)]
    assert sorted(limits) == sorted(wanted)
    assert len(limits) == count
    rings = [one for one in root.iter(f"{SVG}circle") if one.get("fill") == "none"]
    assert len(rings) == sum(map(len, parts))
    assert f"the {count} links {'into' if found['inward'] else 'out of'} the ringed " in "".join(root.itertext())
