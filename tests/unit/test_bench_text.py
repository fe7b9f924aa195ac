"""What bench/ prints and writes, read by parsers written for nccl-tests' text and JSON from their documented layout."""

import copy
import io
import json
import re
from pathlib import Path

import numpy
import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")
pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments, compare, document, findings, osu, records, table
from gpucoll.bench.cases import Case
from gpucoll.bench.machine import Copy, Place, bound, host_names
from gpucoll.bench.measure import Measured
from gpucoll.bench.overlap import Overlap
from gpucoll.bench.progress import Progress

from gpucoll.errors import ArgumentError

SAMPLES = Path(__file__).parents[1] / "samples"
PLACES = [Place(7, "here", 0, -1, "cpu", "A processor"), Place(8, "there", 1, -1, "cpu", "A processor")]
COPY = Copy(40.0, 1 << 26, (20.0, 20.0))


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


def measured(milliseconds=1.0, ranks=2, repetitions=4, wrong=(0, 0)):
    """Both placements at a constant time."""
    return Measured(numpy.full((2, ranks, repetitions), milliseconds * 1e-3), wrong)


def result(line="all_reduce -b 1000", milliseconds=1.0, case=None, count=250, peers=None, **changes):
    case = case or Case("all_reduce", "float32", "sum", 0, 2)
    return document.result(case, count, options(line), ("ring", measured(milliseconds, case.ranks, **changes)),
                           peers or {}, COPY)


def printed(line, results):
    """All that a run of these results prints."""
    chosen = options(line)
    lines = [*table.header(chosen, {"gpucoll": "1.2", "MPI": "3"}, PLACES), *table.titles(chosen, False),
             *map(table.line, results), *table.details(results),
             *table.footer(chosen, document.wrong_elements(results), table.average(results))]
    return "".join(f"{line}\n" for line in lines)


def test_the_parser_reads_what_nccl_tests_prints():
    rows, ranks, footer = read_text((SAMPLES / "nccl_tests.txt").read_text())
    assert [row["size"] for row in rows] == ["8", "32768", "134217728"]
    assert rows[2] == {"size": "134217728", "count": "33554432", "type": "float", "redop": "sum", "root": "-1",
                       "time": "812.40", "algbw": "165.21", "busbw": "165.21", "wrong": "0", "in_time": "809.90",
                       "in_algbw": "165.72", "in_busbw": "165.72", "in_wrong": "N/A", "rest": ""}
    assert [rank[4].strip() for rank in ranks] == ["0", "1"]
    assert footer == {"Out of bounds values": (0.0, "OK"), "Avg bus bandwidth": (55.8849, ""),
                      "concluded": "all_reduce_perf"}


def test_the_same_parser_reads_ours():
    rows, ranks, footer = read_text(printed("all_reduce -b 1000 -e 1000", [result(), result(wrong=(None, None))]))
    assert rows[0] == {"size": "1000", "count": "250", "type": "float", "redop": "sum", "root": "-1", "time": "1000.00",
                       "algbw": "0.00", "busbw": "0.00", "wrong": "0", "in_time": "1000.00", "in_algbw": "0.00",
                       "in_busbw": "0.00", "in_wrong": "0", "rest": ""}
    assert (rows[1]["wrong"], rows[1]["in_wrong"]) == ("N/A", "N/A")
    assert [(rank[2].strip(), rank[3].strip(), rank[4]) for rank in ranks] == [
        ("7", "here", "-1"), ("8", "there", "-1")]
    assert footer["Out of bounds values"] == (0.0, "OK")
    assert footer["concluded"] == "all_reduce"


def test_titles_and_sample_lines_are_nccl_tests_byte_for_byte():
    sample = (SAMPLES / "nccl_tests.txt").read_text().splitlines()
    ours = table.titles(options("all_reduce"), several=False)
    assert ours == sample[7:11]
    lines = table.header(options("all_reduce -b 8 -e 128M -f 4096"), {}, [])
    assert lines[2] == sample[2]
    assert table.header(options("all_reduce"), {}, [Place(12345, "node1", 0, 0, "0000:18:00", "NVIDIA H200")])[-1] == (
        sample[5])
    for line in sample[11:14]:
        assert table.line(parsed(line)) == line
    assert table.footer(options("all_reduce"), 0, 55.8849)[:3] == sample[14:17]


def parsed(line):
    """A line of nccl-tests as one of our results."""
    found = dict(zip(FIELDS, cells(line)[0], strict=True))
    sides = {placement: {"time": float(found[f"{side}time"]), "alg_bw": float(found[f"{side}algbw"]),
                         "bus_bw": float(found[f"{side}busbw"]),
                         "nwrong": None if found[f"{side}wrong"] == "N/A" else int(found[f"{side}wrong"])}
             for placement, side in (("out_of_place", ""), ("in_place", "in_"))}
    return {"size": int(found["size"]), "count": int(found["count"]), "type": found["type"], "redop": found["redop"],
            "root": found["root"], **sides}


# What C's printf makes of a number in nccl-tests' getFloatStr, worked out by hand.
@pytest.mark.parametrize(("value", "width", "text"), [
    (0, 7, "   0.00"), (9999.994, 7, "9999.99"), (99999.94, 7, "99999.9"), (1234567.4, 7, "1234567"),
    (12345678.0, 7, "1.2e+07"), (999.994, 6, "999.99"), (9999.94, 6, "9999.9"), (123456.0, 6, "123456"),
    (1234567.0, 6, " 1e+06")])
def test_numbers_have_as_many_decimals_as_there_is_room_for(value, width, text):
    assert table.number(value, width) == text


def test_counts_of_wrong_elements_are_printed_as_nccl_tests_does():
    assert read_text(table.line(result(wrong=(12, 123456))))[0][0]["wrong"] == "12"
    assert table.line(result(wrong=(12, 1234567))).endswith("  1.23457e+06")  # printf's %6g


WIDTH_OF_LEFT = sum(WIDTHS[:9])


@pytest.mark.parametrize(("name", "redop", "root"), [
    ("all_reduce", "max", "-1"), ("reduce", "max", "2"), ("broadcast", "none", "2"), ("all_gather", "none", "-1"),
    ("reduce_scatter", "max", "-1"), ("sendrecv", "max", "-1"), ("gather", "none", "2"), ("hypercube", "none", "-1")])
def test_op_and_root_stand_where_nccl_tests_has_them(name, redop, root):
    found = result(case=Case(name, "float16", "max", 2, 4), count=8)
    assert table.line(found).split()[2:5] == ["half", redop, root]


def test_several_algorithms_are_named_after_the_last_column():
    _, rest = cells(table.line(result(), name="ring"))
    assert rest == "  ring"
    assert cells(table.line(result()))[1] == ""


def test_spread_and_timestamps_stand_where_nccl_tests_has_them():
    line = table.line(result(), spread=True, stamp="2026-01-02 03:04:05")
    assert line.endswith("  2026-01-02 03:04:05")
    assert len(line) == WIDTH_OF_LEFT + 2 * (33 + 36) + 21
    titles = table.titles(options("all_reduce -I 1 -S 1"), several=False)
    assert titles[2].split()[10:14] == ["i_min", "i_max", "i_p99", "i_cv%"]
    assert titles[2].split()[-1] == "timestamp"
    assert len(titles[2]) == len(line) - 1  # so do nccl-tests' own


def test_bandwidths_are_bytes_over_time_and_factor():
    found = result(milliseconds=2.0, case=Case("all_reduce", "float32", "sum", 0, 4), count=1 << 20)
    body = found["out_of_place"]
    assert body["time"] == pytest.approx(2000)
    assert body["alg_bw"] == pytest.approx((4 << 20) / 2e-3 / 1e9)
    assert body["bus_bw"] == pytest.approx(1.5 * body["alg_bw"])


def test_cpu_time_has_a_name_of_its_own():
    found = result("all_reduce -C 1")
    assert "time" not in found["out_of_place"]
    assert table.titles(options("all_reduce -C 1"), several=False)[2].split()[6] == "cputime"
    assert read_text(table.line(found))[0][0]["time"] == "1000.00"


def test_ratios_are_the_peers_time_over_ours():
    found = [result(milliseconds=1.0, peers={"mpi": measured(other)}) for other in (2.0, 0.5)]
    assert [one["against"]["mpi"]["ratio"] for one in found] == [
        {"out_of_place": 2.0, "in_place": 2.0}, {"out_of_place": 0.5, "in_place": 0.5}]
    assert table.means(found) == {"mpi": {"all_reduce": {"ring": 1.0}}}
    assert table.details(found)[-1].split()[-1] == "0.500"
    assert table.details(found)[3].split()[-1] == "mpi"


def test_shares_are_busbw_over_the_bound():
    case = Case("all_reduce", "float32", "sum", 0, 2)
    assert bound(case, 1 << 20, COPY) == pytest.approx(40 / 6)  # 3P times N bytes at 40 GB/s, factor 1
    found = result(milliseconds=1.0, count=1 << 20)
    assert found["share"] == pytest.approx((4 << 20) / 1e-3 / 1e9 / (40 / 6))
    assert result(case=Case("barrier", "float32", "sum", 0, 2), count=0)["share"] is None


@pytest.mark.parametrize(("line", "variables", "verdict"), [
    ("all_reduce", {}, ""), ("all_reduce --min-bw 1.5", {}, "OK"), ("all_reduce --min-bw 1.6", {}, "FAILED"),
    ("all_reduce", {"NCCL_TESTS_MIN_BW": "1.6"}, "OK"), ("all_reduce", {"NCCL_TESTS_MIN_BW": "1.7"}, "FAILED")])
def test_the_footer_judges_the_bandwidth(line, variables, verdict):
    lines = table.footer(options(line, **variables), 7, 1.5)
    assert lines[:2] == ["# Out of bounds values : 7 FAILED", f"# Avg bus bandwidth    : 1.5 {verdict}"]


# nccl-tests' JSON: the keys that its own tools/analyze_perf_json.py reads, with their types


SPREAD = ("min_us", "max_us", "avg_us", "p99_us", "cv_pct")


def read_json(record):
    """What nccl-tests' analyser takes from a record; KeyError or AssertionError where it would stumble."""
    assert record["version"] == 3
    devices = [device["hostname"] for device in record["config"]["devices"]]
    rows = []
    for one in record["results"]:
        assert isinstance(one["size"], int)
        for placement in ("out_of_place", "in_place"):
            spread = one[f"{placement}_per_iter"]
            assert all(isinstance(spread[key], float) for key in SPREAD)
            ranks = spread["per_process_max_times_us"]
            assert [max(times) for times in zip(*ranks, strict=True)] == pytest.approx(spread["times_us"], abs=1e-3)
        rows.append((one["size"], one["out_of_place"]["time"], one["out_of_place"]["bus_bw"],
                     one["out_of_place"]["nwrong"]))
    return record["config"]["iterations"], devices, rows, record["average_bus_bandwidth"]["bandwidth"]


NCCL_RECORD = {  # written by hand from src/util.cu
    "version": 3, "start_time": "2026-01-02 03:04:05", "args": ["./build/all_reduce_perf", "-I", "1"], "env": ["A=b"],
    "nccl_version": 23007,
    "config": {"nthreads": 1, "ngpus": 1, "minimum_bytes": 8, "maximum_bytes": 8, "step_bytes": 1048576,
               "warmup_iters": 1, "iterations": 2, "aggregated_iterations": 1, "validation": 1, "graph": 0,
               "blocking_collectives": "false", "per_iter_timing": "true", "per_iter_skip": 0, "parallel_init": "false",
               "devices": [{"rank": 0, "group": 0, "pid": 1, "hostname": "node1", "device": 0,
                            "device_hex": "0000:18:00", "device_info": "NVIDIA H200"}]},
    "results": [{
        "size": 8, "count": 2, "type": "float", "redop": "sum", "root": "    -1",
        "out_of_place": {"time": 12.5, "alg_bw": 0.00064, "bus_bw": 0.00064, "nwrong": 0.0},
        "out_of_place_per_iter": {"skipped_iterations": 0, "min_us": 12.0, "max_us": 13.0, "avg_us": 12.5,
                                  "p50_us": 13.0, "p95_us": 13.0, "p99_us": 13.0, "stdev_us": 0.5, "cv_pct": 4.0,
                                  "times_us": [12.0, 13.0], "per_process_max_times_us": [[12.0, 13.0]]},
        "in_place": {"time": 12.5, "alg_bw": 0.00064, "bus_bw": 0.00064, "nwrong": 0.0},
        "in_place_per_iter": {"skipped_iterations": 0, "min_us": 12.0, "max_us": 13.0, "avg_us": 12.5, "p50_us": 13.0,
                              "p95_us": 13.0, "p99_us": 13.0, "stdev_us": 0.5, "cv_pct": 4.0,
                              "times_us": [12.0, 13.0], "per_process_max_times_us": [[12.0, 13.0]]},
        "actual_iterations": 2, "experiment_name": ""}],
    "out_of_bounds": {"count": 0, "okay": "true"},
    "average_bus_bandwidth": {"bandwidth": 0.00064, "okay": "unchecked"}, "errors": [],
    "end_time": "2026-01-02 03:04:06"}


def keys(value):
    """The names in a record, nested as they are; lists by their first element."""
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def test_the_reader_reads_what_nccl_tests_writes():
    assert read_json(NCCL_RECORD) == (2, ["node1"], [(8, 12.5, 0.00064, 0.0)], 0.00064)


def test_the_same_reader_reads_ours():
    record = json.loads((SAMPLES / "bench.json").read_text())
    iterations, devices, rows, _ = read_json(record)
    assert (iterations, len(devices), len(rows)) == (3, 3, 9)
    assert all(nwrong == 0 for *_, nwrong in rows)


def test_our_record_has_every_key_of_nccl_tests():
    def lacking(ours, theirs, path=""):
        for name, below in (theirs or {}).items() if isinstance(theirs, dict) else ():
            if name not in ours:
                yield f"{path}.{name}"
            elif isinstance(below, list | dict):
                first = ours[name][0] if isinstance(below, list) else ours[name]
                yield from lacking(first, below[0] if isinstance(below, list) else below, f"{path}.{name}")

    record = json.loads((SAMPLES / "bench.json").read_text())
    assert set(lacking(record, keys(NCCL_RECORD))) == {".config.step_bytes"}
    assert record["config"]["step_factor"] == 16
    assert record["results"][0]["root"] == "    -1"


def test_a_record_is_made_as_the_sample_is():
    chosen = options("all_reduce -b 64 -e 16K -f 16 -n 3 --algorithm ring,tree,native --against mpi -J bench.json")
    sample = json.loads((SAMPLES / "bench.json").read_text())
    made = {**document.opening(chosen, PLACES, sample["gpucoll"]["machine"], [], []),
            **document.closing(chosen, 0, 1.0, [])}
    made["results"] = [result(peers={"mpi": measured()})]
    made["gpucoll"]["copy"] = sample["gpucoll"]["copy"]
    made["gpucoll"]["ratios"] = sample["gpucoll"]["ratios"]
    assert keys(made) == keys(sample)


# Files


def test_a_file_is_never_overwritten(tmp_path):
    path = str(tmp_path / "run.json")
    names = []
    for number in range(3):
        file = records.reserve(path)
        records.write(file, {"results": [], "number": number})
        names.append(Path(file.name).name)
    assert names == ["run.json", "run.json.0", "run.json.1"]
    assert [records.read(str(tmp_path / name))[0]["number"] for name in names] == [0, 1, 2]


def test_a_file_that_cannot_be_made_or_read_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="GC-FILE"):
        records.reserve(str(tmp_path / "none" / "run.json"))
    for content in (None, "{", "[]", "{}", '{"runs": []}', '{"runs": [3]}'):
        path = tmp_path / "bad.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ArgumentError, match="GC-FILE"):
            records.read(str(path))


def test_a_file_of_the_suite_holds_several_records(tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps({"suite": "2026-01-02", "host": "a", "runs": [{"results": [1]}, {"results": [2]}]}))
    assert [record["results"] for record in records.read(str(path))] == [[1], [2]]


def test_csv_has_a_line_for_each_placement_and_peer():
    lines = records.csv_text({"results": [result(peers={"mpi": measured(2.0)})]}).splitlines()
    rows = [dict(zip(records.COLUMNS, line.split(","), strict=True)) for line in lines[1:]]
    assert lines[0] == ",".join(records.COLUMNS)
    assert [(row["peer"], row["placement"], row["ratio"]) for row in rows] == [
        ("", "out_of_place", ""), ("", "in_place", ""), ("mpi", "out_of_place", "2.0"), ("mpi", "in_place", "2.0")]
    assert rows[0]["root"] == "-1"


def test_the_environment_is_let_in_by_name_and_without_paths():
    given = {"NCCL_ALGO": "Ring", "GPUCOLL_TIMEOUT": "5", "HOME": "/home/x", "AWS_SECRET_ACCESS_KEY": "x", "USER": "x",
             "UCX_TLS": "tcp", "NCCL_DEBUG_FILE": "x", "OMPI_MCA_orte_tmpdir_base": "/tmp/x", "NCCL_COMM_ID": "a:1",
             "UCX_SOME_TOKEN": "x"}
    assert records.environment(given) == ["GPUCOLL_TIMEOUT=5", "NCCL_ALGO=Ring", "UCX_TLS=tcp"]


# Comparing


def test_what_became_slower_is_printed_with_its_interval_and_fails():
    old = [{"results": [result(milliseconds=1.0)]}]
    lines, is_well = compare.report(list(compare.changes([result(milliseconds=1.3)], old)), 1, 0.1)
    assert not is_well
    assert lines[0] == ("# compare: SLOWER  all_reduce 1000 float sum ring out-of-place  1000 us -> 1300 us, "
                        "1.300 times as long [1.300, 1.300]")
    assert "2 figures, 2 slower, 0 faster" in lines[-1]


@pytest.mark.parametrize(("milliseconds", "words"), [(1.05, "0 slower, 0 faster"), (0.5, "0 slower, 2 faster")])
def test_what_is_alike_or_faster_is_well(milliseconds, words):
    old = [{"results": [result(milliseconds=1.0)]}]
    lines, is_well = compare.report(list(compare.changes([result(milliseconds=milliseconds)], old)), 1, 0.1)
    assert is_well
    assert words in lines[-1]


def test_a_wide_spread_is_no_regression():
    slow, quick = numpy.full((2, 2, 6), 1e-3), numpy.full((2, 2, 6), 1e-3)
    slow[..., ::2] *= 3  # median twice as long, by chance
    case = Case("all_reduce", "float32", "sum", 0, 2)
    pair = [document.result(case, 250, options("all_reduce"), ("ring", Measured(seconds, (0, 0))), {}, COPY)
            for seconds in (slow, quick)]
    changes = list(compare.changes(pair[:1], [{"results": pair[1:]}]))
    assert changes[0].interval.ratio == 2.0
    assert compare.report(changes, 1, 0.1)[1]


def test_a_file_of_nccl_tests_can_be_the_baseline():
    case = Case("all_reduce", "float32", "sum", 0, 2)
    found = list(compare.changes([result(case=case, count=2, milliseconds=1.0)], [NCCL_RECORD]))
    assert [change.old for change in found] == [13.0, 13.0]


@pytest.mark.mutant
def test_a_baseline_of_something_else_fails():
    other = copy.deepcopy(result())
    other["algorithm"] = "tree"
    lines, is_well = compare.report(list(compare.changes([result()], [{"results": [other]}])), 1, 0.1)
    assert not is_well
    assert "0 figures" in lines[-1]
    assert "2 have no counterpart" in lines[-1]


# OSU's layout


def test_osu_latency_has_its_columns_and_sizes():
    case = Case("all_gather", "float32", "sum", 0, 2)
    titles = osu.latency_titles("all_gather", "ring")
    assert titles[-1] == "# Size    " + "     Avg Latency(us)     Min Latency(us)     Max Latency(us)  Iterations"
    assert osu.latency_line(result(case=case, count=32)) == (
        "128       " + "             1000.00" * 3 + "           4")


def test_osu_overlap_has_its_four_columns():
    assert osu.overlap_titles("all_reduce", "ring")[-1].split() == [
        "#", "Size", "Overall(us)", "Compute(us)", "Pure", "Comm.(us)", "Overlap(%)"]
    line = osu.overlap_line(64, Overlap(3e-6, 2e-6, 2e-6))
    assert line.split() == ["64", "3.00", "2.00", "2.00", "50.00"]
    assert Overlap(5.0, 2.0, 2.0).percent == 0.0


# Slow ranks and links


def pairs_of(times, size=1024):
    return [{"size": size, "source": source, "target": target, "time_us": time, "least_us": time * 0.9,
             "bandwidth": size / time / 1e3, "nwrong": 0} for (source, target), time in times.items()]


def test_a_slow_link_is_named_in_its_direction_and_marked():
    pairs = pairs_of({(0, 1): 10.0, (1, 0): 11.0, (0, 2): 10.0, (2, 0): 90.0, (1, 2): 12.0, (2, 1): 10.0})
    found = findings.slow_links(pairs, ["a", "b", "c"])
    assert [text.split(":")[0] + text.split(":")[1] for text in found] == ["slow link 2 on c to 0 on a"]
    assert [pair["slow"] for pair in pairs] == [False, False, False, True, False, False]


def test_links_between_hosts_are_not_compared_with_those_within():
    pairs = pairs_of({(0, 1): 1.0, (1, 0): 1.0, (0, 2): 50.0, (2, 0): 51.0, (1, 2): 52.0, (2, 1): 50.0})
    assert findings.slow_links(pairs, ["a", "a", "b"]) == []
    assert len(findings.slow_links(pairs, ["a", "a", "a"])) == 4


@pytest.mark.mutant
def test_a_link_that_was_slow_once_only_is_not_called_slow():
    pairs = pairs_of({(0, 1): 10.0, (1, 0): 90.0, (0, 2): 10.0, (2, 0): 10.0})
    pairs[1]["least_us"] = 11.0
    assert findings.slow_links(pairs, ["a", "b", "c"]) == []


def test_the_rank_that_never_waits_is_the_slow_one():
    busy = numpy.array([[0.1, 0.2, 0.1], [0.2, 0.1, 0.1], [5.0, 5.1, 4.9], [0.1, 0.1, 0.1]])
    assert findings.busiest(busy, numpy.full((4, 3), 5.2)).rank == 2
    assert findings.busiest(busy, numpy.full((4, 3), 5.2), noise=6.0) is None
    busy[2, 1] = 0.1  # not in every round
    assert findings.busiest(busy, numpy.full((4, 3), 5.2)) is None
    assert findings.busiest(numpy.ones((4, 3)), numpy.ones((4, 3))) is None


def test_nodes_of_one_name_are_told_apart():
    assert host_names(PLACES) == ["here", "there"]
    assert host_names([place._replace(host="a") for place in PLACES]) == ["a (node 0)", "a (node 1)"]


# Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(style, stream, total=100):
    seconds = [0.0]
    progress = Progress(style, total, stream, clock=lambda: seconds[0])
    seconds[0] = 30.0
    progress.done(25, "all_reduce of 8 bytes")
    return progress, stream.getvalue()


def test_without_a_terminal_progress_is_lines_with_the_remaining_time():
    _, text = shown("auto", io.StringIO())
    assert text == "gpucoll bench:  25 %  all_reduce of 8 bytes, 30 s so far, 1 min 30 s to go\n"


def test_on_a_terminal_progress_is_a_bar_that_goes_away():
    progress, text = shown("auto", Terminal())
    assert text.startswith("\r[######..................]  25 %")
    progress.clear()
    assert progress._stream.getvalue().endswith(" \r")


def test_progress_can_be_off_or_without_end():
    assert shown("off", io.StringIO())[1] == ""
    assert shown("lines", io.StringIO(), total=None)[1].endswith("so far, no end\n")


# README


def test_readmes_section_is_made_from_the_newest_results():
    from gpucoll.bench import readme

    path, text = readme.newest(), (Path(__file__).parents[2] / "README.md").read_text()
    if path is None or readme.BEGIN not in text:
        pytest.skip("README has no section on performance, or bench/results has no results")
    assert readme.block(path) in text


def test_readmes_section_says_what_the_results_hold(tmp_path):
    from gpucoll.bench import readme

    path = tmp_path / "host-2026-01-02.json"
    record = json.loads((SAMPLES / "bench.json").read_text())
    path.write_text(json.dumps({"suite": "2026-01-02", "host": "host", "runs": [record]}))
    assert readme.newest(tmp_path) == path
    text = readme.block(path)
    assert text.startswith(readme.BEGIN)
    assert text.endswith(readme.END + "\n")
    assert [line.split("|")[4].strip() for line in text.splitlines() if line.startswith("| all_reduce")] == [
        "ring", "tree", "native"]
    assert "none wrong" in text
