"""Every check has mutants that it catches: faults planted in the kernels' sources."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import MUTANTS

pytestmark = [pytest.mark.kernel, pytest.mark.mutant]

CAUGHT = ("AssertionError", "emulation.Fault", "Segmentation fault", "Bus error")


def run(*words):
    """Run the check of a mutant in a process of its own."""
    return subprocess.run([sys.executable, "-X", "faulthandler", Path(__file__).with_name("mutants.py"), *words],
                          capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name):
    job = run(name)
    assert job.returncode != 0, "nobody noticed"
    assert any(word in job.stderr for word in CAUGHT), job.stderr


def test_the_checks_pass_on_the_real_sources():
    job = run()
    assert job.returncode == 0, job.stderr
