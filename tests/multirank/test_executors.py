"""Each executor once between processes, to test the parts unused by threads: MPI, and memory of other processes.

tests/contract covers everything else about executors, on threads.
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest

import gpucoll as gc
import mixture
from gpucoll.arrays.segments import Copier
from gpucoll.executors.engine import plans
from gpucoll.tuner import choice
from harness.grids import generator
from harness.node_ranks import on_two_nodes
from harness.pace import seconds
from programs import collectives
from programs.collectives import MOVEMENTS, REDUCTIONS, program

ALL = (*REDUCTIONS, *MOVEMENTS)
EXECUTORS = {"mpi": "cpu", "shared": "cpu", "native": "cpu", "nccl": "emulated", "peer": "emulated"}


@program
def one_by_one(comm, calls):
    mixture.called(comm, calls)


@program
def mixed(comm, drawn):
    mixture.run(comm, drawn)


ON_GPUS = [pytest.param(name, size, marks=pytest.mark.nightly)
           for name in ("nccl", "peer") for size in (1, 2, *range(4, 9))]


@pytest.mark.parametrize(("name", "size"), [*((name, 3) for name in EXECUTORS), *ON_GPUS])
def test_every_collective(request, ranks, name, size):
    env = {"GPUCOLL_EXECUTOR": name}
    if EXECUTORS[name] == "emulated":
        request.getfixturevalue("emulated_kernels")
        env["GPUCOLL_DEVICE"] = "emulated"
    random = generator(f"processes/{name}")
    drawn = [(collective, "native" if name == "native" else random.choice(
        [one for one in collectives.algorithms(collective) if one != "native"]), "sum", "int32", count, chance)
        for collective in ALL for count, chance in ((random.choice((0, 7)), 0.0), (random.choice((5000, 70001)), 0.9))]
    ranks(one_by_one, size, drawn, env=env, timeout=seconds(100))


@pytest.mark.parametrize("executor", [None, "mpi"])
@pytest.mark.parametrize("count", [
    5, pytest.param(50, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.nightly)])
def test_random_programs(ranks, executor, count):
    """Random programs mix `auto` with named algorithms, asynchronous calls, plans and messages."""
    def test(size, steps):
        ranks(mixed, size, steps, env={"GPUCOLL_EXECUTOR": executor}, timeout=100)

    mixture.given(count, test, (2, 3), algorithms=None if executor else collectives.algorithms)


@pytest.mark.nightly
@pytest.mark.parametrize("gpus", range(1, 9))
def test_random_programs_on_gpus(mpiexec, emulated_kernels, gpus):
    words = "--programs", "40", "--executors", "nccl,peer", "--ranks", "1"
    job = mpiexec(gpus, sys.executable, mixture.__file__, *words, timeout=seconds(1000))
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.emulated
@pytest.mark.parametrize(("gpus", "temper"), [(2, "strict"), pytest.param(8, "quick", marks=pytest.mark.slow)])
def test_a_training_in_cupy(mpiexec, emulated_kernels, gpus, temper):
    program = Path(mixture.__file__).with_name("programs") / "cupy_training.py"
    job = mpiexec(gpus, sys.executable, "-m", "gpucoll", "emulate", "--gpus", str(gpus), "--temper", temper, program)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank} of {gpus}: True" for rank in range(gpus)]


@pytest.mark.emulated
@pytest.mark.parametrize("executor", ["nccl", "peer"])
@pytest.mark.parametrize("temper", ["strict", "quick"])
@pytest.mark.parametrize(("ranks", "count"), [
    pytest.param(2, 12, marks=pytest.mark.slow), pytest.param(3, 100, marks=pytest.mark.nightly)])
def test_random_programs_in_cupy(mpiexec, emulated_kernels, monkeypatch, ranks, count, temper, executor):
    monkeypatch.setenv("GPUCOLL_EXECUTOR", executor)
    program = Path(mixture.__file__).with_name("programs") / "cupy_mixture.py"
    first = generator("cupy").randrange(10**6)
    job = mpiexec(ranks, sys.executable, "-m", "gpucoll", "emulate", "--gpus", str(ranks), "--temper", temper,
                  program, str(first), str(count), timeout=seconds(400))
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [f"rank {rank}: wrong []" for rank in range(ranks)]


def test_native_collectives_on_all_ops_and_dtypes(ranks):
    for collective in REDUCTIONS:
        ranks(collectives.every_op_and_dtype, 4, collective, "native", 1, timeout=seconds(100))
    for body in (collectives.special_values, collectives.shapes_and_strides):
        ranks(body, 3, "native")


@contextlib.contextmanager
def large(*, mapped):
    """Treat every call as large: arrays are copied by the system or, with `mapped`, mapped because copies fail."""
    with contextlib.ExitStack() as stack:
        for size in ("TINY", "SMALL"):
            stack.enter_context(mock.patch.object(plans, size, 0))
        if mapped:
            stack.enter_context(mock.patch.object(Copier, "read", side_effect=PermissionError("not permitted")))
        yield


def over_memory(mpi, mapped):
    """Reading memory of other processes gives the same bits as messages; symmetric memory is read in place."""
    with large(mapped=mapped), gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor="shared") as here, \
            gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor="mpi") as there:
        assert collectives.rounded(here, "float32") == collectives.rounded(there, "float32")
        here.barrier()
        with mock.patch.object(Copier, "read", side_effect=AssertionError):
            for algorithm in ("two_shot", "one_shot", "ring"):
                room = here.zeros(2 << 21, "float32")
                for x in room[5:1 << 21], room[1 << 21:].reshape(2, -1)[0]:
                    x += here.rank + 1
                    assert (here.all_reduce(x, out=x, algorithm=algorithm) == sum(range(here.size + 1))).all()


@pytest.mark.parametrize("mapped", [False, True])
def test_memory_of_other_processes(ranks, mapped):
    ranks(over_memory, 3, mapped, timeout=seconds(100))


def several_nodes(mpi):
    """The hybrid executor, reading memory within a node, gives the same bits as messages alone; shared is refused."""
    with on_two_nodes(mpi, "shared") as comm, pytest.raises(gc.ArgumentError, match="GC-EXECUTOR"):
        comm.all_reduce(numpy.ones(3), algorithm="ring")
    for size in (plans.TINY, 0):
        segment = mpi.size * (size // 128 + 1999)
        with mock.patch.object(plans, "TINY", size), \
                mock.patch.object(sys.modules["gpucoll.algorithms"], "_segment", return_value=segment), \
                mock.patch.object(choice, "PRICED", ()), \
                on_two_nodes(mpi, None) as here, on_two_nodes(mpi, "mpi") as there:
            for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "scan", "broadcast"):
                for algorithm in gc.algorithms(collective, size=mpi.size):
                    shape = (mpi.size, 703) if collective in ("reduce_scatter", "all_to_all") else (2111,)
                    xs = [numpy.random.default_rng(mpi.rank).standard_normal(shape) for _ in range(2)]
                    found, wanted = (getattr(comm, collective)(x, algorithm=algorithm)
                                     for comm, x in zip((here, there), xs, strict=True))
                    assert found.tobytes() == wanted.tobytes(), (collective, algorithm)
            assert here._core.host.executors[0].name == "hybrid"
            assert [one.name for one in here._core.host.executors] == ["hybrid", "mpi", "native"]


@pytest.mark.parametrize("size", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_several_nodes_send_messages_and_read_memory(ranks, size):
    ranks(several_nodes, size, timeout=seconds(100))
