"""Programs on CuPy arrays with parts of a communicator, on GPUs of their own or shared by NCCL."""

import concurrent.futures
from unittest.mock import patch

import cupy
import numpy

import gpucoll as gc
from gpu.helpers import PATIENCE, held, ramp, ranges, refused, same


def split(comm):
    """The parts of a communicator stay on their ranks' GPUs."""
    half = comm.split(comm.rank % 2)
    assert half.device == comm.device
    same(half.all_reduce(cupy.ones(3)), numpy.full(3, float(half.size)))
    half.close()


SHARED = {"split_share": True, "max_ctas": 8, "name": "parts"}


def parts(comm):
    """Parts share NCCL's resources with their parent; calls alternate; a rank without a color has no part."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE, check="full", nccl=SHARED) as parent:
        # At least two ranks in a part, from three ranks on.
        total, color = sum(ranges(comm, 700)), comm.rank % 2 if comm.size > 3 else 0
        members = range(color, comm.size - 1, 2 if comm.size > 3 else 1)
        expected = sum(ranges(comm, 700)[rank] for rank in members)
        same(parent.all_reduce(ramp(comm, 700), algorithm="ring"), total)
        gpu, stream = parent._core.gpus["cuda"], cupy.cuda.Stream(non_blocking=True)
        has_ended = gpu.has_ended
        with stream, held(stream) as gate:
            parent.all_reduce(ramp(comm, 700), algorithm="ring")
            # NCCL splits only without work under way: the work begins when `split` looks for its end.
            with patch.object(gpu, "has_ended", lambda *limit, **rest: gate.set() or has_ended(*limit, **rest)):
                part = parent.split(color if comm.rank in members else None, -comm.rank)
        for algorithm in ("native", "ring", "native", "ring"):
            if part is not None:
                works = [part.all_reduce(ramp(comm, 700), algorithm=algorithm, async_op=True) for _ in range(2)]
                assert all(work.is_enqueued() for work in works)
            same(parent.all_reduce(ramp(comm, 700), algorithm=algorithm), total)
            if part is not None:
                same(part.all_gather(cupy.full(1, comm.rank)), numpy.array([*reversed(members)])[:, None])
                for work in works:
                    work.synchronize()
                    same(work.result, expected)
        if part is not None:
            left = (part.rank - 1) % part.size
            found = part.sendrecv(cupy.full(5, float(part.rank)), cupy.empty(5), (part.rank + 1) % part.size, left)
            same(found, numpy.full(5, float(left)))
            assert family(part) is family(parent)
            inner = [one._core.gpus["cuda"]._transport._comm for one in (parent, part)]
            if hasattr(cupy, "hostile"):  # CuPy's communicators do not tell
                assert inner[0].family is inner[1].family
                told = {"maxCTAs": 8, "splitShare": 1, "commName": "parts"}
                assert [one.fields for one in inner] == [told, told]
                pairs = [one._comm.fields for one in part._core.gpus["cuda"].points.joined.values()]
                assert pairs == len(pairs) * [{"maxCTAs": 8, "commName": "parts"}] != []
            part.close()
        same(parent.all_reduce(ramp(comm, 700), algorithm="native"), total)


def nccl_communicators(comm):
    """Return the number of NCCL communicators made by this rank, after each call.

    A communicator makes the calls, then two: a process group of PyTorch has a communicator for collectives and another
    for messages.
    """
    from cupy.cuda import nccl

    known, found = {*nccl._communicators}, []
    x, right, left = ramp(comm, 30), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    one, *two = made = [gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) for _ in range(3)]
    for collectives, messages in ((one, one), two):
        for algorithm in ("native", "ring"):
            collectives.all_reduce(x, algorithm=algorithm)
            found.append(len({*nccl._communicators} - known))
        for _ in range(2):
            messages.sendrecv(x, cupy.empty_like(x), right, left)
            found.append(len({*nccl._communicators} - known))
    for each in made:
        each.close()
    return found


def failed_part(comm):
    """A part without a rank ends by the deadline; its parent raises on all ranks, since NCCL's abort ends both."""
    x, error = ramp(comm, 700), None
    parent = gc.Communicator.from_mpi(comm.mpi, timeout=4, nccl=SHARED)
    same(parent.all_reduce(x, algorithm="native"), sum(ranges(comm, 700)))
    part = parent.split(comm.rank % 2)
    if comm.rank == 0:
        assert family(part) is family(parent)
        try:
            part.all_reduce(x, algorithm="native", async_op=True).synchronize()
        except gc.CollectiveTimeout as found:
            error = found
        assert error is not None
        part.close()
        assert "shares" in refused("GC-NCCL", parent.all_reduce, x, algorithm="native")
        error = None
    try:
        parent.all_reduce(x, algorithm="native", async_op=True).synchronize()
        parent.close()
    except gc.GpucollError as found:
        error = found
    assert error is not None


def turns(comm):
    """Calls come to NCCL in order, also if the ranks connect at one call and not at the next."""
    from gpucoll.device.cuda import CudaDevice
    from gpucoll.device.nccl import COMPLETE, joined
    from gpucoll.progress.waits import Progress

    nccl = joined(0, 1, cupy.cuda.nccl.get_unique_id(), CudaDevice(comm.device), Progress(PATIENCE), {})
    begun, order = [], []

    def begin(what, call):
        begun.append((concurrent.futures.Future(), call))
        return begun[-1][0]

    def end():
        future, call = begun.pop(0)
        future.set_result(call())

    with patch.object(nccl, "_begin", begin):
        calls, waits = [], []
        for name, needed in (("first", "a"), ("second", "a"), ("third", "")):
            calls.append(nccl._call(name, needed, lambda name=name: order.append(name)))
            waits.append(next(calls[-1]))
        assert len(begun) == 1
        end()
        # The first call has come to NCCL, but its operation has not gone on: the others wait.
        assert [done() for done in waits] == [True, False, False]
        assert [*calls[0]] == []
        assert [done() for done in waits[1:]] == [True, False]
        assert [*calls[1]] == []
        assert waits[2]()
        assert [*calls[2]] == []
        assert (order, begun) == (["first", "second", "third"], [])
        assert nccl._call("fourth", "a", lambda: order.append("fourth")) is COMPLETE
        assert order[-1] == "fourth"
    nccl.close(captured=False)


def family(comm):
    """Return the NCCL communicators with the resources of this one."""
    return comm._core.gpus["cuda"]._transport._family
