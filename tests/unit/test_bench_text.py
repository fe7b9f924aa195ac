"""Output of bench/: nccl-tests' text byte for byte, the JSON record, comparisons, tables."""

import json
from pathlib import Path

import numpy
import pytest
from gpucoll.bench import arguments, readme, records, run, summary, table
from gpucoll.bench.cases import BenchCase
from gpucoll.bench.machine import CopySpeed, RankPlace, bound
from gpucoll.bench.measure import Measured

from gpucoll.errors import ArgumentError
from harness.sources import ROOT

SAMPLES = ROOT / "tests" / "samples"
SAMPLE, NCCL_TESTS = (json.loads((SAMPLES / f"{name}.json").read_text()) for name in ("bench", "nccl_tests"))
PLACES = [RankPlace(7, "here", 0, -1, "cpu", "A processor"), RankPlace(8, "there", 1, -1, "cpu", "A processor")]
COPY = CopySpeed(40.0, 1 << 26, (20.0, 20.0))
ALL_REDUCE = BenchCase("all_reduce", "float32", "sum", 0, 2)

FIELDS = "size count type redop root time algbw busbw wrong in_time in_algbw in_busbw in_wrong".split()


def options(line, **variables):
    return arguments.parse(line.split(), variables)


def measured(milliseconds=1.0, ranks=2, repetitions=6, wrong=(0, 0)):
    """Return measurements of both placements with a constant time."""
    return Measured(numpy.full((2, ranks, repetitions), milliseconds * 1e-3), wrong)


def result(line="all_reduce -b 1000", milliseconds=1.0, case=ALL_REDUCE, count=250, peers=None, **changes):
    return run.result_of(case, count, options(line), ("ring", measured(milliseconds, case.ranks, **changes)),
                           peers or {}, COPY)


def test_titles_and_lines_are_nccl_tests_byte_for_byte():
    sample = (SAMPLES / "nccl_tests.txt").read_text().splitlines()
    assert table.titles(options("all_reduce"), several=False) == sample[7:11]
    assert table.header(options("all_reduce -b 8 -e 128M -f 4096"), {}, [])[2] == sample[2]
    place = RankPlace(12345, "node1", 0, 0, "0000:18:00", "NVIDIA H200")
    assert table.header(options("all_reduce"), {}, [place])[-1] == sample[5]
    for line in sample[11:14]:
        found = dict(zip(FIELDS, line.split(), strict=True))
        sides = {placement: {"time": float(found[f"{side}time"]), "alg_bw": float(found[f"{side}algbw"]),
                             "bus_bw": float(found[f"{side}busbw"]),
                             "nwrong": None if found[f"{side}wrong"] == "N/A" else int(found[f"{side}wrong"])}
                 for placement, side in (("out_of_place", ""), ("in_place", "in_"))}
        assert table.line({**found, **sides}) == line
    assert table.footer(options("all_reduce"), 0, 55.8849)[:3] == sample[14:17]


def test_bandwidths_ratios_and_shares():
    body = result(milliseconds=2.0, case=ALL_REDUCE._replace(ranks=4), count=1 << 20)["out_of_place"]
    assert body == {"time": pytest.approx(2000), "alg_bw": pytest.approx((4 << 20) / 2e-3 / 1e9), "nwrong": 0,
                    "bus_bw": pytest.approx(1.5 * (4 << 20) / 2e-3 / 1e9)}
    found = result("all_reduce -C 1")
    assert "time" not in found["out_of_place"]
    assert table.line(found).split()[5] == "1000.00"
    rows = [result(milliseconds=1.0, peers={"mpi": measured(other)}) for other in (2.0, 0.5)]
    assert [row["against"]["mpi"]["ratio"]["in_place"] for row in rows] == [2.0, 0.5]
    assert run.means(rows) == {"mpi": {"all_reduce": {"ring": 1.0}}}
    assert table.details(rows)[-1].split()[-1] == "0.500"
    limit = 40 / 6  # 3 * P * N bytes move at 40 GB/s; the bus factor of 2 ranks is 1
    assert bound(ALL_REDUCE, 1 << 20, COPY) == pytest.approx(limit)
    assert result(count=1 << 20)["share"] == pytest.approx((4 << 20) / 1e-3 / 1e9 / limit)
    assert result(case=BenchCase("barrier", "float32", "sum", 0, 2), count=0)["share"] is None


def paths(value, path=""):
    """Return the key paths of a record, each behind the keys above; the first element stands for a list."""
    first = value[0] if isinstance(value, list) and value else value
    below = first.items() if isinstance(first, dict) else ()
    return {path}.union(*(paths(item, f"{path}.{name}") for name, item in below))


def test_a_record_has_every_key_of_nccl_tests_and_of_the_sample():
    chosen = options("all_reduce -b 64 -e 16K -f 16 -n 3 --algorithm ring,tree,native --against mpi -J bench.json")
    made = {**run.opening(chosen, PLACES, SAMPLE["gpucoll"]["machine"], [], []), **run.closing(chosen, 0, 1.0, [])}
    made["results"] = [result(peers={"mpi": measured()})]
    made["gpucoll"] |= {key: SAMPLE["gpucoll"][key] for key in ("copy", "ratios")}
    assert paths(made) == paths(SAMPLE)
    assert paths(NCCL_TESTS) - paths(made) == {".config.step_bytes"}


def test_a_file_is_never_overwritten_and_read_only_where_it_holds_results(tmp_path):
    path = tmp_path / "run.json"
    for number, name in enumerate(("run.json", "run.json.0", "run.json.1")):
        file = records.reserve(str(path))
        records.write(file, {"results": [], "number": number})
        assert Path(file.name).name == name
        assert records.read(file.name)[0]["number"] == number
    with pytest.raises(ArgumentError, match="GC-FILE"):
        records.reserve(str(tmp_path / "none" / "run.json"))
    for content in ("{", "[]", "{}", '{"runs": []}', '{"runs": [3]}', "\xff\xfe"):
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(ArgumentError, match="GC-FILE"):
            records.read(str(path))


def test_the_environment_is_let_in_by_name_and_without_paths():
    given = {"NCCL_ALGO": "Ring", "GPUCOLL_TIMEOUT": "5", "HOME": "/home/x", "AWS_SECRET_ACCESS_KEY": "x", "USER": "x",
             "UCX_TLS": "tcp", "NCCL_DEBUG_FILE": "x", "OMPI_MCA_orte_tmpdir_base": "/tmp/x", "NCCL_COMM_ID": "a:1",
             "UCX_SOME_TOKEN": "x"}
    assert records.environment(given) == ["GPUCOLL_TIMEOUT=5", "NCCL_ALGO=Ring", "UCX_TLS=tcp"]


def test_a_wide_spread_is_no_regression():
    slow, quick = numpy.full((2, 2, 6), 1e-3), numpy.full((2, 2, 6), 1e-3)
    slow[..., ::2] *= 3  # the median doubles by chance: every second repetition takes three times as long
    pair = [run.result_of(ALL_REDUCE, 250, options("all_reduce"), ("ring", Measured(seconds, (0, 0))), {}, COPY)
            for seconds in (slow, quick)]
    changes = list(summary.changes(pair[:1], [{"results": pair[1:]}]))
    assert changes[0].interval.ratio == 2.0
    assert summary.report(changes, 1, 0.1)[1]


def test_the_page_on_performance_says_what_the_results_hold():
    assert readme.block(readme.newest()) in (ROOT / "docs" / "performance.md").read_text()


def test_the_page_on_gpus_has_the_table_of_its_file_without_wrong_results(tmp_path):
    page = (ROOT / "docs" / "gpus.md").read_text()
    name = page.partition("python -m gpucoll.bench.readme ")[2].split()[0]
    assert readme.of_gpus(ROOT / name) in page
    (tmp_path / "wrong.json").write_text((ROOT / name).read_text().replace('"passed"', '"failed"'))
    assert readme.of_gpus(tmp_path / "wrong.json") == ""
