"""The `peer` executor between processes, on the emulated device: mapped memory of other ranks, and dying ranks."""

import itertools
import os
import sys
import time
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from harness import thread_ranks
from harness.commands import kept
from harness.node_ranks import staged
from harness.pace import seconds

pytestmark = [pytest.mark.emulated, pytest.mark.kernel]

PEER = {"GPUCOLL_DEVICE": "emulated", "GPUCOLL_EXECUTOR": "peer"}


@pytest.fixture(scope="module")
def kernels(emulated_kernels):
    """Compile the kernels in threads beforehand, so that no rank compiles while other ranks die."""
    def program(comm):
        x = numpy.ones(30_000, "float32")
        for op, algorithm in itertools.product(("sum", "max"), ("one_shot", "two_shot", "ring")):
            comm.all_reduce(x, op=op, algorithm=algorithm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUCOLL_DEVICE", "emulated")
        thread_ranks.on_threads(2, program, timeout=seconds(100), executor="peer")


LARGE = 1_100_000  # elements of four bytes: more than the staging buffer holds


def shared(comm):
    """Results are right wherever the arrays are; nothing is staged if all ranks pass the same symmetric arrays."""
    x, y, other = (comm.empty(LARGE, "float32", device=device) for device in (None, "cpu", None))
    everyone = [numpy.arange(LARGE, dtype=numpy.float32) % 1000 + rank for rank in range(comm.size)]
    odd = comm.rank % 2
    for number, (source, target) in enumerate((
            (x, y), (y, y), (x[5:], y[5:]), (x, y if odd else other), (other if odd else x, other if odd else x),
            (numpy.empty_like(x) if odd else x, y), (x, numpy.empty_like(x)))):
        for algorithm in ("two_shot", "one_shot"):
            source[...] = everyone[comm.rank][:source.size]
            found = comm.all_reduce(source, out=target, algorithm=algorithm)
            assert (found == sum(everyone)[:source.size]).all(), (number, algorithm)
            if number == 0 or (number < 3 and algorithm == "two_shot"):
                assert not staged(comm).any() or number, algorithm
    return bool(staged(comm).any())


def between_processes(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        return shared(comm)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_arrays_that_all_ranks_pass_are_read_where_they_are(rank_pool, kernels, size):
    assert rank_pool.run(between_processes, size, env=PEER, timeout=seconds(100)) == [True] * size


KILLED = """
import os, signal, sys, numpy, gpucoll as gc
comm = gc.init(timeout=float(sys.argv[3]))
x = comm.empty(30_000, "float32") if sys.argv[2] == "symmetric" else numpy.empty(30_000, "float32")
x[:] = 1
comm.all_reduce(x, op="max", out=x, algorithm=sys.argv[1])
if comm.rank == 1:
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # its default action ends the process, wherever it is
try:
    while True:
        comm.all_reduce(x, op="max", out=x, algorithm=sys.argv[1])
except (gc.CollectiveTimeout, gc.BackendError, gc.RankFailedError) as error:
    if comm.rank == 1:
        signal.pause()
    with open(os.path.join(sys.argv[4], f"{comm.rank} {error.code} {os.getpid()}"), "w"):
        os._exit(0)  # MPI's own end would wait for the dead one
"""


def is_running(process):
    """Return whether a process is running; a zombie has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("algorithm", "kind"), [
    ("two_shot", "symmetric"), pytest.param("one_shot", "ordinary", marks=pytest.mark.slow),
    pytest.param("ring", "ordinary", marks=pytest.mark.slow),
])
def test_a_rank_that_dies_is_missed_and_the_others_end(mpiexec, kernels, tmp_path, algorithm, kind):
    job = mpiexec(3, sys.executable, *kept(2, tmp_path), "-c", KILLED, algorithm, kind, str(seconds(2)), tmp_path,
                  env=PEER, timeout=seconds(90))
    told = [name.split() for name in sorted(os.listdir(tmp_path))]
    assert [rank for rank, _, _ in told] == ["0", "2"], job.stdout + job.stderr
    assert {code for _, code, _ in told} <= {"GC-TIMEOUT", "GC-BACKEND", "GC-RANK"}
    give_up = time.monotonic() + seconds(60)
    while any(is_running(process) for _, _, process in told):
        assert time.monotonic() < give_up, told
        time.sleep(0.01)
