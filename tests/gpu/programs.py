"""Programs on CuPy arrays: run by ranks on emulated GPUs, and by the same ranks on a GPU, if there is one.

    mpiexec -n 2 python -m gpu.programs '[["streams", "ring"], ["threads", 3, "points"]]'   # one after the other
"""

import itertools
import json
import sys
import time
import types
from unittest.mock import patch

import cupy
import numpy

import gpucoll as gc
from gpu import blocking, hazards, hostile, lifetimes, peer, splits, streams, tensors, training, walks
from gpu.helpers import PATIENCE, Foreign, called_before, held, raising, ramp, ranges, refused, same
from gpu.mirrored import NATIVE, Mirrored
from harness import thread_ranks
from oracles import oracle
from programs import collectives

HOMES = (streams, peer, tensors, hostile, lifetimes, hazards, training, splits, blocking, walks, sys.modules[__name__])


SEVERAL_GPUS = {"current_device", "refusals"}  # programs using other GPUs than their rank's


def on_mpi(mpi, name, *arguments, **options):
    """Run a program; on emulated GPUs, check for misuse, and for use of other ranks' GPUs by threads of the process."""
    hostile = getattr(cupy, "hostile", None)  # only the emulation has this module
    misuse, contexts = (hostile.reported, hostile.contexts) if hostile else ([], {})
    misuse.clear()
    contexts.clear()
    with gc.Communicator.from_mpi(mpi, timeout=PATIENCE) as comm:
        found = on_gpu(comm, name, *arguments, **options)
        own = comm.device
    assert not misuse, misuse
    assert contexts.keys() <= {own} or name in SEVERAL_GPUS, f"of these GPUs {own} is the rank's: {contexts}"
    return found


def on_gpu(comm, name, *arguments, **options):
    """Run one of the programs below with this rank's GPU as current device."""
    cupy.cuda.Device(comm.device).use()
    program = next(vars(home)[name] for home in HOMES if name in vars(home))
    return program(comm, *arguments, **options)


def threads(size, name, *arguments):
    """Run one of the programs below on threads sharing a GPU, with a stream each."""
    def program(comm):
        cupy.cuda.Device(cupy.cuda.runtime.getDeviceCount() - 1).use()  # a new thread starts with the first device
        with cupy.cuda.Stream(non_blocking=True):
            return on_gpu(comm, name, *arguments)

    return thread_ranks.on_threads(size, program, timeout=PATIENCE)


def many(comm, which):
    for name, *arguments in which:
        on_gpu(comm, name, *arguments)


def mirrored(comm, name, *arguments):
    return getattr(collectives, name).__wrapped__(Mirrored(comm), *arguments)


def native(comm, collective):
    """NCCL's own collective for every op and dtype of NCCL; others are refused before any data move."""
    served = 0
    for op, name in itertools.product(oracle.OPS, oracle.DTYPES):
        if oracle.legal(op, name):
            try:
                collectives.reduction(Mirrored(comm), collective, "native", op, name, 13, in_place=served % 2 == 0)
                served += 1
            except gc.ArgumentError as error:
                told = error.code, "NCCL" in str(error)
            else:
                told = "GC-ALGO", True
            assert told == ("GC-ALGO", True), (op, name)
    return served


def selected(comm):
    """NCCL's own algorithms, by name; what NCCL has not, or cannot be told, is refused before any data move."""
    x, total, first = ramp(comm, 700), sum(ranges(comm, 700)), ranges(comm, 700)[0]
    for algorithm in ("native(ring)", "native(Tree)", "native(ring)", "native(Tree)"):
        same(comm.all_reduce(x, algorithm=algorithm), total)
    same(comm.broadcast(x.copy(), algorithm="native(ring)"), first)
    same(comm.all_gather(x[:1], algorithm="native(ring)"), numpy.array([one[:1] for one in ranges(comm, 700)]))
    for collective, name in (("all_reduce", "native(rings)"), ("all_reduce", "native(ring"), ("all_reduce", "native()"),
                             ("broadcast", "native(tree)"), ("all_to_all", "native(ring)")):
        blocks = cupy.ones(comm.size)
        assert f"NCCL has no {name} for {collective}" in refused("GC-ALGO", getattr(comm, collective), blocks,
                                                                 algorithm=name)
    assert "MPI takes no algorithm" in refused("GC-ALGO", comm.all_reduce, numpy.ones(3), algorithm="native(ring)")
    with patch("gpucoll.device.nccl.version", lambda: 23003):
        assert "NCCL 23003 takes no algorithm" in refused("GC-ALGO", comm.all_reduce, x[1:], algorithm="native(ring)")


def points(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for name in ("bool", "float16", "complex128", *NATIVE):
        x = cupy.asarray(oracle.values("sum", name, comm.rank, 11))
        out = cupy.empty_like(x)
        assert comm.sendrecv(x, out, right, left) is out
        same(out, oracle.values("sum", name, left, 11))
    gaps = cupy.zeros((4, 6), numpy.int32)
    comm.sendrecv(cupy.asfortranarray(cupy.full((4, 3), comm.rank, numpy.int32)), gaps[:, ::2], right, left)
    assert (gaps.get() == numpy.array([left, 0] * 3)).all()
    outs = [cupy.zeros(3 + k) for k in range(3)]
    work = comm.send(outs[2] + 7, 1, async_op=True) if comm.rank == 0 and comm.size > 1 else None
    same(comm.all_reduce(cupy.ones(3)), numpy.full(3, float(comm.size)))  # does not wait for the message
    if comm.rank == 1:
        same(comm.recv(outs[2], 0), numpy.full(5, 7.0))
    if work is not None:
        work.synchronize()
    with comm.group():
        for k, out in enumerate(outs):
            comm.recv(out, left)
            comm.send(cupy.full(3 + k, comm.rank + k / 4), right)
        total = comm.all_reduce(cupy.full(1, comm.rank))
    for k, out in enumerate(outs):
        same(out, numpy.full(3 + k, left + k / 4))
    same(total, numpy.array([sum(range(comm.size))]))


def first_messages(comm):
    """The first messages of two ranks need no other rank, neither before nor after the first collective."""
    mine, left = ramp(comm, 30), (comm.rank - 1) % comm.size
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        for meets in (False, True):
            for first in range(comm.size - 1):
                out = cupy.empty_like(mine)
                if comm.rank == first:
                    other.send(mine, first + 1)
                elif comm.rank == first + 1:
                    same(other.recv(out, first), ranges(comm, 30)[first])
                if first == 0:
                    comm.barrier()  # in which the other ranks are already
            if not meets:
                assert other._core.gpus["cuda"].made_executors == []
                same(other.all_reduce(mine), sum(ranges(comm, 30)))
    with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        # In a ring all pairs begin together.
        same(other.sendrecv(mine, cupy.empty_like(mine), (comm.rank + 1) % comm.size, left), ranges(comm, 30)[left])


def dlpack(comm):
    """A producer's stream is followed without a wait on the host; `__cuda_array_interface__` alone is enough."""
    theirs, ours, total = called_before(comm)
    with held(theirs):
        with theirs:
            x = ramp(comm, 900, 3)
        foreign = Foreign(x, theirs)
        with ours:
            y = comm.all_reduce(foreign, algorithm="tree")
            assert not ours.done
    with ours:
        same(y, total)
    assert foreign.asked == [ours.ptr]
    elsewhere, foreign = cupy.cuda.Stream(non_blocking=True), Foreign(x, theirs)
    y = comm.all_reduce(foreign, algorithm="tree", stream=elsewhere)
    with elsewhere:
        same(y, total)
    assert foreign.asked == [elsewhere.ptr]
    with theirs:
        out = cupy.zeros(900, numpy.float32)
        given = Foreign(out, theirs)
        assert comm.all_reduce(Foreign(x, theirs), given, algorithm="tree") is given
        same(out, total)
        described = types.SimpleNamespace(__cuda_array_interface__=x.__cuda_array_interface__, owner=x)
        same(comm.all_reduce(described, algorithm="tree"), total)


def refusals(comm):
    """Host and GPU arrays do not mix; a refused call moves no data."""
    x, host = cupy.ones(4), numpy.ones(4)
    for code, call, *arguments in (
            ("GC-DEVICE", comm.all_reduce, x, host), ("GC-DEVICE", comm.all_reduce, host, x),
            ("GC-DEVICE", comm.sendrecv, x, host, 0, 0), ("GC-ARRAY", comm.all_reduce, [1.0]),
            ("GC-OVERLAP", comm.all_reduce, x[1:], x[:-1])):
        assert refused(code, call, *arguments), (code, arguments)
    assert comm.mpi is not None or refused("GC-EXECUTOR", comm.all_reduce, x, algorithm="native")
    count = cupy.cuda.runtime.getDeviceCount()
    if count > 1:
        with cupy.cuda.Device((comm.device + 1) % count):
            away = cupy.ones(4)
            found = comm.all_reduce(x)  # for any current device, the call is on the communicator's device
        cupy.cuda.Device(comm.device).use()
        same(found, numpy.full(4, float(comm.size)))
        assert refused("GC-DEVICE", comm.all_reduce, away)
        assert refused("GC-DEVICE", comm.all_reduce, x, away)
    same(comm.all_reduce(x), numpy.full(4, float(comm.size)))
    assert (comm.all_reduce(host) == comm.size).all()  # the same communicator works on the host, too


def aborted(comm):
    """A rank leaves: the waits of the others end at once, and closing does not wait for the rank."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=2) as other:
        same(other.all_reduce(cupy.ones(3), algorithm="ring"), numpy.full(3, float(comm.size)))
        if comm.size == 1:
            return
        if comm.rank == 0:
            work = other.all_reduce(cupy.ones(3), algorithm="ring", async_op=True)
            try:
                work.synchronize()
            except gc.RankFailedError:
                assert refused("GC-REVOKED", other.barrier)
            else:
                raise AssertionError("the rank that is missing was not missed")


def host_against_device(comm, check):
    """A rank passes a GPU array, the others NumPy arrays: all get the error long before the deadline."""
    for earlier in (1, 3):
        _host_against_device(comm, check, earlier)


def _host_against_device(comm, check, earlier):
    with gc.Communicator.from_mpi(comm.mpi, timeout=30, check=check or None) as other:
        for ones in (*[cupy.ones] * earlier, numpy.ones):
            assert (other.all_reduce(ones(3), algorithm="ring") == comm.size).all()
        began, told = time.monotonic(), None
        try:
            if comm.rank == 1:
                other.all_reduce(cupy.ones(3), algorithm="ring", async_op=True).synchronize()
                other.barrier()
            else:
                other.all_reduce(numpy.ones(3), algorithm="ring")
        except gc.MismatchError as error:
            told = error
        assert told is not None
        assert told.ranks == (1,), told
        assert time.monotonic() < began + 20


def broken(comm):
    """NCCL's errors become typed errors: at the start, in a call, and for codes unknown to CuPy."""
    from cupy.cuda import nccl

    for error in (nccl.NcclError(2), KeyError(8), cupy.cuda.runtime.CUDARuntimeError(2)):
        with patch.object(nccl, "NcclCommunicator", raising(error)), \
                gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
            assert refused("GC-NCCL", other.all_reduce, cupy.ones(3))
            assert refused("GC-REVOKED", other.all_reduce, numpy.ones(3))  # the other ranks may be inside NCCL
        with gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
            other.all_reduce(cupy.ones(3))
            with patch.object(nccl, "groupEnd", raising(error, nccl.groupEnd)):
                assert comm.size == 1 or refused("GC-NCCL", other.all_reduce, cupy.ones(3), algorithm="ring")
    with patch.object(nccl, "get_unique_id", raising(nccl.NcclError(3))), \
            gc.Communicator.from_mpi(comm.mpi, timeout=PATIENCE) as other:
        assert refused("GC-NCCL", other.all_reduce, cupy.ones(3))


def main(text):
    """Run the programs; an error of one rank, with the program's name, ends all ranks."""
    for name, *arguments in json.loads(text):
        try:
            if name == "threads":
                threads(*arguments)
            else:
                from mpi4py import MPI

                on_mpi(MPI.COMM_WORLD, name, *arguments)
        except BaseException as error:
            error.add_note(f"in {name} {arguments}")
            raise


if __name__ == "__main__":
    main(sys.argv[1])
