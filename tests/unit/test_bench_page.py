"""bench's page and pictures: figures, tables and words agree with the record; nothing is loaded from elsewhere."""

import base64
import hashlib
import html
import html.parser
import json
import re
import sys
from pathlib import Path

import pytest

from browser import made
from harness.refusals import refused

pytest.importorskip("plotly", reason="pages need plotly: pip install gpucoll[report]")

from gpucoll.bench import report

NOTHING = "\N{EN DASH}"


def without_tags(text):
    return html.unescape(re.sub("<[^>]*>", "", text))


class Page(html.parser.HTMLParser):
    """A page as seen by a reader: elements, text, and tables as rows of cells; scripts are kept apart."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.scripts = [], "", []
        self.tables = [[[without_tags(cell) for cell in re.findall(r"<t[dh]\b.*?</t[dh]>", row, re.DOTALL)]
                        for row in re.findall(r"<tr\b.*?</tr>", table, re.DOTALL)]
                       for table in re.findall(r"<table\b.*?</table>", text, re.DOTALL)]
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts.append(data)
        elif self.cdata_elem != "style":
            self.text += data


@pytest.fixture(scope="module", autouse=True)
def small_plotly():
    """Replace plotly's five megabytes by a few bytes; the browser tests use the whole library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "var Plotly;")
        yield


def page(*found, names=("a.json", "b.json", "c.json")):
    return Page(report.page({name: [record] for name, record in zip(names, found, strict=False)}))


def verdicts(found):
    """Return the rows of the comparison table, by size and algorithm."""
    table = next(table for table in found.tables if table[0][-1:] == ["verdict"])
    return {(row[0], row[1]): row[2:] for row in table[1:]}


def test_runs_are_compared_beyond_chance_and_peers_are_a_control():
    before, after = (made.sweep(speed=speed, against={"mpi": 40.0 / speed}) for speed in (1.0, 2.0))
    found = page(before, after)
    rows = verdicts(found)
    assert rows["8 B", "ring"][:3] == ["10.01", "5.00", "2.000"]
    assert {row[4] for row in rows.values()} == {"faster"}
    assert "6 of 6 faster, 0 slower" in found.text
    assert "3 of 3 of theirs changed too" in found.text
    slower = made.sweep()
    slower["results"] = [one if one["algorithm"] == "ring" else made.result("tree", one["size"], 1e5)
                         for one in slower["results"]]
    assert {(name, row[4]) for (_, name), row in verdicts(page(made.sweep(), slower)).items()} == {
        ("tree", "slower"), ("ring", "no clear difference")}
    skipping, plain = (made.sweep(["ring"], sizes=(64,)) for _ in range(2))
    skipping["results"][0]["out_of_place_per_iter"] = {"skipped_iterations": 8, "times_us": [1e3] * 8 + [10.0] * 6}
    plain["results"][0]["out_of_place_per_iter"] = {"times_us": [10.0] * 6}
    (row,) = verdicts(page(skipping, plain)).values()
    assert row[3] == "1.000 … 1.000"


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onmouseover=alert(3) &amp;"
SAMPLES = Path(made.__file__).parents[1] / "samples"
KEYS = {key for path in SAMPLES.glob("*.json") for key in re.findall(r'"(\w+)": ', path.read_text())}


def spoiled(value):
    """Return the record with a hostile text in place of every free text."""
    if isinstance(value, dict):
        return {key if key in KEYS else HOSTILE: spoiled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [spoiled(one) for one in value]
    return value if not isinstance(value, str) or value.strip() == "-1" or value in ("true", "false") else HOSTILE


def test_nothing_comes_from_elsewhere_and_what_a_file_says_stays_text():
    for record in (made.sweep(against={"mpi": 5.0}), made.NCCL_TESTS):
        text = report.page({HOSTILE: [spoiled(record)], "b": [spoiled(record)]})
        found = Page(text)
        for tag, attributes in found.elements:
            assert not attributes.keys() & {"src", "srcset", "action", "data", "poster", "background"}, tag
            assert attributes.get("href", "#").startswith("#")
            assert not [key for key in attributes if key.startswith("on")]
        assert "alert(1)" in found.text, "it is shown, though"
        charts = [attributes for tag, attributes in found.elements if attributes.get("type") == "application/json"]
        assert len([tag for tag, _ in found.elements if tag == "script"]) == len(charts) + 1
        policy = next(attributes["content"] for _, attributes in found.elements if "http-equiv" in attributes)
        digest = base64.b64encode(hashlib.sha256(found.scripts[-1].encode()).digest()).decode()
        assert policy.startswith("default-src 'none'")
        assert f"script-src 'sha256-{digest}';" in policy


def test_the_command_writes_a_page_and_refuses_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, record in {"a": made.sweep(), "b": made.sweep(speed=2.0), "bad": {"results": [{"size": 8}]}}.items():
        Path(f"{name}.json").write_text(json.dumps(record))
    assert report.main(["a.json", "b.json"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert Path("report.html").read_text(encoding="utf-8") == report.page_text(["a.json", "b.json"])
    for arguments, said in [(["none.json"], "cannot read"), (["bad.json"], "another shape"), ([], "required"),
                            (["a.json", "-o", "no/p.html"], "cannot write")]:
        assert said in refused(capsys, report.main, arguments, "gpucoll bench report")
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "pip install gpucoll[report]" in refused(capsys, report.main, ["a.json"], "gpucoll bench report")
