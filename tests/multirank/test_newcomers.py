"""Newcomers to ranks started by mpiexec: a lost rank is replaced in a training, and a whole job grows; no litter."""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpucoll.transport import ucx
from harness.commands import kept
from harness.jobs import require_launcher, run_job
from harness.pace import seconds
from multirank import kills
from multirank.elastic_group import BEGIN

SIZE, STEPS = 4, 6
UCX, REASON = ucx.library()
# Ranks of pretended hosts see neither the processes nor the memory of other hosts.
WORLD = BEGIN.partition("place, rank")[0] + """
folder, size, timeout, hosts, place = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5]

def publish(name, text):
    with open(os.path.join(folder, f"draft {name}"), "w") as file:
        file.write(text)
    os.rename(file.name, os.path.join(folder, name))

def pretend(number):
    if hosts > 1:
        from gpucoll.communicator import links
        from gpucoll.health import processes
        from gpucoll.launch import bootstrap
        links.process_namespace = processes.process_namespace = lambda: f"host {number}"
        bootstrap.place = lambda comm: bootstrap.RankTopology.of(comm.rank, [one % hosts for one in range(comm.size)])

def world():
    if place:
        pretend(0)
        return gc.join(place, timeout)
    from mpi4py import MPI
    pretend(MPI.COMM_WORLD.rank % hosts)
    return gc.init(timeout=timeout, deterministic=True)

def ends(comm, said):
    rank = comm.rank
    comm.close()
    publish(str(rank), said)
    began = time.monotonic()
    while sum(map(str.isdecimal, os.listdir(folder))) < size and time.monotonic() < began + 60:
        time.sleep(0.01)  # the launcher may end all ranks when the first one ends
    os._exit(0)  # MPI's own end may wait for the dead
"""
REPLACES = WORLD + kills.TRAINS + """
replace = gc.Communicator.replace
def told(comm, timeout):
    rest = comm.shrink()
    if rest.rank == 0 and comm.rank > 0:  # the address of the lost rank 0 is no more
        publish("address", rest.address)
    return replace(comm, timeout)
gc.Communicator.replace = told
losses = {}
def tell(step, loss):
    assert losses.setdefault(step, loss) == loss  # a step that is taken again has the same loss
first = world()
if not place and first.rank == 0 and "rank:0" not in os.environ["GPUCOLL_FAULT"]:
    publish("address", first.address)  # a newcomer may wait there from now on
comm = trained(first, 0, lambda comm, step: step == 6, tell, timeout)
ends(comm, json.dumps(losses))
"""


def said_by_all(mpiexec, folder, program, ranks, how, hosts, **fault):
    """Run a program of `ranks` ranks, and a newcomer at the published address; return the words of all `SIZE`."""
    job, found = folder / "job.py", folder / "found"
    job.write_text(program)
    found.mkdir()
    (folder / "tmp").mkdir()
    memory = {*os.listdir("/dev/shm")}
    words = [job, found, SIZE, seconds(60), hosts]
    shared = {"GPUCOLL_SECRET": "s", "TMPDIR": str(folder / "tmp"), **({"UCX_TLS": "tcp,self"} if hosts > 1 else {})}
    before, options, vendor = [], ("--with-ft", "ulfm") if how == "ulfm" else (), require_launcher().vendor
    if how == "kept" and vendor.mark == "Open MPI":
        options = vendor.keep_survivors
    elif how == "kept":  # MPICH's launcher must not see the death
        before = kept(SIZE, found)
    with ThreadPoolExecutor() as threads:
        started = threads.submit(mpiexec, ranks, sys.executable, *map(str, [*before, *words, ""]),
                                 timeout=seconds(60), options=options, env=shared | fault)
        while not (found / "address").exists():
            assert not started.done(), started.result().stderr
            time.sleep(0.01)
        newcomer = run_job([sys.executable, *map(str, [*words, (found / "address").read_text()])], seconds(60), shared)
        ended = started.result()
    said = {int(path.name): path.read_text() for path in found.iterdir() if path.name.isdecimal()}
    assert sorted(said) == [*range(SIZE)], newcomer.stderr + ended.stderr
    assert [name for name in {*os.listdir("/dev/shm")} - memory if "gpucoll" in name] == []
    assert [path for path in (folder / "tmp").iterdir() if "gpucoll" in path.name.lower()] == []
    return said


@pytest.mark.parametrize(("how", "victim", "hosts"), [
    (how, victim, hosts) if (how, victim, hosts) in (("kept", 1, 1), ("ulfm", 1, 1)) else
    pytest.param(how, victim, hosts, marks=pytest.mark.slow)
    for how in ("kept", "ulfm") for victim, hosts in ((1, 1), (0, 1), (2, 2))])
def test_a_training_under_mpiexec_gets_a_newcomer(mpiexec, tmp_path, how, victim, hosts):
    """MPI shrinks, or the launcher lets the ranks live ("kept"), and they go on without MPI.

    The newcomer waits from the start on at the address of rank 0, or comes after the death of rank 0.
    """
    if how == "ulfm" and require_launcher().vendor.mark != "Open MPI":
        pytest.skip("MPICH does not go on after a death")
    if hosts > 1 and UCX is None:
        pytest.skip(f"UCX is not installed: {REASON}")
    said = said_by_all(mpiexec, tmp_path, REPLACES, SIZE, how, hosts,
                       GPUCOLL_FAULT=f"rank:{victim},seq:22,phase:before,do:sigkill")
    undisturbed = kills.undisturbed(STEPS, 0, ranks=SIZE)
    for rank, losses in said.items():
        losses = {int(step): loss for step, loss in json.loads(losses).items()}
        assert losses == {step: undisturbed[step] for step in losses}
        assert [*losses] == [*range(min(losses) if rank == victim else 0, STEPS)]


GROWS = WORLD + """
comm = world()
if not place:
    if comm.rank == 0:
        publish("address", comm.address)
    was, comm = comm, comm.grow(size, timeout)
    assert (was.closed, was.rank) == (False, comm.rank)
    was.close()
ends(comm, str(comm.all_gather(numpy.array([comm.rank * 10])).ravel().tolist()))
"""


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_whole_job_under_mpiexec_grows(mpiexec, tmp_path, hosts):
    if hosts > 1 and UCX is None:
        pytest.skip(f"UCX is not installed: {REASON}")
    said = said_by_all(mpiexec, tmp_path, GROWS, SIZE - 1, "whole", hosts)
    assert {*said.values()} == {"[0, 10, 20, 30]"}


SHRINKS = """
import sys
import numpy
from mpi4py import MPI
import gpucoll as gc
from gpucoll.transport.process import PROCESS

def tells(name, call):
    return lambda: (MPI.Is_finalized() or print(f"{name} {MPI.COMM_WORLD.rank}\\n", end="", flush=True), call())

PROCESS.close_stores = tells("store", PROCESS.close_stores)
MPI.Finalize = tells("MPI", MPI.Finalize)
MPI.COMM_WORLD.Barrier()  # ranks start seconds apart on a busy machine
comm = gc.init(timeout=float(sys.argv[1]))
if sys.argv[2] == "left":
    if comm.rank == 2:
        comm.close()
        sys.exit()
    try:
        comm.all_reduce(numpy.ones(1))
    except gc.GpucollError as error:
        assert error.ranks == (2,), error
with comm.shrink() as rest:
    found = rest.all_reduce(numpy.ones(1))
    assert found == rest.size, found
    sys.stdout.write(f"sum {rest.size}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize(("how", "survivors"), [("well", 3), ("left", 2)])
def test_ranks_under_mpiexec_shrink_without_a_death(mpiexec, how, survivors):
    """MPI's end comes after the end of the store: it stops the threads that answer the other ranks."""
    job = mpiexec(3, sys.executable, "-c", SHRINKS, str(seconds(2 if how == "left" else 60)), how, timeout=seconds(60))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(f"sum {survivors}\n") == survivors, job.stdout
    assert -1 < job.stdout.find("store 0") < job.stdout.find("MPI 0"), (job.stdout, job.stderr)
