"""Messages between two ranks, groups of calls, splits."""


import numpy
import pytest

import gpucoll as gc
from harness.pace import seconds
from programs.points import all_programs, wrong_dtypes


def a_row_of_ranks(mpi):
    """Beyond the ends of a row of ranks is PROC_NULL: nothing arrives, in blocking, asynchronous and grouped calls."""
    from mpi4py import MPI

    comm = gc.Communicator.from_mpi(mpi, timeout=seconds(60))
    left, right = (other if 0 <= other < comm.size else MPI.PROC_NULL for other in (comm.rank - 1, comm.rank + 1))
    x = numpy.array([comm.rank, 5])
    for came in (lambda out: comm.sendrecv(x, out, right, left),
                 lambda out: comm.sendrecv(x, out, right, left, async_op=True).wait(),
                 lambda out: grouped(comm, x, out, right, left)):
        out = numpy.full(2, -9)
        assert came(out) is out
        assert out.tolist() == ([comm.rank - 1, 5] if comm.rank else [-9, -9])
    assert comm.send(x, MPI.PROC_NULL) is None
    assert comm.recv(out, MPI.PROC_NULL) is out
    with pytest.raises(gc.ArgumentError):
        comm.send([1], MPI.PROC_NULL)
    comm.close()


def grouped(comm, x, out, right, left):
    with comm.group():
        comm.send(x, right)
        comm.recv(out, left)
    return out


def test_nothing_goes_to_nobody(ranks_anywhere):
    ranks_anywhere(a_row_of_ranks, 3)


def on_processes(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60), check="off") as comm:
        all_programs(comm)


def after_one_not_yet_begun(comm):
    """A send queued while another thread advances messages begins before the next send to the same rank."""
    if comm.rank == 0:
        with comm._core.waits._stepping:
            first = comm.send(numpy.array([1]), 1, async_op=True)
        comm.send(numpy.array([2]), 1)
        first.wait()
    elif comm.rank == 1:
        assert [int(comm.recv(numpy.empty(1, int), 0)[0]) for _ in range(2)] == [1, 2]


def over_mpi(mpi, program):
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor="mpi") as comm:
        program(comm)


@pytest.mark.parametrize("program", [wrong_dtypes, after_one_not_yet_begun])
def test_messages_over_mpi(ranks, program):
    """Messages over MPI, used between nodes instead of the engine, keep dtypes apart and stay in order."""
    ranks(over_mpi, 2, program, timeout=seconds(60))


def test_unlike_dtypes_between_threads_without_the_engine():
    gc.run_local(wrong_dtypes, 2, executor="mpi", timeout=seconds(60))


@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_points_between_processes(ranks, size):
    ranks(on_processes, size, timeout=seconds(60))


@pytest.mark.emulated
def test_points_between_processes_on_a_device(ranks, emulated_kernels):
    ranks(on_processes, 3, env={"GPUCOLL_DEVICE": "emulated"}, timeout=seconds(60))
