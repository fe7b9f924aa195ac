"""Programs of `gpucoll.mpi` on CuPy arrays: a call has ended for every stream when it returns, as MPI promises."""

import time

import cupy
import numpy
from mpi4py import MPI

import gpucoll.mpi
from gpu.helpers import PATIENCE, held, ramp, ranges, same
from oracles import oracle

DELAY = 0.02  # seconds by which the GPU is behind the host: a call that only enqueues returns before
COUNT = 300
CALLS = {  # the arguments, given two arrays of COUNT elements for each rank, and the counts of all ranks
    **dict.fromkeys(("Allreduce", "Scan", "Exscan", "Reduce", "Alltoall"), lambda x, out, counts: (x, out)),
    **dict.fromkeys(("Allgather", "Gather"), lambda x, out, counts: (x[:COUNT], out)),
    **dict.fromkeys(("Allgatherv", "Gatherv"), lambda x, out, counts: (x[:COUNT], [out, counts])),
    **dict.fromkeys(("Scatter", "Reduce_scatter_block"), lambda x, out, counts: (x, out[:COUNT])),
    **dict.fromkeys(("Alltoallv", "Ialltoallv"), lambda x, out, counts: ([x, counts], [out, counts])),
    "Scatterv": lambda x, out, counts: ([x, counts], out[:COUNT]),
    "Reduce_scatter": lambda x, out, counts: (x, out[:COUNT], counts),
    "Bcast": lambda x, out, counts: (x,),
    "Sendrecv": lambda x, out, counts: (x, (MPI.COMM_WORLD.rank + 1) % len(counts), 0, out,
                                        (MPI.COMM_WORLD.rank - 1) % len(counts), 0),
}


def late(stream):
    stream.launch_host_func(lambda _: time.sleep(DELAY), None)


def blocking(comm):
    """Every blocking call, and `Wait`, have the result of mpi4py on the host, and leave no work on the stream."""
    stream, counts = cupy.cuda.Stream(non_blocking=True), [COUNT] * comm.size
    with gpucoll.mpi.Comm(comm.mpi, timeout=PATIENCE).comm, stream:
        ours = gpucoll.mpi.Comm(comm.mpi, timeout=PATIENCE)
        for name, arguments in CALLS.items():
            for wait in (lambda one: one.Wait(), lambda one: MPI.Request.Waitall([one])):  # the first waits on the host
                x, out = (numpy.full(COUNT * comm.size, factor * comm.rank - 7, numpy.float32) for factor in (3, 0))
                x += numpy.arange(x.size)
                here, there = cupy.asarray(x), cupy.asarray(out)
                late(stream)
                request = getattr(ours, name)(*arguments(here, there, counts))
                if request is not None:
                    wait(request)
                assert stream.done, name
                request = getattr(comm.mpi, name)(*arguments(x, out, counts))
                if request is not None:
                    request.Wait()
                assert oracle.same_bits(here.get(), x), name
                assert oracle.same_bits(there.get(), out), name
        messages(ours, stream)
        statuses(ours, stream)
        enqueueing(ours, stream)


def messages(ours, stream):
    """`Recv` and `Send` between ranks 0 and 1."""
    if ours.size > 1 and ours.rank < 2:
        for turn in range(3):
            x = cupy.full(COUNT, turn + 1 if ours.rank == 0 else -1, numpy.float32)
            late(stream)
            if ours.rank == 0:
                ours.Send(x, 1)
            else:
                ours.Recv(x, 0)
            assert stream.done
            assert (x.get() == turn + 1).all()


def statuses(ours, stream):
    """MPI's waits for several requests tell source, tag and count of a message on its way beside REQUEST_NULL."""
    for wait, place in (("Waitall", 1), ("Waitsome", 0), ("Waitany", 0)) * (ours.size > 1):
        x, given = cupy.full(COUNT, ours.rank, numpy.float32), [MPI.Status(), MPI.Status()]
        if ours.rank == 1:
            late(stream)
            ours.Send(x, 0, tag=5)
        elif ours.rank == 0:
            requests, told = [MPI.REQUEST_NULL, ours.Irecv(x, 1, tag=5)], given[place]
            getattr(MPI.Request, wait)(requests, told if wait == "Waitany" else given)
            assert (told.source, told.tag, told.Get_count(MPI.FLOAT), *{*x.get()}) == (1, 5, COUNT, 1)


def enqueueing(ours, stream):
    """In a group and in a capture a call cannot end: it is only enqueued."""
    x, out = ramp(ours, COUNT), cupy.zeros(COUNT, numpy.float32)
    with held(stream):
        with ours.comm.group():
            ours.Allreduce(x, out)
            assert not stream.done
        assert not stream.done
    same(out, sum(ranges(ours, COUNT)))
    stream.begin_capture()
    ours.Allreduce(x, out)
    graph = stream.end_capture()
    out[...] = -7
    graph.launch()
    same(out, sum(ranges(ours, COUNT)))
