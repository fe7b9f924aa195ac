"""Ranks on Dask's workers: results, errors and deaths; needs Dask's package `distributed`."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jobs import run_job
from pace import seconds

pytestmark = pytest.mark.skipif(importlib.util.find_spec("distributed") is None,
                                reason="Dask is not installed: pip install distributed")
JOB = Path(__file__).with_name("dask_job.py")


@pytest.mark.parametrize("program", ["results", "errors", "nested"])
def test_programs_on_workers(program):
    job = run_job([sys.executable, JOB, program, str(seconds(60))], seconds(300))
    assert job.returncode == 0, job.stdout + job.stderr


def test_wrong_options_are_refused_before_any_worker_is_asked():
    import gpucoll as gc
    from gpucoll.dask import Workers

    class Cluster:
        def nthreads(self):
            return {}

    with pytest.raises(gc.ArgumentError, match="no workers") as caught:
        Workers(Cluster())
    assert caught.value.code == "GC-DASK"
    with pytest.raises(gc.UsageError):
        Workers(Cluster(), deterministic="often")
