"""Ranks on Dask's workers, and groups of Ray's actors with the backend "gpucoll": results, errors and deaths."""

import importlib.util
import sys
from pathlib import Path

import pytest

from harness.jobs import run_job
from harness.pace import seconds

PROGRAMS = {"dask": ("results", "errors", "nested"), "ray": ("results", "groups", "errors", "late")}
PACKAGES = {"dask": "distributed", "ray": "ray"}


def need(library):
    """Skip the test without the library; the package is not imported into this process."""
    if importlib.util.find_spec(PACKAGES[library]) is None:
        pytest.skip(f"{library.capitalize()} is not installed: pip install {PACKAGES[library]}")


@pytest.mark.parametrize(("library", "program"), [
    (library, name) for library, names in PROGRAMS.items() for name in names])
def test_programs(library, program):
    need(library)
    job_file = Path(__file__).with_name(f"{library}_job.py")
    job = run_job([sys.executable, job_file, program, str(seconds(60))], seconds(300))
    assert job.returncode == 0, job.stdout + job.stderr


def test_wrong_options_are_refused_before_any_worker_is_asked():
    need("dask")
    import gpucoll as gc
    from gpucoll.dask import Workers

    class Cluster:
        def nthreads(self):
            return {}

    with pytest.raises(gc.ArgumentError, match=r"GC-DASK.*no workers"):
        Workers(Cluster())
    with pytest.raises(gc.UsageError):
        Workers(Cluster(), deterministic="often")
