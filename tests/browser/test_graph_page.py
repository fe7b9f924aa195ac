"""Pages of schedules on graphs in a real browser: every step shows its links, texts keep apart, keys work."""

import sys

import pytest

from browser.drawn import COMPLETE, FRAME, LAST, show
from faults import tables
from gpucoll.cli import main
from gpucoll.lab.document import asset
from gpucoll.lab.graphs.link_graph import load_graph

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("own_algorithms")]

GRAPHS = {"dgx1": 8, "torus(4x4)": 16, "dgx_a100(2)": 16, "ring(8)": 8, "grid(3x3)": 9, "fat_tree(2x4x2)": 8}
USED = "[...document.querySelectorAll('.lane.used')].map((line) => data.graph.lines.indexOf(line))"
FLOWS = "(frame ? data.graph.flows[frame - 1] : []).map(([lane]) => lane)"
# Rectangles on the screen of all texts and discs of the stage.


def synthesised(folder, graph, size):
    """Return the path of a page of a synthesised all-gather."""
    path = folder / "made.py"
    assert main(["synthesize", graph, "all_gather", "--size", size, "-o", str(path)]) == 0
    name = path.read_text().split("\ndef ")[1].partition("(")[0]
    page = folder / "page.html"
    assert main(["draw", f"{path}:{name}", "--topology", graph, "-o", str(page)]) == 0
    return page


def check_steps(browser):
    for step in range(browser.run(LAST) + 1):
        assert browser.run(FRAME) == step
        used = browser.run(USED)
        assert sorted(used) == sorted(browser.run(FLOWS))
        assert bool(used) == bool(step)
        assert ("in use; longest" in browser.run("find('said').textContent")) == bool(step)
        browser.press("ArrowRight")
    assert all(done == of for done, of in browser.run(COMPLETE))
    browser.press("Home")
    assert browser.run(USED) == []


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_step_shows_the_links_in_use_and_ends_complete(browser, tmp_path, graph):
    page = synthesised(tmp_path, graph, "1K")
    show(browser, page)
    assert browser.run("document.querySelectorAll('.lane').length") == len(load_graph(graph).edges)
    assert browser.run("document.querySelectorAll('.switch').length") == load_graph(graph).size - GRAPHS[graph]
    check_steps(browser)
    assert browser.errors == []
    assert browser.requests == [f"file://{page}"]


@pytest.mark.parametrize("fault", [fault for fault in tables.planted() if fault.file.endswith("graph.js")],
                         ids=lambda fault: fault.name)
def test_a_fault_of_the_script_is_seen(browser, tmp_path, monkeypatch, fault):
    def planted(package, name):
        return asset(package, name).replace(*fault.changes[0])

    monkeypatch.setattr(sys.modules["gpucoll.lab.draw.page"], "asset", planted)
    show(browser, synthesised(tmp_path, "ring(8)", "1K"))
    with pytest.raises(AssertionError):
        check_steps(browser)
