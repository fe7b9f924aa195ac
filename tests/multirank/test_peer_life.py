"""The `peer` executor between processes, on the emulated device: memory that ranks map, and ranks that die."""

import os
import sys
import time
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
import peer_made
from commands import KEEPER
from multirank import test_symmetric
from pace import seconds
from peer import shared_memory

pytestmark = [pytest.mark.emulated, pytest.mark.kernel]

PEER = {"GPUCOLL_DEVICE": "emulated", "GPUCOLL_EXECUTOR": "peer"}


@pytest.fixture(scope="module")
def kernels(emulated_kernels):
    """Nobody makes kernels while ranks die."""
    peer_made.make([("sum", "float32"), ("max", "float32")])


@pytest.fixture
def ranks(rank_pool, kernels):
    """`ranks(program, size, *args)` on the emulated device, by this executor."""
    def run(program, size, *arguments):
        return rank_pool.run(program, size, *arguments, env=PEER, timeout=seconds(100))

    return run


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("program", "size"), [
    (test_symmetric.arrays, 2), (test_symmetric.errors, 3), pytest.param(test_symmetric.arrays, 5, marks=SLOW),
    pytest.param(test_symmetric.used_again, 3, marks=SLOW), pytest.param(test_symmetric.too_much, 3, marks=SLOW)])
def test_symmetric_memory(ranks, program, size):
    ranks(program, size)


@pytest.mark.parametrize("size", [pytest.param(2, marks=SLOW), 3, pytest.param(4, marks=SLOW)])
def test_arrays_that_all_ranks_pass_are_read_where_they_are(ranks, size):
    before = set(os.listdir("/dev/shm"))
    assert ranks(shared_memory.between_processes, size) == [True] * size
    assert not left_behind(before)


def test_where_one_rank_has_no_memory_no_rank_gets_any(ranks):
    assert ranks(shared_memory.short_of_memory, 3) == [(3, True)] * 3


def no_gpu(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        if comm.device is None:
            with pytest.raises(gc.BackendError, match="no GPU"):
                comm.empty(3, "float32", device="cuda")
        return comm.all_reduce(numpy.ones(3, "float32"))[0]


def test_memory_of_a_gpu_that_is_not_there(ranks):
    assert ranks(no_gpu, 2) == [2, 2]


# ---------------------------------------------------------------- ranks that die

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
except (gc.CollectiveTimeout, gc.BackendError) as error:
    if comm.rank == 1:
        signal.pause()
    with open(os.path.join(sys.argv[4], f"{comm.rank} {error.code} {os.getpid()}"), "w"):
        os._exit(0)  # MPI's own end would wait for the dead one
"""


def left_behind(before):
    return [name for name in set(os.listdir("/dev/shm")) - before if "gpucoll" in name]


def is_running(process):
    """One that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("algorithm", "kind"), [
    ("two_shot", "symmetric"), pytest.param("one_shot", "ordinary", marks=SLOW),
    pytest.param("ring", "ordinary", marks=SLOW)])
def test_a_rank_that_dies_is_missed_and_leaves_nothing(mpiexec, kernels, tmp_path, algorithm, kind):
    before = set(os.listdir("/dev/shm"))
    job = mpiexec(3, sys.executable, "-c", KEEPER, KILLED, algorithm, kind, seconds(2), tmp_path, timeout=seconds(90),
                  env=PEER)
    told = [name.split() for name in sorted(os.listdir(tmp_path))]
    assert [rank for rank, _, _ in told] == ["0", "2"], job.stdout + job.stderr
    assert {code for _, code, _ in told} <= {"GC-TIMEOUT", "GC-BACKEND"}
    give_up = time.monotonic() + seconds(60)
    while any(is_running(process) for _, _, process in told):
        assert time.monotonic() < give_up, told
        time.sleep(0.01)
    assert not left_behind(before)
