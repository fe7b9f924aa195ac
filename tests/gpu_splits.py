"""Programs on CuPy arrays with parts of a communicator, on GPUs of their own or with GPUCOLL_NCCL_SHARE=1."""

from unittest.mock import patch

import cupy
import numpy

import gpucoll as gc
from gpu_helpers import PATIENCE, held, ramp, ranges, refused, same


def split(comm):
    """The parts of a communicator stay on their ranks' GPUs."""
    half = comm.split(comm.rank % 2)
    assert half.device == comm.device
    same(half.all_reduce(cupy.ones(3)), numpy.full(3, float(half.size)))
    half.close()


def parts(comm):
    """Parts share NCCL's resources with their parent; calls alternate; a rank without a color has no part."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as parent:
        total, even = sum(ranges(comm, 700)), comm.rank % 2
        members = range(even, comm.size - 1, 2)
        expected = sum(ranges(comm, 700)[rank] for rank in members)
        same(parent.all_reduce(ramp(comm, 700), algorithm="ring"), total)
        gpu, stream = parent._core.gpus["cuda"], cupy.cuda.Stream(non_blocking=True)
        has_ended = gpu.has_ended
        with stream, held(stream) as gate:
            parent.all_reduce(ramp(comm, 700), algorithm="ring")
            # NCCL splits only without work under way: the work begins when `split` looks for its end.
            with patch.object(gpu, "has_ended", lambda limit: gate.set() or has_ended(limit)):
                part = parent.split(even if comm.rank in members else None, -comm.rank)
        for algorithm in ("native", "ring", "native", "ring"):
            if part is not None:
                work = part.all_reduce(ramp(comm, 700), algorithm=algorithm, async_op=True)
            same(parent.all_reduce(ramp(comm, 700), algorithm=algorithm), total)
            if part is not None:
                same(part.all_gather(cupy.full(1, comm.rank)), numpy.array([*reversed(members)])[:, None])
                work.synchronize()
                same(work.result, expected)
        if part is not None:
            assert family(part) is family(parent)
            inner = [one._core.gpus["cuda"]._transport._comm for one in (parent, part)]
            assert not hasattr(cupy, "hostile") or inner[0].family is inner[1].family  # CuPy's has no such name
            part.close()
        same(parent.all_reduce(ramp(comm, 700), algorithm="native"), total)


def failed_part(comm):
    """A part without a rank ends by the deadline; its parent raises on all ranks, since NCCL's abort ends both."""
    parent, x, error = gc.Communicator.from_mpi(comm.mpi, timeout=4), ramp(comm, 700), None
    same(parent.all_reduce(x, algorithm="native"), sum(ranges(comm, 700)))
    part = parent.split(comm.rank % 2)
    if comm.rank == 0:
        assert family(part) is family(parent)
        assert refused("GC-TIMEOUT", part.all_reduce(x, algorithm="native", async_op=True).synchronize)
        part.close()
        assert "shares" in refused("GC-NCCL", parent.all_reduce, x, algorithm="native")
    try:
        parent.all_reduce(x, algorithm="native", async_op=True).synchronize()
        parent.close()
    except gc.GpucollError as found:
        error = found
    assert error is not None


def family(comm):
    """Return the NCCL communicators with the resources of this one."""
    return comm._core.gpus["cuda"]._transport._family
