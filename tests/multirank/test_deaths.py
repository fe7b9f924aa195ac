"""Ranks that die, stop, stay away or are interrupted: the errors, their delay, and leftovers.

The other ranks must learn of a death within 1 s, and of a missing rank within 1 s after the deadline. The tests allow
three times as long, scaled by the speed of the machine.
"""

import json
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpucoll.health.report import stories, summary
from harness.commands import kept
from harness.jobs import JOB_MARK, end_job, ends_within, marked, require_launcher, same_gpucoll, start_job
from harness.pace import seconds
from multirank.failing import JOB, came_of, check_all
from multirank.guard_job import PHASES, TIMEOUT

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
SIZE, DEATH, LATE = 4, 3.0, TIMEOUT + 3.0  # seconds
# Files left by MPI implementations after a failed job, in /dev/shm and in the temporary directory
OF_MPI = ("mpich", "ompi", "prte", "pmix", "sm_segment", "vader", "hwloc", "openmpi", "ucx", "sem.", "psm")


def survivors(mpiexec, folder, how, executor, size=SIZE, missing=1, **more):
    """Run a job in which ranks survive a death; return `came_of`. Only MPI may use named shared memory."""
    (folder / "tmp").mkdir()
    job = mpiexec(size, sys.executable, *kept(size - missing, folder), JOB, folder, how, executor,
                  timeout=seconds(90), env={"TMPDIR": str(folder / "tmp"), **more})
    found = came_of(folder)
    assert len(found) >= size - missing, job.stderr
    for rank in found:
        named = json.loads((folder / f"{rank}.memory").read_text())
        assert [name for name in named if not (Path(name).name.startswith(OF_MPI) or "ompi" in name)] == []
    assert [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(OF_MPI)] == []
    return found


def fault(rank, phase, do, number=7):
    return {"GPUCOLL_FAULT": f"rank:{rank},seq:{number},phase:{phase},do:{do}"}


@pytest.mark.parametrize("executor", ["auto", pytest.param("mpi", marks=SLOW), pytest.param("native", marks=NIGHTLY)])
def test_a_killed_rank_is_named(mpiexec, tmp_path, executor):
    found = survivors(mpiexec, tmp_path, "kill", executor)
    assert found.keys() == set(range(SIZE)) - {1}
    for lasted, closing, error, culprits, words in found.values():
        assert error == "RankFailedError", words
        assert 1 in culprits, words
        assert lasted < seconds(DEATH)
        assert closing < seconds(DEATH)
    firsts = [words for *_, culprits, words in found.values() if culprits == [1] and "process" in words]
    assert all("has ended" in words for words in firsts)


def test_a_rank_that_exits_in_a_long_call_is_named(mpiexec, tmp_path):
    """A rank exiting in a long call is named, although peers first get a system error: its memory is freed early."""
    found = survivors(mpiexec, tmp_path, "long", "auto", 3)
    assert found.keys() == {0, 2}
    check_all(found, "RankFailedError", 1, within=LATE)


MOMENTS = [(executor, rank, phase) for executor in ("auto", "mpi") for rank in (0, 1, SIZE - 1) for phase in PHASES]
MARKS = dict.fromkeys(MOMENTS, NIGHTLY) | {("auto", 0, "after_send"): (), ("mpi", 1, "before"): SLOW}


@pytest.mark.parametrize(("executor", "rank", "phase"), [pytest.param(*one, marks=MARKS[one]) for one in MOMENTS])
def test_whenever_a_rank_is_killed_nobody_waits(mpiexec, tmp_path, executor, rank, phase):
    """No rank waits for a killed rank; a rank killed after its part may be missed late in the call, or not at all."""
    found = survivors(mpiexec, tmp_path, "", executor, **fault(rank, phase, "sigkill"))
    for lasted, closing, error, culprits, words in found.values():
        assert error == "RankFailedError" or (error == "NoneType" and phase != "before"), words
        assert error == "NoneType" or rank in culprits, words
        assert lasted + closing < seconds(2 * DEATH)
    assert rank not in found


TWO_HOSTS = {"TWO_HOSTS": "1"}  # ranks alternate between two pretended hosts


@pytest.mark.parametrize(("rank", "executor"), [
    (1, "auto"), pytest.param(1, "mpi", marks=SLOW), *(pytest.param(*case, marks=NIGHTLY) for case in [
        (0, "auto"), (1, "native")])])
def test_who_dies_on_another_host_is_named(mpiexec, tmp_path, rank, executor):
    found = survivors(mpiexec, tmp_path, "", executor, 4, **fault(rank, "before", "sigkill"), **TWO_HOSTS)
    assert found.keys() == set(range(4)) - {rank}
    check_all(found, "RankFailedError", rank, within=DEATH, closing=DEATH)
    assert all(f"rank {rank} " in words for *_, words in found.values())


@pytest.mark.parametrize(("rank", "executor", "do"), [(1, "auto", "stop"), (0, "auto", "stop"), (1, "mpi", "idle")])
@SLOW
def test_who_does_not_come_on_another_host_is_named(mpiexec, tmp_path, rank, executor, do):
    """Ranks on both hosts name the missing rank alone, and its last call."""
    how, env = (do, {}) if rank == 1 else ("", fault(rank, "before", "sigstop"))
    found = survivors(mpiexec, tmp_path, how, executor, 4, **env, **TWO_HOSTS)
    found.pop(rank, None)  # the launcher may wake the stopped rank at the end of the job
    assert found.keys() == set(range(4)) - {rank}
    check_all(found, "CollectiveTimeout", rank, within=LATE, closing=DEATH)
    for *_, words in found.values():
        assert f"rank {rank} " in words
        assert "all_reduce by" in words.partition(" is every")[0]


GOES_ON = """
import os, sys
import gpucoll as gc
comm = gc.init()
comm.barrier()
if comm.rank == 1:
    os._exit(0)
try:
    comm.barrier()
except gc.RankFailedError as error:
    sys.stdout.write(f"{error.ranks}\\n")
if sys.argv[1] == "close":
    comm.close()
"""


@pytest.mark.parametrize("how", ["close", pytest.param("leave", marks=SLOW)])
def test_who_goes_on_after_a_death_comes_to_its_end(mpiexec, how):
    """Survivors of a death exit: MPI_Finalize alone would wait for the dead rank, for ever with MPICH."""
    job = mpiexec(3, sys.executable, "-c", GOES_ON, how, options=require_launcher().vendor.keep_survivors,
                  timeout=seconds(30))
    assert job.stdout == "(1,)\n(1,)\n", job.stderr
    # If MPI_Finalize does wait, the watchdog prints its time limit.
    assert {*re.findall(r"^Timeout \((.*)\)!", job.stderr, re.MULTILINE)} <= {"0:00:01"}, job.stderr


@pytest.mark.parametrize(("how", "last"), [("stop", "is stopped"), pytest.param("idle", "computes since", marks=SLOW)])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(mpiexec, tmp_path, how, last):
    found = survivors(mpiexec, tmp_path, how, "auto")
    found.pop(1, None)  # the launcher may wake the stopped rank at the end of the job
    check_all(found, "CollectiveTimeout", 1, within=LATE, closing=DEATH)
    assert any(last in words and "all_reduce" in words for *_, words in found.values())


@pytest.mark.slow
def test_a_rank_that_goes_on_too_late_is_told(mpiexec, tmp_path):
    found = survivors(mpiexec, tmp_path, "late", "auto", 3, missing=0)
    assert found.keys() == set(range(3))
    lasted, closing, error, *_ = found.pop(1)
    # No error, if the parts of all ranks were visible already.
    assert error in ("CollectiveTimeout", "RankFailedError", "RevokedError", "NoneType")
    assert lasted < seconds(DEATH)
    assert closing < seconds(DEATH)
    assert found[0][2] == "CollectiveTimeout"
    assert found[2][2] in ("CollectiveTimeout", "NoneType")  # NoneType: rank 2 completed in time


def test_a_rank_that_crashes_shows_where_and_its_file_which_call(mpiexec, tmp_path):
    """A crash prints the stack, and the flight recorder names the last call, though the launcher ends the job."""
    (tmp_path / "dumps").mkdir()
    job = mpiexec(3, sys.executable, JOB, tmp_path, "segv", "auto", env={"GPUCOLL_DUMP_DIR": str(tmp_path / "dumps")})
    assert job.returncode != 0
    assert "Segmentation fault" in job.stderr
    assert "in goes" in job.stderr
    groups, damaged = stories(tmp_path / "dumps")
    (found,) = (summary(name, files) for name, files in groups.items())
    assert (damaged, found["unheard"], found["calls"] >= 4) == ([], [], True)
    last = found["last"][1]
    assert last["state"] == "has ended"
    assert last["words"].startswith("all_reduce")


def test_who_interrupts_the_launcher_ends_the_job(tmp_path):
    """SIGINT to mpiexec, as by Ctrl-C, leaves no process of the job."""
    token, launcher = uuid.uuid4().hex, require_launcher()
    with tempfile.TemporaryFile() as output:
        process = start_job(launcher.command(3, [sys.executable, JOB, tmp_path, "idle", "auto"]), token, output,
                            environment=same_gpucoll())
        try:
            while not any(tmp_path.glob("*.memory")):  # the other ranks have reached the deadline
                assert process.poll() is None
                time.sleep(0.01)
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert ends_within(process, 10)
            left = marked(JOB_MARK, token)
            while left and time.monotonic() < began + seconds(9):
                for descriptor in left:
                    os.close(descriptor)
                left = marked(JOB_MARK, token)
            assert left == []
        finally:
            end_job(process, token)


BESIDE = """
import sys, numpy, gpucoll as gc
with gc.init(timeout=60) as comm:
    mine = comm.zeros(50_000, "f8")
    for number in range(50):
        mine[...] = comm.rank + number * int(sys.argv[1])
        assert (comm.all_reduce(mine) == sum(range(comm.size)) + comm.size * number * int(sys.argv[1])).all()
"""


@pytest.mark.slow
def test_two_jobs_beside_each_other(mpiexec):
    with ThreadPoolExecutor(2) as threads:
        jobs = list(threads.map(lambda factor: mpiexec(2, sys.executable, "-c", BESIDE, factor), ("3", "1000")))
    assert [job.returncode for job in jobs] == [0, 0], jobs


NEVER_COMES = """
import os, signal, sys, time, gpucoll as gc
from gpucoll.launch import bootstrap
from mpi4py import MPI
how, folder, rank = sys.argv[1], sys.argv[2], MPI.COMM_WORLD.rank
if how == "stop" and rank == 1:
    bootstrap.place = lambda comm: os.kill(os.getpid(), signal.SIGSTOP)
if how != "idle" or rank != 1:
    began, said = time.monotonic(), "nothing"
    try:
        gc.init(timeout=float(sys.argv[3]))
    except gc.CollectiveTimeout as error:
        said = f"{error.ranks} {time.monotonic() - began < float(sys.argv[3]) + 3}"
    with open(os.path.join(folder, f"draft {rank}"), "w") as file:
        file.write(said)
    os.rename(file.name, os.path.join(folder, str(rank)))
    time.sleep(0.1 * rank)
elif how == "idle":
    while len([name for name in os.listdir(folder) if name.isdecimal()]) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)  # and is not there at the end either
"""


@pytest.mark.parametrize("how", [pytest.param("idle", marks=SLOW), "stop"])
def test_who_does_not_come_to_init_is_named(mpiexec, tmp_path, how):
    """A rank missing from init is named, also in MPI's own blocking calls; MPI_Finalize without this rank ends, too."""
    job = mpiexec(3, sys.executable, "-c", NEVER_COMES, how, tmp_path, str(seconds(1)), timeout=seconds(20))
    said = {rank: tmp_path.joinpath(rank).read_text() for rank in "02"}  # the launcher may wake rank 1 at the end
    assert said == {"0": "(1,) True", "2": "(1,) True"}, job


STAYS_OUT = """
import contextlib, os, sys, time, gpucoll as gc
comm, folder = gc.init(timeout=60), sys.argv[1]
def fails(*_):
    raise KeyError("split")
began, said = time.monotonic(), ""
if comm.rank == 1:
    comm._core.link.split = fails
    with contextlib.suppress(KeyError), comm:
        comm.split(0)
else:
    try:
        comm.split(0)
    except gc.RankFailedError as error:
        said = [*error.ranks, time.monotonic() - began < float(sys.argv[2])]
with open(os.path.join(folder, f"draft {comm.rank}"), "w") as file:
    file.write(str(said))
os.rename(file.name, os.path.join(folder, str(comm.rank)))
while sum(map(str.isdecimal, os.listdir(folder))) < comm.size and time.monotonic() < began + 60:
    time.sleep(0.01)  # MPI's launcher ends all when one ends like this
os._exit(0)
"""


@pytest.mark.parametrize("executor", [None, pytest.param("mpi", marks=NIGHTLY)])
def test_who_fails_where_mpi_has_no_deadline_is_named(mpiexec, tmp_path, executor):
    job = mpiexec(3, sys.executable, "-c", STAYS_OUT, tmp_path, str(seconds(DEATH)), timeout=seconds(60),
                  env={"GPUCOLL_EXECUTOR": executor})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": "[1, True]", "1": "", "2": "[1, True]"}, job.stderr
