"""Jobs of ranks: an mpiexec and all its processes; no process is left behind.

    launch(2, sys.executable, "script.py")  # as started by a user

Every timeout is scaled by the machine's pace. This process never imports mpi4py.
"""

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from harness.pace import Patience, seconds

INSTALL_HINT = "no mpiexec beside this Python or on the PATH: pip install gpucoll[mpich]"
JOB_MARK = "RANKS_JOB"  # in the environment of every process of a job, to identify the job's processes
TERMINATE_SECONDS = 3.0  # for mpiexec to clean up after SIGTERM
TAIL = 4000  # characters of output shown per rank


class StartFailed(Exception):
    """The ranks did not start."""


class JobTimeout(Exception):
    """A job did not end in time; the message has the output so far."""


class Vendor(NamedTuple):
    """The options of one kind of mpiexec."""

    mark: str  # a word in the output of `--version`
    options: tuple
    keep_survivors: tuple  # without these, the first death kills all ranks, and ranks show no stacks
    environment: dict  # waiting ranks yield: more ranks than cores


VENDORS = (
    Vendor("Open MPI", ("--oversubscribe", "--allow-run-as-root"), ("--continuous",),
           {"OMPI_MCA_mpi_yield_when_idle": "1"}),
    Vendor("HYDRA", (), ("-disable-auto-cleanup",), {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}),  # MPICH
    Vendor("", (), (), {}),
)


class Launcher(NamedTuple):
    path: str
    version: str
    vendor: Vendor

    def command(self, ranks, argv, options=()):
        return [self.path, "-n", str(ranks), *self.vendor.options, *options, *map(os.fspath, argv)]


@functools.cache
def find_launcher():
    """Return the mpiexec beside this Python, else on the PATH, else None."""
    from gpucoll.launch.launchers import find_mpiexec

    path = find_mpiexec()
    if path is None:
        return None
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=seconds(60)).stdout
    vendor = next(vendor for vendor in VENDORS if vendor.mark in shown)
    return Launcher(path, " ".join(shown.split()[:5]), vendor)


def require_launcher():
    launcher = find_launcher()
    if launcher is None:
        raise StartFailed(INSTALL_HINT)
    return launcher


def start_job(command, token, output, errors=subprocess.STDOUT, environment=None, cwd=None):
    """Start an mpiexec in a new process group; all its processes have the token in their environment."""
    variables = {**os.environ, **require_launcher().vendor.environment, **(environment or {}), JOB_MARK: token}
    variables = {name: value for name, value in variables.items() if value is not None}
    return subprocess.Popen(command, env=variables, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                            start_new_session=True)


def end_job(process, token):
    """End all processes of the job; give mpiexec a chance to remove its own files."""
    if process.poll() is None:
        process.terminate()
        ends_within(process, TERMINATE_SECONDS)
    kill_marked(JOB_MARK, token)
    if process.poll() is None:
        process.kill()
        process.wait()


def outputs_of(processes, limit):
    """Return what each process writes; no process is left."""
    try:
        return [process.communicate(timeout=limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def kill_marked(name, value):
    while members := marked(name, value):
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(member, signal.SIGKILL)
                wait([member], TERMINATE_SECONDS)
            os.close(member)


def marked(name, value):
    """Return handles of the living processes with this variable: ranks leave mpiexec's group and session.

    Only Linux shows environments; elsewhere mpiexec is trusted to end its ranks.
    """
    handles = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(int(place.name))  # first the handle: the pid may be reused later
            try:
                found = f"{name}={value}\0".encode() in (place / "environ").read_bytes()
            except OSError:
                found = False
            handles.append(handle) if found else os.close(handle)
    return handles


def python(*words, timeout=60.0, env=None, cwd=None):
    """Run Python with these words, in this process's environment and `env`; return the `CompletedProcess`, as text."""
    return subprocess.run([sys.executable, *map(str, words)], env={**os.environ, **(env or {})}, cwd=cwd, text=True,
                          capture_output=True, timeout=seconds(timeout), check=False)


def launch(ranks, *argv, timeout=60.0, env=None, cwd=None, options=()):
    """Run `mpiexec -n ranks argv`; return the `subprocess.CompletedProcess`, output as text. No process is left.

    The ranks import the same gpucoll as this process. `env` adds variables (None removes a variable), `options` go to
    mpiexec. Raises JobTimeout, with the output so far, if the job does not end in time.
    """
    __tracebackhide__ = True
    return run_job(require_launcher().command(ranks, argv, options), timeout, env, cwd)


def run_job(command, timeout, env=None, cwd=None):
    """Run a command starting ranks; return the `subprocess.CompletedProcess`. No process is left behind."""
    token = uuid.uuid4().hex
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # a pipe could stay open in an orphan
        process = start_job(command, token, output, errors, {**same_gpucoll(), **(env or {})}, cwd)
        try:
            in_time = ends_within(process, timeout)
        finally:
            end_job(process, token)
        texts = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (output, errors)]
    if not in_time:
        said = section("stdout", texts[0]) + section("stderr", texts[1])
        raise JobTimeout(f"no end within {timeout:g} s: {' '.join(map(str, command))}{said}")
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def ends_within(process, timeout):
    patience = Patience(timeout)
    while (left := patience.left()) and process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(left)
    return process.poll() is not None


def same_gpucoll():
    """Return the variables for another Python to import the same gpucoll."""
    found = importlib.util.find_spec("gpucoll")
    if found is None or found.origin is None:
        return {}
    places = [str(Path(found.origin).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(places)}


def section(title, text):
    """Return the end of the text under a title; "" for an empty text."""
    text = text.strip("\n")
    cut = f"[{len(text) - TAIL} characters left out] ..." if len(text) > TAIL else ""
    return f"\n\n--- {title} ---\n{cut}{text[-TAIL:]}\n" if text else ""
