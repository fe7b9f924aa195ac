"""Processes started by hand that form a group of ranks, and may be killed; every program begins with `BEGIN`."""

import contextlib
import json
import os
import subprocess
import sys

from gpucoll.launch import launchers
from harness.commands import without_mpi4py
from harness.jobs import same_gpucoll
from harness.pace import seconds

# Every program begins like this. `say` writes a line of JSON; `broken` makes calls until a rank is lost.
BEGIN = """
import json, os, signal, sys, time
import numpy
import gpucoll as gc

def say(**more):
    sys.stdout.write(json.dumps(more) + "\\n")
    sys.stdout.flush()

def die(comm):
    try:
        comm.all_reduce(numpy.arange(1000) * (comm.rank + 1))  # the first call of `broken` elsewhere
    finally:
        os.kill(os.getpid(), signal.SIGKILL)

def broken(comm):
    try:
        while True:
            comm.all_reduce(numpy.arange(1000) * (comm.rank + 1))
    except gc.RankFailedError as error:
        return list(error.ranks)

def shows(comm, was):
    mine = numpy.arange(5) * 10 + comm.rank
    total = comm.all_reduce(mine)
    assert (total == sum(numpy.arange(5) * 10 + rank for rank in range(comm.size))).all()
    say(was=was, rank=comm.rank, size=comm.size, address=comm.address,
        all=comm.all_gather(numpy.array([was])).ravel().tolist())

place, rank, size, timeout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
how = sys.argv[5:]
def world():
    return gc.init(store=place, rank=rank, size=size, timeout=timeout)
"""


class Group:
    """Processes started by hand; `said()` waits for all, and returns their lines and exit codes."""

    def __init__(self, folder):
        self._place, self._folder = f"tcp://127.0.0.1:{launchers.free_port()}", folder
        self._processes = []

    def start(self, program, rank=0, size=0, *more, secret="s", timeout=60.0):
        env = {**os.environ, **same_gpucoll(), **without_mpi4py(self._folder), "GPUCOLL_SECRET": secret,
               "TMPDIR": str(self._folder)}
        command = [sys.executable, "-c", BEGIN + program, self._place, str(rank), str(size), str(seconds(timeout))]
        self._processes.append(subprocess.Popen([*command, *map(str, more)], env=env, text=True, stdin=subprocess.PIPE,
                                                stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return self._processes[-1]

    def start_all(self, program, size, *more, **options):
        return [self.start(program, rank, size, *more, **options) for rank in range(size)]

    def said(self):
        found = [process.communicate(timeout=seconds(120)) for process in self._processes]
        for process, (_, errors) in zip(self._processes, found, strict=True):
            assert process.returncode in (0, -9), errors
        return [json.loads(line) for output, _ in found for line in output.splitlines()]

    def close(self):
        for process in self._processes:
            process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                stream.close()
            process.wait()


@contextlib.contextmanager
def group_in(folder):
    """Yield a `Group`; afterwards no process is left, and neither shared memory nor temporary files."""
    before = {*os.listdir("/dev/shm")}
    with contextlib.closing(Group(folder)) as group:
        yield group
    assert [name for name in {*os.listdir("/dev/shm")} - before if "gpucoll" in name] == []
    assert [name for name in os.listdir(folder) if "gpucoll" in name.lower()] == []
