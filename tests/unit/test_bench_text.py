"""What bench/ prints and writes, read by parsers written for nccl-tests' text and JSON from their documented layout."""

import importlib.machinery
import importlib.util
import io
import json
import re
from pathlib import Path

import numpy
import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments, findings, overlap, readme, records, regret, run, summary, table
from gpucoll.bench.cases import Case
from gpucoll.bench.machine import Copy, Place, bound, host_names
from gpucoll.bench.measure import Measured

from gpucoll.errors import ArgumentError

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "samples"
SAMPLE, NCCL_TESTS = (json.loads((SAMPLES / f"{name}.json").read_text()) for name in ("bench", "nccl_tests"))
PLACES = [Place(7, "here", 0, -1, "cpu", "A processor"), Place(8, "there", 1, -1, "cpu", "A processor")]
COPY = Copy(40.0, 1 << 26, (20.0, 20.0))
ALL_REDUCE = Case("all_reduce", "float32", "sum", 0, 2)

# nccl-tests' text: the widths of its printf formats, column by column
WIDTHS = (12, 2, 12, 2, 8, 2, 6, 2, 6, *(2, 7, 2, 6, 2, 6, 2, 6) * 2)
FIELDS = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "wrong", "in_time", "in_algbw",
          "in_busbw", "in_wrong")
RANK = re.compile(r"#  Rank ([ \d]\d) Group ([ \d]\d) Pid ([ \d]{5}\d) on (.{10,}) device ([- \d]\d) \[([^\]]+)\] (.+)")


def cells(line):
    """The columns of a line of fixed widths; what stands between two must be blank."""
    place, found = 0, []
    for number, width in enumerate(WIDTHS):
        cell = line[place:place + width]
        assert len(cell) == width, line
        if number % 2:
            assert not cell.strip(), line
        else:
            found.append(cell.strip())
        place += width
    return found, line[place:]


def read_text(text):
    """Lines of data, ranks, and the two figures of the footer, as a script for nccl-tests' output reads them."""
    rows, ranks, footer = [], [], {}
    for line in text.splitlines():
        if line[:1] != "#":
            found, rest = cells(line)
            rows.append({**dict(zip(FIELDS, found, strict=True)), "rest": rest.strip()})
        elif line.startswith("#  Rank"):
            ranks.append(RANK.fullmatch(line).groups())
        elif found := re.fullmatch(r"# (Out of bounds values|Avg bus bandwidth   ) : (\S+) (\w*)", line):
            footer[found[1].strip()] = (float(found[2]), found[3])
        elif line.startswith("# Collective test concluded: "):
            footer["concluded"] = line.split(": ")[1]
    return rows, ranks, footer


def options(line, **variables):
    return arguments.parse(line.split(), variables)


def measured(milliseconds=1.0, ranks=2, repetitions=6, wrong=(0, 0)):
    """Both placements at a constant time."""
    return Measured(numpy.full((2, ranks, repetitions), milliseconds * 1e-3), wrong)


def result(line="all_reduce -b 1000", milliseconds=1.0, case=ALL_REDUCE, count=250, peers=None, **changes):
    return run.result_of(case, count, options(line), ("ring", measured(milliseconds, case.ranks, **changes)),
                           peers or {}, COPY)


def test_the_parser_reads_what_nccl_tests_prints_and_what_we_print():
    rows, ranks, footer = read_text((SAMPLES / "nccl_tests.txt").read_text())
    assert [row["size"] for row in rows] == ["8", "32768", "134217728"]
    assert [rank[4].strip() for rank in ranks] == ["0", "1"]
    assert footer == {"Out of bounds values": (0.0, "OK"), "Avg bus bandwidth": (55.8849, ""),
                      "concluded": "all_reduce_perf"}
    chosen, results = options("all_reduce -b 1000 -e 1000"), [result(), result(wrong=(None, None))]
    lines = [*table.header(chosen, {"gpucoll": "1.2", "MPI": "3"}, PLACES), *table.titles(chosen, False),
             *map(table.line, results), *table.details(results),
             *table.footer(chosen, run.wrong_elements(results), table.average(results))]
    rows, ranks, footer = read_text("\n".join(lines))
    assert rows[0] == {"size": "1000", "count": "250", "type": "float", "redop": "sum", "root": "-1", "time": "1000.00",
                       "algbw": "0.00", "busbw": "0.00", "wrong": "0", "in_time": "1000.00", "in_algbw": "0.00",
                       "in_busbw": "0.00", "in_wrong": "0", "rest": ""}
    assert (rows[1]["wrong"], rows[1]["in_wrong"]) == ("N/A", "N/A")
    assert [(rank[2].strip(), rank[3].strip(), rank[4]) for rank in ranks] == [
        ("7", "here", "-1"), ("8", "there", "-1")]
    assert (footer["Out of bounds values"], footer["concluded"]) == ((0.0, "OK"), "all_reduce")


def test_titles_and_lines_are_nccl_tests_byte_for_byte():
    sample = (SAMPLES / "nccl_tests.txt").read_text().splitlines()
    assert table.titles(options("all_reduce"), several=False) == sample[7:11]
    assert table.header(options("all_reduce -b 8 -e 128M -f 4096"), {}, [])[2] == sample[2]
    place = Place(12345, "node1", 0, 0, "0000:18:00", "NVIDIA H200")
    assert table.header(options("all_reduce"), {}, [place])[-1] == sample[5]
    for line in sample[11:14]:
        found = dict(zip(FIELDS, cells(line)[0], strict=True))
        sides = {placement: {"time": float(found[f"{side}time"]), "alg_bw": float(found[f"{side}algbw"]),
                             "bus_bw": float(found[f"{side}busbw"]),
                             "nwrong": None if found[f"{side}wrong"] == "N/A" else int(found[f"{side}wrong"])}
                 for placement, side in (("out_of_place", ""), ("in_place", "in_"))}
        assert table.line({**found, **sides}) == line
    assert table.footer(options("all_reduce"), 0, 55.8849)[:3] == sample[14:17]


def test_columns_stand_where_nccl_tests_has_them():
    # What C's printf makes of a number in nccl-tests' getFloatStr, worked out by hand.
    for value, width, text in [
            (0, 7, "   0.00"), (9999.994, 7, "9999.99"), (99999.94, 7, "99999.9"), (1234567.4, 7, "1234567"),
            (12345678.0, 7, "1.2e+07"), (999.994, 6, "999.99"), (9999.94, 6, "9999.9"), (1234567.0, 6, " 1e+06")]:
        assert table.number(value, width) == text
    assert table.line(result(wrong=(12, 1234567))).endswith("  1.23457e+06")  # printf's %6g
    for name, redop, root in [("reduce", "max", "2"), ("broadcast", "none", "2"), ("all_gather", "none", "-1"),
                              ("sendrecv", "max", "-1"), ("hypercube", "none", "-1")]:
        found = result(case=Case(name, "float16", "max", 2, 4), count=8)
        assert table.line(found).split()[2:5] == ["half", redop, root]
    assert cells(table.line(result(), name="ring"))[1] == "  ring"
    line = table.line(result(), spread=True, stamp="2026-01-02 03:04:05")
    assert line.endswith("  2026-01-02 03:04:05")
    assert len(line) == sum(WIDTHS[:9]) + 2 * (33 + 36) + 21
    titles = table.titles(options("all_reduce -I 1 -S 1"), several=False)
    assert (titles[2].split()[10:14], titles[2].split()[-1]) == (["i_min", "i_max", "i_p99", "i_cv%"], "timestamp")
    assert len(titles[2]) == len(line) - 1  # so do nccl-tests' own


def test_bandwidths_ratios_and_shares():
    body = result(milliseconds=2.0, case=ALL_REDUCE._replace(ranks=4), count=1 << 20)["out_of_place"]
    assert body == {"time": pytest.approx(2000), "alg_bw": pytest.approx((4 << 20) / 2e-3 / 1e9), "nwrong": 0,
                    "bus_bw": pytest.approx(1.5 * (4 << 20) / 2e-3 / 1e9)}
    found = result("all_reduce -C 1")
    assert "time" not in found["out_of_place"]
    assert read_text(table.line(found))[0][0]["time"] == "1000.00"
    assert table.titles(options("all_reduce -C 1"), several=False)[2].split()[6] == "cputime"
    rows = [result(milliseconds=1.0, peers={"mpi": measured(other)}) for other in (2.0, 0.5)]
    assert [row["against"]["mpi"]["ratio"]["in_place"] for row in rows] == [2.0, 0.5]
    assert run.means(rows) == {"mpi": {"all_reduce": {"ring": 1.0}}}
    assert (table.details(rows)[3].split()[-1], table.details(rows)[-1].split()[-1]) == ("mpi", "0.500")
    limit = 40 / 6  # 3P times N bytes at 40 GB/s, factor 1
    assert bound(ALL_REDUCE, 1 << 20, COPY) == pytest.approx(limit)
    assert result(count=1 << 20)["share"] == pytest.approx((4 << 20) / 1e-3 / 1e9 / limit)
    assert result(case=Case("barrier", "float32", "sum", 0, 2), count=0)["share"] is None


def test_the_footer_judges_the_bandwidth():
    for line, variables, verdict in [
            ("all_reduce", {}, ""), ("all_reduce --min-bw 1.5", {}, "OK"), ("all_reduce --min-bw 1.6", {}, "FAILED"),
            ("all_reduce", {"NCCL_TESTS_MIN_BW": "1.6"}, "OK"), ("all_reduce", {"NCCL_TESTS_MIN_BW": "1.7"}, "FAILED")]:
        lines = table.footer(options(line, **variables), 7, 1.5)
        assert lines[:2] == ["# Out of bounds values : 7 FAILED", f"# Avg bus bandwidth    : 1.5 {verdict}"]


# nccl-tests' JSON: the keys that its own tools/analyze_perf_json.py reads, with their types


def read_json(record):
    """What nccl-tests' analyser takes from a record; KeyError or AssertionError where it would stumble."""
    assert record["version"] == 3
    rows = []
    for one in record["results"]:
        assert isinstance(one["size"], int)
        for placement in ("out_of_place", "in_place"):
            spread = one[f"{placement}_per_iter"]
            assert all(isinstance(spread[key], float) for key in ("min_us", "max_us", "avg_us", "p99_us", "cv_pct"))
            ranks = spread["per_process_max_times_us"]
            assert [max(times) for times in zip(*ranks, strict=True)] == pytest.approx(spread["times_us"], abs=1e-3)
        rows.append((one["size"], one["out_of_place"]["time"], one["out_of_place"]["nwrong"]))
    return record["config"]["iterations"], [one["hostname"] for one in record["config"]["devices"]], rows


def keys(value):
    """The names in a record, nested as they are; lists by their first element."""
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def lacking(ours, theirs, path=""):
    """The keys of `theirs` that `ours` does not have."""
    for name, below in theirs.items() if isinstance(theirs, dict) else ():
        if name not in ours:
            yield f"{path}.{name}"
        elif isinstance(below, list | dict):
            first = ours[name][0] if isinstance(below, list) else ours[name]
            yield from lacking(first, below[0] if isinstance(below, list) else below, f"{path}.{name}")


def test_the_reader_reads_what_nccl_tests_writes_and_what_we_write():
    assert read_json(NCCL_TESTS) == (2, ["node1"] * 4, [(1024, 12.5, 0.0), (4096, 12.5, 0.0)])
    iterations, devices, rows = read_json(SAMPLE)
    assert (iterations, len(devices), len(rows), {wrong for *_, wrong in rows}) == (3, 3, 9, {0})
    assert set(lacking(SAMPLE, keys(NCCL_TESTS))) == {".config.step_bytes"}
    assert (SAMPLE["config"]["step_factor"], SAMPLE["results"][0]["root"]) == (16, "    -1")


def test_a_record_is_made_as_the_sample_is():
    chosen = options("all_reduce -b 64 -e 16K -f 16 -n 3 --algorithm ring,tree,native --against mpi -J bench.json")
    made = {**run.opening(chosen, PLACES, SAMPLE["gpucoll"]["machine"], [], []),
            **run.closing(chosen, 0, 1.0, [])}
    made["results"] = [result(peers={"mpi": measured()})]
    made["gpucoll"] |= {key: SAMPLE["gpucoll"][key] for key in ("copy", "ratios")}
    assert keys(made) == keys(SAMPLE)


def test_a_file_is_never_overwritten_and_read_only_where_it_holds_results(tmp_path):
    path = tmp_path / "run.json"
    for number, name in enumerate(("run.json", "run.json.0", "run.json.1")):
        file = records.reserve(str(path))
        records.write(file, {"results": [], "number": number})
        assert Path(file.name).name == name
        assert records.read(file.name)[0]["number"] == number
    with pytest.raises(ArgumentError, match="GC-FILE"):
        records.reserve(str(tmp_path / "none" / "run.json"))
    for content in (None, "{", "[]", "{}", '{"runs": []}', '{"runs": [3]}', "\xff\xfe"):
        bad = tmp_path / "bad.json"
        if content is not None:
            bad.write_bytes(content.encode("latin-1"))
        with pytest.raises(ArgumentError, match="GC-FILE"):
            records.read(str(bad))


def test_csv_has_a_line_for_each_placement_and_peer():
    lines = records.csv_text({"results": [result(peers={"mpi": measured(2.0)})]}).splitlines()
    rows = [dict(zip(records.COLUMNS, line.split(","), strict=True)) for line in lines[1:]]
    assert lines[0] == ",".join(records.COLUMNS)
    assert [(row["peer"], row["placement"], row["ratio"]) for row in rows] == [
        ("", "out_of_place", ""), ("", "in_place", ""), ("mpi", "out_of_place", "2.0"), ("mpi", "in_place", "2.0")]
    assert (rows[0]["root"], rows[2]["time_us"], rows[2]["p99_us"]) == ("-1", "2000.0", "2000.0")


def test_the_environment_is_let_in_by_name_and_without_paths():
    given = {"NCCL_ALGO": "Ring", "GPUCOLL_TIMEOUT": "5", "HOME": "/home/x", "AWS_SECRET_ACCESS_KEY": "x", "USER": "x",
             "UCX_TLS": "tcp", "NCCL_DEBUG_FILE": "x", "OMPI_MCA_orte_tmpdir_base": "/tmp/x", "NCCL_COMM_ID": "a:1",
             "UCX_SOME_TOKEN": "x"}
    assert records.environment(given) == ["GPUCOLL_TIMEOUT=5", "NCCL_ALGO=Ring", "UCX_TLS=tcp"]


def test_what_became_slower_is_printed_with_its_interval_and_fails():
    old = [{"results": [result(milliseconds=1.0)]}]
    for milliseconds, words, is_well in [(1.3, "2 figures, 2 slower, 0 faster", False), (1.05, "0 slower, 0", True),
                                         (0.5, "0 slower, 2 faster", True)]:
        lines, found = summary.report(list(summary.changes([result(milliseconds=milliseconds)], old)), 1, 0.1)
        assert found == is_well
        assert words in lines[-1]
        if not is_well:
            assert lines[0] == ("# compare: SLOWER  all_reduce 1000 float sum ring out-of-place  1000 us -> 1300 us, "
                                "1.300 times as long [1.300, 1.300]")
    slow, quick = numpy.full((2, 2, 6), 1e-3), numpy.full((2, 2, 6), 1e-3)
    slow[..., ::2] *= 3  # median twice as long, by chance
    pair = [run.result_of(ALL_REDUCE, 250, options("all_reduce"), ("ring", Measured(seconds, (0, 0))), {}, COPY)
            for seconds in (slow, quick)]
    changes = list(summary.changes(pair[:1], [{"results": pair[1:]}]))
    assert changes[0].interval.ratio == 2.0
    assert summary.report(changes, 1, 0.1)[1], "a wide spread is no regression"
    found = list(summary.changes([result(case=ALL_REDUCE._replace(ranks=4), count=256)], [NCCL_TESTS]))
    assert [change.old for change in found] == [13.0, 13.0], "nccl-tests' files say neither algorithm nor ranks"
    other = [{"results": [result() | {"algorithm": "tree"}]}]
    lines, is_well = summary.report(list(summary.changes([result()], other)), 1, 0.1)
    assert not is_well, "a baseline of something else"
    assert "0 figures" in lines[-1]


def test_osus_columns():
    assert table.osu_titles("all_gather", "ring", overlap=False)[-1] == (
        "# Size    " + "     Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations")
    assert table.osu_latency(result(case=Case("all_gather", "float32", "sum", 0, 2), count=32)) == (
        "128       " + "             1000.00" * 3 + "           6")
    assert table.osu_titles("all_reduce", "ring", overlap=True)[-1].split() == [
        "#", "Size", "Overall(us)", "Compute(us)", "Pure", "Comm.(us)", "Overlap(%)"]
    line = table.osu_overlap({"size": 64, "overall_us": 3, "compute_us": 2, "pure_us": 2, "overlap_pct": 50}, "ring")
    assert line.split() == ["64", "3.00", "2.00", "2.00", "50.00", "ring"]
    assert overlap.percent(5.0, 2.0, 2.0) == 0.0


def pairs_of(times, size=1024):
    return [{"size": size, "source": source, "target": target, "time_us": time, "least_us": time * 0.9,
             "bandwidth": size / time / 1e3, "nwrong": 0} for (source, target), time in times.items()]


def test_slow_links_and_ranks_are_named():
    pairs = pairs_of({(0, 1): 10.0, (1, 0): 11.0, (0, 2): 10.0, (2, 0): 90.0, (1, 2): 12.0, (2, 1): 10.0})
    found = findings.slow_links(pairs, ["a", "b", "c"])
    assert [text.split(":")[0] + text.split(":")[1] for text in found] == ["slow link 2 on c to 0 on a"]
    assert [pair["slow"] for pair in pairs] == [False, False, False, True, False, False]
    pairs[3]["least_us"] = 11.0
    assert findings.slow_links(pairs, ["a", "b", "c"]) == [], "slow once only"
    pairs = pairs_of({(0, 1): 1.0, (1, 0): 1.0, (0, 2): 50.0, (2, 0): 51.0, (1, 2): 52.0, (2, 1): 50.0})
    assert [len(findings.slow_links(pairs, hosts)) for hosts in ("aab", "aaa")] == [0, 4], "links between hosts"
    busy, elapsed = numpy.array([[0.1, 0.2, 0.1], [0.2, 0.1, 0.1], [5.0, 5.1, 4.9]]), numpy.full((3, 3), 5.2)
    assert findings.busiest(busy, elapsed).rank == 2
    assert findings.busiest(busy, elapsed, noise=6.0) is None
    busy[2, 1] = 0.1  # not in every round
    assert findings.busiest(busy, elapsed) is None
    assert host_names([place._replace(host="a") for place in PLACES]) == ["a (node 0)", "a (node 1)"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_one_line_on_a_terminal_and_lines_elsewhere():
    texts = []
    for style, stream, total in [("auto", io.StringIO(), 100), ("auto", Terminal(), 100), ("off", Terminal(), 100),
                                 ("lines", io.StringIO(), None)]:
        seconds = [0.0]
        progress = table.Progress(style, total, stream, clock=lambda seconds=seconds: seconds[0])
        seconds[0] = 30.0
        progress.done(25, "all_reduce of 8 bytes")
        progress.clear()
        texts.append(stream.getvalue())
    line = "all_reduce of 8 bytes, 0:00:30 so far, 0:01:30 to go"
    assert texts == [f"gpucoll bench: {line}\n", f"{line}\r\033[K", "",
                     "gpucoll bench: all_reduce of 8 bytes, 0:00:30 so far, no end\n"]


def test_regret_is_the_share_by_which_the_choice_takes_longer_than_the_best():
    ring, tree = ("mpi", "ring"), ("mpi", "tree")
    row = regret.judged(64, tree, {tree: [3e-6] * 9, ring: [2e-6] * 9})
    assert regret.line(row).split() == ["64", "mpi:tree", "3.00", "mpi:ring", "2.00", "50.0", "50.0", "50.0"]
    assert len(regret.line(row)) == len(regret.LINE.format(*regret.TITLES[0]))
    assert regret.judged(64, ring, {tree: [3e-6] * 9, ring: [2e-6] * 9})["regret"] == 0
    noisy = regret.judged(64, tree, {tree: [1.2, 0.9, 1.4, 1.2, 1.0], ring: [1.0, 1.5, 0.8, 1.0, 1.1]})
    assert (noisy["regret"], noisy["beyond"]) == (pytest.approx(0.2), 0), "intervals that hold 0 are no proof"
    for rows, within in [([(0.125, 0.0)], False), ([(0.125, 0.0), (0.0, 0.0)], True),
                         ([(0.375, 0.3125), *[(0.0, 0.0)] * 3], False), ([(0.375, 0.25), *[(0.0, 0.0)] * 3], True)]:
        found = regret.verdict([{"regret": one, "beyond": beyond} for one, beyond in rows])
        assert (found["within"], found["worst"]) == (within, rows[0][0])


# README and the standing suite


def test_readmes_section_says_what_the_results_hold(tmp_path):
    path, text = readme.newest(), (ROOT / "README.md").read_text()
    assert readme.block(path) in text
    path = tmp_path / "host-2026-01-02.json"
    path.write_text(json.dumps({"suite": "2026-01-02", "host": "host", "runs": [SAMPLE]}))
    assert readme.newest(tmp_path) == path
    text = readme.block(path)
    assert [line.split("|")[4].strip() for line in text.splitlines() if line.startswith("| all_reduce")] == [
        "ring", "tree", "native"]
    assert "none wrong" in text


def test_the_suite_runs_what_the_bench_accepts_and_writes_what_it_reads(tmp_path):
    loader = importlib.machinery.SourceFileLoader("standing_suite", str(ROOT / "scripts" / "bench"))
    suite = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(suite)
    for ranks, line in (*suite.RUNS, *suite.QUICK):
        assert ranks in (2, 4, 8)
        assert arguments.parse(line.split(), {}).tests
    assert regret.parser().parse_args([*suite.REGRET[1].split()[1:], "-J", "F.json"]).collective == "all_reduce"
    paths = [Path(suite.write([json.loads(json.dumps(SAMPLE))], str(tmp_path), "host", "2026-01-02",
                              {"verdict": {"mean": 0.123456789}})) for _ in range(2)]
    assert [path.name for path in paths] == ["host-2026-01-02.json", "host-2026-01-02.json.0"]
    assert json.loads(paths[0].read_text())["regret"] == {"verdict": {"mean": 0.123457}}
    (found,) = records.read(str(paths[0]))
    changes = list(summary.changes(SAMPLE["results"], [found]))
    assert len(changes) == 2 * len(SAMPLE["results"])
    assert all(change.interval.ratio == pytest.approx(1, rel=1e-4) for change in changes)
    for path in (ROOT / "bench" / "results").glob("*.json"):
        for record in records.read(str(path)):
            assert (record["out_of_bounds"], record["errors"]) == ({"count": 0, "okay": "true"}, [])
