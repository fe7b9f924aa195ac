"""Programs on CuPy arrays for cases of silent errors or endless waits in CUDA: all end, by a typed error."""

import os
import signal
import threading
from unittest.mock import patch

import cupy
import numpy

import gpucoll as gc
from gpu.helpers import PATIENCE, ramp, ranges, refused, same
from gpucoll.device.cuda import CurrentDevice
from harness.pace import seconds

RUNTIME = cupy.cuda.runtime


def current_device(comm):
    """Calls, their ends and closing leave the thread's current device unchanged, for any current device."""
    count = RUNTIME.getDeviceCount()
    x, y, stream = cupy.ones(5), cupy.ones(5), cupy.cuda.Stream(non_blocking=True)
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        for device in range(count):
            RUNTIME.setDevice(device)
            for call in (lambda: other.all_reduce(x), lambda: other.all_reduce(x, stream=stream, algorithm="ring"),
                         lambda: other.all_reduce(x, async_op=True).wait(), other.barrier,
                         lambda: other.sendrecv(x, y, other.rank, other.rank),
                         lambda: other.all_gather_v(x), lambda: other.plan("all_reduce", x)(),
                         lambda: refused("GC-DEVICE", other.all_reduce, x, numpy.ones(5))):
                call()
                assert RUNTIME.getDevice() == device
    assert RUNTIME.getDevice() == count - 1, "closing has changed it"


def finalized(comm):
    """A finalizer uses the GPU while a new thread asks for its current device: the thread gets no other GPU."""
    asked, own, found = RUNTIME.getDevice, comm.device, []

    def ask():
        device = asked()
        RUNTIME.setDevice(own)  # as a finalizer does, in a garbage collection at this moment
        return device

    def act():
        with patch.object(RUNTIME, "getDevice", ask), CurrentDevice(own):
            pass
        found.append(asked())

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert found == [own]


def fault(comm):
    """After a fault of the device every wait ends at once, by an error reporting the fault; CuPy returns codes."""
    for ask in (lambda work: work.synchronize(), lambda work: work.is_completed()):
        with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
            work = other.all_reduce(cupy.ones(10), async_op=True)
            work._enqueue()
            with patch.object(RUNTIME, "eventQuery", lambda event: 700):
                assert "700" in refused("GC-CUDA", ask, work)


def missing(comm, algorithm):
    """A rank does not make a call, and no thread of the others asks: their copies end by the deadline, with NaN.

    Closing raises the error, naming the rank. By a schedule over NCCL's messages some elements may be this rank's own
    contribution, copied by a kernel after the abort.
    """
    last, stream, error = comm.size - 1, cupy.cuda.Stream(non_blocking=True), None
    with stream:
        other = gc.Communicator.from_mpi(comm.mpi, timeout=seconds(4))
        x, y = ramp(comm, 3000), cupy.zeros(3000, numpy.float32)
        for _ in range(2):
            same(other.all_reduce(x, y, algorithm=algorithm), sum(ranges(comm, 3000)))
        y[...] = -7
        stream.synchronize()
        if comm.rank != last:
            other.all_reduce(x, y, algorithm=algorithm)
            found = numpy.isnan(y.get())
            assert found.all() or (comm.mpi is not None and algorithm == "ring" and found.any())
    comm.barrier()
    try:
        other.close()
    except gc.CollectiveTimeout as found:
        error = found
    assert comm.rank == last or (error is not None and last in error.ranks), error
    same(comm.all_reduce(cupy.ones(3)), numpy.full(3, float(comm.size)))


def streams_refused(comm):
    """CUDA's per-thread stream, and the null stream while a blocking stream is captured, are refused at once."""
    x = cupy.ones(3)
    same(comm.all_reduce(x), numpy.full(3, float(comm.size)))
    assert "per-thread" in refused("GC-STREAM", comm.all_reduce, x, stream=2)
    blocking = cupy.cuda.Stream()
    with blocking:
        blocking.begin_capture()
        assert refused("GC-STREAM", comm.all_reduce, x, stream=cupy.cuda.Stream.null)
        blocking.end_capture()
    same(comm.all_reduce(x), numpy.full(3, float(comm.size)))


def float8_below_hopper(comm):
    """NCCL reduces float8 from sm_90 on: if one rank has less, `auto` uses a schedule, and `native` is refused."""
    x = cupy.full(64, 0x38, "uint8")  # ones
    facts = RUNTIME.getDeviceProperties
    older = (lambda ordinal: {**facts(ordinal), "major": 8, "minor": 0}) if comm.rank == comm.size - 1 else facts
    with patch.object(RUNTIME, "getDeviceProperties", older), \
            gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        said = refused("GC-ALGO", other.all_reduce, x, dtype="float8_e4m3fn", algorithm="native")
        assert "sm_80" in said, said
        found = other.all_reduce(x, dtype="float8_e4m3fn")
        assert (found.get() == {1: 0x38, 2: 0x40, 3: 0x44, 4: 0x48}[comm.size]).all()


def of_threads(comm):
    """Ranks as threads meet on the host, outside of any graph, and share one GPU with memory accessible to all."""
    x, stream = cupy.ones(3), cupy.cuda.Stream(non_blocking=True)
    same(comm.all_reduce(x), numpy.full(3, float(comm.size)))
    with stream:
        stream.begin_capture()
        assert "CUDA graph" in refused("GC-ALGO", comm.all_reduce, x, algorithm="ring")
        assert refused("GC-STREAM", comm.send, x, comm.rank)
        stream.end_capture()
    other = comm.split(0)
    if RUNTIME.getDeviceCount() > 1:
        with cupy.cuda.Device(comm.rank % 2):  # a part of the ranks has the device of its parent
            found = other.all_reduce(x)
        same(found, numpy.full(3, float(comm.size)))
        if comm.rank == 0:
            gc.run_local(on_two_gpus, 2, timeout=PATIENCE)
    other.close()
    same(comm.all_reduce(x), numpy.full(3, float(comm.size)))


def on_two_gpus(comm):
    with cupy.cuda.Device(comm.rank):
        assert "threads are on GPUs" in refused("GC-DEVICE", comm.all_reduce, cupy.ones(3))


def kernels_of_threads(comm):
    """Kernels waiting for each other on one GPU are not put on streams that block each other."""
    x, streams = cupy.ones(3), (cupy.cuda.Stream.null, cupy.cuda.Stream())
    for _ in range(2):  # the second time the call is compiled, for a non-blocking stream
        for blocking in streams:
            assert "non_blocking=True" in refused("GC-ALGO", comm.all_reduce, x, stream=blocking, algorithm="one_shot")
        same(comm.all_reduce(x, algorithm="one_shot"), numpy.full(3, float(comm.size)))


def two(comm):
    """Calls of two communicators side by side, on separate streams, end in any order of waiting."""
    first, second = comm.split(0), comm.split(0)
    x = ramp(comm, 5000)
    total = sum(ranges(comm, 5000))
    for turn in range(10):
        works = [one.all_reduce(x, algorithm=algorithm, async_op=True)
                 for one, algorithm in ((first, "ring"), (second, "native"), (first, "tree"))]
        for work in works if turn % 2 else reversed(works):
            same(work.wait(), total)
    first.close()
    same(second.all_reduce(x), total)
    second.close()


def killed(comm):
    """Rank 1 dies: rank 0's call ends at the deadline or before, by an error."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=5) as other:
        same(other.all_reduce(cupy.ones(3), algorithm="ring"), numpy.full(3, 2.0))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            other.all_reduce(cupy.ones(3), algorithm="ring", async_op=True).synchronize()
        except gc.GpucollError as error:
            print(f"rank 0 was told: {error}", flush=True)
            os._exit(0)  # MPI would wait for the dead rank


def torch_tensors(comm):
    """PyTorch's tensors: in place, requiring grad, float8, and on a current stream of PyTorch."""
    import torch

    side = torch.cuda.Stream(comm.device)
    with torch.cuda.stream(side):
        x = torch.full((1000,), float(comm.rank + 1), device=f"cuda:{comm.device}")
        comm.all_reduce(x, x)
        x += 1  # in the same stream: after the sum
        weight = torch.nn.Parameter(torch.ones(10, device=f"cuda:{comm.device}"))
        assert comm.broadcast(weight) is weight
        small = torch.ones(64, device=f"cuda:{comm.device}").to(torch.float8_e4m3fn)
        comm.all_reduce(small, small)
    side.synchronize()
    assert (x.cpu().numpy() == sum(range(1, comm.size + 1)) + 1).all()
    assert (small.float().cpu().numpy() == comm.size).all()
