"""The page in a real browser: no complaint, every line drawn, nothing asked of the network, keys and phones served."""

import json

import pytest

from browser import made

pytest.importorskip("gpucoll.bench.report", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import plot, report
from gpucoll.bench.page import canvas

NAMES = ["ring", "tree", "star", "chain"]
SIZES = (8, 1024, 1 << 20)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages by name, as files."""
    folder = tmp_path_factory.mktemp("pages")
    one = made.sweep(NAMES, against={"mpi": 5.0})
    records = {"one": [one], "two": [one, made.sweep(NAMES, speed=1.5, against={"mpi": 5.0})], "links": [made.links(8)],
               "nccl": [made.NCCL_TESTS, one]}
    for name, found in records.items():
        (folder / f"{name}.html").write_text(report.page(found), encoding="utf-8")
    return folder


# Where a line is seen: it has a length on the screen, and a colour other than the paper's.
SEEN = """[...document.querySelectorAll("g[data-line]")].filter((line) => {
  const place = line.getBoundingClientRect(), path = line.querySelector("polyline");
  const hidden = ["none", getComputedStyle(document.body).backgroundColor];
  return place.width > 100 && path && path.getBoundingClientRect().width > 100 &&
    !hidden.includes(getComputedStyle(path).stroke);
}).map((line) => line.dataset.line)"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 390, 700, 1280, 1920])
@pytest.mark.parametrize("name", ["one", "two", "links", "nccl"])
def test_no_complaints_no_requests_nothing_too_wide(browser, pages, name, width, dark):
    browser.show(pages / f"{name}.html", width, dark=dark)
    assert browser.errors == []
    assert browser.requests == [f"file://{pages}/{name}.html"]
    assert browser.run(OVERFLOW) <= 0
    assert browser.run("innerWidth") == width, "a phone does not shrink it"


@pytest.mark.mutant
def test_complaints_and_requests_are_seen(browser, pages, tmp_path):
    """Among them that the page's policy keeps a script out that is not its own."""
    text = (pages / "one.html").read_text(encoding="utf-8")
    (tmp_path / "false.html").write_text(text.replace('"use strict";', '"use strict"; missing();'), encoding="utf-8")
    browser.show(tmp_path / "false.html")
    assert any("Content Security Policy" in error for error in browser.errors)
    (tmp_path / "false.html").write_text('<script>missing()</script><img src="no.png">')
    browser.show(tmp_path / "false.html")
    assert any("missing is not defined" in error for error in browser.errors)
    assert any(address.endswith("no.png") for address in browser.requests)


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no scripts"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_every_line_is_seen_once_for_each_quantity(browser, pages, width, dark, scripts):
    browser.show(pages / "one.html", width, dark=dark, scripts=scripts)
    lines = browser.run(SEEN)
    assert sorted(line for line in lines if line != "0:bound") == sorted([f"0:{name}" for name in [*NAMES, "mpi"]] * 2)
    assert lines.count("0:bound") >= 1


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["stroke:var(--paper)", "display:none", "stroke:none"])
def test_a_line_that_nobody_sees_is_found(browser, pages, tmp_path, fault):
    text = (pages / "one.html").read_text(encoding="utf-8").replace("stroke:var(--line-2)", fault)
    (tmp_path / "false.html").write_text(text, encoding="utf-8")
    browser.show(tmp_path / "false.html")
    assert "0:star" not in browser.run(SEEN)


def test_both_runs_are_seen(browser, pages):
    browser.show(pages / "two.html")
    lines = browser.run(SEEN)
    assert {f"{run}:{name}" for run in (0, 1) for name in [*NAMES, "mpi"]} <= set(lines)
    assert set(NAMES) <= set(lines), "how they differ"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_tables_are_whole(browser, pages, width):
    """A row for every size and curve, no empty cell; they scroll inside of the page."""
    browser.show(pages / "one.html", width)
    table = "document.querySelector('.panel table')"
    assert browser.run(f"{table}.tBodies[0].rows.length") == len(SIZES) * (len(NAMES) + 1)
    assert browser.run(f"[...{table}.tBodies[0].rows].flatMap((row) => [...row.cells]).filter((cell) => "
                       "!cell.innerText.trim()).length") == 0
    widths = browser.run(f"[{table}.scrollWidth, {table}.parentElement.clientWidth, innerWidth]")
    assert widths[1] <= widths[2]
    assert browser.run(f"getComputedStyle({table}.parentElement).overflowX") == "auto"


@pytest.mark.parametrize("width", [360, 1280])
def test_text_is_legible(browser, pages, width):
    """Nothing below 11 pixels on the screen, in the pictures neither; names do not leave them."""
    browser.show(pages / "one.html", width)
    sizes = browser.run("""[...document.querySelectorAll("svg:not(.sign)")].filter((picture) => picture.clientWidth)
        .flatMap((picture) => [...picture.querySelectorAll("text")].map((text) =>
        text.getAttribute("font-size") * picture.clientWidth / picture.viewBox.baseVal.width))""")
    assert len(sizes) > 20
    assert min(sizes) >= 10.9
    outside = browser.run("""[...document.querySelectorAll("svg text")].filter((text) => {
        const place = text.getBoundingClientRect(), picture = text.ownerSVGElement.getBoundingClientRect();
        return place.width && (place.left < picture.left - 1 || place.right > picture.right + 1);
    }).map((text) => text.textContent)""")
    assert outside == []


def test_in_place_is_chosen_without_scripts(browser, pages):
    browser.show(pages / "one.html", scripts=False)
    shown = "[...document.querySelectorAll('.side')].filter((side) => side.clientHeight).map((side) => side.className)"
    assert browser.run(shown) == ["side out_of_place"]
    browser.run("document.querySelector('label[for=in_place-0]').click()")
    assert browser.run(shown) == ["side in_place"]
    assert len(browser.run(SEEN)) >= 2 * (len(NAMES) + 1)


def test_keys_read_values_off(browser, pages):
    browser.show(pages / "one.html")
    browser.run("document.querySelector('figure').focus()")
    said = "document.querySelector('figure output').innerText"
    assert browser.run(said).startswith("1 MiB")
    browser.press("Home")
    assert browser.run(said).split()[:3] == ["8", "B", "mpi"], "the best first"
    algbw = 8 / (10 + 8 / 1e3) / 1e3
    assert f"ring {algbw * 1.5:.3g} GB/s" in browser.run(said)
    browser.press("ArrowRight")
    assert browser.run(said).startswith("1 KiB")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert browser.run(said).startswith("8 B"), "the first stays the first"
    browser.press("End")
    assert browser.run(said).startswith("1 MiB")
    assert browser.run("document.querySelectorAll('.wide .cursor').length") == 1
    assert browser.errors == []


def test_the_pointer_reads_the_nearest_column(browser, pages):
    browser.show(pages / "one.html")
    place = browser.run("(() => { const p = document.querySelector('.wide svg').getBoundingClientRect(); "
                        "return [p.left, p.top, p.width, p.height]; })()")
    browser.move(place[0] + place[2] * 0.15, place[1] + place[3] / 2)
    assert browser.run("document.querySelector('figure output').innerText").startswith("8 B")


def test_a_line_is_hidden_and_shown_by_keyboard(browser, pages):
    browser.show(pages / "one.html")
    before = browser.run(SEEN)
    browser.run("document.querySelector('.legend button').focus()")
    browser.press(" ")
    assert browser.run("document.activeElement.getAttribute('aria-pressed')") == "false"
    assert sorted(browser.run(SEEN)) == sorted(line for line in before if line != "0:ring")
    browser.run("document.querySelector('figure').focus()")
    assert "ring" not in browser.run("document.querySelector('figure output').innerText")
    browser.run("document.querySelector('.legend button').focus()")
    browser.press("Enter")
    assert sorted(browser.run(SEEN)) == sorted(before)


def test_all_that_can_be_used_is_reached_by_tab(browser, pages):
    browser.show(pages / "one.html")
    reached = []
    for _ in range(30):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.className || document.activeElement.id || "
                                   "document.activeElement.tagName.toLowerCase()"))
    wanted = {"skip", "theme", "pick-out_of_place", "button", "figure", "scroll", "summary"}
    assert wanted <= set(reached), reached


@pytest.mark.parametrize("dark", [False, True], ids=["from light", "from dark"])
def test_light_and_dark_are_switched(browser, pages, dark):
    browser.show(pages / "one.html", dark=dark)
    papers = []
    for _ in range(3):
        papers.append(browser.run("getComputedStyle(document.body).backgroundColor"))
        browser.run("document.querySelector('#theme').click()")
    colours = [f"rgb({', '.join(str(int(palette['paper'][place:place + 2], 16)) for place in (1, 3, 5))})"
               for palette in (canvas.DARK, canvas.LIGHT)]
    first, second = colours if dark else colours[::-1]
    assert papers == [first, second, first]


def test_links_show_every_pair(browser, pages):
    browser.show(pages / "links.html")
    assert browser.run("document.querySelectorAll('.wide svg polygon').length") == 8 * 7 + 40, "squares and key"
    browser.run("document.querySelector('details').open = true")
    assert browser.run("document.querySelector('table').tBodies[0].rows.length") == 56


def test_a_drawing_of_its_own_is_shown(browser, tmp_path):
    plot.draw(made.sweep(NAMES), tmp_path / "f.svg")
    browser.show(tmp_path / "f.svg")
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('g[data-line] polyline').length") >= 2 * len(NAMES)
    assert browser.run("document.documentElement.getBoundingClientRect().width") > 1000


def test_the_readings_are_those_of_the_record(browser, pages):
    browser.show(pages / "one.html")
    found = json.loads(browser.run("document.querySelector('figure script').textContent"))
    assert [size for size, _ in found] == ["8 B", "1 KiB", "1 MiB"]
    assert [name for _, name, _ in found[0][1]] == ["mpi", *NAMES], "the best first"
