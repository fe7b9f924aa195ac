"""`gpucoll run` as a user would type it, with nothing left behind."""

import sys

from ranks import run_job


def gpucoll_run(*arguments, timeout=60.0, env=None, cwd=None):
    """The `subprocess.CompletedProcess` of `gpucoll run arguments`; JobTimeout where it does not end in time."""
    return run_job([sys.executable, "-m", "gpucoll", "run", *map(str, arguments)], timeout, env, cwd)
