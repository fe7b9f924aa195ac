"""MPI's own start has a deadline: if a rank does not come, the other ranks name it and end."""

import sys
from pathlib import Path

import pytest

from harness.jobs import require_launcher
from harness.pace import seconds
from multirank.conftest import DEPENDS

NEVER_STARTS = """
import os, signal, sys, time
import gpucoll as gc
from gpucoll.launch.launchers import started
how, timeout = sys.argv[1], float(sys.argv[2])
if started().rank == 1:
    if how == "exit":
        os._exit(0)
    while True:
        os.kill(os.getpid(), signal.SIGSTOP) if how == "stop" else time.sleep(0.01)
if how == "doctor":
    import runpy
    os.environ["GPUCOLL_TIMEOUT"], sys.argv = sys.argv[2], ["gpucoll", "doctor"]
    runpy.run_module("gpucoll", run_name="__main__")
gc.init(timeout=timeout)
"""


@pytest.mark.parametrize(("how", "why"), [
    ("exit", "has ended"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("stop", "is stopped"), ("idle", "has not come to it"), ("doctor", "has not come to it")])])
def test_who_does_not_come_to_mpis_start_is_named(mpiexec, how, why):
    """The job ends and names the missing rank. Without the deadline, nothing would wake a process in MPI_Init.

    The doctor has the same deadline.
    """
    options = require_launcher().vendor.keep_survivors if how == "exit" else ()  # Open MPI's ends the job otherwise
    job = mpiexec(3, sys.executable, "-c", NEVER_STARTS, how, str(seconds(2)), timeout=seconds(20), options=options)
    assert job.returncode != 0
    told = [line for line in job.stderr.splitlines() if "[GC-TIMEOUT] init" in line]
    assert told, job.stderr
    assert all(f"rank 1 {why}" in line for line in told), told
    assert "start_mpi" in job.stderr  # the stack of the waiting rank


def test_every_row_of_what_depends_on_mpi_names_a_test():
    for file, names in DEPENDS.items():
        text = Path(__file__).with_name(file).read_text()
        assert [name for name in names if f"def {name.partition('[')[0] or 'test_'}" not in text] == [], file
