"""The bench's page in a real browser: no complaint, no network request; every line, dark mode, no script."""

import pytest

from browser import made
from faults import tables

pytest.importorskip("plotly", reason="pages need plotly: pip install gpucoll[report]")

from gpucoll.bench import report

pytestmark = pytest.mark.nightly

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
FIRST = "document.querySelector('.js-plotly-plot')"
# Names of the visible lines: paths with a length on the screen, in another colour than the paper's.
SEEN = f"""[...{FIRST}.querySelectorAll(".scatterlayer .trace")].filter((line) => {{
  const path = line.querySelector("path.js-line"), paper = getComputedStyle(document.body).backgroundColor;
  return path && path.getBoundingClientRect().width > 50 && !["none", paper].includes(getComputedStyle(path).stroke);
}}).map((line) => {FIRST}.data[line.__data__[0].trace.index].name)"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the folder of the pages, as files by name."""
    folder, one = tmp_path_factory.mktemp("pages"), made.sweep(["ring", "tree"], against={"mpi": 5.0})
    later = made.sweep(["ring", "tree"], speed=1.5, against={"mpi": 5.0})
    for name, files in {"one": [one], "two": [one, later], "nccl": [made.NCCL_TESTS]}.items():
        text = report.page({f"{number}.json": [record] for number, record in enumerate(files)})
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


def show(browser, path, width=1280, **options):
    """Load a page and wait for its first figure."""
    browser.show(path, width, 1000, **options)
    browser.wait(".js-plotly-plot .main-svg")


def place(browser, selector):
    """Return the middle of an element of the first figure, and the element's size."""
    return browser.run(f"(() => {{ const p = {FIRST}.querySelector('{selector}').getBoundingClientRect(); "
                       "return [p.left + p.width / 2, p.top + p.height / 2, p.width, p.height]; })()")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 700, 1920])
@pytest.mark.parametrize("name", ["one", "two", "nccl"])
def test_no_complaints_no_requests_nothing_too_wide(browser, pages, name, width, dark):
    show(browser, pages / f"{name}.html", width, dark=dark)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [f"file://{pages}/{name}.html"]
    assert browser.run(OVERFLOW) <= 0
    assert browser.run("innerWidth") == width, "a phone does not shrink it"


@pytest.mark.mutant
def test_a_script_that_is_not_the_pages_own_is_kept_out_and_seen(browser, pages, tmp_path):
    text = (pages / "one.html").read_text(encoding="utf-8")
    (((old, new),),) = [fault.changes for fault in tables.planted() if fault.file == "bench/report.js"]
    assert text.count(old) == 1
    (tmp_path / "false.html").write_text(text.replace(old, new), encoding="utf-8")
    browser.show(tmp_path / "false.html")
    assert any("Content Security Policy" in error for error in browser.errors)


def test_hover_reads_values_a_drag_zooms_and_the_legend_hides_lines(browser, pages):
    show(browser, pages / "one.html")
    assert set(browser.run(SEEN)) == {"ring", "tree", "mpi", "copy bound"}
    x, y, width, height = place(browser, ".nsewdrag")
    browser.move(x - width * 0.45, y)
    browser.move(x - width * 0.46, y)
    browser.wait(".hoverlayer .legend")
    said = browser.run(f"{FIRST}.querySelector('.hoverlayer').textContent")
    assert "8 bytes" in said
    assert "ring" in said
    assert f"{1.5 * 8 / (10 + 8 / 1e3) / 1e3:.3g}" in said
    before = browser.run(f"{FIRST}._fullLayout.xaxis.range")
    for kind, right in (("mousePressed", -0.2), ("mouseMoved", 0.0), ("mouseMoved", 0.2), ("mouseReleased", 0.2)):
        browser.ask("Input.dispatchMouseEvent", type=kind, x=x + width * right, y=y + height * right, button="left",
                    buttons=1, clickCount=1)
    low, high = browser.run(f"{FIRST}._fullLayout.xaxis.range")
    assert before[0] < low < high < before[1]
    x, y, *_ = place(browser, ".legendtoggle")
    for kind in ("mousePressed", "mouseReleased"):
        browser.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    browser.ask("Runtime.evaluate", awaitPromise=True, expression=(
        f"new Promise((done) => {{ const look = () => {FIRST}.data[0].visible === 'legendonly' ? done(true) "
        ": requestAnimationFrame(look); look(); })"))
    assert "ring" not in browser.run(SEEN)
    assert browser.errors == []
