"""Groups of Ray's actors with the backend "gpucoll": results, several groups, errors and deaths; needs Ray."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jobs import run_job
from pace import seconds

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray")
JOB = Path(__file__).with_name("ray_job.py")


@pytest.mark.parametrize("program", ["results", "habits", "groups", "errors", "late"])
def test_programs_of_actors(program):
    job = run_job([sys.executable, JOB, program, str(seconds(60))], seconds(300))
    assert job.returncode == 0, job.stdout + job.stderr
