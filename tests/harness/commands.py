"""`gpucoll run` as typed by a user, without leaving processes behind."""

import os
import sys

from harness.jobs import same_gpucoll
from harness.ranks import run_job


def gpucoll_run(*arguments, timeout=60.0, env=None, cwd=None):
    """Return the `subprocess.CompletedProcess` of `gpucoll run arguments`; raise JobTimeout if it runs too long."""
    return run_job([sys.executable, "-m", "gpucoll", "run", *map(str, arguments)], timeout, env, cwd)


def without_mpi4py(folder):
    """Return the variables of a Python without mpi4py; a module in `folder` hides mpi4py."""
    (folder / "hidden").mkdir(exist_ok=True)
    (folder / "hidden" / "mpi4py.py").write_text("raise ImportError('mpi4py is not installed')\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder / "hidden"), same_gpucoll().get("PYTHONPATH", "")])}


# A process between the launcher and a rank, so that the launcher does not end the other ranks after the first death.
KEEPER = """
import os, subprocess, sys, time
subprocess.call([sys.executable, "-c", *sys.argv[1:]], close_fds=False)
give_up = time.monotonic() + 300
while len(os.listdir(sys.argv[-1])) < 2 and time.monotonic() < give_up:
    time.sleep(0.01)
"""
