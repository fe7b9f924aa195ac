"""MPI's own collectives, repeated: the engine compares the calls, then MPI runs the collective."""

import json
import os
import signal
import sys
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.call.table import Calls
from gpucoll.core.ops import OPS
from gpucoll.executors.native import NativeExecutor, _Collective
from harness.jobs import python
from harness.pace import seconds

COUNTS = (3, 70_000)  # elements of a block: eager and rendezvous messages of MPI
native = {"algorithm": "native"}


def blocks(size, count):
    """Return the inputs of all ranks: element j of row i goes from rank i to rank j."""
    return numpy.arange(size * size * count, dtype=float).reshape(size, size, count) % 1013


def cases(comm, count):
    """Yield a name, a function making the call on new arrays, in place or not, and the expected result.

    In place, the result overwrites the input, or the input is a block of the result.
    """
    size, rank = comm.size, comm.rank
    every = blocks(size, count)
    sums, mine = every.sum(0), every[rank]

    def reducing(name, expected, **options):
        def call(is_in_place, **more):
            x = mine.copy()
            return getattr(comm, name)(x, out=x if is_in_place else numpy.full_like(x, -1.0), **options, **more)

        return name, call, expected

    def gathered(is_in_place, **more):
        out = numpy.full((size, size, count), -1.0)
        out[rank] = mine
        return comm.all_gather(out[rank] if is_in_place else mine.copy(), out=out, **more)

    yield reducing("all_reduce", sums)
    yield reducing("scan", every[:rank + 1].sum(0))
    yield reducing("all_to_all", every[:, rank])
    yield "all_gather", gathered, every
    yield "reduce_scatter", lambda _, **more: comm.reduce_scatter(mine.copy(), **more), sums[rank]
    for root in range(size):
        def at_root(x, root=root):
            return x if rank == root else None

        def reduced(is_in_place, root=root, **more):
            x = mine.copy()
            return comm.reduce(x, out=at_root(x, root) if is_in_place else None, root=root, **more)

        def to_root(is_in_place, root=root, **more):
            out = numpy.full((size, size, count), -1.0)
            out[rank] = mine
            return comm.gather(out[rank] if is_in_place and rank == root else mine, out=at_root(out, root), root=root,
                               **more)

        yield f"reduce to {root}", reduced, at_root(sums)
        yield f"gather to {root}", to_root, at_root(every)
        yield (f"broadcast from {root}", lambda _, root=root, **more: comm.broadcast(mine.copy(), root=root, **more),
               every[root])
        yield (f"scatter from {root}", lambda _, root=root, **more: comm.scatter(
            every[root].copy() if rank == root else None, root=root, **more), every[root][rank])


def in_unlike_ways(mpi, check):
    """Some ranks call asynchronously, some in place: MPI needs one kind of collective on all ranks nevertheless."""
    turns = [(waits, places) for waits in (True, False, None) for places in (True, False, None)] * 2
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60), check=check) as comm:
        for count in COUNTS:
            for name, call, expected in cases(comm, count):
                for waits, places in turns:  # None: the odd ranks
                    waits_here, in_place = (comm.rank % 2 == 1 if one is None else one for one in (waits, places))
                    found = call(in_place, **native) if waits_here else call(in_place, **native, async_op=True).wait()
                    where = name, count, waits, places
                    assert found is None if expected is None else (found == expected).all(), where


@pytest.mark.parametrize("check", ["full", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_make_one_call_in_unlike_ways(ranks, size, check):
    ranks(in_unlike_ways, size, check, timeout=seconds(100))


def again(mpi):
    """A repeated call takes no step in Python before MPI's blocking call, and copies nothing, also in place."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        for name, call, expected in cases(comm, 5):
            for in_place in (False, True):
                call(in_place, **native)
                with mock.patch.object(Calls, "resolve", side_effect=AssertionError(name)), \
                        mock.patch.object(Calls, "begin", side_effect=AssertionError(name)), \
                        mock.patch.object(NativeExecutor, "copied", side_effect=AssertionError(name)):
                    found = call(in_place, **native)
                assert found is None if expected is None else (found == expected).all(), (name, in_place)
        comm.barrier(**native)
        with mock.patch.object(Calls, "resolve", side_effect=AssertionError):
            comm.barrier(**native)


def test_a_call_like_one_before_is_the_engines(ranks):
    ranks(again, 3, timeout=seconds(60))


def beside_mpi(mpi, constant):
    """The op of a row whose constant MPI lacks: MPI combines by the engine."""
    row = OPS["prod"]._replace(mpi=constant)
    with mock.patch.dict(OPS, prod=row), gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        for count in (1, 5):
            for _ in range(3):
                x = numpy.arange(count) * (3.0, 4.0, 0.5)[comm.rank]
                for algorithm in ("native", "ring"):
                    assert (comm.all_reduce(x, op="prod", algorithm=algorithm) == 6.0 * numpy.arange(count) ** 3).all()


@pytest.mark.parametrize("constant", [None, "HYPOT"])
def test_an_op_that_mpi_lacks_is_the_engines(ranks, constant):
    ranks(beside_mpi, 3, constant, timeout=seconds(60))


def differ(mpi):
    """A mismatch in repeated calls raises the same error on all ranks; no data move, and the next call works."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        x, y, out = numpy.full(4, comm.rank + 1.0), numpy.full(5, comm.rank + 1.0), numpy.zeros(5)
        for _ in range(2):
            assert (comm.all_reduce(x, out=out[:4], **native) == 6).all()
            assert (comm.all_reduce(y, out=out, **native) == 6).all()
        for _ in range(2):
            out[:] = -1.0
            with pytest.raises(gc.MismatchError) as found:
                comm.all_reduce(*((y, out) if comm.rank == 2 else (x, out[:4])), **native)
            assert (found.value.code, found.value.ranks) == ("GC-SHAPE", (2,))
            assert (out == -1).all(), "written to"
            assert (comm.all_reduce(x, out=out[:4], **native) == 6).all()


def test_ranks_that_differ_in_calls_made_before_are_told(ranks):
    ranks(differ, 3, timeout=seconds(60))


RECORDED = """
import numpy, gpucoll as gc
from gpucoll.launch import bootstrap
from harness.node_ranks import on_two_nodes

with {made} as comm:
    for x in (numpy.ones(3), numpy.ones(3), numpy.ones(6)[::2 if comm.rank else 1][:3]):
        comm.all_reduce(x, algorithm="native")
"""


@pytest.mark.parametrize("made", ["gc.init()", "on_two_nodes(bootstrap.world(), None)"], ids=["one node", "two nodes"])
def test_each_call_is_recorded_once(mpiexec, tmp_path, made):
    """Each call is recorded once: on ranks planning the call (strided arrays), on others, and if only compared."""
    job = mpiexec(2, sys.executable, "-c", RECORDED.format(made=made),
                  env={"GPUCOLL_DUMP_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)})
    assert job.returncode == 0, job.stderr
    shown = python("-m", "gpucoll", "report", "--trace", tmp_path / "trace.json", tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    calls = [event["pid"] for event in events if event.get("name") == "all_reduce"]
    assert sorted(calls) == [0, 0, 0, 1, 1, 1], (shown.stdout, events)


STOPS = """
import os, signal, sys, threading
import numpy, gpucoll as gc

def stop(calling):
    while not calling():
        pass
    os.kill(os.getpid(), signal.SIGSTOP)  # where MPI has much to do yet, and rank 0 nothing without this one

with gc.init(timeout=60) as world, gc.Communicator.from_mpi(world.mpi, timeout=float(sys.argv[1])) as comm:
    x, out = numpy.ones(8 << 20), numpy.zeros(8 << 20)
    for turn in range(4):
        if (comm.rank, turn) == (1, 3):
            threading.Thread(target=stop, args=(comm._core.calls.engine.calling,), daemon=True).start()
        comm.all_reduce(x, out=out, algorithm="native")
"""


@pytest.mark.slow
def test_a_rank_that_stops_in_mpis_blocking_call_ends_the_job_at_the_deadline(mpiexec):
    job = mpiexec(2, sys.executable, "-c", STOPS, str(seconds(4.0)))
    assert job.returncode != 0
    assert "CollectiveTimeout: [GC-TIMEOUT] MPI's own collective: waited" in job.stderr, job.stderr
    assert "is stopped in its call 4, all_reduce by native" in job.stderr, job.stderr


def refused_inside(mpi, algorithm, op):
    """After a mismatch in a call run partly in Python, the ranks can go on."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        x = numpy.full(3, 2.0)
        for _ in range(2):
            comm.all_reduce(x, op=op, algorithm=algorithm)
            comm.all_reduce(x[:2], op=op, algorithm=algorithm)
        for _ in range(3):
            with pytest.raises(gc.MismatchError):
                comm.all_reduce(x[:2] if comm.rank else x, op=op, algorithm=algorithm)
            comm.gather(x)
            comm.all_reduce(numpy.ones(7), algorithm="native", async_op=True).wait()


@pytest.mark.parametrize(("algorithm", "op"), [("native", "sum"), ("ring", gc.elementwise_op("a + b - a * b", 0))])
def test_ranks_that_differ_where_python_has_a_part_go_on(ranks, algorithm, op):
    ranks(refused_inside, 2, algorithm, op, timeout=seconds(60))


def a_signal_between_mpis_calls(mpi):
    """The arguments for other arrays are made in Python, where a signal's handler may call the communicator."""
    found, made = [], _Collective._arguments

    def rings(*_):
        with pytest.raises(gc.UsageError, match="inside another call") as refused:
            comm.barrier()
        found.append(refused.value.code)

    def interrupted(call, *arguments):
        os.kill(os.getpid(), signal.SIGUSR1)
        return made(call, *arguments)

    before = signal.signal(signal.SIGUSR1, rings)
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        arrays = [numpy.ones(9) for _ in range(2)]
        for _ in range(3):
            comm.all_reduce(arrays[0], **native)
        with mock.patch.object(_Collective, "_arguments", interrupted):
            comm.all_reduce(arrays[1], **native)
        assert (comm.all_reduce(arrays[1], **native) == comm.size).all()
    signal.signal(signal.SIGUSR1, before)
    assert found == ["GC-USAGE"]


def test_a_handler_that_calls_between_mpis_calls_is_refused(ranks):
    ranks(a_signal_between_mpis_calls, 2)
