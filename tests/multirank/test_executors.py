"""Each executor once between processes: what threads have not, which is MPI itself and memory that the system reaches.

What executors do beside that is held by tests/contract, on threads.
"""

import contextlib
import itertools
import subprocess
import sys
from unittest import mock

import numpy
import pytest

import gpucoll as gc
import mixture
import oracle
import programs
from gpucoll.arrays.segments import Copier
from gpucoll.collectives import COLLECTIVES
from gpucoll.dtypes import row_of
from gpucoll.executors import Task
from gpucoll.executors.shared import SharedExecutor, calls, neighbours
from gpucoll.links import MpiLink
from grids import generator
from pace import seconds
from programs import MOVEMENTS, REDUCTIONS, program

ALL = (*REDUCTIONS, *MOVEMENTS)
NO_NATIVE = {"GPUCOLL_ALGO": "^native"}
EXECUTORS = {"mpi": "cpu", "shared": "cpu", "native": "cpu", "nccl": "emulated", "peer": "emulated"}


@program
def every_collective(comm, calls):
    mixture.called(comm, calls)


@pytest.mark.parametrize("name", EXECUTORS)
def test_every_collective(request, ranks, name):
    env = {"GPUCOLL_EXECUTOR": name}
    if EXECUTORS[name] == "emulated":
        request.getfixturevalue("emulated_kernels")
        env["GPUCOLL_DEVICE"] = "emulated"
    random = generator(f"processes/{name}")
    drawn = [(collective, "native" if name == "native" else random.choice(
        [one for one in programs.algorithms(collective) if one != "native"]), "sum", "int32", count, chance)
        for collective in ALL for count, chance in ((random.choice((0, 7)), 0.0), (random.choice((5000, 70001)), 0.9))]
    ranks(every_collective, 3, drawn, env=env, timeout=seconds(100))


def test_native_collectives_on_all_ops_and_dtypes(ranks_anywhere):
    for collective in REDUCTIONS:
        ranks_anywhere(programs.every_op_and_dtype, 4, collective, "native", 1, timeout=seconds(100))
    for body in (programs.special_values, programs.shapes_and_strides):
        ranks_anywhere(body, 3, "native")


def test_threads_start_no_mpi():
    script = ("import sys, numpy, gpucoll as gc; comm, = gc.init_local(1); comm.all_reduce(numpy.ones(2)); "
              "comm.close(); print('mpi4py.MPI' in sys.modules)")
    job = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert job.stdout == "False\n"


# ---------------------------------------------------------------- memory that the system reaches

NOTHING = Task("barrier", "auto", None, None, None, row_of("uint8"))


@contextlib.contextmanager
def large(*, mapped):
    """Every call as a large one, whose arrays the system copies, or where it forbids that, which are mapped."""
    with contextlib.ExitStack() as stack:
        for size in ("TINY", "SMALL", "COPIED"):
            stack.enter_context(mock.patch.object(calls, size, -1))
        if mapped:
            stack.enter_context(mock.patch.object(Copier, "read", side_effect=PermissionError("not permitted")))
        yield


def over_memory(mpi, mapped):
    """The bits of messages, by memory of other processes; symmetric memory is read where it is."""
    with large(mapped=mapped), gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor="shared") as here, \
            gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor="mpi") as there:
        assert programs.rounded(here, "float32") == programs.rounded(there, "float32")
        here.barrier()
        with mock.patch.object(Copier, "read", side_effect=AssertionError):
            for algorithm in ("two_shot", "one_shot", "ring"):
                x = here.zeros(1 << 21, "float32")[5:]
                x += here.rank + 1
                assert (here.all_reduce(x, out=x, algorithm=algorithm) == sum(range(here.size + 1))).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_memory_of_other_processes(ranks, mapped):
    ranks(over_memory, 3, mapped, timeout=seconds(100))


def with_fences(mpi):
    """As on another processor, by MPI's own fence."""
    with mock.patch.object(neighbours.platform, "machine", return_value="aarch64"), \
            gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor="shared") as comm:
        assert neighbours.make_fence(threads=False) is not None
        return comm.all_reduce(numpy.ones(3), algorithm="ring")[0] == mpi.size


def test_fences(ranks):
    assert all(ranks(with_fences, 3))


def on_two_nodes(mpi, executor):
    """A communicator whose ranks are told that they are on two nodes in turn."""
    link = MpiLink(mpi, 30.0)
    link.place = link.place._replace(nodes=tuple(rank % 2 for rank in range(mpi.size)))
    with mock.patch.object(MpiLink, "of", return_value=link):
        return gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor=executor)


def several_nodes(mpi):
    """The hybrid executor reads memory within a node: the bits are those of messages alone; shared is refused."""
    with on_two_nodes(mpi, "shared") as comm, pytest.raises(gc.ArgumentError) as refused:
        comm.all_reduce(numpy.ones(3), algorithm="ring")
    assert refused.value.code == "GC-EXECUTOR"
    for size in (calls.TINY, -1):
        with mock.patch.object(calls, "TINY", size), on_two_nodes(mpi, None) as here, \
                on_two_nodes(mpi, "mpi") as there:
            for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "scan", "broadcast"):
                for algorithm in gc.algorithms(collective, size=mpi.size):
                    shape = (mpi.size, 703) if collective in ("reduce_scatter", "all_to_all") else (2111,)
                    xs = [numpy.random.default_rng(mpi.rank).standard_normal(shape) for _ in range(2)]
                    found, wanted = (getattr(comm, collective)(x, algorithm=algorithm)
                                     for comm, x in zip((here, there), xs, strict=True))
                    assert found.tobytes() == wanted.tobytes(), (collective, algorithm)
            assert isinstance(here._host.executors[0], SharedExecutor)
            assert [one.name for one in here._host.executors] == ["hybrid", "mpi", "native"]
            assert here._host.executors[0].serves(NOTHING) is None


@pytest.mark.parametrize("size", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_several_nodes_send_messages_and_read_memory(ranks, size):
    ranks(several_nodes, size, timeout=seconds(100))


LATE = """
import sys, numpy, gpucoll as gc
comm = gc.init(executor="shared")
mine = numpy.ones(3 << 20)
comm.all_reduce(mine, algorithm=sys.argv[1])
if comm.rank == 0:
    comm._waits.timeout = 0.5
    x = numpy.ones(3 << 20)
    try:
        comm.all_reduce(x, algorithm=sys.argv[1])
    except gc.CollectiveTimeout:
        comm.mpi.Send(numpy.ones(1), 1)  # only now does the other rank come
        comm.close()
        del comm, x
        canaries = [numpy.full(3 << 20, 7.0) for _ in range(4)]
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()  # the other rank has tried
        assert all((canary == 7).all() for canary in canaries), "written after the failure"
        sys.stdout.write("late\\n")
else:
    from mpi4py import MPI
    comm.mpi.Recv(numpy.empty(1), 0)
    try:
        comm.all_reduce(mine, algorithm=sys.argv[1])
        sys.stdout.write("went on without the other rank\\n")
    except gc.GpucollError:
        pass
    comm.close()
    MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("algorithm", ["two_shot", *(pytest.param(name, marks=pytest.mark.slow)
                                                     for name in ("one_shot", "ring"))])
def test_a_late_rank_writes_nowhere(mpiexec, algorithm):
    job = mpiexec(2, sys.executable, "-c", LATE, algorithm, timeout=seconds(60))
    assert job.stdout == "late\n", job.stderr
    assert job.returncode == 0, job.stderr


# ---------------------------------------------------------------- no collective depends on MPI's own


def choices(mpi):
    """What could be chosen of every collective at many sizes."""
    with gc.Communicator.from_mpi(mpi) as comm:
        found = [comm.explain(collective, nbytes) for collective in COLLECTIVES for nbytes in (0, 1 << 16, 1 << 26)]
    return {row["algorithm"] for one in found for row in one.candidates}


def test_excluded_it_is_no_candidate(ranks):
    assert all("native" not in names for names in ranks(choices, 4, env=NO_NATIVE))
    assert all("native" in names for names in ranks(choices, 4))  # it is there to be excluded


@program
def uneven(comm, collective, big):
    """Blocks of very different lengths: what a rank has says nothing of what the others have."""
    last = comm.size - 1
    whole = [[numpy.full(big if (source, target) == (last, last) else 1, 100 * source + target)
              for target in range(comm.size)] for source in range(comm.size)]
    mine = whole[comm.rank]
    if collective == "all_to_all_v":
        found, expected = comm.all_to_all_v(mine), [row[comm.rank] for row in whole]
    elif collective == "scatter_v":
        found, expected = [comm.scatter_v(mine if comm.rank == last else None, last)], [whole[last][comm.rank]]
    else:
        found, expected = getattr(comm, collective)(mine[last]), [row[last] for row in whole]
    for one, wanted in zip(found or (), expected if found else (), strict=True):
        assert oracle.same_bits(one, wanted)


def test_of_uneven_blocks_all_ranks_choose_alike(ranks):
    for env, big in itertools.product(({}, NO_NATIVE), (1 << 12, 1 << 21)):
        for collective in ("all_gather_v", "gather_v", "scatter_v", "all_to_all_v"):
            ranks(uneven, 4, collective, big, env=env)
