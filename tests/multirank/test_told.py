"""The page of told errors: each rank is told what the page says."""

import re

import pytest

import told
from harness.sources import ROOT

PAGE = (ROOT / "docs/guide/told.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def test_the_page_has_the_programs():
    assert SECTIONS.keys() == told.CASES.keys()
    for title, (_, body, *_) in told.CASES.items():
        assert body.strip() in SECTIONS[title], "run scripts/told.py again"


@pytest.mark.slow
@pytest.mark.parametrize("title", told.CASES)
def test_each_rank_is_told_what_the_page_says(title):
    """The texts may differ in what depends on time; ranks, classes and ranks named may not."""
    said = re.findall(r"^\| (\d) \| (\w+) \| (\S.*?) \|", SECTIONS[title], re.MULTILINE)
    assert [(str(rank), kind, str(tuple(ranks))) for rank, kind, ranks, _ in told.told(*told.CASES[title])] == said
