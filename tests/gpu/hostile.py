"""Programs for a hostile machine: blocking first messages, live graphs, memory and handles used again.

Run on the stand-in by its rules; programs independent of the stand-in also run on a GPU.
"""

import threading
import time
import types
from unittest.mock import patch

import cupy
import numpy

import gpucoll as gc
from gpu.helpers import PATIENCE, held, ramp, ranges, refused, same
from gpucoll.transport.rendezvous import becomes
from harness.pace import seconds

SOON = seconds(3)


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
    begun = time.monotonic()
    other.close()
    assert time.monotonic() - begun < SOON
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
    begun = time.monotonic()
    other.close()
    assert time.monotonic() - begun < SOON
    assert plan.executor == ("native" if algorithm == "native" else "nccl")


def missed(comm):
    """A first message to a missing rank ends by the deadline, instead of waiting in NCCL for ever."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=SOON) as other:
        other.all_reduce(cupy.ones(3), algorithm="ring")
        said = []

        def send():
            cupy.cuda.Device(comm.device).use()
            said.append(refused("GC-TIMEOUT", lambda: other.send(cupy.ones(3), 1, async_op=True).synchronize()))

        if comm.rank == 0 and comm.size > 1:
            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            thread.join(4 * SOON)
        said = comm.mpi.bcast(said, 0)
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

        if comm.rank == 0 and comm.size > 1:
            thread = threading.Thread(target=capture, daemon=True)
            thread.start()
            thread.join(4 * SOON)
        said = comm.mpi.bcast(said, 0)
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


def handed_out_again(comm, what):
    """The memory used by a graph or a plan is not handed out again while the graph or plan exists."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        shape = comm.size, 500
        x, all_of = ramp(comm, comm.size * 500).reshape(shape), ranges(comm, comm.size * 500)
        if what == "plan":
            out, expected = cupy.empty(shape, numpy.float32), sum(all_of).reshape(shape)
            again = comm.plan("all_reduce", x, out, stream=stream)
            del x
        else:
            out, expected = x, all_of[comm.rank].reshape(shape)
            comm.all_to_all(x, x, algorithm="native")
            stream.begin_capture()
            comm.all_to_all(x, x, algorithm="native")  # back again
            again = stream.end_capture().launch
        theirs = [cupy.full(shape, 1000 + k, numpy.float32) for k in range(4)]
        again()
        for k, one in enumerate(theirs):
            same(one, numpy.full(shape, 1000 + k, numpy.float32))
        same(out, expected)


def many_streams(comm, algorithm):
    """More streams than a GPU has hardware queues; handles of closed streams are used again."""
    for turn in range(3):
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(20)]
        found = []
        for k, stream in enumerate(streams):
            with stream:
                found.append(comm.all_reduce(ramp(comm, 300, turn + k), algorithm=algorithm))
        for k, (stream, one) in enumerate(zip(streams, found, strict=True)):
            with stream:
                same(one, sum(ranges(comm, 300, turn + k)))
        del found, one, stream, streams


def blocking(comm, algorithm):
    """CuPy's streams block the null stream by default."""
    stream = cupy.cuda.Stream()
    with stream:
        for k in range(3):
            y = comm.all_reduce(ramp(comm, 3000, k), algorithm=algorithm)
            with cupy.cuda.Stream.null:
                same(y + 1, sum(ranges(comm, 3000, k)) + 1)
                z = comm.all_reduce(ramp(comm, 3000, k), algorithm=algorithm)
            same(z + y, 2 * sum(ranges(comm, 3000, k)))


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


def captured_beside(comm, algorithm):
    """An asynchronous call in a capture: its stream joins, `wait` brings it back, asking for its end is an error."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = ramp(comm, 2000)
        out = cupy.empty_like(x)
        comm.all_reduce(x, out, algorithm=algorithm, async_op=True).wait()
        stream.synchronize()
        stream.begin_capture()
        work = comm.all_reduce(x, out, algorithm=algorithm, async_op=True)
        try:
            becomes(work.is_completed, seconds(60))  # in a capture NCCL is called by a separate thread
            told = False
        except gc.UsageError:
            told = True
        work.wait()
        out *= 2
        graph = stream.end_capture()
        graph.launch()
        same(out, 2 * sum(ranges(comm, 2000)))
    assert told, "the end of a call in a capture was asked for"


def captured_globally(comm, algorithm):
    """In a global capture allocating, loading and asking are forbidden: a planned call does nothing of the kind."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = ramp(comm, 2000)
        out = cupy.empty_like(x)
        plan = comm.plan("all_reduce", x, out, algorithm=algorithm, stream=stream)
        for _ in range(2):
            plan()
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        plan()
        graph = stream.end_capture()
        graph.launch()
        same(out, sum(ranges(comm, 2000)))


def without_nccl(comm):
    """CuPy lacks NCCL's library on one rank: every rank gets the error."""
    from cupy.cuda import nccl  # imported by CuPy on demand

    stub = types.SimpleNamespace(available=False) if comm.rank == 0 else nccl
    with patch.object(cupy.cuda, "nccl", stub), gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        assert refused("GC-NCCL", other.all_reduce, cupy.ones(3))
