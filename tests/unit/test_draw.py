"""Drawings show the real schedule, end complete, load nothing from elsewhere, and are the same every time."""

import base64
import hashlib
import itertools
import json
import re
import runpy
from collections import Counter

import pytest

import gpucoll as gc
from gpucoll.algorithms import algorithms, registry, schedule
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Send
from gpucoll.lab.draw import draw, view
from gpucoll.lab.draw.record import NO_CONTENT
from harness.grids import sampled
from harness.sources import ROOT
from oracles.counting import count

NAMES = list(registry())


def sizes(collective, name):
    return [size for size in (1, 2, 3, 5, 8) if name in algorithms(collective, size=size)]


def sends(collective, name, size):
    """Count the chunks sent from each rank to each peer."""
    sent = Counter()
    for rank in range(size):
        for step in itertools.chain.from_iterable(schedule(collective, name, rank=rank, size=size)):
            if isinstance(step, Send):
                sent[rank, step.peer] += step.src.count
    return sent


def data_of(html):
    """Return the data given to the page's script."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)[1])


def held_at_the_end(data):
    """Return the contributors of every chunk of output by (rank, chunk), from the page's changes alone."""
    return {(rank, first + place): frozenset(data["contents"][content])
            for changes in data["changes"] for rank, output, first, contents in changes if output
            for place, content in enumerate(contents)}


@pytest.mark.parametrize(("collective", "name"), sampled(NAMES, keep=30, seed=11))
def test_what_is_drawn_is_what_happens(collective, name):
    """The page's last state is the wanted state; rounds and messages equal the proved schedule's."""
    for size in sizes(collective, name):
        data = data_of(draw(name, collective, size=size, root=size - 1 if COLLECTIVES[collective].rooted else 0))
        found = held_at_the_end(data)
        wanted = {(rank, chunk): frozenset(data["contents"][content]) for rank, row in enumerate(data["wanted"])
                  for chunk, content in enumerate(row) if content != NO_CONTENT}
        assert {key: found.get(key) for key in wanted} == wanted, size
        recording, drawn = view(name, collective, size=size), Counter()
        for message in recording.messages:
            drawn[message.sender, message.receiver] += message.chunks
        assert drawn == sends(collective, name, size)
        assert recording.rounds == count(collective, name, size).rounds


def test_nothing_is_asked_for_from_elsewhere_and_the_policy_allows_the_pages_own_script_only():
    html = draw("ring", size=3)
    for text in (html, draw("ring", size=3, form="svg")):
        assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert "@import" not in text
        assert "url(" not in text
    script = re.search(r"<script>(.*)</script>\n</body>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1].split("; ")
    assert {"default-src 'none'", f"script-src 'sha256-{digest}'"} <= set(policy)
    assert "{{" not in html.replace(script, ""), "every blank is filled"


def test_a_notebook_shows_a_drawing_by_one_call(tmp_path):
    drawing = gc.draw("binomial", 5, collective="broadcast", root=2)
    picture = draw("binomial", "broadcast", size=5, root=2, form="svg")
    assert drawing._repr_svg_() == picture
    assert repr(drawing) == "<Drawing of broadcast by binomial, 5 ranks>"
    for form in ("svg", "html"):
        drawing.save(tmp_path / f"drawn.{form}")
        assert (tmp_path / f"drawn.{form}").read_text(encoding="utf-8") == \
            draw("binomial", "broadcast", size=5, root=2, form=form)
    assert gc.draw("ring")._repr_svg_() == draw("ring", form="svg")
    for wrong, code in ((lambda: gc.draw("rign"), "GC-ALGO"), (lambda: gc.draw("ring", 1000), "GC-DRAW"),
                        (lambda: drawing.save("drawn.png"), "GC-DRAW"),
                        (lambda: drawing.save(tmp_path / "no" / "drawn.svg"), "GC-FILE")):
        with pytest.raises(gc.ArgumentError, match=code + "]"):
            wrong()


def test_pictures_of_the_guide_tell_what_each_collective_means():
    """Before and after, by hand; the quickest for short and for long arrays in the figure of times."""
    ext = ROOT / "docs/_ext"
    meanings, curves = (runpy.run_path(str(ext / f"{name}.py")) for name in ("meanings", "curves"))
    after = {name: [["+".join(block) for block in blocks] for blocks in meanings["contents"](name)[1]]
             for name in meanings["SHOWN"]}
    assert after["all_to_all"][1] == ["a1", "b1", "c1", "d1"]
    assert after["reduce_scatter"] == [[f"a{rank}+b{rank}+c{rank}+d{rank}"] for rank in range(4)]
    assert after["gather"] == [["a", "b", "c", "d"], [], [], []]
    assert after["scan"][2:] == [["a+b+c"], ["a+b+c+d"]]
    assert meanings["contents"]("scatter")[0] == [[["a0"], ["a1"], ["a2"], ["a3"]], [], [], []]
    assert all(f">{text}</text>" in meanings["figure"](name) for name, rows in after.items()
               for blocks in rows for text in blocks)
    times = curves["times"]()
    assert [min(times, key=lambda name: times[name][place]) for place in (0, -1)] == \
        ["recursive_doubling", "halving_doubling"]
    assert curves["figure"]().count("<path d=") == 6 + len(curves["ALGORITHMS"])


def test_a_drawing_tells_the_masters_bottleneck_and_each_ranks_own_contribution():
    """By hand: what the busiest rank moves, idle time by bytes, the room of a round, the inputs, and the formulas."""
    star, tree, ring = (view(name, "all_reduce", size=4) for name in ("star", "tree", "ring"))
    assert [star.told(turn) for turn in range(2)] == ["rank 0 receives 3 n", "rank 0 sends 3 n"]
    assert [tree.told(turn) for turn in (0, 1)] == ["2 ranks send n", "rank 1 sends n"]
    assert {ring.told(turn) for turn in range(6)} == {"each rank sends n/4"}
    # In a round of the star rank 0 moves 3 n, and each other rank n: idle for two thirds of the time.
    assert (star.idle, star.rank_idle) == ((0.5, 0.5), (0, *[pytest.approx(2 / 3)] * 3))
    assert (set(ring.idle), set(ring.rank_idle)) == ({0.0}, {0.0})
    gather = draw("binomial", "gather", size=4, form="svg")
    assert [text in gather for text in (">a0<", ">b0<", ">c0<", ">d0<", ">e0<")] == [True] * 4 + [False]
    widths = {}
    for name in ("star", "tree", "ring"):
        text = draw(name, size=4, form="svg")
        widths[name] = [float(one) for one in re.findall(r'width="([\d.]+)" height="4" rx="2" class="ink"', text)]
        assert ">round 1<" in text
    assert [round(star_ - tree_, 2) for star_, tree_ in zip(widths["star"], widths["tree"], strict=False)] == [80, 80]
    assert "Rounds: 6 = 2 * (P - 1). The busiest rank sends 3n/2 = 2 * (P - 1) * n / P; all ranks together " in text
