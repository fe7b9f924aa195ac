"""Small all-reduces in one exchange of slots: the bits of one_shot, whoever comes when, and nobody waits for ever."""

import functools
import os

import numpy
import pytest

import gpucoll as gc
import oracle
from gpucoll.executors.shared.slots import KINDS, SLOT, library

COUNTS = (1, 2, 3, 17, 1000)


@pytest.fixture
def ranks(rank_pool):
    if library() is None:
        pytest.skip("slots are compiled: they need g++, or another compiler that CXX names")
    return functools.partial(rank_pool.run)


def on_shared(test):
    @functools.wraps(test)
    def run(mpi, *arguments):
        with gc.Communicator.from_mpi(mpi, executor="shared", timeout=60) as comm:
            return test(comm, *arguments)

    return run


def exchanges(comm):
    """How many calls of this rank were exchanges of slots."""
    slots = comm._host.executors[0]._slots
    return 0 if slots is None else slots.call


def operands(name, op, size, count):
    return [oracle.values(op, name, rank, count) for rank in range(size)]


@on_shared
def every_op_and_dtype(comm):
    calls = 0
    for name in KINDS:
        for op in ("sum", "prod", "min", "max", "avg"):
            if oracle.legal(op, name):
                for count in (*COUNTS, SLOT // numpy.dtype(name).itemsize):
                    everyone = operands(name, op, comm.size, count)
                    x, out = everyone[comm.rank], numpy.empty_like(everyone[0])
                    for _ in range(3):  # the first as an operation, the others at once
                        found = comm.all_reduce(x, out, op=op, algorithm="one_shot")
                        assert oracle.same_bits(found, oracle.reduced(op, name, everyone)), (name, op, count)
                        calls += 1
    assert exchanges(comm) == calls
    comm.all_reduce(numpy.ones(SLOT + 1, numpy.uint8), algorithm="one_shot")  # too long, and of another dtype
    comm.all_reduce(numpy.ones(2), op="max", algorithm="two_shot")
    assert exchanges(comm) == calls


@on_shared
def the_bits_of_messages(comm):
    """Rounding depends on the order, and NaN wins from any rank."""
    random = numpy.random.default_rng(comm.rank)
    with gc.Communicator.from_mpi(comm.mpi, executor="mpi") as messages:
        for name in ("float32", "float64"):
            x = random.standard_normal(301).astype(name) * 10.0 ** random.integers(-20, 20, 301)
            for op in ("sum", "prod", "min", "max"):
                expected = messages.all_reduce(x.astype(name), op=op, algorithm="one_shot")
                assert oracle.same_bits(comm.all_reduce(x.astype(name), op=op, algorithm="one_shot"), expected)
        x[comm.rank] = numpy.nan
        for op in ("sum", "min", "max"):
            found = comm.all_reduce(x, op=op, algorithm="one_shot")
            assert numpy.isnan(found[:comm.size]).all()
            assert not numpy.isnan(found[comm.size:]).any()
    return exchanges(comm)


@on_shared
def each_in_its_own_way(comm, seed):
    """Ranks that repeat a call, that make it anew, in place, beside others: all in one exchange."""
    random = numpy.random.default_rng((seed, comm.rank))
    x, kept = numpy.zeros(9, numpy.int64), numpy.zeros(9, numpy.int64)
    plan = comm.plan("all_reduce", x, kept, algorithm="one_shot")
    for turn in range(40):
        x[:] = turn + comm.rank
        expected = numpy.full(9, turn * comm.size + comm.size * (comm.size - 1) // 2)
        way = int(random.integers(5))
        if way == 0:
            found = plan()
        elif way == 1:
            found = comm.all_reduce(x, kept, algorithm="one_shot")
        elif way == 2:
            found = comm.all_reduce(x.copy(), algorithm="one_shot")
        elif way == 3:
            found = comm.all_reduce(x, algorithm="one_shot", async_op=True).wait()
        else:
            with comm.group():
                found = comm.all_reduce(x, kept, algorithm="one_shot")
        assert oracle.same_bits(found, expected), (turn, way)
    assert exchanges(comm) == 40


def somebody_stays_away(mpi):
    comm = gc.Communicator.from_mpi(mpi, executor="shared", timeout=2)
    x, out = numpy.ones(4), numpy.empty(4)
    for _ in range(3):
        comm.all_reduce(x, out, algorithm="one_shot")
    if comm.rank == 0:
        found = "away"
    else:
        with pytest.raises(gc.CollectiveTimeout) as late:
            comm.all_reduce(x, out, algorithm="one_shot")
        with pytest.raises(gc.RevokedError):
            comm.all_reduce(x, out, algorithm="one_shot")
        found = late.value.code
    mpi.Barrier()
    comm.close()
    return found


def no_compiler_on_one(mpi):
    """All take the other way where one rank cannot take this one."""
    from gpucoll.executors import shared

    before, shared.library = shared.library, (lambda: None) if mpi.rank == 1 else shared.library
    try:
        with gc.Communicator.from_mpi(mpi, executor="shared", timeout=60) as comm:
            found = comm.all_reduce(numpy.full(3, comm.rank + 1), algorithm="one_shot")
            assert found.tolist() == [comm.size * (comm.size + 1) // 2] * 3
            return exchanges(comm)
    finally:
        shared.library = before


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_op_and_dtype(ranks, size):
    ranks(every_op_and_dtype, size, timeout=120)


def test_the_bits_are_those_of_one_shot_anywhere(ranks):
    assert ranks(the_bits_of_messages, 5) == [11] * 5


@pytest.mark.parametrize("seed", range(3))
def test_ranks_need_not_call_alike(ranks, seed):
    ranks(each_in_its_own_way, 4, seed)


def test_who_waits_for_one_that_never_comes_ends_at_the_deadline(ranks):
    assert ranks(somebody_stays_away, 3) == ["away", "GC-TIMEOUT", "GC-TIMEOUT"]


def test_without_a_compiler_on_every_rank_there_are_no_slots(ranks):
    assert ranks(no_compiler_on_one, 3) == [0] * 3


def test_the_compiler_is_asked_once_and_may_be_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    library.cache_clear()
    try:
        assert library() is None
    finally:
        monkeypatch.undo()
        library.cache_clear()
    assert os.environ.get("CXX") != str(tmp_path / "none")
