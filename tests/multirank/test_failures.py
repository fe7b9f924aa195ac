"""After a failure: nothing is written any more, nobody waits for ever, the job ends in order."""

import sys

import numpy
import pytest

import gpucoll as gc

LATE = """
import sys, time, numpy, gpucoll as gc
kind, count = sys.argv[1], int(sys.argv[2])
comm = gc.init(timeout=0.5)
if comm.rank == 0:
    try:
        comm.recv(numpy.zeros(count), 1) if kind == "recv" else comm.all_reduce(numpy.ones(count), algorithm=kind)
    except gc.CollectiveTimeout:
        comm.close()
        del comm
        canaries = [numpy.full(count, 7.0) for _ in range(6)]
        sys.stdout.write("late\\n")
        sys.stdout.flush()
        give_up = time.monotonic() + 2
        while time.monotonic() < give_up:
            assert all((canary == 7).all() for canary in canaries), "written after the failure"
else:
    time.sleep(1)  # late on purpose: the other rank's deadline has passed
    try:
        comm.send(numpy.ones(count), 0) if kind == "recv" else comm.all_reduce(numpy.ones(count), algorithm=kind)
    except gc.GpucollError:
        pass
    comm.close()
"""


@pytest.mark.parametrize("count", [1000, 300_000])
@pytest.mark.parametrize("kind", ["ring", "star", "native", "recv"])
def test_a_late_rank_writes_nowhere_and_all_end_in_order(mpiexec, kind, count):
    job = mpiexec(2, sys.executable, "-c", LATE, kind, str(count), timeout=60)
    assert job.stdout == "late\n", job.stderr
    assert job.returncode == 0, job.stderr


DROPPED = """
import numpy, gpucoll as gc
comm = gc.init(timeout=20)
work = comm.all_reduce(numpy.ones(200_000), algorithm="ring", async_op=True)
if comm.rank:
    print(work.wait()[0])
"""


def test_a_work_that_is_dropped_at_the_end_of_a_script_is_completed(mpiexec):
    job = mpiexec(2, sys.executable, "-c", DROPPED, timeout=60)
    assert (job.returncode, job.stdout) == (0, "2.0\n"), job.stderr


REENTRANT = """
import signal, numpy, gpucoll as gc
comm = gc.init(timeout=20)

def handler(*_):
    comm.barrier()

signal.signal(signal.SIGALRM, handler)
if comm.rank == 0:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        comm.all_reduce(numpy.ones(3), algorithm="ring")
    except gc.UsageError as error:
        print(error)
comm.close()
"""


def test_a_call_inside_a_call_is_refused(mpiexec):
    job = mpiexec(2, sys.executable, "-c", REENTRANT, timeout=60)
    assert "inside another call" in job.stdout, job.stderr
    assert job.returncode == 0




def asymmetric(mpi, native):
    """One rank closes while the other calls: the call is not answered by the farewell."""
    comm = gc.Communicator.from_mpi(mpi, timeout=1.0)
    if comm.rank == 0:
        comm.close()
        return None
    with pytest.raises(gc.CollectiveTimeout):
        comm.all_reduce(numpy.full(3, 5.0), algorithm="native" if native else "ring")
    comm.close()
    return None


@pytest.mark.parametrize("native", [True, False])
def test_a_rank_that_closes_answers_no_call(ranks, native):
    ranks(asymmetric, 2, native, timeout=30)


def one_has_failed(mpi):
    """A failed rank tells when it closes: the others need not wait for their deadline."""
    import time

    comm = gc.Communicator.from_mpi(mpi, timeout=25.0)
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError), comm:
            raise ZeroDivisionError
        with pytest.raises(gc.ClosedError):
            comm.barrier()
    started = time.monotonic()
    comm.close()
    return time.monotonic() - started < 20


def test_a_failed_rank_says_so_when_it_leaves(ranks):
    assert all(ranks(one_has_failed, 3, timeout=60))


def late_to_init(mpi):
    own = mpi.Dup()  # spoilt by the rank that does not come
    if mpi.rank:
        with pytest.raises(gc.CollectiveTimeout, match="to make this communicator"):
            gc.Communicator.from_mpi(own, timeout=0.3)
    return True


def test_a_rank_that_never_comes_to_init_is_a_timeout(ranks):
    ranks(late_to_init, 2, timeout=30)


def without_end(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=float("inf")) as comm:
        comm.all_reduce(numpy.ones(3), async_op=True).wait()
    return True


def test_no_deadline_at_all(ranks):
    ranks(without_end, 2)


def unmet(mpi):
    with gc.Communicator.from_mpi(mpi) as comm, pytest.raises(gc.ArgumentError, match="GC-ALGO"):
        comm.all_gather(numpy.ones(3))
    return True


def test_a_rule_that_cannot_be_met_is_an_error(ranks):
    ranks(unmet, 2, env={"GPUCOLL_ALGO": "all_gather:tree"})
