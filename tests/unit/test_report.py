"""bench/report.py: a page that holds every number, needs nothing else, and trusts nothing that a file says."""

import base64
import copy
import hashlib
import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from browser import made

pytest.importorskip("gpucoll.bench.report", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import report
from gpucoll.bench.page import curves, tables
from gpucoll.bench.page.axes import BY, NOTHING

SAMPLES = Path(__file__).parents[1] / "samples"
VOID = {"meta", "input", "br", "hr", "img", "link"}


class Page(html.parser.HTMLParser):
    """A page taken apart: its elements, its tables, its text; tags that do not match are an error."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.tables, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"{tag} closes something else"

    def handle_data(self, data):
        inside = set(self.open)
        if "style" not in inside and "script" not in inside:
            self.text.append(data)
        if inside & {"th", "td"} and "svg" not in inside:
            self.tables[-1][-1][-1] += data

    def having(self, tag, **wanted):
        return [found for name, found in self.elements if name == tag and wanted.items() <= found.items()]

    def rows(self, title):
        """The table that begins with a column of that title, as dicts; a title that comes twice is numbered."""
        for table in self.tables:
            titles = next(row for row in table if row[0])
            if titles[0].startswith(title):
                body = table[table.index(titles) + 1:]
                keys = [f"{text}{titles[:place].count(text) or ''}" for place, text in enumerate(titles)]
                return [dict(zip(keys, row, strict=True)) for row in body]
        raise AssertionError(f"no table of {title}")


def page(*records, files=()):
    return Page(report.page(records, files))


def three_digits(value):
    """As a column has it, made another way than by the page."""
    return f"{float(f'{value:.2e}'):.{max(0, 2 - int(f'{value:e}'.partition('e')[2]))}f}"


def complete(found, record):
    """The check: each result and each peer has a row, with the figures of both placements."""
    rows = {(row["size"], row["algorithm"]): row for row in found.rows("size")}
    assert len(rows) == len(found.rows("size"))
    wanted = {}
    for one in record["results"]:
        for name, measured in {one["algorithm"]: one, **one["against"]}.items():
            wanted.setdefault((one["size"], name), measured)
    assert len(wanted) == len(rows)
    for (size, name), measured in wanted.items():
        row = rows[{8: "8 B", 1024: "1 KiB", 1 << 20: "1 MiB"}[size], name]
        for placement, again in (("out_of_place", ""), ("in_place", "1")):
            figures = measured[placement]
            assert float(row[f"time µs{again}"].replace(",", "")) == pytest.approx(figures["time"], rel=0.01)
            assert row[f"algbw GB/s{again}"] == three_digits(figures["alg_bw"])
            assert row[f"busbw GB/s{again}"] == three_digits(figures["bus_bw"])
            assert row[f"#wrong{again}"] == str(figures["nwrong"])


def test_every_number_is_on_the_page():
    record = made.sweep(["ring", "tree", "star"], against={"mpi": 5.0, "gloo": 50.0})
    complete(page(record), record)


@pytest.mark.mutant
@pytest.mark.parametrize("fault", ["a row less", "a figure changed", "a peer less", "an error hidden"])
def test_a_page_that_says_otherwise_is_found(fault):
    record = made.sweep(against={"mpi": 5.0}, wrong=7)
    false = copy.deepcopy(record)
    if fault == "a row less":
        del false["results"][3]
    elif fault == "a figure changed":
        false["results"][3]["in_place"]["alg_bw"] *= 1.01
    elif fault == "a peer less":
        for one in false["results"]:
            one["against"] = {}
    else:
        false["results"][0]["out_of_place"]["nwrong"] = 0
    with pytest.raises(AssertionError):
        complete(page(false), record)


def test_what_gpucoll_adds_is_in_its_columns():
    record = made.sweep(["ring"], sizes=(1 << 20,), against={"mpi": 2000.0})
    ours, peer = page(record).rows("size")
    (one,) = record["results"]
    assert ours["of bound %"] == three_digits(100 * one["out_of_place"]["bus_bw"] / 8)
    assert ours[f"mpi / ours {BY}"] == f"{one['against']['mpi']['ratio']['out_of_place']:.2f}"
    assert ours["skew µs"] == "3.25"
    assert ours["slowest rank"] == "1"
    assert peer[f"mpi / ours {BY}"] == NOTHING


def test_bars_are_as_long_as_the_bandwidth_is_near_the_best():
    bars = [found["style"] for found in page(made.sweep(["ring", "tree", "star"], sizes=(64,))).having("span")
            if "style" in found]
    assert bars == [f"--part:{part}%" for part in (100, 100, 50, 50, 25, 25)], "each half as fast as the one before"


def test_every_line_is_drawn_wide_and_narrow_for_both_placements_and_quantities():
    record = made.sweep(["ring", "tree", "star"], against={"mpi": 5.0})
    found = page(record)
    for name in ("ring", "tree", "star", "mpi"):
        assert len(found.having("g", **{"data-line": f"0:{name}"})) == 8
    assert len(found.having("button", **{"aria-pressed": "true"})) == 4


def test_a_panel_for_each_kind():
    record = made.sweep(["ring"])
    record["results"] += made.sweep(["ring"], collective="broadcast")["results"]
    record["results"] += made.sweep(["ring"], ranks=8)["results"]
    found = page(record)
    headings = [f"all_reduce · float · sum · {ranks} ranks · cpu" for ranks in (4, 8)]
    assert all(heading in "".join(found.text) for heading in headings)
    assert len(found.having("section", **{"class": "panel"})) == 3 + 2, "machine and glossary besides"
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"][1:] for link in found.having("a")} <= set(ids)


# Alone and safe


@pytest.fixture(scope="module")
def texts():
    return {"one": report.page([made.sweep(against={"mpi": 5.0})]), "pairs": report.page([made.links()]),
            "two": report.page([made.sweep(), made.sweep(speed=2)], ["old", "new"])}


@pytest.mark.parametrize("name", ["one", "pairs", "two"])
def test_nothing_comes_from_elsewhere(texts, name):
    found = Page(texts[name])
    for tag, attributes in found.elements:
        assert not attributes.keys() & {"src", "srcset", "action", "data", "poster", "xlink:href", "background"}, tag
        assert attributes.get("href", "#").startswith("#")
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        assert not [key for key in attributes if key.startswith("on")], "no handlers in attributes"
    bare = texts[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttp|import\(", bare)


@pytest.mark.parametrize("name", ["one", "pairs", "two"])
def test_the_policy_lets_this_script_run_and_no_other(texts, name):
    (policy,) = Page(texts[name]).having("meta", **{"http-equiv": "Content-Security-Policy"})
    (script,) = re.findall(r"<script>(.*?)</script>", texts[name], re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy["content"]
    assert f"script-src 'sha256-{digest}';" in policy["content"]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onmouseover=alert(3) &amp;"


def spoiled(value):
    """The same record with a hostile text in place of every free one."""
    if isinstance(value, dict):
        return {key if key in KEYS else HOSTILE: spoiled(one) for key, one in value.items()}
    if isinstance(value, list):
        return [spoiled(one) for one in value]
    return value if not isinstance(value, str) or value.strip() == "-1" or value in ("true", "false") else HOSTILE


KEYS = set(re.findall(r"\w+", (Path(curves.__file__).parents[1] / "records.py").read_text()))


@pytest.mark.parametrize("given", [made.sweep(against={"mpi": 5.0}), made.links(), made.NCCL_TESTS],
                         ids=["sweep", "links", "nccl-tests"])
def test_what_a_file_says_stays_text(given):
    text = report.page([spoiled(given), spoiled(given)], [HOSTILE, "b"])
    found = Page(text)
    assert not found.having("img")
    assert len(found.having("script", type="application/json")) + 1 == len(found.having("script"))
    assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
    assert "alert(1)" in "".join(found.text), "it is shown, though"


# What it says


def test_one_file_of_nccl_tests_itself():
    found = page(made.NCCL_TESTS)
    text = "".join(found.text)
    assert "all_reduce · float · sum · 4 ranks · cuda".split(" · ")[0] in text
    assert "NVIDIA H200" in text
    assert "NCCL_ALGO=Ring" in text
    assert [row["algorithm"] for row in found.rows("size")] == ["nccl-tests", "nccl-tests"]


@pytest.mark.parametrize("name", ["bench", "pairs"])
def test_the_samples_make_pages(name):
    path = SAMPLES / f"{name}.json"
    record = json.loads(path.read_text())
    found = Page(report.made([str(path)]))
    if record["results"]:
        names = {one["algorithm"] for one in record["results"]} | {
            peer for one in record["results"] for peer in one["against"]}
        assert {row["algorithm"] for row in found.rows("size")} == names
        assert len(found.rows("size")) == len(names) * len({one["size"] for one in record["results"]})
    else:
        assert len(found.tables) > 1


def test_what_went_wrong_is_said_first():
    record = made.sweep(["ring"], wrong=3)
    record["gpucoll"] |= {"interrupted": True, "findings": ["rank 2 is late"],
                          "left_out": [{"what": "nccl", "reason": "no GPU"}]}
    record["average_bus_bandwidth"]["okay"] = "false"
    text = " ".join(page(record).text)
    for said in ("9 wrong", "interrupted", "rank 2 is late", "Left out: nccl (no GPU)", "below the least"):
        assert said in text
        assert text.index(said) < text.index("Shortest time")
    assert "all correct" not in text


def test_all_correct_is_said_of_what_was_checked():
    assert "all correct" in " ".join(page(made.sweep()).text)


def test_the_lead_is_right():
    """At 8 bytes tree takes 20 us and mpi 5; ring has most bandwidth of ours, mpi of all."""
    text = "".join(page(made.sweep(against={"mpi": 5.0})).text)
    assert "Shortest time at 8 B: mpi 5 µs; of ours ring 10 µs." in text
    best = 1.5 * (1 << 20) / 5 / 1e3
    assert f"Highest bus bandwidth: mpi {best:.0f} GB/s at 1 MiB" in text
    alone = "".join(page(made.sweep()).text)
    assert "Shortest time at 8 B: ring 10 µs." in alone


def test_ratios_are_those_of_the_best_algorithm():
    record = made.sweep()
    record["gpucoll"]["ratios"] = {"mpi": {"all_reduce": {"ring": 0.5, "tree": 0.25}}, "gloo": {}}
    text = " ".join(page(record).text)
    assert f"0.50 {BY} ring against mpi, geometric mean" in text
    assert "gloo" not in text
    record["gpucoll"]["ratios"]["mpi"]["reduce"] = {"ring": 2.0, "tree": 8.0}
    assert f"2.00 {BY} the best for each of 2 tests against mpi" in " ".join(page(record).text), "sqrt(0.5 * 8)"


def test_pairs_are_listed_the_slowest_first():
    rows = page(made.links(ranks=3, slow=(2, 0))).rows("from rank")
    assert len(rows) == 6
    assert (rows[0]["from rank"], rows[0]["to rank"], rows[0]["bandwidth GB/s"]) == ("2", "0", "0.500")
    assert [row["verdict"] for row in rows] == ["slow"] + [""] * 5
    assert rows[0]["of the median %"] == "12"


def test_overlap_has_osus_columns():
    record = made.sweep()
    record["gpucoll"]["overlap"] = [{"collective": "all_reduce", "algorithm": "ring", "size": 1024, "overall_us": 12.0,
                                     "compute_us": 10.0, "pure_us": 8.0, "overlap_pct": 75.0}]
    text = " ".join(page(record).text)
    for said in ("Overlap", "12.00", "10.00", "8.00", "75"):
        assert said in text


# Several files


def compared(before, after):
    return Page(report.page([before, after], ["old.json", "new.json"]))


def verdicts(found):
    """The last table that begins with sizes and has a verdict."""
    for table in found.tables:
        if table[0][-1] == "verdict":
            return {(row[0], row[1]): row[2:] for row in table[1:]}
    raise AssertionError("nothing was compared")


def test_twice_as_fast_is_said_of_every_size():
    found = verdicts(compared(made.sweep(), made.sweep(speed=2.0)))
    assert len(found) == 6
    assert all(row[2] == "2.000" and row[4] == "faster" for row in found.values())
    assert found["8 B", "ring"][:2] == ["10.01", "5.00"]


def test_a_slower_algorithm_is_found_among_the_others():
    after = made.sweep()
    after["results"] = [one if one["algorithm"] == "ring" else made.result("tree", one["size"], 1e5, bound=8.0)
                        for one in after["results"]]
    found = verdicts(compared(made.sweep(), after))
    assert {name for (_, name), row in found.items() if row[4] == "slower"} == {"tree"}
    assert {row[4] for (_, name), row in found.items() if name == "ring"} == {"no clear difference"}


def test_no_verdict_without_repetitions():
    one, other = made.sweep(times=[10.0, 11.0]), made.sweep(times=[1.0, 1.1], speed=2.0)
    found = verdicts(compared(one, other)).values()
    assert {(row[2], row[3], row[4]) for row in found} == {("2.000", NOTHING, "too few repetitions")}


def test_intervals_lie_around_the_ratio():
    before = made.sweep(["ring"], sizes=(64,), times=[10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0])
    after = made.sweep(["ring"], sizes=(64,), times=[9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
    (row,) = verdicts(compared(before, after)).values()
    low, high = map(float, row[3].split(" … "))
    assert float(row[2]) == pytest.approx(13 / 12, abs=1e-3)
    assert low < 13 / 12 < high
    assert row[4] == "no clear difference"


@pytest.mark.parametrize(("low", "high", "wanted"), [(1.1, 1.2, 1), (0.8, 0.9, -1), (0.9, 1.1, 0), (None, None, 0)])
def test_directions(low, high, wanted):
    assert tables.direction(curves.Change(8, 1.0, 1.0, 1.0, low, high)) == wanted


def test_the_skipped_repetitions_do_not_count():
    before = made.sweep(["ring"], sizes=(64,), times=[*[1000.0] * 8, *[10.0] * 6])
    before["results"][0]["out_of_place_per_iter"]["skipped_iterations"] = 8
    (row,) = verdicts(compared(before, made.sweep(["ring"], sizes=(64,), times=[10.0] * 6))).values()
    assert row[3] == "1.000 … 1.000"


def test_peers_are_a_control():
    """The machine became twice as fast, not the algorithms: the peers show it, and do not count as ours."""
    times = {"against": {"mpi": 40.0}}, {"against": {"mpi": 20.0}}
    found = compared(made.sweep(["ring"], **times[0]), made.sweep(["ring"], speed=2.0, **times[1]))
    text = " ".join(found.text)
    assert "3 of 3 faster, 0 slower" in text
    assert "3 of 3 of theirs changed too" in text
    assert [row[2] for (_, name), row in verdicts(found).items() if name == "mpi"] == ["2.000"] * 3
    still = compared(made.sweep(["ring"], **times[0]), made.sweep(["ring"], speed=2.0, **times[0]))
    assert "0 of 3 of theirs changed too" in " ".join(still.text)
    assert "control" not in " ".join(compared(made.sweep(), made.sweep(speed=2.0)).text)


def test_only_what_both_have_is_compared():
    found = compared(made.sweep(["ring"]), made.sweep(["tree"]))
    assert "against" not in " ".join(text for text in found.text if text.startswith("B"))
    mixed = compared(made.NCCL_TESTS, made.sweep(["ring"]))
    assert len(mixed.having("section", **{"class": "panel"})) == 4, "a GPU's panel, the host's, machines, glossary"


def test_files_are_told_apart_and_explained():
    found = page(made.sweep(), made.sweep(), made.sweep(), files=["a.json", "b.json", "c.json"])
    text = " ".join(found.text)
    assert all(name in text for name in ("a.json", "b.json", "c.json", "B against A", "C against A"))
    assert len(found.having("g", **{"data-line": "2:ring"})) == 8


# The command


@pytest.fixture
def files(tmp_path):
    for name, record in {"a": made.sweep(), "b": made.sweep(speed=2.0)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / "suite.json").write_text(json.dumps({"suite": "2026-11-21", "host": "h", "runs": [
        made.sweep(), made.sweep(["chain"], collective="broadcast"), made.links()]}))
    return tmp_path


def test_the_command_writes_the_page(files, capsys):
    assert report.main([str(files / "a.json"), str(files / "b.json"), "-o", str(files / "p.html")]) == 0
    assert (files / "p.html").read_text(encoding="utf-8") == report.made([str(files / "a.json"), str(files / "b.json")])
    assert capsys.readouterr().out == ""
    assert report.main([str(files / "a.json")]) == 0
    assert capsys.readouterr().out == report.made([str(files / "a.json")])


def test_a_suite_is_one_file_with_several_runs(files):
    found = Page(report.made([str(files / "suite.json")]))
    text = " ".join(found.text)
    assert "every pair of ranks" in text
    assert text.count("all correct") == 1, "one line of tiles for one file"
    assert "all_reduce · float" in text
    assert "broadcast · float" in text
    assert "against" not in text.partition("How to read this")[0].replace("Against", ""), "nothing to compare"


def test_runs_of_one_file_that_measured_the_same_are_numbered():
    text = " ".join(page(made.sweep(["ring"]), made.sweep(["ring"], speed=2.0), files=["suite", "suite"]).text)
    assert "2 against 1" in text
    assert "3 of 3 faster" in text


@pytest.mark.parametrize(("content", "says"), [
    (None, "cannot read"), ("{", "is no JSON"), ("[]", "no results"), ('{"a": 1}', "no results"),
    ('{"results": [{"size": 8}]}', "another shape"), ('{"results": 3}', "another shape"),
    ("\xff\xfe", "is no JSON")])
def test_what_is_no_record_ends_with_one_line(content, says, tmp_path, capsys):
    path = tmp_path / "f.json"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(SystemExit) as ended:
        report.main([str(path), "-o", str(tmp_path / "p.html")])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("gpucoll bench report: [GC-FILE] ")
    assert says in told
    assert told.count("\n") == 1
    assert not (tmp_path / "p.html").exists()


@pytest.mark.parametrize("arguments", [[], ["--unknown"], ["a.json", "-o"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_output_that_cannot_be_written(files, capsys):
    with pytest.raises(SystemExit) as ended:
        report.main([str(files / "a.json"), "-o", str(files / "no" / "p.html")])
    assert ended.value.code == 2
    assert "cannot write" in capsys.readouterr().err


def test_gpucoll_bench_report_needs_neither_mpi_nor_matplotlib(files):
    source = ("import sys; from gpucoll.cli import main; assert main('bench report a.json -o p.html'.split()) == 0; "
              "assert not {'matplotlib', 'mpi4py.MPI'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", source], cwd=files, check=True)
    assert (files / "p.html").stat().st_size > 10_000
