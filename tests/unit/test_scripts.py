"""scripts/test: the meaning of the command line, and true totals however a run ends."""

import itertools
import os
import pathlib
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest

import environment
from harness import budgets, pace
from harness.grids import is_in_share

ROOT = pathlib.Path(__file__).parents[2]


def test_what_is_run_follows_from_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds the folder of the tests
    script = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "test")))
    assert [script.chosen_marks(words.split()) for words in ("-k ring -x", "-m slow -mkernel", "-m=gpu -x")] == \
        ["", "kernel", "gpu"]
    assert script.workers(["-n", "3"]) == script.workers(["--pdb"]) == ["--dist", "worksteal"]
    assert script.workers(["-k", "ring"])[0] == "-n"
    monkeypatch.setattr(environment, "stamp_of", lambda python: {"vendor": "openmpi"})
    monkeypatch.setattr(environment, "ensure", lambda extras, name: (sorted(extras)[1], name))
    assert script.other_part("", "not slow") == (("mpich", ".venv-mpich"), ["-m", "multirank and (not slow)"])


SUITE = """
import os, time, pytest
@pytest.mark.parametrize("n", range(3))
def test_quick(n): assert n != 1
def test_skipped(): pytest.skip("as asked")
def test_last():
    if "DIE" in os.environ: os._exit(3)
    open("there", "w").close()
    if "WAIT" in os.environ: time.sleep(600)
"""
START = '''
import runpy, sys, types
script = types.SimpleNamespace(**runpy.run_path(sys.argv[1]))
script.processes.ROOT = sys.argv[2]
'''
PROGRAM = START + '''
planted = f"""import sys
sys.path.insert(0, {sys.argv[4]!r})
from harness import reporting
for state, name in (("caught", "one"), ("missed", "two"), ("caught", "three")): reporting.write(state, name)"""
parts = [script.run_part(sys.executable, words)
         for words in (script.pytest_words(["-n", sys.argv[3]]), ["-c", planted])]
sys.exit(script.conclude(parts, "nightly", 71.6))
'''


def own_suite(folder, suite=SUITE, name="test_it.py", more=""):
    """Write `suite` into the folder, with the conftest.py of these tests followed by `more`."""
    folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
    folder.joinpath(name).write_text(suite)
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text().replace(
        "HERE = Path(__file__).parent\n", f"HERE = Path({str(ROOT / 'tests')!r})\n") + more)


@pytest.mark.parametrize(("variable", "workers", "line", "code"), [
    ("DIE", 0, "2 passed, 2 failed, 1 skipped", 3),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("WAIT", 1, "2 passed, 1 failed, 1 skipped", 143),
        ("PASS", 0, "3 passed, 1 failed, 1 skipped", 1), ("DIE", 1, "2 passed, 2 failed, 1 skipped", 1)])])
def test_totals_are_true_however_a_run_ends(tmp_path, variable, workers, line, code):
    own_suite(tmp_path)
    job = subprocess.Popen([sys.executable, "-c", PROGRAM, ROOT / "scripts" / "test", tmp_path, str(workers),
                            ROOT / "tests"],
                           cwd=tmp_path, stdout=-1, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT / "scripts"), variable: "1"})
    if variable == "WAIT":
        while not (tmp_path / "there").exists():
            assert job.poll() is None
        job.terminate()
    lines = job.communicate()[0].splitlines()
    assert lines[-1] == f"nightly: {line}, 2 of 3 planted faults caught, 72 min", lines
    assert job.returncode == code
    assert lines[-2].startswith("stopped, with exit code 143, in test_it.py::test_last") == (variable == "WAIT")


def test_the_shares_of_a_night_have_every_name_once():
    names = [f"tests/test_it.py::test_that[{number}]" for number in range(3000)]
    for shares in (1, 3, 7):
        chosen = [[name for name in names if is_in_share(name, f"{number}/{shares}")]
                  for number in range(1, shares + 1)]
        assert sorted(itertools.chain(*chosen)) == sorted(names)
        assert max(map(len, chosen)) < 1.2 * len(names) / shares


class Report:
    """A report of pytest, as far as the ledger reads reports."""

    def __init__(self, nodeid, duration, cpu, *keywords):
        self.nodeid, self.duration, self.keywords = nodeid, duration, dict.fromkeys(keywords, 1)
        self.user_properties = [("cpu", 99.0), ("cpu", cpu)]  # the value of an earlier phase, then of this phase


def test_folders_are_held_to_their_budgets(monkeypatch):
    """Seconds are only shown; too many processor seconds fail a run under `HOLD`; slow tests count for neither."""
    monkeypatch.setenv(pace.VARIABLE, "2.0")
    monkeypatch.setattr(budgets, "BUDGETS", {"unit": (10, 4), "peer": (10, 4)})
    ledger = budgets.Ledger()
    for report in (Report("tests/unit/test_a.py::one", 3.0, 2.0), Report("tests/unit/test_a.py::one", 4.0, 1.0),
                   Report("tests/unit/test_a.py::two", 99.0, 8.0), Report("tests/peer/test_b.py::slow", 99, 99, "slow"),
                   Report("tests/peer/test_b.py::three", 1.0, 16.5), Report("test_it.py::four", 1.0, 99.0)):
        ledger.add(report)
    assert ledger.lines() == [
        "  99.0 s  tests/unit/test_a.py::two", "   7.0 s  tests/unit/test_a.py::one",
        "   1.0 s  tests/peer/test_b.py::three", "   1.0 s  test_it.py::four",
        "tests/peer: 1 tests, 1 of 20 s, 16 of 8 processor seconds  <-- OVER BUDGET",
        "tests/unit: 2 tests, 106 of 20 s, 11 of 8 processor seconds  <-- OVER BUDGET"]
    monkeypatch.delenv(budgets.HOLD, raising=False)
    assert ledger.far_over() == []
    monkeypatch.setenv(budgets.HOLD, "1")
    assert ledger.far_over() == ["peer"]  # above twice the budget
