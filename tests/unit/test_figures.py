"""Each figure in the documents has a source: a comment above the table or paragraph, or one for the whole page.

    <!-- figures: measured bench/results/FILE.json ... --> the figures stand in the files
    <!-- figures: computed by FILE -->                     a program, used by a test
    <!-- figures: checked by FILE -->                      a test compares them
    <!-- figures: limits of FILE -->                       settings, not results
    <!-- figures: estimated: WORDS -->                     estimates; the table has a basis for each row
    <!-- figures: formula: WORDS -->                       the figures follow from these words
"""

import json
import re

import pytest

from harness.sources import ROOT

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
         if "changes.d" not in page.parts and "gallery" not in page.parts]
FIGURE = re.compile(r"[-+~]?\d[\d,./ ]*( ?[\w%/]+)?( (to|at|and) \d.*)?(; .*)?")
# A number of the prose that some machine or program has given. Numbers of elements, ranks and calls need no source.
PROSE = re.compile(r"(?<![\w.])(\d[\d.,]*(?: to \d[\d.,]*)?) (?:[num]?s|[GMK]B/s|%|times (?:as|fewer|longer))(?!\w)")
MARK = re.compile(r"<!-- (?:figures(?: of this page)?: (measured|computed by|checked by|limits of|estimated:|formula:)|"
                  r"(made by)) (.+?) -->")


def tables(text):
    """Yield the marks above each table with figures, its own or the page's, and the rows, without the first column."""
    whole = whole_page(text)
    for match in re.finditer(r"^(.*)\n((?:\|.*\n)+)", text + "\n", re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in match[2].splitlines()[2:]]
        if any(FIGURE.fullmatch(cell) for row in rows for cell in row):
            yield MARK.fullmatch(match[1]) or whole, rows


def paragraphs(text):
    """Yield the mark above each paragraph or list with figures, its own or the page's, and the figures as one row."""
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = " ".join(line.strip() for line in block.splitlines() if not line.startswith("|"))
        if figures := PROSE.findall(words):
            yield MARK.match(block.lstrip()) or whole_page(text), [figures]


def whole_page(text):
    """Return the mark of the whole page, or None."""
    found = re.search(r"^<!-- (?:figures of this page|made by).*-->$", text, re.MULTILINE)
    return found and MARK.fullmatch(found[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_have_their_source(page):
    text = page.read_text()
    for mark, rows in (*tables(text), *paragraphs(text)):
        assert mark, f"{page.name}: no source above {rows[0]}"
        kind, source = mark[1] or mark[2], mark[3].split()[-1]
        if kind in ("estimated:", "formula:"):
            continue
        path = ROOT / source.replace("gpucoll.bench.", "bench/").replace("bench/readme", "bench/readme.py")
        assert path.is_file(), f"{page.name}: {source} is not there"
        if kind == "measured":
            there = [number for name in mark[3].split() for number in numbers(json.loads((ROOT / name).read_text()))]
            there += [100 * number for number in there if number < 2]  # shares, as percent
            found = {round(number + 1e-9, digits) for digits in (0, 1) for number in there}
            figures = {float(figure.replace(",", "")) for row in rows for cell in row
                       for figure in re.findall(r"\d[\d,]*(?:\.\d+)?", cell)}
            assert figures <= found, f"{page.name}: {source} has no {figures - found}"
        elif kind == "checked by":
            assert path.name.startswith("test_"), f"{page.name}: {source} is no test"
        else:
            tests = (one.read_text() for one in (ROOT / "tests").rglob("test_*.py") if one.name != "test_figures.py")
            assert any(re.search(rf"\b{path.stem}\b", text) for text in tests), f"{page.name}: no test uses {source}"


def numbers(value):
    """Yield all numbers of a JSON value."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers(one)
    elif isinstance(value, int | float):
        yield float(value)
