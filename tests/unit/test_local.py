"""Threads as ranks: the same calls and the same programs, no MPI."""

import subprocess
import sys

import numpy
import pytest

import gpucoll as gc
from thread_ranks import on_threads


def everything(comm):
    rank, size = comm.rank, comm.size
    x = numpy.arange(1000.0) + rank
    total = sum(numpy.arange(1000.0) + other for other in range(size))
    for algorithm in (*gc.algorithms("all_reduce"), "auto"):
        assert (comm.all_reduce(x, algorithm=algorithm) == total).all()
    assert (comm.all_reduce(x.copy(), async_op=True).wait() == total).all()
    assert (comm.all_gather(x) == numpy.arange(1000.0) + numpy.arange(size)[:, None]).all()
    assert [len(block) for block in comm.all_gather_v(numpy.zeros(rank))] == list(range(size))
    assert comm.scatter(numpy.arange(size) if rank == 0 else None) == rank
    out = numpy.empty(1000)
    comm.sendrecv(x, out, (rank + 1) % size, (rank - 1) % size)
    assert out[0] == (rank - 1) % size
    half = comm.split(rank % 2)
    assert half.all_reduce(numpy.array([1]))[0] == half.size
    again = comm.split(rank % 2)
    assert again.size == half.size
    comm.barrier()
    return comm.mpi, comm.local_rank, comm.local_size, comm.node, comm.nodes


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_call(size):
    assert on_threads(size, everything) == [(None, rank, size, 0, 1) for rank in range(size)]


@pytest.mark.emulated
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_call_on_the_emulated_device(size, monkeypatch, emulated_kernels):
    monkeypatch.setenv("GPUCOLL_DEVICE", "emulated")
    assert on_threads(size, everything) == [(None, rank, size, 0, 1) for rank in range(size)]


def test_threads_have_no_native_collectives():
    def program(comm):
        with pytest.raises(gc.ArgumentError, match="native") as refused:
            comm.all_reduce(numpy.ones(2), algorithm="native")
        return refused.value.code

    assert on_threads(2, program) == ["GC-EXECUTOR"] * 2
    with pytest.raises(gc.ArgumentError, match="no native"):
        gc.init_local(2, executor="native")
    for wrong in (0, -1, 1.5, True, "two"):
        with pytest.raises(gc.ArgumentError):
            gc.init_local(wrong)


def test_a_rank_that_never_comes_is_a_timeout():
    one, _ = gc.init_local(2, timeout=0.2)
    with pytest.raises(gc.CollectiveTimeout):
        one.all_reduce(numpy.ones(3))
    with pytest.raises(gc.RevokedError):
        one.barrier()


def test_no_mpi_is_started():
    script = ("import sys, numpy, gpucoll as gc; comm, = gc.init_local(1); comm.all_reduce(numpy.ones(2)); "
              "comm.close(); print('mpi4py.MPI' in sys.modules)")
    job = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert job.stdout == "False\n"
