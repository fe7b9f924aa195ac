"""Errors name the rank at fault, not the rank reporting the failure, and never no rank at all."""

import threading
import time

import numpy
import pytest

import gpucoll as gc
from gpucoll.core.dtypes import row_of
from gpucoll.executors import Call, CallRequest
from gpucoll.health import processes
from gpucoll.health.observed import ObservedCall
from gpucoll.health.processes import RankThreads
from harness.pace import seconds


def out_of_reach(mpi):
    """If the system refuses access to a peer's memory and a rank has ended, the error names the ended rank."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        shared, gone = comm._core.host._shared, [7]
        with pytest.raises(gc.BackendError, match="no access to another rank"):
            shared.out_of_reach(3)
        comm._core.life.guard._processes = type("Processes", (), {
            "ended": lambda self, patience=0.0: gone, "numbers": {}, "state": lambda self, rank: "dead"})()
        for told in (lambda: shared.out_of_reach(3), lambda: shared.attach(comm.rank ^ 1, 10 ** 9)):
            with pytest.raises(gc.RankFailedError) as failed:
                told()
            assert failed.value.ranks == (7,)
        comm._core.life.guard._processes = comm._core.link.processes


def test_memory_out_of_reach_is_a_rank_that_has_ended(ranks):
    ranks(out_of_reach, 2)


def failure_of_another(mpi, executor, kind):
    """Rank 2 has missed rank 1, or waited for it until the deadline: rank 0, waiting for rank 2, names rank 1."""
    with gc.Communicator.from_mpi(mpi, executor=executor, timeout=seconds(60)) as comm:
        x = numpy.ones(5)
        comm.all_reduce(x)
        if comm.rank == 2:
            error = kind("waited in vain", ranks=(1,))
            comm._core.waits.failure = error
            comm._core.host.fail(error)
            if kind is gc.CollectiveTimeout:  # else the mark in shared memory alone tells
                comm._core.life.abort()
        elif comm.rank == 0:
            with pytest.raises(kind) as told:
                comm.all_reduce(x)
            assert told.value.ranks == (1,)
        else:
            comm._core.waits.failure = kind("does not come", ranks=(1,))  # not reported to other ranks
            comm._core.life.has_aborted = True
        mpi.Barrier()


def never_compared(mpi):
    """Ranks waiting for the messages of a missing root name the root, although calls are not compared."""
    with gc.Communicator.from_mpi(mpi, executor="mpi", check="off", timeout=0.5) as comm:
        if comm.rank != 1:
            with pytest.raises(gc.CollectiveTimeout) as late:
                comm.broadcast(numpy.ones(5), root=1, algorithm="linear")
            assert late.value.ranks == (1,)
        mpi.Barrier()


def test_a_rank_whose_message_does_not_come_is_named(ranks):
    ranks(never_compared, 3)


@pytest.mark.parametrize(("executor", "kind"), [("shared", gc.CollectiveTimeout), ("mpi", gc.CollectiveTimeout),
                                                ("shared", gc.RankFailedError)])
def test_the_failure_of_another_rank_names_its_culprit(ranks, executor, kind):
    ranks(failure_of_another, 3, executor, kind)


def left_alone(comm, ended):
    """End the thread of rank 1 between two calls; return the ranks named by the next call on the other ranks."""
    x = numpy.ones(3)
    comm.all_reduce(x)
    if comm.rank == 1:
        return None
    ended.wait()
    with pytest.raises(gc.RankFailedError) as told:
        comm.all_reduce(x)
    return told.value.ranks


@pytest.mark.parametrize("executor", [None, "mpi"])
def test_a_thread_that_ends_between_calls_is_named(monkeypatch, executor):
    monkeypatch.setattr(processes, "THREAD_GRACE", 0.1)
    comms, found, ended = gc.init_local(3, timeout=seconds(60), executor=executor), {}, threading.Event()
    threads = [threading.Thread(target=lambda comm=comm: found.update({comm.rank: left_alone(comm, ended)}))
               for comm in comms]
    for thread in threads:
        thread.start()
    threads[1].join()
    ended.set()
    for thread in threads:
        thread.join()
    assert found == {0: (1,), 1: None, 2: (1,)}
    for comm in comms:
        comm.close()


def test_another_thread_may_go_on_for_a_rank(monkeypatch):
    """A rank has ended once its calling threads have, and no other thread has made a call for THREAD_GRACE seconds."""
    now, running, used = [100.0], {1, 2}, {0: {1}, 1: {2}}
    monkeypatch.setattr(processes, "_running", lambda: running)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    threads = RankThreads({rank: lambda rank=rank: used[rank] for rank in used})

    def ended_after(seconds):
        now[0] += seconds
        return threads.ended()

    assert ended_after(0) == ()
    running.discard(2)
    assert ended_after(1) == ()
    assert ended_after(9) == ()
    used[1] = {3}  # thread 3 has made a call, and has ended as well
    assert ended_after(0.9) == ()
    assert ended_after(9) == ()
    assert ended_after(2) == (1,)
    used[1] = {4, 3}
    running.add(4)
    assert ended_after(0.01) == (1,)  # the ranks share each look
    assert ended_after(1) == ()


def test_a_communicator_that_no_thread_has_used_has_not_ended():
    assert RankThreads({0: set}).ended() == ()


def known_threads(comm):
    """Calls in Python and calls of the engine alone both record the native id of the calling thread."""
    x, me = numpy.ones(3), threading.get_native_id()
    for _ in range(3):
        comm.all_reduce(x, x.copy())
    assert comm._core.waits.thread == me
    out, done = numpy.empty_like(x), []
    comm.all_reduce(x, out)

    def other():
        comm.all_reduce(x, out)
        done.append(threading.get_native_id())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert comm._core.host.thread() == done[0]


def test_the_engine_notes_which_thread_calls():
    gc.run_local(known_threads, 2, timeout=seconds(60))


def test_an_operation_behind_an_observer_is_told_its_error():
    told = []

    class Inner(Call):
        def run(self, source, target, stream=None, *, repeated=False):
            try:
                yield lambda: False
            except gc.GpucollError as error:
                told.append(error)
                raise

    inner = Inner(None, CallRequest("barrier", "auto", row_of("uint8")))
    seen = type("Observer", (), {"on_phase": lambda self, phase, request, rows: None})()
    operation, error = ObservedCall(inner, [seen], None).run(None, None), gc.MismatchError("unlike")
    next(operation)
    with pytest.raises(gc.MismatchError):
        operation.throw(error)
    assert told == [error]
