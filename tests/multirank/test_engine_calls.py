"""Calls between processes of a node that the engine's table of calls could confuse, or run differently from Python."""

import os
import signal
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.executors.engine.neighbours import SMALL
from harness.node_ranks import on_shared
from harness.pace import seconds
from harness.paths import least
from oracles import oracle


def calls_change_where_their_result_goes(mpi):
    """Results go to another array, in place and to new memory by turns; short ones with every algorithm."""
    for executor, count in (("shared", 3), ("shared", SMALL // 8 + 1), ("mpi", 3)):
        with gc.Communicator.from_mpi(mpi, executor=executor, timeout=seconds(60)) as comm:
            for name in ("all_reduce", "reduce", "scan", "exscan", "all_to_all", "all_gather", "gather"):
                for algorithm in ("auto", *(gc.algorithms(name, size=comm.size) if count == 3 else ())):
                    _by_turns(comm, name, algorithm, count)


def _by_turns(comm, name, algorithm, count):
    rank, size = comm.rank, comm.size
    given = (size, count) if name == "all_to_all" else (count,)
    taken = (size, count) if name in ("all_to_all", "all_gather", "gather") else (count,)
    x, apart, both = (numpy.empty(shape, int) for shape in (given, taken, taken))
    inside = both[rank] if taken != given else both
    for turn in range(6):
        source, out = ((x, apart), (inside, both), (x, None))[turn % 3]
        everyone = [numpy.arange(turn, turn + x.size).reshape(given) * (other + 1) for other in range(size)]
        both[:] = apart[:] = -1
        source[:] = everyone[rank]
        found = getattr(comm, name)(source, out, algorithm=algorithm)
        if found is not None:
            assert numpy.array_equal(found, oracle.outcome(name, everyone, rank)), (name, algorithm, count, turn)


@on_shared
def a_signal_in_a_call_of_the_users_own(comm):
    """A collective call from a signal handler raises GC-USAGE, and the interrupted call ends well."""
    x, found = numpy.ones(1000), []
    plan = comm.plan("all_reduce", x, op=gc.elementwise_op("a + b"), algorithm="ring")
    combined = plan()

    def rings(*_):
        with pytest.raises(gc.UsageError) as refused:
            comm.barrier()
        found.append(refused.value.code)

    before = signal.signal(signal.SIGUSR1, rings)
    begin = numpy.errstate.__enter__  # entered by NumPy's part of every call

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGUSR1)
        return begin(self)

    with mock.patch.object(numpy.errstate, "__enter__", interrupted):
        plan()
    signal.signal(signal.SIGUSR1, before)
    assert found
    assert set(found) == {"GC-USAGE"}
    assert (combined == comm.size).all()


@on_shared
def calls_that_come_again_pass_few_lines(comm):
    """Repeated calls run in the engine, and pass few lines of Python, whatever the algorithm and the length."""
    x, out, other = numpy.ones(9), numpy.empty(9), (comm.rank + 1) % comm.size
    long = numpy.ones(SMALL // 8 + 1)
    calls = {"all_reduce": lambda: comm.all_reduce(x, out), "ring": lambda: comm.all_reduce(x, out, algorithm="ring"),
             "long": lambda: comm.all_reduce(long, long), "broadcast": lambda: comm.broadcast(x),
             "scatter": lambda: comm.scatter(numpy.ones((comm.size, 3)) if comm.rank == 0 else None),
             "scan": lambda: comm.scan(x), "exscan": lambda: comm.exscan(x),
             "all_gather_v": lambda: comm.all_gather_v(x[:5 + comm.rank]), "gather_v": lambda: comm.gather_v(x, 1),
             "all_to_all_v": lambda: comm.all_to_all_v([x[:1 + comm.rank + rank] for rank in range(comm.size)]),
             "reduce_scatter_v": lambda: comm.reduce_scatter_v(x, [1, 3, 5]),
             "barrier": comm.barrier, "plan": comm.plan("all_gather", x),
             "sendrecv": lambda: comm.sendrecv(x, out, other, (comm.rank - 1) % comm.size)}
    for name, call in calls.items():
        call()
        call()
        few = 5 if name == "exscan" else 3  # Python fills the result of the first rank
        files, lines = least(comm, call, few, 120)
        assert files <= few, (name, files)
        assert lines <= 120, (name, lines)


@pytest.mark.parametrize("body", [
    calls_that_come_again_pass_few_lines, calls_change_where_their_result_goes, a_signal_in_a_call_of_the_users_own])
def test_engine_calls(ranks, body):
    ranks(body, 3)
