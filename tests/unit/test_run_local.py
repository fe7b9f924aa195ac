"""`run_local`: the first error, no wait for failed ranks; objects."""

import itertools
import os
import pickle
import sysconfig
import threading
import time
import tracemalloc

import numpy
import pytest

import gpucoll as gc
from gpucoll.communicator.objects import LONG_BYTES
from harness.jobs import python


@pytest.mark.parametrize("executor", ["shared", "mpi"])
def test_the_first_error_is_raised_and_ends_the_others_waits(executor):
    def one_fails(comm):
        if comm.rank == 1:
            raise KeyError("planted")
        comm.all_reduce(numpy.ones(3))

    began = time.monotonic()
    with pytest.raises(KeyError, match="planted") as error:
        gc.run_local(one_fails, 3, timeout=600.0, executor=executor)
    assert error.value.__notes__ == ["on rank 1 of 3"]
    assert time.monotonic() - began < 300


def test_an_injected_failure_ends_the_communicator(monkeypatch):
    monkeypatch.setenv("GPUCOLL_FAULT", "rank:0,seq:1,phase:after_send,do:raise")
    with gc.init_local(1)[0] as comm:
        with pytest.raises(gc.BackendError, match="GC-FAULT"):
            comm.all_reduce(numpy.ones(5))
        with pytest.raises(gc.RevokedError):
            comm.barrier()


def test_many_threads_on_a_core_leave_it_to_the_late_one(monkeypatch):
    """Waiting threads sleep; looks of Python in between are rare, as all share Python's lock. Load only delays them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    looks, cleared = [[] for _ in range(20)], threading.Barrier(20)

    def program(comm):
        mine = looks[comm.rank]
        comm._core.waits.hooks.append(lambda: mine.append(time.monotonic()))
        for _ in range(2):  # the first call is made by Python, the other by the engine alone
            mine.clear()
            cleared.wait()
            while comm.rank == 0 and min(map(len, looks[1:])) < 3:
                time.sleep(0.01)
            comm.barrier()
            assert all(later - look > 0.03 for look, later in itertools.pairwise(mine)), mine

    gc.run_local(program, len(looks), timeout=600.0)


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python keeps its lock")
def test_extension_modules_leave_pythons_lock_off():
    program = """if True:
        import sys, gpucoll._engine, gpucoll._ucx
        assert not sys._is_gil_enabled()"""
    found = python("-W", "error", "-c", program, env={"PYTHON_GIL": ""})  # as if it were not set
    assert found.returncode == 0, found.stderr


class Stubborn:
    def __reduce__(self):
        raise OSError("planted")


def objects(comm):
    """Each rank's objects arrive unchanged; a rank unable to give an object raises, and the next call works."""
    root, mine = comm.size - 1, {"rank": comm.rank, "data": "x" * comm.rank}
    everyone = [{"rank": rank, "data": "x" * rank} for rank in range(comm.size)]
    assert comm.all_gather_object(mine) == everyone
    assert comm.gather_object(mine, root) == (everyone if comm.rank == root else None)
    assert comm.broadcast_object(mine if comm.rank == root else None, root) == everyone[root]
    assert comm.scatter_object(everyone if comm.rank == root else None, root) == mine
    with comm.group():
        for call in (comm.all_gather_object, comm.gather_object, comm.broadcast_object, comm.scatter_object):
            with pytest.raises(gc.UsageError, match="outside the group"):
                call(everyone)
    if comm.size == 1:
        return
    wrong = Stubborn() if comm.rank == 1 else 1
    for call in (lambda: comm.all_gather_object(wrong), lambda: comm.gather_object(wrong),
                 lambda: comm.broadcast_object(wrong, 1), lambda: comm.scatter_object([wrong] * comm.size, 1),
                 lambda: comm.scatter_object([1], 1)):
        with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError):
            call()
    assert comm.all_gather_object(comm.rank) == [*range(comm.size)]


@pytest.mark.parametrize("size", [1, 3])
def test_objects(size):
    gc.run_local(objects, size, timeout=60.0)


def long_object(rank):
    """Return an object with buffers at both sides of the limit, the short one of a length that shifts later ranks'."""
    some = numpy.random.default_rng(rank).integers(0, 256, (4, LONG_BYTES // 2 + 48 * rank), numpy.uint8)
    fixed = some[1].view(numpy.int16).copy()
    fixed.flags.writeable = False
    return {"longest element": some.reshape(-1).view(numpy.clongdouble), "nested": [{"fixed": fixed, "again": fixed}],
            "Fortran": numpy.asfortranarray(some), "strided": some[::2, 1::3], "short": some[0, :LONG_BYTES - 1 - rank],
            "exact": some.reshape(-1)[:LONG_BYTES], "odd": some.reshape(-1)[3:LONG_BYTES + 4 + rank], "none": some[:0],
            "bytes": some.tobytes(), "row": bytearray(some[2]),
            "record": some.reshape(-1).view([("a", "<f4"), ("b", "<i4")])}


def same(found, expected):
    for key, value in expected.items():
        if key == "nested":
            assert found[key][0]["fixed"] is found[key][0]["again"]
            assert not found[key][0]["fixed"].flags.writeable
            assert found[key][0]["fixed"].tobytes() == value[0]["fixed"].tobytes()
        elif isinstance(value, numpy.ndarray):
            assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
            assert found[key].flags.f_contiguous or key != "Fortran"
            assert found[key].flags.aligned
            assert found[key].tobytes() == value.tobytes()
            found[key].view(numpy.uint8)[...] = 0  # writable, and no other object's memory
        else:
            assert found[key] == value
            assert type(found[key]) is type(value)


def long_objects(comm):
    """Objects with long buffers on some ranks or on all arrive unchanged, in memory of their own."""
    for with_buffers in (range(comm.size), [comm.size - 1], [0]):
        everyone = [long_object(rank) if rank in with_buffers else {"rank": "x" * rank} for rank in range(comm.size)]
        mine, root = long_object(comm.rank) if comm.rank in with_buffers else everyone[comm.rank], comm.size - 1
        before = pickle.dumps(mine)
        for found in (comm.all_gather_object(mine), comm.gather_object(mine, root)):
            for one, expected in zip(found or [], everyone, strict=found is not None):
                same(one, expected)
        found = comm.broadcast_object(mine if comm.rank == root else None, root)
        if comm.rank == root:
            assert found is mine
        else:
            same(found, everyone[root])
        same(comm.scatter_object(everyone if comm.rank == root else None, root), everyone[comm.rank])
        assert pickle.dumps(mine) == before


@pytest.mark.parametrize("size", [1, 3])
def test_objects_with_long_buffers(size):
    gc.run_local(long_objects, size, timeout=60.0)


@pytest.mark.parametrize(("call", "memory"), [("broadcast", 2), ("all_gather", 9), ("gather", 6), ("scatter", 9)])
def test_long_buffers_take_no_memory_beside_the_new_objects(call, memory):
    """Three ranks: `memory` is that of new objects, and of the rows sent; scatter_v joins its rows first."""
    array = numpy.arange(1 << 20)  # all ranks' threads share one array

    def run(comm):
        given = [array] * comm.size if call == "scatter" else array
        begin = getattr(comm, f"{call}_object")
        comm.barrier()
        if comm.rank == 0:
            tracemalloc.reset_peak()
        comm.barrier()
        kept = begin(given)
        comm.barrier()
        return tracemalloc.get_traced_memory()[1], kept is None

    tracemalloc.start()
    try:
        peaks = gc.run_local(run, 3, timeout=60.0)
    finally:
        tracemalloc.stop()
    assert peaks[0][0] < (memory + 0.5) * array.nbytes
