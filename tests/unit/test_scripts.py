"""scripts/test: the meaning of the command line, and true totals however a run ends."""

import os
import pathlib
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest

import environment

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
