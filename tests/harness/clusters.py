"""A cluster of two hosts on this machine, with programs and jobs in a folder of the test."""

import contextlib
import fcntl
import os
import sys
import tempfile

import pytest

import hosts
import schedulers
from harness.jobs import same_gpucoll
from harness.pace import seconds
from harness.ranks import run_job

LOCK = os.path.join(tempfile.gettempdir(), f"clusters-of-{os.getuid()}.lock")

# Slurm 22.05 sometimes garbles a message between MPICH's ranks while MPI starts: start the command again.
GARBLED = "mpi/pmi2: value not properly terminated"
# Prints the host's name, node, local rank and local size of each rank, and the number in an array of jobs.
PLACE = """
import json, os, socket, sys
import numpy
import gpucoll as gc

with gc.init(timeout=float(sys.argv[1])) as comm:
    x = numpy.arange(1 << 16) + comm.rank
    assert (comm.all_reduce(x) == numpy.arange(1 << 16) * comm.size + sum(range(comm.size))).all()
    places = comm.all_gather_object([socket.gethostname(), comm.node, comm.local_rank, comm.local_size])
    if comm.rank == 0:
        print(json.dumps([places, os.environ.get("SLURM_ARRAY_TASK_ID", "")]))
"""
# The rank of sys.argv[2] fails in the way of sys.argv[3], after some calls.
FAILS = """
import os, signal, sys
import numpy
import gpucoll as gc

with gc.init(timeout=float(sys.argv[1])) as comm:
    for turn in range(1000):
        comm.all_reduce(numpy.ones(4))
        if turn == 20 and comm.rank == int(sys.argv[2]):
            open(os.path.join(sys.argv[4], "failed"), "w").close()
            if sys.argv[3] == "raise":
                raise ZeroDivisionError("on purpose")
            os.kill(os.getpid(), signal.SIGKILL)
"""


class Cluster:
    """A cluster of two hosts, with a folder for programs and their files."""

    def __init__(self, everyone, variables, folder, launcher):
        self.everyone, self.folder = everyone, folder
        self.mpi = "--mpi=pmix" if launcher.vendor.mark == "Open MPI" else "--mpi=pmi2"
        self.variables = {**schedulers.prepared(sys.executable, variables), **same_gpucoll(),
                          **launcher.vendor.environment, "GPUCOLL_CACHE": str(folder / "cache"),
                          "OMP_NUM_THREADS": "1"}

    def run(self, command, timeout=60):
        """Run a shell's command on the head; return the `subprocess.CompletedProcess`."""
        words = self.everyone[0].within("sh", "-c", f"cd {self.folder}\n{command}")
        for _ in range(3):
            job = run_job(words, seconds(timeout), self.variables)
            if GARBLED not in job.stderr:
                break
        return job

    def printed(self, command, timeout=60):
        """Return the output of a command that must not fail."""
        job = self.run(command, timeout)
        assert job.returncode == 0, job.stdout + job.stderr
        return job.stdout

    def program(self, text, *arguments, deadline=30):
        """Return the words of a Python program, with the deadline of its calls as the first argument."""
        path = self.folder / "program.py"
        path.write_text(text)
        return " ".join(["python", str(path), str(seconds(deadline)), *map(str, arguments)])

    def script(self, text):
        """Return the path of a job's script for sbatch."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{text}\n")
        return path


@contextlib.contextmanager
def made_cluster(kind, folder, launcher):
    """Yield a `Cluster` with the daemons of Slurm or ssh; skip the test on a machine without them."""
    reason = hosts.lacking() or schedulers.lacking(kind)
    if reason:
        pytest.skip(f"a cluster with {kind}: {reason}")
    with contextlib.ExitStack() as stack:
        # One cluster at a time: two of them, each with its ranks, are too much for a small machine.
        fcntl.flock(stack.enter_context(open(LOCK, "w")), fcntl.LOCK_EX)
        everyone = stack.enter_context(hosts.made(2))
        yield Cluster(everyone, stack.enter_context(schedulers.KINDS[kind](everyone)), folder, launcher)
