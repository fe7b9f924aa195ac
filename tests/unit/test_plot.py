"""bench/plot.py and the pictures below it: what is read off a picture is what the record says."""

import copy
import doctest
import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from browser import made
from gpucoll.errors import ArgumentError, UsageError

pytest.importorskip("gpucoll.bench.plot", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import plot
from gpucoll.bench.page import axes, canvas, charts, curves, heatmap

SVG = "{http://www.w3.org/2000/svg}"
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "ns": 1e-3, "µs": 1, "ms": 1e3, "s": 1e6}


@pytest.mark.parametrize("name", ["axes", "canvas", "charts", "curves", "facts", "heatmap", "layout", "tables"])
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(f"gpucoll.bench.page.{name}")).failed == 0


# Reading a picture: an SVG is parsed, its axes are found by their labels, and the signs are measured against them.


def drawn(record, quantity=charts.BANDWIDTH, size=axes.WIDE, **options):
    (panel,) = curves.panels([record])
    picture = charts.lines(panel, quantity, curves.names([panel]), size=size, **options)
    return ElementTree.fromstring(canvas.alone(picture, canvas.fixed(canvas.LIGHT)))


def value(text):
    number, _, unit = text.partition(" ")
    return float(number) * UNITS.get(unit, 1)


def scale(labels):
    """What a pixel says, from two of the labels of a logarithmic axis."""
    (first, low), (last, high) = labels[0], labels[-1]
    return lambda pixel: math.exp(math.log(low) + (pixel - first) / (last - first) * math.log(high / low))


def scales(root):
    texts = [(text, text.text) for text in root.iter(f"{SVG}text")]
    across = [(float(text.get("x")), value(said)) for text, said in texts
              if text.get("text-anchor") == "middle" and said[0].isdigit()]
    up = [(float(text.get("y")) - 4, value(said)) for text, said in texts if text.get("text-anchor") == "end"]
    return scale(across), scale(up)


def centre(sign):
    if sign.tag == f"{SVG}circle":
        return float(sign.get("cx")), float(sign.get("cy"))
    corners = [tuple(map(float, corner.split(","))) for corner in sign.get("points").split()]
    return tuple(sum(column) / len(corners) for column in zip(*corners, strict=True))


def read_off(root):
    """For each line its signs, as values of the two axes."""
    across, up = scales(root)
    found = {}
    for group in root.iter(f"{SVG}g"):
        signs = [centre(sign) for sign in group if sign.tag != f"{SVG}polyline"]
        found[group.get("data-line")] = [(across(x), up(y)) for x, y in signs]
    return found


def held_against(root, record, figure, placement="out_of_place"):
    """The check: every line has a sign for each size, where the record's figure is."""
    found = read_off(root)
    wanted = {}
    for one in record["results"]:
        wanted.setdefault(f"0:{one['algorithm']}", []).append((one["size"], one[placement][figure]))
        for peer, measured in one["against"].items():
            wanted.setdefault(f"0:{peer}", {})
            wanted[f"0:{peer}"] = dict(wanted[f"0:{peer}"]) | {one["size"]: measured[placement][figure]}
    assert set(found) - {"0:bound"} == set(wanted)
    for name, points in wanted.items():
        assert found[name] == [pytest.approx(point, rel=0.01) for point in sorted(dict(points).items())]


@pytest.mark.parametrize("size", [axes.WIDE, axes.NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("placement", ["out_of_place", "in_place"])
@pytest.mark.parametrize(("quantity", "figure"), [(charts.BANDWIDTH, "bus_bw"), (charts.LATENCY, "time")],
                         ids=["busbw", "time"])
def test_what_is_read_off_is_what_was_measured(quantity, figure, placement, size):
    record = made.sweep(["ring", "tree", "star"], [8 << 2 * step for step in range(10)], against={"mpi": 5.0})
    held_against(drawn(record, quantity, size, placement=placement), record, figure, placement)


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["a point less", "a line less", "another figure", "a point moved"])
def test_a_wrong_picture_is_found(fault):
    record = made.sweep()
    false = copy.deepcopy(record)
    if fault == "a point less":
        del false["results"][-1]
    elif fault == "a line less":
        false["results"] = [one for one in false["results"] if one["algorithm"] == "ring"]
    elif fault == "a point moved":
        false["results"][2]["out_of_place"]["bus_bw"] *= 1.05
    with pytest.raises(AssertionError):
        held_against(drawn(false), record, "alg_bw" if fault == "another figure" else "bus_bw")


@pytest.mark.parametrize(("quantity", "bound"), [(charts.BANDWIDTH, lambda size: 8.0),
                                                 (charts.LATENCY, lambda size: size * 1.5 / 8.0 / 1e3)])
def test_the_bound_is_dashed_and_where_it_belongs(quantity, bound):
    root = drawn(made.sweep(sizes=[1 << 20, 4 << 20, 16 << 20]), quantity)
    (dashed,) = [line for line in root.iter(f"{SVG}polyline") if line.get("stroke-dasharray")]
    across, up = scales(root)
    for place in dashed.get("points").split():
        x, y = map(float, place.split(","))
        assert up(y) == pytest.approx(bound(across(x)), rel=0.01)
    assert "copy bound" in [text.text for text in root.iter(f"{SVG}text")]


def test_lines_without_a_bound_have_none():
    record = made.record([made.result("ring", size, size / 100) for size in (64, 128)])
    assert not [line for line in drawn(record).iter(f"{SVG}polyline") if line.get("stroke-dasharray")]


def test_one_size_is_drawn_and_zeros_are_left_out():
    record = made.record([made.result("ring", 64, 10.0)])
    held_against(drawn(record), record, "bus_bw")
    zeros = made.record([made.result("ring", 0, 10.0), *record["results"]])
    held_against(drawn(zeros), record, "bus_bw")


def test_one_rank_has_no_bandwidth():
    """2(n-1)/n is 0: the picture says so; the time is drawn."""
    record = made.sweep(ranks=1)
    assert "No bandwidth" in "".join(drawn(record).itertext())
    held_against(drawn(record, charts.LATENCY), record, "time")


def test_names_stand_apart_and_inside():
    record = made.sweep([f"algorithm {place}" for place in range(12)], [64 << 10, 1 << 20])
    root = drawn(record)
    heights = sorted(float(text.get("y")) for text in root.iter(f"{SVG}text") if text.get("font-weight") and
                     text.text.startswith(("algorithm", "copy")))
    assert len(heights) == 13
    assert all(high - low >= charts.LINE_HEIGHT - 0.2 for low, high in itertools.pairwise(heights))
    assert heights[0] > 0
    assert heights[-1] < axes.WIDE[1]


def test_every_algorithm_has_a_look_of_its_own():
    (panel,) = curves.panels([made.sweep([f"a{place}" for place in range(24)])])
    styles = curves.names([panel])
    looks = [(mark.shape % len(canvas.OUTLINES), mark.role) for mark in
             (charts.mark(curve, styles, 0) for curve in panel.curves)]
    assert len(set(looks)) == 24


def test_axes_say_sizes_in_powers_of_two_and_their_units():
    said = [text.text for text in drawn(made.sweep(sizes=[8, 64, 512, 4096, 32768])).iter(f"{SVG}text")]
    assert {"8 B", "32 B", "128 B", "512 B", "2 KiB", "8 KiB", "32 KiB"} <= set(said)
    assert {"message size", "bus bandwidth (GB/s)"} <= set(said)


# Colours


def channels(colour):
    return [int(colour[place:place + 2], 16) / 255 for place in (1, 3, 5)]


def linear(colour):
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]


def luminance(colour):
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# How those without one kind of cone see, in linear RGB: Machado, Oliveira, Fernandes 2009, severity 1.
SEEN = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def oklab(rgb):
    """Björn Ottosson's OKLab, in which equal distances look equal."""
    cones = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
             (0.0883024619, 0.2817188376, 0.6299787005))
    turn = ((0.2104542553, 0.7936177850, -0.0040720468), (1.9779984951, -2.4285922050, 0.4505937099),
            (0.0259040371, 0.7827717662, -0.8086757660))
    return times(turn, [math.cbrt(c) for c in times(cones, rgb)])


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


@pytest.mark.parametrize("palette", [canvas.LIGHT, canvas.DARK], ids=["light", "dark"])
def test_colours_stand_out(palette):
    paper = palette["paper"]
    assert all(contrast(palette[f"line-{line}"], paper) >= 3 for line in range(canvas.LINES)), "signs: WCAG 1.4.11"
    assert all(contrast(palette[role], paper) >= 4.5 for role in ("ink", "muted", "bound", "peer", "good", "bad"))


@pytest.mark.parametrize("palette", [canvas.LIGHT, canvas.DARK], ids=["light", "dark"])
@pytest.mark.parametrize("kind", SEEN)
def test_colours_differ_for_the_colour_blind(palette, kind):
    seen = [oklab([min(max(c, 0), 1) for c in times(SEEN[kind], linear(palette[f"line-{line}"]))])
            for line in range(canvas.LINES)]
    nearest = min((math.dist(one, other), first, second) for (first, one), (second, other)
                  in itertools.combinations(enumerate(seen), 2))
    assert nearest[0] >= 0.08, nearest


def test_heat_grows_lighter_and_its_numbers_are_legible():
    colours = [heatmap.heat(step / 100) for step in range(101)]
    lights = [luminance(colour) for colour in colours]
    assert lights == sorted(lights)
    assert colours[0] != colours[-1]
    inks = ["#ffffff" if step / 100 < heatmap.SWITCH else "#000000" for step in range(101)]
    assert min(contrast(ink, colour) for ink, colour in zip(inks, colours, strict=True)) >= 4.4


# Pairs of ranks


def cells(root):
    """The squares by colour: what is no square of the map has the paper's colour or lies in its key."""
    return [(text.text, text) for text in root.iter(f"{SVG}text") if re.fullmatch(r"[\d.]+", text.text or "")]


def beside(root, anchor, rank, axis="x"):
    """Where the number of a rank stands above its column, or before its row."""
    return next(text.get(axis) for text in root.iter(f"{SVG}text") if text.text == rank and
                text.get("text-anchor") == anchor)


def test_a_square_for_every_pair_and_a_frame_for_the_slow_one():
    found = curves.pairs(made.links(ranks=5, slow=(3, 1)))
    picture = heatmap.pair_map(1 << 20, found[1 << 20])
    root = ElementTree.fromstring(canvas.alone(picture, canvas.fixed(canvas.LIGHT)))
    said = [text for text, _ in cells(root)]
    assert said.count("4") == 19 + 1 + 2, "19 pairs, the key's end, and rank 4 twice"
    assert said.count("0.5") == 1
    assert "slow: 3 to 1" in root.find(f"{SVG}desc").text
    slow = next(element for text, element in cells(root) if text == "0.5")
    assert slow.get("x") == beside(root, "middle", "1"), "received by rank 1: its column"
    assert slow.get("y") == beside(root, "end", "3", "y"), "sent by rank 3: its row"
    frames = [line for line in root.iter(f"{SVG}polyline") if canvas.LIGHT["bad"] in line.get("style")]
    assert len(frames) == 2, "the link and the key"
    corners = [tuple(map(float, corner.split(","))) for corner in frames[0].get("points").split()]
    assert min(x for x, _ in corners) < float(slow.get("x")) < max(x for x, _ in corners)
    assert min(y for _, y in corners) < float(slow.get("y")) < max(y for _, y in corners)


def test_many_ranks_keep_their_numbers_apart():
    found = curves.pairs(made.links(ranks=64))[1 << 20]
    root = ElementTree.fromstring(canvas.alone(heatmap.pair_map(1 << 20, found), canvas.fixed(canvas.LIGHT)))
    across = sorted(float(text.get("x")) for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "middle" and
                    text.text.isdigit())
    assert all(high - low >= 20 for low, high in itertools.pairwise(across))
    assert len([one for one in root.iter(f"{SVG}polygon")]) >= 64 * 63


# Files


def test_an_svg_file_is_whole_and_needs_no_matplotlib(tmp_path):
    source = ("import json, sys; from gpucoll.bench import plot; plot.draw(json.load(open('r.json')), 'f.svg'); "
              "assert 'matplotlib' not in sys.modules and 'mpi4py.MPI' not in sys.modules")
    (tmp_path / "r.json").write_text(json.dumps(made.sweep()))
    subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
    root = ElementTree.parse(tmp_path / "f.svg").getroot()
    lines = [group.get("data-line") for group in root.iter(f"{SVG}g")]
    assert sorted(lines) == sorted(["0:bound", "0:ring", "0:tree"] * 2), "bandwidth beside time"
    assert root.find(f"{SVG}title").text == "all_reduce · float · sum · 4 ranks · cpu"
    assert "var(" not in (tmp_path / "f.svg").read_text(), "colours of a file of its own do not hang on a page"


def test_all_that_was_measured_is_in_the_file(tmp_path):
    record = made.sweep()
    record["results"] += made.sweep(["chain"], collective="broadcast")["results"]
    record["gpucoll"]["pairs"] = made.links()["gpucoll"]["pairs"]
    plot.draw(record, tmp_path / "f.svg")
    text = (tmp_path / "f.svg").read_text()
    assert [text.count(name) > 0 for name in ("all_reduce", "broadcast", "pairs of ranks")] == [True] * 3


def test_the_same_record_gives_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        plot.draw(made.sweep(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_shows_the_same(tmp_path):
    pytest.importorskip("matplotlib", reason="PNG needs matplotlib: pip install gpucoll[plot]")
    import matplotlib.image

    for name in ("a.png", "b.png"):
        plot.draw(made.sweep(), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    image = matplotlib.image.imread(tmp_path / "a.png")
    width = (3 * plot.GAP + 2 * axes.WIDE[0]) * plot.DPI / plot.INCH
    assert image.shape[1] == int(width)
    for role in ("line-0", "line-1", "bound", "paper"):
        far = abs(image[..., :3] - channels(canvas.LIGHT[role])).max(axis=2)
        assert (far < 0.01).sum() > 50, role
    assert "matplotlib.pyplot" not in sys.modules, "no window, no global state"


def test_without_matplotlib_png_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for call in (plot.writer, lambda path: plot.draw(made.sweep(), path)):
        with pytest.raises(UsageError, match=r"GC-PLOT.*pip install gpucoll\[plot\]"):
            call(str(tmp_path / "f.png"))
    assert not list(tmp_path.iterdir())
    plot.draw(made.sweep(), tmp_path / "f.svg")


@pytest.mark.parametrize("name", ["f.pdf", "f", "f.svgz", "svg"])
def test_other_endings_are_refused(name, tmp_path):
    with pytest.raises(ArgumentError, match="GC-PLOT"):
        plot.writer(name)
    with pytest.raises(ArgumentError, match="GC-PLOT"):
        plot.draw(made.sweep(), str(tmp_path / name))


def test_what_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match=r"GC-FILE.*cannot write .*No such file"):
        plot.draw(made.sweep(), str(tmp_path / "no" / "f.svg"))
    with pytest.raises(ArgumentError, match="nothing was measured"):
        plot.draw(made.record([]), str(tmp_path / "f.svg"))
