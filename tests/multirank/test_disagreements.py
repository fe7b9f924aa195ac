"""Ranks that differ in what they call are all told, at once, in what and where; those that only seem to are not."""

import itertools
import time

import numpy
import pytest

import gpucoll as gc
from gpucoll.collectives import COLLECTIVES
from grids import generator, sampled
from multirank.disagreements import CULPRIT, LENGTHS, REFUSALS, call, cases, made
from multirank.test_one_pass import ranks  # noqa: F401 (a fixture)
from pace import seconds

EXECUTORS = (None, "shared", "mpi", "native")
TOLD = 2.0  # seconds; 0.5 where the machine has nothing else to do
SLOW = pytest.mark.slow


def algorithms(name, executor, size):
    """Those that an executor has: what is chosen, MPI's own, schedules."""
    schedules = [] if executor == "native" else [*gc.algorithms(name, size=size, op="sum", dtype="float64")]
    return ["auto", *schedules[:3], *(["native"] if executor in (None, "native") and schedules else [])]


def every_way(mpi, executor, names, share, env_nodes=1):
    """All told alike, named, in time, and the next call is right; `share` of the cases are drawn."""
    random, slowest = generator(f"disagreements {executor} {names}"), 0.0
    with gc.Communicator.from_mpi(mpi, executor=executor, timeout=seconds(60)) as comm:
        assert comm.nodes == env_nodes
        for name in names:
            listed = algorithms(name, executor, comm.size)
            for case, (length, count) in itertools.product(cases(name, listed), LENGTHS.items()):
                if random.random() >= share:
                    continue
                other = next((one for one in listed[::-1] if one not in ("auto", "native", case.algorithm)), None)
                if case.way == "algorithm" and other is None:
                    continue
                slowest = max(slowest, _one(comm, case, length, count, other))
    print(f"the slowest was told after {slowest:.3f} s")


def _one(comm, case, length, count, other):
    """Seconds until this rank is told."""
    native = case.algorithm == "native"
    right = None
    try:
        right = call(comm, case.collective, case.algorithm, count)
    except gc.ArgumentError:
        assert native, case  # MPI has none: on all ranks
        return 0.0
    comm.mpi.Barrier()
    began, told, result = time.monotonic(), None, None
    try:
        result = made(comm, case, count, other)
    except gc.GpucollError as error:
        told = error
    lasted = time.monotonic() - began
    words = f"{case} {length}: {told!r}"
    if not case.code:
        assert told is None, words
        assert _alike(result, right), words
    elif comm.rank == CULPRIT and isinstance(told, REFUSALS):
        assert case.code == "GC-PEER", words
    else:
        expected = gc.PeerError if case.code == "GC-PEER" else gc.MismatchError
        assert type(told) is expected, words
        assert told.ranks == (CULPRIT,), words
        assert told.code == case.code, words
        assert case.code == "GC-PEER" or "disagreements.py:" in str(told) or case.collective.endswith("_v"), words
        assert lasted < seconds(TOLD), (lasted, words)
    assert (comm.all_reduce(numpy.full(3, comm.rank)) == comm.size * (comm.size - 1) // 2).all(), words
    return lasted


def _alike(result, right):
    if isinstance(right, list):
        return all(map(_alike, result, right))
    return (result is None) == (right is None) and (right is None or (result == right).all())


PARTS = [tuple(COLLECTIVES)[part::4] for part in range(4)]


@pytest.mark.parametrize(("executor", "part"), sampled(list(itertools.product(EXECUTORS, range(4))), keep=8, seed=31))
def test_ranks_that_differ_are_told(ranks, executor, part):  # noqa: F811 (the fixture)
    ranks(every_way, 3, executor, PARTS[part], 0.15)


@SLOW
@pytest.mark.parametrize("executor", EXECUTORS)
def test_eight_ranks_that_differ_are_told(ranks, executor):  # noqa: F811
    ranks(every_way, 8, executor, tuple(COLLECTIVES), 0.1)
