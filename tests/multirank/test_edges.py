"""Edge cases: refused calls leave nothing behind, failures of one rank reach all ranks, closing frees everything."""

import contextlib
import ctypes
import errno
import os
import threading
import time
from gc import collect
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.executors.engine import neighbours
from harness.pace import Patience, seconds
from harness.thread_ranks import on_threads
from programs.collectives import check, program

EMULATED = {"GPUCOLL_DEVICE": "emulated"}


def refusal(call):
    """Return the type, the code and the culprits of the error raised by a call."""
    with pytest.raises(gc.GpucollError) as error:
        call()
    return type(error.value).__name__, error.value.code, error.value.ranks


@program
def odd_arrays(comm):
    """Inputs and outputs may begin at any byte address, and the array of a root may be read-only."""
    x, out = (numpy.frombuffer(bytearray(401), numpy.float32, 100, 1) for _ in range(2))
    x[...] = numpy.arange(100) + comm.rank
    for algorithm in ("auto", "ring", "one_shot"):
        assert comm.all_reduce(x, out, algorithm=algorithm) is out
        check(out.copy(), numpy.float32(comm.size * numpy.arange(100) + sum(range(comm.size))))
    for algorithm in gc.algorithms("broadcast", size=comm.size):
        for count in (1, 5000):
            x = numpy.arange(count) + 100 * comm.rank
            x.flags.writeable = comm.rank != 1
            check(comm.broadcast(x, numpy.int64(1), algorithm=algorithm), numpy.arange(count) + 100)


@pytest.mark.emulated
def test_calls_on_a_device(ranks, emulated_kernels):
    ranks(odd_arrays, 3, env=EMULATED)


@pytest.mark.parametrize("executor", ["mpi", "shared"])
def test_odd_arrays_on_the_host(ranks, executor):
    ranks(odd_arrays, 3, env={"GPUCOLL_EXECUTOR": executor})


@program
def grouped(comm):
    """In a group, messages of two ranks with one tag match in the order of the calls, of whatever kind."""
    other, outs = 1 - comm.rank, [numpy.zeros(1) for _ in range(3)]
    with comm.group():
        comm.recv(outs[0], other)
        comm.send(numpy.array([1.0]), other)
        comm.sendrecv(numpy.array([2.0]), outs[1], other, other)
        comm.recv(outs[2], other)
        comm.send(numpy.array([3.0]), other)
    assert numpy.concatenate(outs).tolist() == [1, 2, 3]
    for call in (lambda: comm.send(outs[0], None), lambda: comm.recv(outs[0], None),
                 lambda: comm.sendrecv(outs[0], outs[1], other, None)):
        assert refusal(call) == ("ArgumentError", "GC-ROOT", ())


def test_messages_of_a_group_keep_their_order(ranks):
    ranks(grouped, 2)


@program
def told(comm):
    """A wrong argument or a lack of memory on rank 1 alone is an error of all ranks; the communicator stays usable."""
    last = comm.rank == 1
    calls = {"GC-SPLIT": lambda: comm.split(0, 1 << 31 if last else 0),
             "GC-DTYPE": lambda: comm.all_gather_v(numpy.zeros(3, [("\u00e9" * 300, "f4")] if last else "f4"))}
    for code, call in calls.items():
        assert refusal(call) == (("ArgumentError" if code == "GC-SPLIT" else "DtypeError", code, ()) if last else
                                 ("PeerError", "GC-PEER", (1,)))
    counts = [3, 1, *[1] * (comm.size - 2)] if last else [1, 3, *[1] * (comm.size - 2)]
    kind, code, _ = refusal(lambda: comm.reduce_scatter_v(numpy.zeros(comm.size + 2), counts))
    assert (kind, code) == ("MismatchError", "GC-COUNTS")
    for identity in (None, "x"):
        assert refusal(lambda identity=identity: gc.elementwise_op("a + b", identity))[1] == "GC-OP"
    ints, wide = numpy.ones(2, "i4"), gc.elementwise_op("a + b", 1 << 70)
    assert refusal(lambda: comm.exscan(ints, op=wide))[1] == "GC-OP-DTYPE"
    bytes_, large = numpy.ones(2, "u1"), gc.elementwise_op("a + b + (1 << 10)")
    assert refusal(lambda: comm.all_reduce(bytes_, op=large))[1] == "GC-OP-DTYPE"
    assert refusal(lambda: comm.empty((1 << 40,), "f8"))[1] == "GC-MEMORY"
    assert refusal(lambda: comm.empty((1 << 31, 1 << 31, 0), "f4"))[1] == "GC-SHAPE"
    denied = neighbours.Segment
    if last:
        neighbours.Segment = Denied
    try:
        assert refusal(lambda: comm.split(0)) == ("BackendError", "GC-MEMORY", (1,))
    finally:
        neighbours.Segment = denied
    assert comm.all_reduce(numpy.ones(1))[0] == comm.size


class Denied(neighbours.Segment):
    """Shared memory refused to a process that may open no more files."""

    def __init__(self, nbytes, *, shared=True):
        if shared:
            raise OSError(24, "Too many open files")
        super().__init__(nbytes, shared=False)


def test_what_one_rank_is_denied_all_are_told(ranks):
    ranks(told, 3)


@contextlib.contextmanager
def full_on(is_full):
    """Refuse all memory that would be reserved."""
    with mock.patch("os.posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")) \
            if is_full else contextlib.nullcontext():
        yield


@program
def filled(comm):
    """Memory that the system refuses to rank 1 is an error of all ranks; after `empty` the communicator stays usable.

    The memory of an array in `empty`, of a workspace and of a staging buffer is reserved before its first use.
    """
    assert comm.all_reduce(comm.empty((8,), "f8")).size == 8
    with full_on(comm.rank == 1):
        told = refusal(lambda: comm.empty((1 << 20,), "f8"))
    assert told == (("BackendError", "GC-MEMORY", ()) if comm.rank == 1 else ("PeerError", "GC-PEER", (1,)))
    for lengths in ((1000,), (1000, 1 << 20)):
        part = comm.split(0)
        for length in lengths[:-1]:
            part.all_gather(numpy.ones(length))
        with full_on(comm.rank == 1), pytest.raises(gc.GpucollError, match=r"GC-MEMORY.*No space left on device"):
            part.all_gather(numpy.ones(lengths[-1]))
        part.close()
    x = comm.empty((1 << 20,), "f8")
    x[:] = comm.rank
    assert comm.all_reduce(x)[-1] == sum(range(comm.size))


def test_memory_that_is_refused_is_an_error_of_all_ranks(ranks):
    ranks(filled, 3)


@pytest.mark.parametrize("name", ["__array_interface__", "__cuda_array_interface__", "__dlpack__", "__dlpack_device__"])
def test_an_object_whose_properties_raise(name):
    x = type("Raising", (), {name: property(lambda _: {}[name])})()
    (comm,) = gc.init_local(1)
    for call in (lambda: comm.all_reduce(x), lambda: comm.all_reduce(numpy.ones(1), x), lambda: comm.send(x, 0)):
        assert refusal(call)[1] == "GC-ARRAY"


def unlike(mpi):
    os.environ["GPUCOLL_EXECUTOR"] = ("shared", "mpi", "shared")[mpi.rank]
    return refusal(lambda: gc.Communicator.from_mpi(mpi, timeout=seconds(60)))


def test_options_unlike_on_ranks_are_refused_by_all(ranks):
    assert ranks(unlike, 3, env={"GPUCOLL_EXECUTOR": None}) == [("UsageError", "GC-OPTION", (1,))] * 3


@program
def forked(comm):
    """Calls of a forked child are refused; the end of the child does not end calls of the parent."""
    work, (reader, writer) = comm.all_reduce(numpy.ones(3), algorithm="ring", async_op=True), os.pipe()
    again = comm.plan("all_reduce", numpy.ones(2))
    again()
    child = os.fork()
    if child == 0:
        codes = []
        for call in (lambda: comm.all_reduce(numpy.ones(2)), again, lambda: gc.Communicator.from_mpi(comm.mpi)):
            try:
                call()
            except gc.UsageError as error:
                codes.append(error.code)
        comm.close()
        os.write(writer, repr(codes).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert eval(os.read(reader, 1000)) == ["GC-FORK"] * 3
    os.close(reader)
    os.close(writer)
    assert (work.wait() == comm.size).all()
    assert (again() == comm.size).all()


def test_a_forks_child_has_no_part(ranks):
    ranks(forked, 2)


def test_a_second_thread_in_a_call_is_refused():
    one, other = gc.init_local(2, timeout=seconds(10))
    errors = []

    def wait_in_vain():
        with pytest.raises(gc.GpucollError) as error:
            one.barrier()
        errors.append(error.value.code)

    first = threading.Thread(target=wait_in_vain)
    first.start()
    while one._core.waits._owner is None:
        pass
    assert refusal(one.barrier) == ("UsageError", "GC-THREAD", ())
    first.join()
    assert errors == ["GC-THREAD"]
    assert refusal(lambda: one.all_reduce(numpy.ones(1)))[1] == "GC-REVOKED"
    other.close()


def large(mpi, algorithm):
    """Move more bytes than 31 bits can count."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(200)) as comm:
        count = int(2.1 * (1 << 30)) + 3
        x, some = numpy.zeros(count, numpy.uint8), [0, 1 << 20, count - 1]
        x[some] = comm.rank + 1
        if algorithm == "send":
            comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        else:
            comm.all_reduce(x, out=x, algorithm=algorithm)
        assert x[some].tolist() == [1 if algorithm == "send" else 3] * 3
        assert numpy.count_nonzero(x) == 3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "star", "send"])
def test_arrays_over_two_gibibytes(ranks, algorithm):
    ranks(large, 2, algorithm, timeout=seconds(220))


COLLECTING = threading.Lock()


def held():
    """Return the memory pages, descriptors, mappings and threads of this process, after trimming malloc's reserves."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/maps") as maps, open("/proc/self/statm") as memory:
        pages = int(memory.read().split()[1])
        return pages, len(os.listdir("/proc/self/fd")), len(list(maps)), threading.active_count()


@program
def gone(comm, count, is_closed):
    """Making, using, and closing or dropping many communicators does not grow the resources held by the process."""
    def make(times):
        for _ in range(times):
            parts = [comm.split(comm.rank % 2, -comm.rank), comm.split(0 if comm.rank == 0 else None)]
            parts += [gc.Communicator.from_mpi(comm.mpi, timeout=seconds(60))] if comm.mpi else []
            for part in filter(None, parts):
                part.all_reduce(part.zeros(3, "float32", device="cpu"))
                part.all_gather_v(numpy.ones(part.rank))
                part.all_reduce(numpy.ones(3), algorithm="ring")
                part.all_reduce(numpy.ones(3), algorithm="ring", async_op=True).wait()
                if is_closed:
                    part.close()
            del part, parts
        comm.barrier()  # every thread has dropped its communicator
        with COLLECTING:  # `collect` returns at once while another thread collects
            collect()

    make(20)
    before = held()
    make(count)
    patience = Patience(20)  # a progress thread ends some time after its communicator
    while any(more >= few + count for few, more in zip(before[1:], held()[1:], strict=True)) and patience.left():
        time.sleep(1e-3)
    after = held()
    assert all(more < few + count for few, more in zip(before[1:], after[1:], strict=True)), (before, after)
    if is_closed or comm.mpi is None:  # MPI's part of a dropped communicator stays
        made = 3 * count * (comm.size if comm.mpi is None else 1)  # this process has all ranks, or one
        assert after[0] < before[0] + made + 1000, (before, after)  # less than a page each, plus 4 MB


WAYS = [pytest.param({}, id="shared"), pytest.param({"GPUCOLL_EXECUTOR": "mpi"}, id="mpi", marks=pytest.mark.slow),
        pytest.param(EMULATED, id="emulated", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("count", "is_closed"), [
    pytest.param(20, True, id="closed"), pytest.param(700, True, id="closed-700", marks=pytest.mark.nightly),
    pytest.param(20, False, id="dropped", marks=pytest.mark.slow)])
@pytest.mark.parametrize("env", WAYS)
def test_what_is_closed_or_dropped_is_gone(ranks, count, is_closed, env, request):
    """A dropped communicator frees files, mappings and threads; MPI's part stays, since MPI frees collectively."""
    if env is EMULATED:
        request.getfixturevalue("emulated_kernels")
    ranks(gone, 3, count, is_closed, env=env, timeout=1200)


@pytest.mark.parametrize("is_closed", [pytest.param(True, id="closed", marks=pytest.mark.slow),
                                       pytest.param(False, id="dropped")])
@pytest.mark.parametrize("count", [20, pytest.param(700, marks=pytest.mark.nightly)])
def test_what_threads_close_is_gone(count, is_closed):
    on_threads(3, gone, count, is_closed)
