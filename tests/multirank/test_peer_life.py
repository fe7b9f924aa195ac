"""The `peer` executor on the emulated device: memory that ranks share, planned calls, threads, ranks that die or are
late."""

import os
import sys
import time
from pathlib import Path
from unittest import mock

import numpy
import pytest

import gpucoll as gc
import oracle
import peer_made
import programs
import thread_ranks
from commands import KEEPER
from multirank import test_symmetric

pytestmark = [pytest.mark.emulated, pytest.mark.kernel]

PEER = {"GPUCOLL_DEVICE": "emulated", "GPUCOLL_EXECUTOR": "peer"}
LARGE = 1_100_000  # elements of four bytes: more than are staged at a time


@pytest.fixture(scope="module")
def kernels(emulated_kernels):
    """Nobody makes kernels while ranks die."""
    peer_made.make([("sum", "float32"), ("max", "float32")])


@pytest.fixture
def ranks(rank_pool, kernels):
    """`ranks(program, size, *args)` on the emulated device, by this executor."""
    def run(program, size, *arguments):
        return rank_pool.run(program, size, *arguments, env=PEER, timeout=100)

    return run


# ---------------------------------------------------------------- symmetric memory


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("program", [test_symmetric.arrays, test_symmetric.used_again])
def test_symmetric_memory(ranks, program, size):
    ranks(program, size)


def test_wrong_arguments(ranks):
    ranks(test_symmetric.errors, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_no_memory(ranks, size):
    ranks(test_symmetric.too_much, size)


def staged(comm):
    """What was ever staged in this rank's slab."""
    meeting = comm._gpus["emulated"].executors[0]._meeting
    first = meeting.room.offsets["staging"]
    return meeting.memory.slab.row[first:first + meeting.room.staging]


def shared(comm):
    """Results are right wherever the ranks' arrays are, and nothing is staged where all pass the same ones."""
    x, y, other = (comm.empty(LARGE, "float32", device=device) for device in (None, "cpu", None))
    everyone = [numpy.arange(LARGE, dtype=numpy.float32) % 1000 + rank for rank in range(comm.size)]
    odd = comm.rank % 2
    for number, (source, target) in enumerate((
            (x, y), (y, y), (x[5:], y[5:]), (x, y if odd else other), (other if odd else x, other if odd else x),
            (numpy.empty_like(x) if odd else x, y), (x, numpy.empty_like(x)))):
        for algorithm in ("two_shot", "one_shot"):
            source[...] = everyone[comm.rank][:source.size]
            found = comm.all_reduce(source, out=target, algorithm=algorithm)
            assert (found == sum(everyone)[:source.size]).all(), (number, algorithm)
            if number == 0 or (number < 3 and algorithm == "two_shot"):
                assert not staged(comm).any() or number, algorithm
    return bool(staged(comm).any())


def shared_between_processes(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        return shared(comm)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_arrays_that_all_ranks_pass_are_read_where_they_are(ranks, size):
    assert ranks(shared_between_processes, size) == [True] * size


def no_gpu(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=20) as comm:
        if comm.device is None:
            with pytest.raises(gc.BackendError, match="no GPU"):
                comm.empty(3, "float32", device="cuda")
        return comm.all_reduce(numpy.ones(3))[0]


def test_memory_of_a_gpu_that_is_not_there(ranks):
    assert ranks(no_gpu, 2) == [2, 2]


def short_of_memory(mpi):
    """One rank has no more memory: no rank gets any, and then all of them do."""
    from gpucoll.executors.peer.fibers import FiberMemory

    with gc.Communicator.from_mpi(mpi, timeout=20) as comm:
        comm.empty(3, "int8")
        with mock.patch.object(FiberMemory, "new_slab", side_effect=OSError("none left")) if comm.rank else \
                mock.patch.object(FiberMemory, "__doc__", ""):
            heap = comm._heaps["emulated"]
            make, heap._make = heap._make, comm._gpus["emulated"].executors[0]._meeting.memory.new_slab
            with pytest.raises(gc.BackendError if comm.rank else gc.PeerError):
                comm.empty(1 << 27, "uint8")
            heap._make = make
        x = comm.empty((1 << 26) + 5000, "uint8")
        x[:] = 1
        return int(comm.all_reduce(x[-5000:], algorithm="two_shot").max()), staged(comm).any()


def test_where_one_rank_has_no_memory_no_rank_gets_any(ranks):
    for largest, was_staged in ranks(short_of_memory, 3):
        assert largest == 3
        assert was_staged  # the result was


# ---------------------------------------------------------------- planned calls


def planned(mpi):
    """Calls of a plan allocate nothing on the device."""
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        for collective, algorithm in (("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("all_reduce", "ring"),
                                      ("all_gather", "bruck"), ("broadcast", "chain"), ("reduce_scatter", "circulant")):
            x = numpy.ones((comm.size, 3000))
            out = {} if collective == "broadcast" else {"out": numpy.empty(
                {"all_gather": (comm.size, comm.size, 3000), "reduce_scatter": (3000,)}.get(collective, x.shape))}
            plan = comm.plan(collective, x, algorithm=algorithm, **out)
            assert plan.executor == "peer"
            plan()
            device = comm._gpus["emulated"].device
            with mock.patch.object(device, "empty", wraps=device.empty) as allocated:
                for number in range(2, 5):
                    x[...] = number
                    found = plan()
                    expected = number * (comm.size if "reduce" in collective else 1)
                    assert (found == expected).all(), (collective, algorithm)
                assert allocated.call_count == 0, (collective, algorithm)
        return True


@pytest.mark.parametrize("size", [2, 3])
def test_planned_calls_allocate_nothing(ranks, size):
    assert all(ranks(planned, size))


# ---------------------------------------------------------------- threads


def on_threads(size, program):
    """Run `program(comm)` on a thread for each rank, by this executor."""
    return thread_ranks.on_threads(size, program, timeout=60, executor="peer")


@pytest.fixture
def emulated(monkeypatch, emulated_kernels):
    monkeypatch.setenv("GPUCOLL_DEVICE", "emulated")


THREADED = [("every_count", "all_reduce", "two_shot"), ("every_count", "reduce_scatter", "ring"),
            ("copies", "all_to_all", "direct"), ("copies", "all_gather_v", "ring"), ("shapes_and_strides", "one_shot"),
            ("special_values", "ring"), ("carriers", "two_shot"), ("in_place_here_and_there", "auto")]


@pytest.mark.parametrize("body", THREADED, ids="-".join)
@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_threads(emulated, body, size):
    name, *arguments = body
    on_threads(size, lambda comm: getattr(programs, name).__wrapped__(comm, *arguments))


def test_ops_and_dtypes_on_threads(emulated):
    def program(comm):
        for op, name in (("min", "bfloat16"), ("land", "int8"), ("avg", "complex64"), ("prod", "uint16")):
            assert oracle.legal(op, name)
            programs.reduction(comm, "all_reduce", "ring", op, name, 13)

    on_threads(3, program)


def test_threads_share_memory(emulated):
    assert on_threads(3, shared) == [True] * 3


# ---------------------------------------------------------------- ranks that are late, or die

LATE = """
import sys, time, numpy, gpucoll as gc
comm = gc.init(timeout=1.0)
x = comm.empty(30_000, "float32") if sys.argv[2] == "symmetric" else numpy.empty(30_000, "float32")
x[:] = 1
assert (comm.all_reduce(x, algorithm=sys.argv[1]) == comm.size).all()
if comm.rank == 0:
    try:
        comm.all_reduce(x, out=x, algorithm=sys.argv[1])
    except gc.CollectiveTimeout as error:
        try:
            comm.all_reduce(x, algorithm=sys.argv[1])
        except gc.RevokedError:
            sys.stdout.write("late\\n")
            sys.stdout.flush()
else:
    time.sleep(3)  # late on purpose: the other rank's deadline has passed
    try:
        comm.all_reduce(x, algorithm=sys.argv[1])
    except gc.GpucollError:
        pass
comm.close()
"""


@pytest.mark.parametrize(("algorithm", "kind"), [("one_shot", "ordinary"), ("two_shot", "symmetric"),
                                                 ("ring", "ordinary")])
def test_a_rank_that_is_late_is_missed_at_the_deadline(mpiexec, kernels, algorithm, kind):
    job = mpiexec(2, sys.executable, "-c", LATE, algorithm, kind, timeout=60, env=PEER)
    assert job.stdout == "late\n", job.stderr
    assert job.returncode == 0, job.stderr




KILLED = """
import os, signal, sys, numpy, gpucoll as gc
comm = gc.init(timeout=2.0)
x = comm.empty(30_000, "float32") if sys.argv[2] == "symmetric" else numpy.empty(30_000, "float32")
x[:] = 1
comm.all_reduce(x, op="max", out=x, algorithm=sys.argv[1])
if comm.rank == 1:
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # its default action ends the process, wherever it is
try:
    while True:
        comm.all_reduce(x, op="max", out=x, algorithm=sys.argv[1])
except (gc.CollectiveTimeout, gc.BackendError) as error:
    with open(os.path.join(sys.argv[3], f"{comm.rank} {error.code} {os.getpid()}"), "w"):
        os._exit(0)  # MPI's own end would wait for the dead one
"""


def still_running(processes, seconds=10.0):
    """Which of these processes do not end within so many seconds; one that nobody has waited for has ended."""
    give_up = time.monotonic() + seconds
    while (found := [process for process in processes if is_running(process)]) and time.monotonic() < give_up:
        time.sleep(0.01)
    return found


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("algorithm", "kind"), [("two_shot", "symmetric"), ("one_shot", "ordinary"),
                                                 ("ring", "ordinary")])
def test_a_rank_that_dies_is_missed_and_leaves_nothing(mpiexec, kernels, tmp_path, algorithm, kind):
    before = set(os.listdir("/dev/shm"))
    job = mpiexec(3, sys.executable, "-c", KEEPER, KILLED, algorithm, kind, tmp_path, timeout=90, env=PEER)
    told = [name.split() for name in sorted(os.listdir(tmp_path))]
    assert [rank for rank, _, _ in told] == ["0", "2"], job.stdout + job.stderr
    assert {code for _, code, _ in told} <= {"GC-TIMEOUT", "GC-BACKEND"}
    assert not still_running([process for _, _, process in told])
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "gpucoll" in name]
