"""Failing allocations in the engine: each allocation of a call fails once. `allocations.py` is the program."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine import allocations
from faults import tables
from gpucoll.device.store import recipe, user_store
from harness.grids import sampled
from harness.jobs import launch, run_job

HOOKS = Path(__file__).with_name("failing.cc")
PROGRAM = Path(allocations.__file__)
# The program on an engine built here, with some texts changed.
CHANGED = f"""
import json, sys
sys.path.insert(0, {str(PROGRAM.parents[1])!r})
from engine import allocations
from harness import extension
with extension.serving(extension.built(extension.changed(json.loads(sys.argv[1])))):
    sys.exit(allocations.main(sys.argv[2]))
"""


def linked():
    """Return the compiled library of failing allocations."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "failing.so")
        subprocess.run(["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-o", target, HOOKS, "-ldl"], check=True)
        return target.read_bytes()


def carried_out(kind, *words):
    """Return the job of a kind of calls, with the hooks preloaded before the C++ library, but not into the launcher."""
    path = user_store().path(HOOKS.read_text(), ".so", linked, flags=recipe())
    command = ["env", f"LD_PRELOAD={path}", sys.executable, *words, kind]
    ranks = allocations.RANKS if kind in allocations.MESSAGES else 0
    return launch(ranks, *command, timeout=300) if ranks else run_job(command, 300)


@pytest.mark.parametrize("kind", sampled([(kind,) for kind in allocations.CALLS], keep=2, seed=31))
def test_a_call_without_memory_is_a_typed_error(kind):
    job = carried_out(kind, PROGRAM)
    assert job.returncode == 0, job.stdout + job.stderr
    assert int(re.search(r"(\d+) allocations", job.stdout)[1]) > 10, job.stdout


@pytest.mark.parametrize("kind", sampled([(kind,) for kind in allocations.MESSAGES], keep=1, seed=32))
def test_a_message_without_memory_is_a_typed_error(mpiexec, kind):
    job = carried_out(kind, PROGRAM)
    assert job.returncode == 0, job.stdout + job.stderr
    assert int(re.search(r"(\d+) allocations", job.stdout)[1]) > 3, job.stdout


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", tables.of_kinds("memory"))
def test_an_engine_that_bears_none_is_noticed(mpiexec, name):
    mutant = tables.of_kinds("memory")[name]
    job = carried_out(mutant.caught, "-c", CHANGED, json.dumps(mutant.changes))
    assert job.returncode != 0, job.stdout
