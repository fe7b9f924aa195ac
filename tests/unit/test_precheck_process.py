"""`gpucoll precheck` of programs whose ranks differ as processes do: a finding or exit code 2, never agreement."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.pace import seconds

PROGRAMS = tomllib.loads((Path(__file__).parents[1] / "faults/process_programs.toml").read_text())
HEAD, RIGHT = PROGRAMS["head"], PROGRAMS["right"]
WRONG = {name: text for kind in ("texts", "addresses", "numbers", "chance", "threads", "ends")
         for name, text in PROGRAMS[kind].items()}
RANKS = 4
UNKNOWN = {"unsupported", "process"}  # kinds with exit code 2


def command(folder, text):
    """Run the command for a program; return the exit code and the findings."""
    program = folder / "program.py"
    program.write_text(HEAD + text + "\n")
    words = [sys.executable, "-m", "gpucoll", "precheck", "-n", str(RANKS), "--json", str(program), str(folder)]
    job = subprocess.run(words, capture_output=True, text=True, timeout=seconds(200), check=False)
    return job.returncode, json.loads(job.stdout)


def check(folder, name):
    text = WRONG.get(name) or RIGHT[name]
    code, found = command(folder, text)
    kinds = [one["kind"] for one in found]
    assert code == (2 if {*kinds} & UNKNOWN else 1 if kinds else 0), found
    assert name in RIGHT or code, f"{name} agrees"
    assert name in WRONG or not {*kinds} - UNKNOWN, found
    assert all(re.search(r"\w+ \w+ \w+", one["message"]) for one in found)  # a sentence
    return found


CERTAIN = {  # the programs that always run: kind of the finding, and a word of its message
    "a loop over a set": ("process", "order of a set"), "a number of a process": ("process", "number of a process"),
    "a thread that drops errors": ("unsupported", "another thread"), "a call at the exit": ("ended", "rank 3"),
    "SIGKILL": ("unsupported", "SIGKILL"), "execv": ("unsupported", "replaces its process"),
    "os._exit with a code": ("exit", "3"), "sorted by address": ("shape", "ranks"),
}


@pytest.mark.parametrize(("name", "kind", "word"), [(name, *rest) for name, rest in CERTAIN.items()])
def test_what_differs_between_processes_is_a_finding_or_cannot_be_checked(tmp_path, name, kind, word):
    (found,) = check(tmp_path, name)
    assert (found["kind"], word in found["message"]) == (kind, True), found


def test_two_runs_name_the_ranks_and_both_lines(tmp_path):
    code, (found,) = command(tmp_path, "if hash('weight') % 97 == 77: comm.barrier()\ncomm.all_gather(np.ones(2))\n")
    first = len(HEAD.splitlines())
    assert (code, found["kind"], found["ranks"]) == (2, "process", [*range(RANKS)])
    assert [place.rpartition(":")[2] for place in found["places"]] == [str(first + 1), str(first + 2)], found
    assert [one["call"].split()[0] for one in found["calls"]] == ["barrier,", "all_gather"]


WHYS = {"one rank's order": "one rank tells the others", "a folder that must be new": "FileExistsError",
        "one rank's random number": "", "an exit taken back": "", "objects of any length": ""}


@pytest.mark.parametrize(("name", "why"), WHYS.items())
def test_a_right_program_has_no_finding(tmp_path, name, why):
    found = check(tmp_path, name)
    assert [why in one["message"] for one in found] == [True] * bool(why), found


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({*WRONG, *RIGHT} - {*CERTAIN, *WHYS}))
def test_no_program_that_depends_on_its_process_agrees_and_no_right_one_has_a_finding(tmp_path, name):
    check(tmp_path, name)
