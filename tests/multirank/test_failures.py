"""After a failure, nothing is written any more, no rank waits for ever, and the job ends in order."""

import sys

import numpy
import pytest

import gpucoll as gc
from harness.pace import seconds

# Rank 1 is late: it waits until rank 0 has given up. Rank 0 then watches its own memory until rank 1 has finished.
LATE = """
import gc as garbage, os, sys, time, numpy, gpucoll as gc
from mpi4py import MPI
(executor, kind), count, timeout, folder = sys.argv[1].split(), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
MPI.COMM_WORLD.Barrier()
comm = gc.init(timeout=timeout if executor == "any" else 60, executor=None if executor == "any" else executor)
mine = numpy.ones(count)
if executor == "shared":
    comm.all_reduce(mine, algorithm=kind)
    comm._core.waits.timeout = timeout  # the first call takes long on a loaded machine

def tell(what):
    open(os.path.join(folder, what), "w").close()

def is_told(what):
    return os.path.exists(os.path.join(folder, what))

if comm.rank == 0:
    try:
        comm.recv(numpy.zeros(count), 1) if kind == "recv" else comm.all_reduce(numpy.ones(count), algorithm=kind)
    except gc.CollectiveTimeout:
        sys.stdout.write("late\\n")
        sys.stdout.flush()
    if kind != "two_shot":  # in which others' memory is written to
        comm.close()
    garbage.collect()
    canaries = [numpy.full(count, 7.0) for _ in range(6)]  # where arrays were, if nothing keeps them
    tell("given up")
    while not is_told("through"):
        assert all((canary == 7).all() for canary in canaries), "written after the failure"
    assert all((canary == 7).all() for canary in canaries), "written after the failure"
    comm.close()
else:
    while not is_told("given up"):
        time.sleep(0.01)
    try:
        found = comm.send(mine, 0) if kind == "recv" else comm.all_reduce(mine, algorithm=kind)
        assert found is None or (found == 2).all(), "read after the failure"
    except gc.GpucollError:
        pass
    finally:
        tell("through")
    comm.close()
"""


@pytest.mark.parametrize(("kind", "count"), [("any ring", 300_000), ("any recv", 1000), ("shared two_shot", 3 << 20), *(
    pytest.param(kind, count, marks=pytest.mark.slow) for kind, count in (
        ("any ring", 1000), ("any star", 300_000), ("any native", 1000), ("any native", 300_000), ("any recv", 300_000),
        ("shared one_shot", 3 << 20), ("shared ring", 3 << 20)))])
def test_a_late_rank_writes_nowhere_and_all_end_in_order(mpiexec, tmp_path, kind, count):
    job = mpiexec(2, sys.executable, "-c", LATE, kind, str(count), str(seconds(0.5)), tmp_path)
    assert (job.returncode, job.stdout) == (0, "late\n"), job.stderr


DROPPED = """
import numpy, gpucoll as gc
comm = gc.init()
work = comm.all_reduce(numpy.ones(200_000), algorithm="ring", async_op=True)
if comm.rank:
    print(work.wait()[0])
"""


def test_a_work_dropped_at_the_end_is_completed(mpiexec):
    job = mpiexec(2, sys.executable, "-c", DROPPED)
    assert (job.returncode, job.stdout) == (0, "2.0\n"), job.stderr


def closes(mpi, algorithm):
    """If one rank closes while the other calls, the call fails instead of being completed by the end."""
    mpi.barrier()
    comm = gc.Communicator.from_mpi(mpi, timeout=seconds(60))
    if comm.rank:
        with pytest.raises(gc.RankFailedError, match=r"rank 0 .*has closed the communicator before its first call"):
            comm.all_reduce(numpy.full(3, 5.0), algorithm=algorithm)
    comm.close()


def has_failed(mpi):
    """A failed rank reports the failure on closing: other ranks do not wait for the deadline, far beyond the test's."""
    comm = gc.Communicator.from_mpi(mpi, timeout=10_000.0)
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError), comm:
            raise ZeroDivisionError
        with pytest.raises(gc.ClosedError):
            comm.barrier()
    comm.close()


def late_to_init(mpi):
    own = mpi.Dup()  # unusable after this test: one rank does not come
    if mpi.rank:
        with pytest.raises(gc.CollectiveTimeout, match="to make this communicator"):
            gc.Communicator.from_mpi(own, timeout=0.3)


def without_end(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=float("inf")) as comm:
        comm.all_reduce(numpy.ones(3), async_op=True).wait()


@pytest.mark.parametrize(("program", "arguments"), [
    (closes, ("native",)), (closes, ("ring",)), (has_failed, ()), (late_to_init, ()), (without_end, ())])
def test_one_of_the_ranks(ranks, program, arguments):
    ranks(program, 2, *arguments)
