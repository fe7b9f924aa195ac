"""No collective depends on MPI's own: all run by schedules, over a wire that can do nothing but send and receive."""

import contextlib
import copy

import numpy
import pytest

import gpucoll as gc
from gpucoll.collectives import COLLECTIVES
from gpucoll.communicator.backends import HostBackend
from programs import MOVED, MOVEMENTS, REDUCTIONS, check, reduction

ELSEWHERE = ("barrier",)  # what has no arrays
SCHEDULES = {"GPUCOLL_ALGO": "^native"}
COUNTS = (0, 1, 5, 1000, 70001)


class Wire:
    """What schedules need of MPI, and nothing else: whoever asks for more fails."""

    def __init__(self, comm):
        self.Isend, self.Irecv = comm.Isend, comm.Irecv


@contextlib.contextmanager
def communicator(mpi, **options):
    """A communicator whose executors have never seen MPI's collectives."""
    with gc.Communicator.from_mpi(mpi, timeout=30, **options) as comm:
        bare, whole = copy.copy(comm._link), comm._host
        bare.wire, bare.mpi = Wire(bare.wire), None
        comm._host = HostBackend(bare, 30, comm.executor)
        try:
            yield comm
        finally:
            comm._host.close()
            comm._host = whole


def every_count(mpi, collective, executor):
    with communicator(mpi, executor=executor) as comm:
        for count in COUNTS:
            for root in {0, comm.size - 1}:
                if collective in MOVED:
                    MOVED[collective](comm, "auto", "int32", count, root)
                else:
                    reduction(comm, collective, "auto", "sum", "int32", count, in_place=root == 0)
        found = comm.explain(collective, 4 * COUNTS[-1])
        return found["executor"], {row["executor"] for row in found.candidates}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("collective", [*REDUCTIONS, *MOVEMENTS])
def test_every_collective(ranks, collective, size):
    found = ranks(every_count, size, collective, "mpi", env=SCHEDULES)
    assert found == [("mpi", {"mpi"})] * size


def test_these_are_all_collectives():
    assert {*REDUCTIONS, *MOVEMENTS, *ELSEWHERE} == {*COLLECTIVES}


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_to_all_v"])
def test_a_wire_without_collectives_is_enough_where_no_executor_is_named(ranks, collective):
    assert all("native" not in executors for _, executors in ranks(every_count, 3, collective, None))


def the_rest(mpi):
    """Barrier, groups, work behind, other ops and dtypes, messages; all of it on a wire without collectives."""
    with communicator(mpi, executor="mpi") as comm:
        comm.barrier()
        x, total = numpy.arange(100.0) + comm.rank, comm.size * numpy.arange(100.0) + sum(range(comm.size))
        work = comm.all_reduce(x, async_op=True)
        work.wait()
        check(work.result, total)
        with comm.group():
            first, second = comm.all_reduce(x), comm.all_gather(x)
        check(first, total)
        check(second, numpy.stack([numpy.arange(100.0) + rank for rank in range(comm.size)]))
        check(comm.all_reduce(x, op="avg"), total / comm.size)
        either = gc.elementwise_op("a + b - a*b", identity=0)
        check(comm.all_reduce(numpy.full(3, float(comm.rank == 1)), op=either), numpy.full(3, float(comm.size > 1)))
        out = numpy.empty_like(x)
        comm.sendrecv(x, out, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        check(out, numpy.arange(100.0) + (comm.rank - 1) % comm.size)
        return True


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_what_is_no_collective_with_arrays(ranks, size):
    assert all(ranks(the_rest, size, env=SCHEDULES))


def choices(mpi):
    """What is chosen, and what could be, of every collective at many sizes where MPI's own is there, but excluded."""
    with gc.Communicator.from_mpi(mpi) as comm:
        found = [comm.explain(collective, nbytes) for collective in COLLECTIVES for nbytes in (0, 8, 1 << 16, 1 << 26)]
        comm.all_reduce(numpy.ones(3))
        called = [row["algorithm"] for row in comm.explain("all_reduce", 24).candidates if row["calls"]]
    return {row["algorithm"] for one in found for row in one.candidates}, called


def test_excluded_it_is_no_candidate(ranks):
    for names, called in ranks(choices, 4, env=SCHEDULES):
        assert "native" not in names
        assert len(called) == 1
    for names, _ in ranks(choices, 4):
        assert "native" in names  # it is there to be excluded


def native(mpi):
    """MPI's own, on a communicator that has forgotten it."""
    with communicator(mpi) as comm:
        with pytest.raises(gc.ArgumentError, match="no native collectives"):
            comm.all_reduce(numpy.ones(3), algorithm="native")
        with pytest.raises(AttributeError, match="Iallreduce"):
            _ = comm._host.executors[0]._comm.Iallreduce
    return True


def test_the_wire_without_collectives_has_none(ranks):
    assert all(ranks(native, 2))


def uneven(mpi, collective, big):
    """Blocks of very different lengths: what a rank has says nothing of what the others have."""
    with gc.Communicator.from_mpi(mpi, timeout=10) as comm:
        lengths = [[big if (source, target) == (comm.size - 1, comm.size - 1) else 1 for target in range(comm.size)]
                   for source in range(comm.size)]
        whole = [[numpy.arange(length) + 100 * source + target for target, length in enumerate(row)]
                 for source, row in enumerate(lengths)]
        mine, last = whole[comm.rank], comm.size - 1
        if collective == "all_to_all_v":
            found, expected = comm.all_to_all_v(mine), [row[comm.rank] for row in whole]
        elif collective == "scatter_v":
            found, expected = [comm.scatter_v(mine if comm.rank == last else None, last)], [whole[last][comm.rank]]
        else:
            found, expected = getattr(comm, collective)(mine[last]), [row[last] for row in whole]
        if collective == "gather_v" and comm.rank:
            found = expected = []
        for one, wanted in zip(found, expected, strict=True):
            check(one, wanted)
        return True


@pytest.mark.parametrize("env", [{}, SCHEDULES])
@pytest.mark.parametrize("collective", ["all_gather_v", "gather_v", "scatter_v", "all_to_all_v"])
def test_of_uneven_blocks_all_ranks_choose_alike(ranks, collective, env):
    for big in (1 << 12, 1 << 16, 1 << 21):
        assert all(ranks(uneven, 4, collective, big, env=env))
