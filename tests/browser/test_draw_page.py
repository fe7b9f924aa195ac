"""Drawn pages in a real browser: no complaint, every step, complete at the end; keys, pointer, phones, no script."""

import pytest

from browser.drawn import COMPLETE, FRAME, LAST, OVERFLOW, show
from gpucoll.algorithms import registry
from gpucoll.lab.draw import draw

STEPPED = [("all_reduce", "tree", 8, {}), ("all_to_all", "direct", 5, {}), ("scatter", "linear", 6, {}),
           ("exscan", "linear", 4, {}), ("barrier", "dissemination", 6, {}), ("broadcast", "tree", 1, {})]


def page(folder, collective, name, size, **options):
    path = folder / "page.html"
    path.write_text(draw(name, collective, size=size, **options), encoding="utf-8")
    return path


@pytest.mark.nightly
@pytest.mark.parametrize(("collective", "name", "size", "options"), STEPPED, ids=str)
def test_stepping_to_the_end_completes_every_chunk(browser, tmp_path, collective, name, size, options):
    path = page(tmp_path, collective, name, size, **options)
    show(browser, path)
    last = browser.run(LAST)
    for step in range(last):
        assert browser.run(FRAME) == step
        browser.press("ArrowRight")
    assert browser.run(FRAME) == last
    complete = browser.run(COMPLETE)
    assert len(complete) == size
    assert all(done == of for done, of in complete)
    assert sum(of for _, of in complete) > 0
    assert browser.errors == []
    assert browser.requests == [f"file://{path}"]


# What the page tells about the cell of a rank and a column, and the colour drawn there.
POINTED = """((x, y, {left, top}) => {
    canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: left + x, clientY: top + y}));
    const dot = context.getImageData(x, y, 1, 1).data.slice(0, 3);
    return [find("cell").textContent, "#" + Array.from(dot, (one) => one.toString(16).padStart(2, "0")).join("")];
})(cellX(%d) + 6, sizes.top + %d * sizes.down + 6, canvas.getBoundingClientRect())"""


def test_before_the_first_message_each_rank_shows_its_own_contribution(browser, tmp_path):
    show(browser, page(tmp_path, "all_reduce", "ring", 4))
    for rank, letter in enumerate("abcd"):
        for chunk in range(4):
            told = f"Rank {rank}, input chunk {chunk}: {letter}{chunk}"
            assert browser.run(POINTED % (chunk, rank)) == [told, browser.run(f"data.colours[{rank}]")]
    browser.press("ArrowRight")
    assert browser.run(POINTED % (0, 0))[0] == "Rank 0, output chunk 0: empty"


@pytest.mark.nightly
@pytest.mark.parametrize("width", [360, 700, 1920])
def test_every_algorithm_opens_ends_complete_and_is_not_too_wide(browser, tmp_path, width):
    for collective, name in registry():
        show(browser, page(tmp_path, collective, name, 8), width)
        browser.press("End")
        assert all(done == of for done, of in browser.run(COMPLETE)), (collective, name)
        assert (browser.errors, browser.run(OVERFLOW) <= 0) == ([], True), (collective, name)
        assert browser.run("innerWidth") == width, "a phone does not shrink it"


@pytest.mark.nightly
def test_the_lanes_are_shown_without_scripts(browser, tmp_path):
    browser.show(page(tmp_path, "all_reduce", "tree", 8), scripts=False)
    assert browser.run("[...document.querySelectorAll('.lanes svg')].every((one) => one.clientHeight > 10)")
    assert browser.run("[...document.querySelectorAll('.controls, .panes')].every((one) => one.clientHeight === 0)")
