"""Programs for a hostile machine: blocking first messages, live graphs, memory and handles used again.

Run on emulated GPUs by their rules; programs independent of these also run on a GPU.
"""

import threading
import time
import types
from unittest.mock import patch

import cupy
import numpy

import gpucoll as gc
from gpu.helpers import PATIENCE, held, ramp, ranges, refused, same
from harness.pace import seconds

SOON = seconds(3)


def ends_soon(other):
    begun = time.monotonic()
    other.close()
    assert time.monotonic() - begun < SOON


def kept_graph(comm, algorithm):
    """Closing neither waits for the user's graphs, as for a late rank, nor aborts a communicator being destroyed."""
    other = gc.Communicator.from_mpi(comm.mpi, timeout=3 * SOON)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = ramp(comm, 2000)
        out = cupy.empty_like(x)
        other.all_reduce(x, out, algorithm=algorithm)
        stream.begin_capture()
        other.all_reduce(x, out, algorithm=algorithm)
        graph = stream.end_capture()
        graph.launch()
        same(out, sum(ranges(comm, 2000)))
    ends_soon(other)
    del graph


def kept_plan(comm, algorithm):
    """Closing waits neither for a plan still in use, nor for remembered calls."""
    other = gc.Communicator.from_mpi(comm.mpi, timeout=3 * SOON)
    x = ramp(comm, 2000)
    out = cupy.empty_like(x)
    plan = other.plan("all_reduce", x, out, algorithm=algorithm)
    for _ in range(7):
        plan()
        other.all_reduce(x, out, algorithm=algorithm)
    same(out, sum(ranges(comm, 2000)))
    ends_soon(other)
    assert plan.executor == ("native" if algorithm == "native" else "nccl")


def said_by_first(comm, body, said):
    """Run `body` in a thread of the first of several ranks, which may hang; return what has been said there."""
    if comm.rank == 0 and comm.size > 1:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(4 * SOON)
    return comm.mpi.bcast(said, 0)


def missed(comm):
    """A first message to a missing rank ends by the deadline, instead of waiting in NCCL for ever."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=SOON) as other:
        other.all_reduce(cupy.ones(3), algorithm="ring")
        said = []

        def send():
            cupy.cuda.Device(comm.device).use()
            said.append(refused("GC-TIMEOUT", lambda: other.send(cupy.ones(3), 1, async_op=True).synchronize()))

        said = said_by_first(comm, send, said)
        if said == [""] and comm.rank == 1:  # NCCL had room for the message
            same(other.recv(cupy.empty(3), 0), numpy.ones(3))
    assert said or comm.size == 1, "the message is waited for without a deadline"


def captured_alone(comm):
    """A rank alone captures a collective: the capture ends by the deadline, instead of waiting in NCCL for ever."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=SOON) as other:
        x, stream, said = cupy.ones(3), cupy.cuda.Stream(non_blocking=True), []
        other.all_reduce(x, x, algorithm="native")

        def capture():
            cupy.cuda.Device(comm.device).use()
            with stream:
                stream.begin_capture()
                said.append(refused("GC-TIMEOUT", other.all_reduce, x, x, algorithm="native"))
                stream.end_capture()

        said = said_by_first(comm, capture, said)
    assert said or comm.size == 1, "the captured call is waited for without a deadline"


def in_turn(comm):
    """PyTorch's ring: send to the right, then receive from the left. The ring ends, possibly by an error."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with gc.Communicator.from_mpi(comm.mpi, timeout=SOON) as other:
        other.all_reduce(cupy.ones(3), algorithm="ring")
        ended = []

        def ring():
            cupy.cuda.Device(comm.device).use()
            try:
                out = cupy.empty(5)
                work = other.send(cupy.full(5, float(comm.rank)), right, async_op=True)
                other.recv(out, left)
                work.synchronize()
                same(out, numpy.full(5, float(left)))
            except gc.GpucollError as error:
                ended.append(error.code)
            ended.append("")

        thread = threading.Thread(target=ring, daemon=True)
        thread.start()
        thread.join(5 * SOON)
        assert not thread.is_alive(), "the messages are waited for without a deadline"
        assert ended
        comm.barrier()


def faulted(comm):
    """After a fault on the GPU a wait ends with CUDA's error, not at the deadline."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        comm.all_reduce(ramp(comm, 30))
        with held(stream):
            work = comm.all_reduce(ramp(comm, 30), async_op=True)
            cupy._machine.MACHINE.fail(RuntimeError("an illegal address"))
    try:
        work.synchronize()
    except gc.CollectiveTimeout as error:
        raise AssertionError("the fault was taken for a rank that is late") from error
    except gc.BackendError:
        return
    raise AssertionError("the fault was not told")


def without_nccl(comm):
    """CuPy lacks NCCL's library on one rank: every rank gets the error."""
    from cupy.cuda import nccl  # imported by CuPy on demand

    stub = types.SimpleNamespace(available=False) if comm.rank == 0 else nccl
    with patch.object(cupy.cuda, "nccl", stub), gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        assert refused("GC-NCCL", other.all_reduce, cupy.ones(3))
