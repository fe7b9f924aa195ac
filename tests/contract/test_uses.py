"""Features around collectives, equal on every executor: works, messages, groups, custom ops, failures, memory."""

import gc as garbage
import threading
import weakref

import numpy
import pytest

import gpucoll as gc
from harness.grids import naming
from harness.pace import seconds
from harness.thread_ranks import all_on_threads
from programs.points import all_programs  # messages between two ranks, groups, splits


def progress(comm):
    """The operation ends while this thread runs pure Python and never calls the library."""
    for algorithm in ("ring", "tree"):
        x = numpy.arange(100_000.0)
        _, work = (comm.all_reduce(x, algorithm=algorithm, async_op=is_async) for is_async in (False, True))
        assert isinstance(work, gc.Work)
        while not work._ended():  # only reads a flag; is_completed() would make progress
            sum(range(1000))
        assert work.is_completed()
        assert (work.wait() == x * comm.size).all()
        assert work.wait() is work.result


def kept_alive(comm):
    x = numpy.ones(200_000)
    alive = weakref.ref(x)
    work = comm.all_reduce(x, async_op=True, algorithm="ring")
    del x
    garbage.collect()
    assert (work.wait() == comm.size).all()
    del work
    garbage.collect()
    assert alive() is None


# ---------------------------------------------------------------- custom ops


def custom_ops(comm):
    everyone = [numpy.linspace(0, 0.9, 500, dtype=numpy.float32) * (rank + 1) / comm.size for rank in range(comm.size)]
    x, total = everyone[comm.rank].copy(), everyone[0]
    for other in everyone[1:]:
        total = total + other - total * other
    assert comm.all_reduce(x, op=gc.elementwise_op("a + b - a*b"), algorithm="star").tobytes() == total.tobytes()
    scaled = comm.all_reduce(x, op=gc.premul_sum(0.5 + comm.rank), algorithm="tree")
    factors = [numpy.float32(0.5 + rank) for rank in range(comm.size)]
    assert numpy.allclose(scaled, sum(factor * one for factor, one in zip(factors, everyone, strict=True)))
    first = comm.exscan(x, op=gc.elementwise_op("max(a, b)", identity=-7))
    assert (first == (everyone[comm.rank - 1] if comm.rank else -7)).all()
    assert (x == everyone[comm.rank]).all()


def bad_expressions(comm):
    """An expression valid only in NumPy is refused on every rank before data move, with the compiler's line."""
    x = numpy.ones(5, numpy.complex64)
    with pytest.raises((gc.ArgumentError, gc.DtypeError), match="complex64") as found:
        comm.all_reduce(x, op=gc.elementwise_op("abs(a) + b"), algorithm="tree")
    assert found.value.code.startswith("GC-OP")
    assert (x == 1).all()
    assert comm.all_reduce(x.real.copy())[0] == comm.size  # the communicator still works


PROGRAMS = (progress, kept_alive, all_programs, custom_ops)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_beside_collectives(executor, program):
    executor.run(3, program)


@pytest.mark.parametrize("executor", ["nccl", "peer"], indirect=True)
def test_a_bad_expression_is_refused_with_the_compilers_line(executor):
    executor.run(2, bad_expressions)


# ---------------------------------------------------------------- failures


def late(comm, begun):
    """If a rank never comes, waits and works raise a timeout, and the communicator is revoked."""
    comm.all_reduce(numpy.ones(5), algorithm="ring")  # all ranks meet under the long timeout
    begun.wait(seconds(60)) if comm.rank == 0 else begun.set()
    if comm.rank == 0:
        work = comm.all_reduce(numpy.ones(5), async_op=True, algorithm="ring")
        after = comm.all_reduce(numpy.ones(5), async_op=True)
        comm._core.waits.timeout, work._deadline = 0.2, 0.0  # set once both calls are under way
        for wait in (work.wait, work.synchronize):
            with pytest.raises(gc.CollectiveTimeout, match=r"waited 0\.2 s for the other ranks"):
                wait()
        assert work.is_completed()
        for call in (after.wait, comm.barrier, lambda: comm.all_reduce(numpy.ones(3))):
            with pytest.raises(gc.RevokedError):
                call()


def test_a_rank_that_never_comes_is_a_timeout(executor):
    executor.run(2, late, threading.Event())


def test_executors_that_threads_do_not_have(monkeypatch, emulated_kernels):
    def native(comm):
        with pytest.raises(gc.ArgumentError, match=r"GC-EXECUTOR.*native"):
            comm.all_reduce(numpy.ones(2), algorithm="native")
        comm.close()

    all_on_threads(gc.init_local(2), native)
    with pytest.raises(gc.ArgumentError, match="no native"):
        gc.init_local(2, executor="native")
    for wrong in (0, 1.5, True):
        with pytest.raises(gc.ArgumentError):
            gc.init_local(wrong)
    monkeypatch.setenv("GPUCOLL_DEVICE", "emulated")
    with naming("mpi on a device"), gc.init_local(1, executor="mpi")[0] as alone, \
            pytest.raises(gc.ArgumentError, match="GC-EXECUTOR"):
        alone.all_reduce(numpy.ones(2))


# ---------------------------------------------------------------- symmetric memory


def symmetric(comm):
    x, y = comm.empty((3, 5), "float32"), comm.zeros(7, numpy.int16)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((3, 5), numpy.float32, (7,), numpy.int16)
    assert not y.any()
    assert (comm.zeros((), "bfloat16").shape, comm.zeros((4, 0), bool).size) == ((), 0)
    x[...] = comm.rank
    assert comm.all_reduce(x, out=x) is x
    assert (x == sum(range(comm.size))).all()
    places = set()
    for number in range(12):
        room = comm.zeros(1 << 18, "float64")
        room += number
        assert (comm.all_reduce(room, out=room) == comm.size * number).all()
        places.add(room.ctypes.data)
        del room
    assert len(places) <= 2  # freed memory is used again
    comm.close()
    assert (x == sum(range(comm.size))).all()  # the array outlives the communicator
    with pytest.raises(gc.ClosedError, match="GC-CLOSED"):
        comm.empty(3, "int8")


def symmetric_refused(comm):
    odd = comm.rank == comm.size - 1
    for arguments, code in (((3 + odd, "int8"), "GC-SHAPE"), ((3, "int8" if odd else "uint8"), "GC-DTYPE")):
        with pytest.raises(gc.MismatchError) as found:
            comm.empty(*arguments)
        assert found.value.code == code
        assert found.value.ranks == (comm.size - 1,)
    for arguments, kind in (((3, "int8", "gpu"), gc.ArgumentError), ((-1, "int8"), gc.ArgumentError),
                            ((2, object), gc.DtypeError)):
        with pytest.raises(kind if odd else gc.PeerError):
            comm.zeros(*(arguments if odd else (3, "int8")))
    with pytest.raises(gc.BackendError):  # beyond any address space: an error on every rank, without harm
        comm.empty(1 << 56, "float64")
    assert comm.zeros(3, "int8").sum() == 0
    block = comm.empty(1 << 18, "float64")
    where = block.ctypes.data
    del block
    with pytest.raises(gc.MismatchError):  # the drop of the block is announced in a call that is refused
        comm.empty(3 + odd, "int8")
    assert comm.empty(1 << 18, "float64").ctypes.data == where


@pytest.mark.parametrize("program", [symmetric, symmetric_refused], ids=["good", "refused"])
def test_symmetric_memory(executor, program):
    for size in (1, 3) if program is symmetric else (3,):
        executor.run(size, program)
