"""Ranks without MPI: under `gpucoll run --standalone` and started by hand, and the end of a job without MPI."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from gpucoll.launch import launchers
from harness.commands import gpucoll_run, without_mpi4py
from harness.jobs import JOB_MARK, kill_marked, marked, outputs_of, same_gpucoll
from harness.pace import seconds

COLLECTIVES = f"""
import sys
import numpy
import gpucoll as gc
sys.path[:0] = [{str(Path(__file__).parents[1])!r}]
import mixture
from harness.grids import generator

def check(comm):
    mixture.run(comm, mixture.draw(generator("standalone"), comm.size, steps=20))
    itself = comm.recv(numpy.zeros(3), comm.rank, tag=8, async_op=True)
    comm.send(numpy.ones(3), comm.rank, tag=8)
    assert (itself.wait() == 1).all()
    assert comm.all_gather_object({{"rank": comm.rank}}) == [{{"rank": rank}} for rank in range(comm.size)]

with gc.init(timeout=200) as comm:
    assert (comm.local_rank, comm.local_size, comm.nodes, comm.mpi) == (comm.rank, comm.size, 1, None)
    check(comm)
    with comm.split(comm.rank % 2, -comm.rank) as part:
        members = [one for one in range(comm.size) if one % 2 == comm.rank % 2][::-1]
        assert (part.rank, part.size) == (members.index(comm.rank), len(members))
        check(part)
with gc.init(timeout=200, executor="mpi") as comm:  # the same schedules, by messages through the store
    check(comm)
assert "mpi4py.MPI" not in sys.modules
sys.stdout.write(f"rank {{comm.rank}} of {{comm.size}} ok\\n")
"""
DISTRIBUTED = """
import datetime, sys
import numpy
import gpucoll.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=200))
rank, size = dist.get_rank(), dist.get_world_size()
x = numpy.arange(5.0) * (rank + 1)
dist.all_reduce(x)
assert (x == numpy.arange(5.0) * (size * (size + 1) // 2)).all()
if rank == 0:
    came = numpy.zeros((size - 1, 3))
    assert {dist.recv(row) for row in came} == {*range(1, size)}  # from anybody
    assert sorted(came[:, 0]) == [*range(1, size)]
else:
    dist.send(numpy.full(3, float(rank)), 0)
dist.monitored_barrier()
late = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=201))
if rank < 2:
    try:
        assert late.communicator.timeout == 201
        if rank == 0:
            dist.monitored_barrier(late, timeout=0.3)
    except TimeoutError as error:
        assert error.ranks == (1,), error.ranks
    else:
        assert rank == 1
    y = numpy.ones(1)
    dist.all_reduce(y, group=late)
    assert y[0] == 2
dist.barrier()
dist.destroy_process_group()
assert "mpi4py.MPI" not in sys.modules
sys.stdout.write(f"rank {rank} of {size} ok\\n")
"""


@pytest.fixture
def script(tmp_path):
    """Return `script(text)`, a function to write job.py with this text and to return the folder."""
    def write(text):
        (tmp_path / "job.py").write_text(text)
        return tmp_path
    return write


def ok(size):
    return [f"rank {rank} of {size} ok" for rank in range(size)]


@pytest.mark.parametrize("text", [COLLECTIVES, DISTRIBUTED], ids=["ours", "by torch.distributed's names"])
def test_collectives_without_mpi(launcher, script, text):
    folder = script(text)
    job = gpucoll_run("--standalone", "-n", 3, "job.py", cwd=folder, timeout=120, env=without_mpi4py(folder))
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == ok(3)


def by_hand(folder, variables, text=COLLECTIVES):
    """Start a process for each set of variables, as torchrun or a batch script would; return status, output, errors."""
    base = {**os.environ, **same_gpucoll(), **without_mpi4py(folder)}
    ranks = [subprocess.Popen([sys.executable, "-c", text], env={**base, **own}, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for own in variables]
    outputs = outputs_of(ranks, seconds(120))
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


def test_torchruns_variables_are_enough(tmp_path):
    port = str(launchers.free_port())
    told = [{**launchers.torchrun_variables(rank, 2, rank, 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            for rank in range(2)]
    found = by_hand(tmp_path, told)
    assert [(code, out.split("\n")[0]) for code, out, _ in found] == [(0, line) for line in ok(2)], found


WORLDS = """
import json, os
import numpy, gpucoll as gc
for store, rank in json.loads(os.environ["WORLDS"]):
    with gc.init(store=store, rank=rank, size=2, timeout=100) as comm:
        assert comm.all_reduce(numpy.arange(4) * (rank + 1)).tolist() == [0, 3, 6, 9]
print("ok")
"""


def test_processes_that_have_been_in_unlike_numbers_of_worlds_meet(tmp_path):
    """A process' first world is another process' second world, at a store of their own."""
    first, second = (f"tcp://127.0.0.1:{launchers.free_port()}" for _ in range(2))
    worlds = [[(first, 0), (second, 0)], [(first, 1)], [(second, 1)]]
    found = by_hand(tmp_path, [{"WORLDS": json.dumps(one)} for one in worlds], WORLDS)
    assert [(code, out) for code, out, _ in found] == [(0, "ok\n")] * 3, found


def test_a_lone_process_and_one_clear_error_without_mpi4py(tmp_path):
    alone = "import numpy, gpucoll as gc; comm = gc.init(); print(comm.size, comm.mpi, comm.all_reduce(numpy.ones(2)))"
    assert by_hand(tmp_path, [{}], alone) == [(0, "1 None [1. 1.]\n", "")]
    (code, _, errors), = by_hand(tmp_path, [{"PMI_RANK": "0", "PMI_SIZE": "4"}], alone)
    assert code == 1
    assert "GC-LAUNCHER] MPICH's mpiexec started 4 ranks" in errors
    assert "pip install mpi4py" in errors
    assert "gpucoll run --standalone -n 4" in errors


# ---------------------------------------------------------------- the end of a job

ENDS = """
import os, signal, subprocess, sys, threading
import numpy
import gpucoll as gc
comm = gc.init(timeout=250)
sys.modules["gpucoll.cli.standalone"].SELF_EXIT = 1e6  # a rank that waits for its end stays until the launcher ends it
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])  # which outlives whoever forgets it
comm.barrier()
print(comm.rank, "is here", flush=True)
if comm.rank == 1:
    {end}
comm.all_reduce(numpy.ones(3))
"""


@pytest.mark.parametrize(("end", "status", "words"), [
    ("raise KeyError('a bug')", 1, "KeyError: 'a bug'"),
    pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", marks=pytest.mark.slow),
    ("sys.exit(4)", 4, "status 4"), pytest.param("os._exit(7)", 7, "status 7", marks=pytest.mark.slow),
    pytest.param("threading.Thread(target=lambda: 1 / 0).start()", 1, "ZeroDivisionError", marks=pytest.mark.slow)])
def test_a_rank_that_ends_ends_the_job(launcher, script, end, status, words):
    folder, token = script(ENDS.replace("{end}", end)), uuid.uuid4().hex
    with started(folder, token) as job:
        errors = job.communicate(timeout=seconds(100))[1]
        assert job.returncode == status, errors
        assert marked(JOB_MARK, token) == []  # before the context ends them
    assert words in errors
    assert "gpucoll run: rank 1 (process" in errors
    assert errors.count("Traceback") == ("Error" in words), errors


MANY_ERRORS = """
import pathlib, time
import gpucoll as gc

class Told(Exception):
    def __str__(self):  # gives another rank the time to tell as well
        pathlib.Path(f"told {comm.rank}").touch()
        late = time.monotonic() + 2
        while len([*pathlib.Path().glob("told *")]) < 2 and time.monotonic() < late:
            time.sleep(0.01)
        return "all have it"

comm = gc.init(timeout=200)
comm.barrier()
raise Told
"""


def test_of_many_errors_one_traceback_is_shown(launcher, script):
    folder = script(MANY_ERRORS)
    job = gpucoll_run("--standalone", "-n", 3, "job.py", cwd=folder, env=without_mpi4py(folder))
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == job.stderr.count("all have it") == 1, job.stderr
    assert len([*folder.glob("told *")]) == 1


PATIENT = """
import runpy
from gpucoll.cli import standalone
standalone.KILL_TIMEOUT = 1e6
runpy.run_module("gpucoll", run_name="__main__")
"""


@contextlib.contextmanager
def started(folder, token, *options, by=("-m", "gpucoll")):
    """Run a job of three ranks; the token identifies its processes, which are killed on leaving the context."""
    command = [sys.executable, *by, "run", "--standalone", "-n", "3", *options, "job.py"]
    env = {**os.environ, **without_mpi4py(folder), JOB_MARK: token}
    job = subprocess.Popen(command, cwd=folder, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, start_new_session=True)
    with job:
        try:
            yield job
        finally:
            job.kill()
            kill_marked(JOB_MARK, token)


@pytest.mark.parametrize(("number", "status"), [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)])
def test_a_signal_ends_all(launcher, script, number, status):
    """A signal ends the job at once, without the rest of the grace period, if all ranks end."""
    folder, token = script(ENDS.replace("{end}", "signal.pause()")), uuid.uuid4().hex
    with started(folder, token, by=("-c", PATIENT)) as job:
        assert sorted(job.stdout.readline() for _ in range(3)) == [f"{rank} is here\n" for rank in range(3)]
        job.send_signal(number)
        job.communicate(timeout=seconds(15))
        assert job.returncode == status
        assert marked(JOB_MARK, token) == []


# ---------------------------------------------------------------- modules

PRINTS = """
import os, sys
from pathlib import Path
Path(f"told{os.environ['RANK']}").write_text(f"{sys.argv[1:]}, {__name__}, {__package__}")
"""


@pytest.mark.parametrize("options", [["--standalone"], pytest.param([], marks=pytest.mark.slow)])
def test_a_module_runs_as_by_python_m(launcher, script, options):
    folder = script("")
    (folder / "package").mkdir()
    (folder / "package" / "__main__.py").write_text(PRINTS)
    job = gpucoll_run(*options, "-n", 2, "-m", "package", "-m", "x", cwd=folder)
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
    for rank in range(2):
        assert (folder / f"told{rank}").read_text() == "['-m', 'x'], __main__, package"
