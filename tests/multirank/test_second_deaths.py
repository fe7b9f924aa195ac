"""A further rank dies while ranks regroup: at each step the others become one group, with the right results."""

import sys
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from gpucoll.communicator import links
from harness.commands import without_mpi4py
from harness.jobs import python, require_launcher
from harness.pace import seconds

PROGRAM = Path(__file__).with_name("second_deaths.py")
SLOW = pytest.mark.slow
# The dying rank, and its last step; after `all_gather:2` some ranks have the new group, and others not.
LEADER = "_invite:1 take:2 allgather:2 meet:1 all_gather:2"
GROWN = "all_gather:3 all_gather:5 all_gather:6"
OTHER = "apply:2 _place_of:1 membership:2 all_gather:2"


def run(folder, *given):
    done = python(PROGRAM, *given, timeout=300, env={**without_mpi4py(folder), "TMPDIR": str(folder)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize(("call", "first", "victim", "steps"), [
    ("shrink", 3, 0, LEADER),
    ("shrink", 3, 1, OTHER),
    ("grow", -1, 100, "meet:1 all_gather:2"),
    pytest.param("shrink", 0, 1, LEADER, marks=SLOW),
    pytest.param("shrink", 0, 3, OTHER, marks=SLOW),
    pytest.param("shrink", 3, 0, "survivors:1 take:1 _invite:2 check_alike:1 meet:2 all_gather:1", marks=SLOW),
    pytest.param("grow", -1, 0, f"_invite:1 take:2 allgather:2 meet:1 {GROWN}", marks=SLOW),
    pytest.param("grow", -1, 1, f"grown:1 apply:1 _place_of:2 membership:2 meet:1 {GROWN}", marks=SLOW),
    pytest.param("grow", -1, 100, "apply:2 _place_of:1 allgather:1 membership:2 all_gather:1", marks=SLOW),
    pytest.param("replace", 3, 1, "all_gather:3 all_gather:4 all_gather:6 grown:1 all_gather:7 all_gather:9",
                 marks=SLOW),
    pytest.param("replace", 0, 100, "meet:1 all_gather:1 all_gather:2", marks=SLOW)])
def test_the_others_are_one_group(tmp_path, call, first, victim, steps):
    run(tmp_path, "--call", call, "--ranks", 4 if call == "shrink" else 3 if call == "grow" else 4, "--first", first,
        "--victim", victim, "--at", steps.replace(" ", ","))


@pytest.mark.nightly
@pytest.mark.parametrize(("call", "first", "victim"), [
    (call, first, victim) for call, firsts in (("shrink", (0, 3)), ("grow", (-1,)), ("replace", (0, 3)))
    for first in firsts for victim in (0, 1, 2, 3, *[100] * (call != "shrink")) if victim != first])
def test_every_step(tmp_path, call, first, victim):
    run(tmp_path, "--call", call, "--first", first, "--victim", victim)


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["shrink", "grow", "replace"])
def test_random_moments(tmp_path, call):
    run(tmp_path, "--call", call, "--soak", 40)


SHRINKS = """
while True:
    try:
        while comm.size > 2:
            comm.all_reduce(numpy.ones(3))
        break
    except (gc.RankFailedError, gc.RevokedError):
        count = 0  # of the steps in the next meeting
        comm = comm.shrink()
"""
LAUNCHED = """
import os, signal, sys, threading
import numpy
import gpucoll as gc
comm = gc.init(timeout=float(sys.argv[1]))
rank = comm.rank
comm.all_reduce(numpy.ones(3))
if rank == 3:
    raise KeyError
if rank == 2:
    from gpucoll.launch import regroup
    regroup._place_of = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
""" + SHRINKS + """sys.stdout.write(f"{comm.all_gather(numpy.array([rank])).ravel().tolist()}\\n")
comm.close()
"""


def test_under_survive_the_other_ranks_go_on(tmp_path):
    """After an uncaught exception on one rank, and the kill of another one while the ranks shrink."""
    (tmp_path / "job.py").write_text(LAUNCHED)
    job = python("-m", "gpucoll", "run", "--standalone", "--survive", "-n", 4, "job.py", seconds(60), timeout=120,
                 cwd=tmp_path, env=without_mpi4py(tmp_path))
    assert (job.returncode, job.stdout) == (0, "[0, 1]\n[0, 1]\n"), job.stderr
    for words in ("gpucoll run: rank 3 (process", "gpucoll run: rank 2 (process", "the other ranks go on"):
        assert words in job.stderr


@pytest.mark.parametrize("late", [False, True])
def test_a_thread_interrupted_while_it_shrinks_is_left_out(monkeypatch, late):
    """The other threads go on without it, whether it is interrupted before or after they count on it."""
    survivors = links.LocalLink.survivors

    def interrupted(link, timeout):
        if timeout and link.place.rank == 2 and link.place.size == 4:
            if late:
                survivors(link, timeout)
            raise KeyboardInterrupt
        return survivors(link, timeout)

    def program(comm):
        was = comm.rank
        if was == 1:
            comm.close()
            return None
        while True:
            try:
                comm = comm.shrink()
                return comm.all_gather(numpy.array([was])).ravel().tolist()
            except KeyboardInterrupt:
                return None
            except (gc.RankFailedError, gc.RevokedError):
                pass

    monkeypatch.setattr(links.LocalLink, "survivors", interrupted)
    assert gc.run_local(program, 4, timeout=seconds(60)) == [[0, 3], None, None, [0, 3]]


ULFM = """
import os, signal, sys
import numpy
import gpucoll as gc
from gpucoll.communicator import elastic, links
from gpucoll.communicator.metadata import MetadataExchange
timeout, victim, step, folder = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
comm = gc.init(timeout=timeout)
rank = comm.rank
comm.all_reduce(numpy.ones(3))
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
name, _, number = step.partition(":")
owner = {"_by_mpi": links, "offer": links, "membership": links, "all_gather": MetadataExchange}[name]
call, count = getattr(owner, name), 0
def counted(*given, **more):
    global count
    for result in (lambda: None, lambda: call(*given, **more)):
        found, count = result(), count + 1
        if rank == victim and count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(owner, name, counted)
""" + SHRINKS + """total = comm.all_reduce(numpy.array([rank]))[0]
with open(os.path.join(folder, str(rank)), "w") as file:
    file.write(f"{comm.all_gather(numpy.array([rank])).ravel().tolist()} {total}")
comm.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", ["_by_mpi:1", "_by_mpi:4", "offer:1", "membership:2", "all_gather:1", "all_gather:2"])
def test_mpi_shrinks_again(mpiexec, tmp_path, step):
    if require_launcher().vendor.mark != "Open MPI":
        pytest.skip("MPICH does not go on after a death")
    job = mpiexec(4, sys.executable, "-c", ULFM, str(seconds(20)), "1", step, str(tmp_path), timeout=seconds(90),
                  options=("--with-ft", "ulfm"))
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert said == {"0": "[0, 2] 2", "2": "[0, 2] 2"}, job.stderr
