"""The `shared` executor: all collectives in each way of reaching memory, and what it does when ranks fail."""

import os
import sys
import threading

import numpy
import pytest

import gpucoll as gc
from commands import KEEPER
from gpucoll.executors.shared import neighbours
from grids import in_pairs, sampled
from programs import MOVEMENTS, REDUCTIONS, algorithms, share_of
from shared_programs import (
    WAYS,
    a_long_mixture,
    async_and_grouped,
    in_way,
    many_broadcasts,
    on_several_nodes,
    read_only_root,
    refused_on_several_nodes,
    same_bits_as_messages,
)

SHARED = {"GPUCOLL_EXECUTOR": "shared"}
SIZES = (1, 2, 3, 4, 5, 7, 8)


def grid(collectives, seed, keep):
    """Every two values of parameters together, but not all of their combinations: those would take an hour."""
    whole = [(way, collective, algorithm, size) for way in WAYS for collective in collectives
             for algorithm in algorithms(collective) if algorithm != "native" for size in SIZES]
    return sampled(in_pairs(whole, seed), keep, seed)


@pytest.mark.parametrize(("way", "collective", "algorithm", "size"), grid(REDUCTIONS, 12, keep=24))
def test_every_op_and_dtype(ranks, way, collective, algorithm, size):
    ranks(in_way, size, way, "every_op_and_dtype", collective, algorithm, share_of(size), timeout=120, env=SHARED)


@pytest.mark.parametrize(("way", "collective", "algorithm", "size"), grid(REDUCTIONS, 13, keep=24))
def test_every_count(ranks, way, collective, algorithm, size):
    ranks(in_way, size, way, "every_count", collective, algorithm, timeout=120, env=SHARED)


@pytest.mark.parametrize(("way", "collective", "algorithm", "size"), grid(MOVEMENTS, 14, keep=24))
def test_copies(ranks, way, collective, algorithm, size):
    ranks(in_way, size, way, "copies", collective, algorithm, timeout=120, env=SHARED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 5])
def test_in_place_on_some_ranks_only(ranks, way, size):
    for algorithm in algorithms("all_reduce"):
        if algorithm != "native":
            found = ranks(in_way, size, way, "in_place_here_and_there", algorithm, env=SHARED)
            assert len(set(found)) == 1


@pytest.mark.parametrize("body", ["shapes_and_strides", "special_values", "carriers"])
def test_other_arrays(ranks, body):
    for algorithm in ("one_shot", "two_shot", "ring", "auto"):
        ranks(in_way, 4, "copied", body, algorithm, env=SHARED)
    ranks(in_way, 3, "copied", "shapes_of_the_others", env=SHARED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce"])
def test_many_segments(ranks, way, collective):
    for algorithm in algorithms(collective):
        if algorithm not in ("native", "auto"):
            ranks(in_way, 4, way, "segmented", collective, algorithm, timeout=120, env=SHARED)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("way", "size"), [("small", 3), ("copied", 4), ("mapped", 5), ("shared", 8)])
def test_the_bits_are_those_of_the_mpi_executor(ranks, way, size, dtype):
    ranks(same_bits_as_messages, size, way, dtype, timeout=120)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_calls_one_after_the_other(ranks, way, size):
    ranks(a_long_mixture, size, way, 10 * size, timeout=120)


@pytest.mark.parametrize("count", [7, 5000])
def test_a_root_that_runs_ahead(ranks, count):
    ranks(many_broadcasts, 4, count)


def test_behind_a_work_in_a_group_and_in_a_part(ranks):
    ranks(async_and_grouped, 4)


@pytest.mark.parametrize("count", [7, 1 << 20])
def test_what_a_root_reads_it_does_not_write(ranks, count):
    ranks(read_only_root, 3, count)


def test_several_nodes_are_refused(ranks):
    assert ranks(refused_on_several_nodes, 4) == ["GC-EXECUTOR"] * 4


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("way", ["small", "copied"])
def test_several_nodes_send_messages_and_read_memory(ranks, way, size):
    assert all(ranks(on_several_nodes, size, way, timeout=120))


def on_a_thread(comm):
    with comm:
        large = numpy.full(3 << 20, comm.rank, numpy.float32)
        assert (comm.all_reduce(large, algorithm="two_shot") == sum(range(comm.size))).all()
        for algorithm in gc.algorithms("all_reduce", size=comm.size):
            assert comm.all_reduce(numpy.array([comm.rank]), algorithm=algorithm)[0] == sum(range(comm.size))
        blocks = comm.all_to_all_v([numpy.full(comm.rank + 1, peer) for peer in range(comm.size)])
        assert [len(block) for block in blocks] == [rank + 1 for rank in range(comm.size)]
        done.append(comm.rank)


done: list[int] = []


def test_threads():
    done.clear()
    threads = [threading.Thread(target=on_a_thread, args=(comm,))
               for comm in gc.init_local(4, executor="shared", timeout=30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1, 2, 3]


LATE = """
import sys, time, numpy, gpucoll as gc
comm = gc.init(timeout=0.5, executor="shared")
mine = numpy.ones(3 << 20)
comm.all_reduce(mine, algorithm=sys.argv[1])
if comm.rank == 0:
    x = numpy.ones(3 << 20)
    try:
        comm.all_reduce(x, algorithm=sys.argv[1])
    except gc.CollectiveTimeout:
        comm.close()
        del comm, x
        canaries = [numpy.full(3 << 20, 7.0) for _ in range(4)]
        sys.stdout.write("late\\n")
        sys.stdout.flush()
        give_up = time.monotonic() + 2
        while time.monotonic() < give_up:
            assert all((canary == 7).all() for canary in canaries), "written after the failure"
else:
    time.sleep(1)  # late on purpose: the other rank's deadline has passed
    try:
        comm.all_reduce(mine, algorithm=sys.argv[1])
        sys.stdout.write("went on without the other rank\\n")
    except gc.GpucollError:
        pass
    comm.close()
"""


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "ring"])
def test_a_late_rank_writes_nowhere(mpiexec, algorithm):
    job = mpiexec(2, sys.executable, "-c", LATE, algorithm, timeout=60)
    assert job.stdout == "late\n", job.stderr
    assert job.returncode == 0, job.stderr


KILLED = """
import os, signal, sys, time, numpy, gpucoll as gc
comm = gc.init(timeout=2.0, executor="shared")
x = comm.empty(1 << 20, "float32") if sys.argv[1] == "symmetric" else numpy.empty(1 << 22, "float32")
x[:] = 1
comm.all_reduce(x, out=x)
if comm.rank == 1:
    signal.setitimer(signal.ITIMER_REAL, 0.2)  # its default action ends the process, wherever it is
try:
    while True:
        comm.all_reduce(x, op="max", out=x)
except (gc.CollectiveTimeout, gc.BackendError, gc.RankFailedError) as error:
    with open(os.path.join(sys.argv[2], str(comm.rank)), "w") as file:
        file.write(error.code)
    give_up = time.monotonic() + 20  # the launcher ends all with the first that leaves
    while len(os.listdir(sys.argv[2])) < 2 and time.monotonic() < give_up:
        time.sleep(0.01)
    os._exit(0)
"""


@pytest.mark.parametrize("kind", ["symmetric", "ordinary"])
def test_a_rank_that_dies_is_missed_at_the_deadline_and_leaves_nothing(mpiexec, tmp_path, kind):
    before = set(os.listdir("/dev/shm"))
    job = mpiexec(3, sys.executable, "-c", KEEPER, KILLED, kind, tmp_path, timeout=90)
    assert sorted(os.listdir(tmp_path)) == ["0", "2"], job.stderr
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "gpucoll" in name]


def test_other_processors_have_fences(monkeypatch, ranks):
    monkeypatch.setattr(neighbours.platform, "machine", lambda: "x86_64")
    assert neighbours.make_fence(threads=False) is None
    monkeypatch.setattr(neighbours.platform, "machine", lambda: "aarch64")
    assert neighbours.make_fence(threads=True) is None
    assert all(ranks(with_fences, 3))


def with_fences(mpi):
    """As on another processor: every mark is told after a fence, and every wait followed by one."""
    from unittest import mock

    with mock.patch.object(neighbours.platform, "machine", return_value="aarch64"), \
            gc.Communicator.from_mpi(mpi, timeout=60, executor="shared") as comm:
        assert neighbours.make_fence(threads=False) is not None
        return comm.all_reduce(numpy.ones(3), algorithm="ring")[0] == mpi.size
