"""Measure Python's own time for a repeated all_reduce on a GPU, with a device doing nothing; needs no GPU.

    mpiexec -n 2 python tests/host_time.py

Runs on the stand-in for CuPy; launches, events and NCCL do nothing after every call has been made once. Prints
microseconds of the thread's processor time: of a call into `out`, of a plan's call, of a call with a newly allocated
result (without the time of CuPy's pool), and of a broadcast.
"""

import functools
import gc
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS / "stand_in"), str(TESTS.parent)]
os.environ.setdefault("STAND_IN_GPUS", "8")

import cupy  # noqa: E402  (the stand-in)
from cupy import _raw  # noqa: E402
from cupy.cuda import nccl, runtime  # noqa: E402
from cupy.cuda import stream as streams  # noqa: E402
from mpi4py import MPI  # noqa: E402

import gpucoll  # noqa: E402

CASES = [("peer", "auto", 1 << 10, "one launch"), ("peer", "ring", 1 << 20, "one launch"),
         ("native", "auto", 1 << 20, "one of NCCL's"), ("nccl", "ring", 1 << 10, "replayed from a graph"),
         ("nccl", "ring", 1 << 22, "two rounds, launch by launch")]
CALLS, REPEATS = 1000, 15
ATTRIBUTES = ("shape", "strides", "dtype", "size", "nbytes", "flags")  # plain attributes of CuPy's arrays


class Once:
    """A property, hidden by an attribute of the same name."""

    def __init__(self, found):
        self._find = found.fget

    def __get__(self, instance, owner):
        return self._find(instance)


def nothing(*_, **__):
    """Replace the device's work."""


def idle(ordinal, stream):
    """Make the device do nothing from here on, and make parts written in C in CuPy cheap."""
    runtime.getDevice = functools.partial(int, ordinal)
    cupy.cuda.get_current_stream = lambda device_id=-1: stream
    _raw.Function.__call__ = streams.Event.record = streams.Graph.launch = streams._BaseStream.wait_event = nothing
    streams._BaseStream.is_capturing = bool
    runtime.graphLaunch = nothing  # methods already kept by calls stay unchanged
    for name in ("send", "recv", "_collective"):
        setattr(nccl.NcclCommunicator, name, nothing)
    nccl.groupStart = nccl.groupEnd = nothing


def plain(array):
    """Turn the requested properties of an array into attributes."""
    vars(array).update({name: getattr(array, name) for name in ATTRIBUTES})


def microseconds(call):
    """Return the median time per call."""
    found = []
    for _ in range(REPEATS):
        begun = time.thread_time()
        for _ in itertools.repeat(None, CALLS):
            call()
        found.append((time.thread_time() - begun) / CALLS * 1e6)
    return statistics.median(found)


def main():
    world = gpucoll.init()
    cupy.cuda.Device(world.device).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    calls = []
    with stream:
        for executor, algorithm, nbytes, note in CASES:
            comm = gpucoll.Communicator.from_mpi(MPI.COMM_WORLD, executor=executor)
            x = cupy.ones(nbytes // 4, "f4")
            out = cupy.empty_like(x)
            call = functools.partial(comm.all_reduce, x, out, algorithm=algorithm)
            plan = comm.plan("all_reduce", x, out, algorithm=algorithm)
            new = functools.partial(comm.all_reduce, x, algorithm=algorithm)
            given = functools.partial(comm.broadcast, x)
            for _ in range(6):
                for one in (call, plan, new, given):
                    one()
            calls.append((f"{executor:7} {algorithm:5} {nbytes:8} B, {note}", (call, plan, new, given), comm, x, out))
        stream.synchronize()
        world.barrier()
        idle(world.device, stream)
        for *_, comm, x, out in calls:
            plain(x), plain(out)
            comm._core.gpus["cuda"].device.empty = lambda *_, out=out: out
        for name in ATTRIBUTES:
            setattr(cupy.ndarray, name, Once(vars(cupy.ndarray)[name]))
        gc.disable()
        for what, kinds, *_ in calls:
            found = map(microseconds, kinds)
            if world.rank == 0:
                words = zip(("call", "plan", "new result", "broadcast"), found, strict=True)
                print(f"{what}: {', '.join(f'{kind} {spent:.2f} us' for kind, spent in words)}", flush=True)
            else:
                list(found)
    MPI.COMM_WORLD.Barrier()
    os._exit(0)  # waiting for the device would never end


main()
