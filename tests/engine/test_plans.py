"""Plans that the engine is given: what is wrong in them is refused, or does no harm."""

import ast
import sys
from pathlib import Path

import pytest

from engine import written
from gpucoll.algorithms import find, registry, schedule
from gpucoll.executors.shared.engine import library
from gpucoll.executors.shared.neighbours import SMALL, TINY
from grids import generator
from jobs import run_job

FUZZED = Path(__file__).with_name("fuzzed.py")
# Runs it on an engine that is built here, in which one text is another.
CHANGED = f"""
import sys
sys.path.insert(0, {str(FUZZED.parents[1])!r})
import extension
from engine import fuzzed
old, new, seed, count = sys.argv[1:]
fuzzed.main(extension.built(extension.text().replace(old, new)), seed, int(count))
"""
MUTANTS = {
    "buffers without memory": ("whole(reading.has_rooms() && ", "whole("),
    "parts beyond the end": ("offset <= there && nbytes <= there - offset", "true"),
    "parts beyond others' workspaces": ("(offset <= node->room && nbytes <= node->room - offset)", "true"),
    "memory that there is not": ("catch (const std::exception&) {  // no", "catch (const int&) {  // no"),
}


def ended(*command):
    """What came of the plans; the text of the last one where the process has not come to its end."""
    job = run_job([sys.executable, *command], 600)
    assert job.returncode == 0, (job.returncode, job.stderr[-4000:])
    return ast.literal_eval(job.stdout)


@pytest.mark.skipif(library() is None, reason="no engine that fits is installed")
@pytest.mark.parametrize("count", [4000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_plans_with_something_wrong_do_no_harm(count):
    came = ended(FUZZED, str(generator(f"plans/{count}").random()), str(count))
    assert came.keys() >= {"done", "ValueError", "TypeError", "OverflowError", "GpucollError"}
    assert came["done"] > count / 10


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_not_checked_is_noticed(name):
    old, new = MUTANTS[name]
    command = [sys.executable, "-c", CHANGED, old, new, "1", "20000"]
    assert run_job(command, 600).returncode != 0


def scratch_of(rounds):
    """How many chunks of scratch a schedule has."""
    return max((part.first + part.count for steps in rounds for step in steps for part in step
                if isinstance(part, tuple) and part.buffer == "scratch"), default=0)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 17])
def test_scratch_of_small_calls_has_room(size):
    """Small calls work in the control segments on all ranks, or on none: no rank's scratch may be too long for that."""
    for collective, name in registry():
        if find(collective, name).unfit(size, None) is None and not collective.endswith("_v"):
            for rank in range(size):
                rounds = schedule(collective, name, rank=rank, size=size, nodes=(0,) * size)
                assert scratch_of(rounds) <= rounds.chunks * (SMALL // TINY), (collective, name, rank)


def test_all_collectives_are_written():
    assert {collective for collective, _ in written.NAMES} == {collective for collective, _ in registry()}
