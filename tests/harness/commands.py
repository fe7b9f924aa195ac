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


KEEPER = """
import os, subprocess, sys, time
subprocess.call([sys.executable, *sys.argv[3:]], close_fds=False)
give_up = time.monotonic() + 300
while sum(name.split()[0].isdecimal() for name in os.listdir(sys.argv[2])) < int(sys.argv[1]) \\
        and time.monotonic() < give_up:
    time.sleep(0.01)
"""


def kept(survivors, folder):
    """Return words before those of a rank's Python: a process between the launcher and the rank.

    It ends once so many ranks have left a file with their number in the folder. Without this process the launcher would
    end all ranks after the first death.
    """
    return ["-S", "-c", KEEPER, str(survivors), str(folder)]
