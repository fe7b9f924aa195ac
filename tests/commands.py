"""`gpucoll run` as a user would type it, with nothing left behind."""

import subprocess
import sys
import tempfile
import uuid

from ranks import JobTimeout, end_job, ends_within, same_gpucoll, start_job, timeout_message, whole


def gpucoll_run(*arguments, timeout=60.0, env=None, cwd=None):
    """The `subprocess.CompletedProcess` of `gpucoll run arguments`; JobTimeout where it does not end in time."""
    command, token = [sys.executable, "-m", "gpucoll", "run", *map(str, arguments)], uuid.uuid4().hex
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_job(command, token, output, errors, {**same_gpucoll(), **(env or {})}, cwd)
        try:
            in_time = ends_within(process, timeout)
        finally:
            end_job(process, token)
        result = subprocess.CompletedProcess(command, process.returncode, whole(output), whole(errors))
    if not in_time:
        raise JobTimeout(timeout_message(result, timeout))
    return result
