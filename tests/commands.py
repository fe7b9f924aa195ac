"""`gpucoll run` as a user would type it, with nothing left behind."""

import os
import sys

from jobs import same_gpucoll
from ranks import run_job


def gpucoll_run(*arguments, timeout=60.0, env=None, cwd=None):
    """The `subprocess.CompletedProcess` of `gpucoll run arguments`; JobTimeout where it does not end in time."""
    return run_job([sys.executable, "-m", "gpucoll", "run", *map(str, arguments)], timeout, env, cwd)


def without_mpi4py(folder):
    """The variables of a Python that has no mpi4py; `folder` is there for what hides it."""
    (folder / "hidden").mkdir(exist_ok=True)
    (folder / "hidden" / "mpi4py.py").write_text("raise ImportError('mpi4py is not installed')\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder / "hidden"), same_gpucoll().get("PYTHONPATH", "")])}


# Between the launcher and a rank, so that it does not end the others with the first that dies.
KEEPER = """
import os, subprocess, sys, time
subprocess.call([sys.executable, "-c", *sys.argv[1:]], close_fds=False)
give_up = time.monotonic() + 300
while len(os.listdir(sys.argv[-1])) < 2 and time.monotonic() < give_up:
    time.sleep(0.01)
"""
