"""scripts/bench: its runs are command lines that the bench accepts, and its file is one that the bench reads."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("gpucoll.bench.cases", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import arguments, compare, records

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).parents[1] / "samples" / "bench.json"


@pytest.fixture(scope="module")
def suite():
    """The script as a module; it has no ending."""
    loader = importlib.machinery.SourceFileLoader("standing_suite", str(ROOT / "scripts" / "bench"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def test_every_run_is_one_that_the_bench_accepts(suite):
    for ranks, line in (*suite.RUNS, *suite.QUICK):
        assert ranks in (2, 4, 8)
        assert arguments.parse(line.split(), {}).tests


def test_the_file_is_read_by_the_bench_and_holds_no_paths(suite, tmp_path):
    record = json.loads(SAMPLE.read_text())
    first, second = (Path(suite.write([json.loads(SAMPLE.read_text())], str(tmp_path), "host", "2026-01-02"))
                     for _ in range(2))
    assert [path.name for path in (first, second)] == ["host-2026-01-02.json", "host-2026-01-02.json.0"]
    (found,) = records.read(str(first))
    assert "/" not in json.dumps({**found, "gpucoll": {**found["gpucoll"], "machine": None}}).replace("GB/s", "")
    changes = list(compare.changes(record["results"], [found]))
    assert len(changes) == 2 * len(record["results"])
    assert all(change.interval.ratio == pytest.approx(1, rel=1e-4) for change in changes)


def test_committed_results_are_of_faultless_runs():
    for path in (ROOT / "bench" / "results").glob("*.json"):
        for record in records.read(str(path)):
            assert record["out_of_bounds"] == {"count": 0, "okay": "true"}
            assert record["errors"] == []
