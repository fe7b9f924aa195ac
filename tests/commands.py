"""`gpucoll run` as a user would type it, with nothing left behind."""

import sys

from ranks import run_job


def gpucoll_run(*arguments, timeout=60.0, env=None, cwd=None):
    """The `subprocess.CompletedProcess` of `gpucoll run arguments`; JobTimeout where it does not end in time."""
    return run_job([sys.executable, "-m", "gpucoll", "run", *map(str, arguments)], timeout, env, cwd)


# Between the launcher and a rank, so that it does not end the others with the first that dies.
KEEPER = """
import os, subprocess, sys, time
subprocess.call([sys.executable, "-c", *sys.argv[1:]], close_fds=False)
give_up = time.monotonic() + 300
while len(os.listdir(sys.argv[-1])) < 2 and time.monotonic() < give_up:
    time.sleep(0.01)
"""
