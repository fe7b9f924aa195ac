"""The bench's page in a real browser: no complaint, no network request, nothing too wide, no other script."""

import pytest

from browser import made
from faults import tables

pytest.importorskip("plotly", reason="pages need plotly: pip install gpucoll[report]")

from gpucoll.bench import report

pytestmark = pytest.mark.nightly

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return the folder of the pages, as files by name."""
    folder, one = tmp_path_factory.mktemp("pages"), made.sweep(["ring", "tree"], against={"mpi": 5.0})
    later = made.sweep(["ring", "tree"], speed=1.5, against={"mpi": 5.0})
    for name, files in {"one": [one], "two": [one, later], "nccl": [made.NCCL_TESTS]}.items():
        text = report.page({f"{number}.json": [record] for number, record in enumerate(files)})
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 700, 1920])
@pytest.mark.parametrize("name", ["one", "two", "nccl"])
def test_no_complaints_no_requests_nothing_too_wide(browser, pages, name, width, dark):
    browser.show(pages / f"{name}.html", width, 1000, dark=dark)
    browser.wait(".js-plotly-plot .main-svg")
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
