"""Messages from any source and with any tag, and probes before the receive."""

import numpy
import pytest

import gpucoll as gc
from harness.grids import naming
from harness.pace import seconds
from harness.thread_ranks import on_threads
from programs.collectives import program
from programs.wildcards import PROGRAMS


@pytest.mark.parametrize("executor", [None, "mpi"])  # by the engine, and by the threads' own table of messages
@pytest.mark.parametrize("size", [1, 4])
def test_between_threads(size, executor):
    for one in PROGRAMS:
        with naming(one):
            on_threads(size, one, executor=executor)


@program
def all_programs(comm):
    for one in PROGRAMS:
        one.__wrapped__(comm)


@pytest.mark.parametrize("executor", ["shared", "mpi"])  # the engine's mailboxes; MPI, used between nodes
def test_between_processes(ranks, executor):
    ranks(all_programs, 4, env={"GPUCOLL_EXECUTOR": executor}, timeout=seconds(60))


def mpis_constants(mpi):
    """mpi4py's constants and Status are accepted in place of gpucoll's."""
    from mpi4py import MPI

    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        status, out, right = MPI.Status(), numpy.zeros(5), (comm.rank + 1) % comm.size
        work = comm.send(numpy.full(5, float(comm.rank)), right, tag=8, async_op=True)
        comm.recv(out, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        work.wait()
        left = (comm.rank - 1) % comm.size
        assert (status.source, status.tag, status.count, status.Get_count(MPI.DOUBLE)) == (left, 8, 40, 5)
        assert (out == left).all()
        assert comm.probe(MPI.PROC_NULL, MPI.ANY_TAG).source == gc.PROC_NULL
        with pytest.raises(gc.ArgumentError):
            comm.send(out, 0, MPI.ANY_TAG)


def test_constants_of_mpi4py(ranks):
    ranks(mpis_constants, 3)


@program
def on_a_device(comm):
    """Wildcards on a device raise a typed error, since NCCL has no tags, and the communicator stays usable."""
    x = numpy.zeros(3)
    for call in (lambda: comm.recv(x), lambda: comm.recv(x, 0, gc.ANY_TAG), comm.probe, comm.iprobe):
        with pytest.raises(gc.UsageError, match=r"GC-WILDCARD.*NCCL has no tags"):
            call()
    status = gc.Status()
    with comm.group():
        comm.send(x + 1, comm.rank)
        comm.recv(x, comm.rank, 0, status)
    assert (status.source, status.tag, status.count) == (comm.rank, 0, 24)
    assert comm.all_reduce(x)[0] == comm.size


@pytest.mark.emulated
def test_refused_on_a_device(ranks, emulated_kernels):
    ranks(on_a_device, 2, env={"GPUCOLL_DEVICE": "emulated"})
