"""Threads as ranks and processes that end: farewells, and the rank that an error names."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest

import gpucoll as gc
from gpucoll.core.signature import LastCall
from gpucoll.executors.engine import failures
from gpucoll.executors.engine.tables import FAILURE
from gpucoll.health import guard, processes
from gpucoll.health.farewell import Farewell, Why
from gpucoll.health.processes import Processes
from harness.thread_ranks import all_on_threads

NEVER = 1e6  # seconds: a test waiting so long would be stopped


def test_a_rank_that_has_come_to_a_call_is_not_awaited():
    """The waiting thread may be without a processor while another thread asks."""
    comms = gc.init_local(2, timeout=NEVER)
    all_on_threads(comms, lambda comm: comm.barrier())
    first, second = (comm._core.host._shared for comm in comms)
    waiting = first.compare("a call")
    go_on = next(waiting)
    assert first.awaited() == {1}
    assert next(second.compare("a call"), None) is None
    assert first.awaited() is None
    assert go_on()
    assert next(waiting, None) is None
    for comm in comms:
        comm.close()


def test_a_process_that_has_the_number_of_an_ended_one_is_alive(monkeypatch):
    """A process ended before watching is dead; a later process with the same number is alive."""
    ends = []

    def opened(number):
        if number == 9:
            raise ProcessLookupError
        ends.append(os.pipe())
        return ends[-1][0]

    monkeypatch.setattr(os, "pidfd_open", opened)
    monkeypatch.setattr(processes, "_descriptors", {})
    assert Processes({0: 7, 1: 9}).ended() == (1,)
    before = Processes({0: 7})
    os.close(ends[0][1])  # the process ends
    assert before.ended() == (0,)
    assert Processes({0: 7}).ended() == ()
    assert before.ended() == (0,)
    for descriptor in (ends[0][0], *ends[1]):
        os.close(descriptor)


@pytest.mark.parametrize(("farewell", "named"), [(Farewell(Why.FAILED, (2,)), (2,)), (Farewell(Why.FAILED), (1,)),
                                                 (Farewell(Why.FAILED, (1,)), (1,)), (Farewell(Why.ENDS), (1,))])
def test_a_rank_that_fails_because_of_another_rank_names_that_rank(monkeypatch, farewell, named):
    """Rank 1, awaited by rank 0, has left: because of rank 2, by a failure of its own, or by the end of its process."""
    monkeypatch.setattr(guard, "LEFT_TIME", -1.0)
    watching = guard.Guard(0, Processes({}), lambda: {1}, dict, lambda: {1: farewell}, lambda: 0.0)
    with pytest.raises(gc.RankFailedError) as failed:
        watching.check()
    assert failed.value.ranks == named


@pytest.mark.parametrize(("mine", "theirs", "is_told"), [((4, 0), (3, 0), True), ((3, 1), (3, 0), True),
                                                         ((3, 0), (3, 0), False), ((3, 0), (4, 1), False)])
def test_a_rank_that_has_closed_is_named_in_the_calls_that_it_has_not_made(mine, theirs, is_told):
    farewell = Farewell(Why.CLOSES, (), *theirs, words="has closed the communicator after its call 3 (a.py:7)")
    watching = guard.Guard(0, Processes({}), lambda: None, dict, lambda: {1: farewell}, lambda: 0.0,
                           position=lambda: mine)
    if not is_told:
        watching.check()
        return
    with pytest.raises(gc.RankFailedError, match=r"rank 1 has closed the communicator after its call 3 \(a.py:7\)") \
            as told:
        watching.check()
    assert told.value.ranks == (1,)
    # Ranks that all close are judged when all have come.
    closing = guard.Guard(0, Processes({}), lambda: None, dict, lambda: {1: farewell}, lambda: 0.0,
                          position=lambda: mine)
    closing.is_closing = lambda: True
    closing.check()


class Ends:
    """Processes of other hosts, with the ends in this order."""

    numbers, watch = {}, None

    def __init__(self, *ranks):
        self._ranks = ranks

    def ended(self, patience=0.0):
        return self._ranks

    def state(self, rank):
        return "dead" if rank in self._ranks else ""


def test_of_several_deaths_the_first_is_named(monkeypatch):
    """Rank 2 awaits rank 1; the end of rank 3 was the first, so rank 3 is named."""
    monkeypatch.setattr(guard, "LEFT_TIME", -1.0)
    watching = guard.Guard(2, Ends(3, 1), lambda: {1}, dict, dict, lambda: 1.0)
    with pytest.raises(gc.RankFailedError) as failed:
        watching.check()
    assert failed.value.ranks == (3,)


def test_a_rank_that_was_frozen_names_itself(monkeypatch):
    """Between two looks of one wait 20 s have passed: ranks that have ended meanwhile are not to blame."""
    now = [100.0]
    monkeypatch.setattr(guard, "LEFT_TIME", -1.0)
    monkeypatch.setattr(guard.time, "monotonic", lambda: now[0])
    ends = Ends()
    watching = guard.Guard(2, ends, lambda: {1}, dict, dict, lambda: 99.0)
    watching.check()
    watching.check()
    now[0] += 20
    ends._ranks = (1,)
    with pytest.raises(gc.RankFailedError, match="this rank, 2, did not run for 20 s") as failed:
        watching.check()
    assert failed.value.ranks == (2,)


@pytest.mark.parametrize(("calls", "named"), [
    ({1: LastCall(2, has_ended=False), 2: LastCall(1, has_ended=True)}, (2,)),  # rank 1 waits for rank 2, as rank 0
    ({1: LastCall(2, has_ended=False), 2: LastCall(1, has_ended=False)}, (1, 2)), ({1: LastCall(2)}, (1,))])
def test_who_waits_in_an_earlier_call_is_not_blamed_beside_who_waits_in_none(calls, named):
    calls = {0: LastCall(3, has_ended=False), **calls}
    watching = guard.Guard(0, Processes({}), lambda: {1, 2}, lambda: calls, dict, lambda: 0.0)
    assert watching.blame()[1] == named


@pytest.mark.parametrize(("called", "words"), [
    (LastCall(3, has_ended=False), "is in its call 3"), (LastCall(3, has_ended=True), "computes since its call 3"),
    (LastCall(3), "has made no call since its call 3"), (LastCall(), "has made no call"), (None, "is silent"),
    (LastCall(3, "barrier\na.py:7", True), r"computes since its call 3, barrier \(first made at a.py:7\)"),
    (LastCall(3, has_ended=True, when=1.0), r"computes since its call 3, \d+ s ago")],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "")
def test_what_a_rank_is_said_to_do(called, words):
    watching = guard.Guard(0, Processes({}), lambda: {1}, dict, dict, lambda: 0.0, last=lambda rank: called)
    assert re.fullmatch(f"rank 1 {words}", watching.describe(1))


def test_a_failure_that_is_shown_waits_for_its_cause():
    """The mark in shared memory comes before the farewell with the cause."""
    cause = Farewell(Why.FAILED, (2,), words="has failed in its call 4: [GC-RANK] rank 2 has ended")
    came = iter([{}, {}, {1: cause}])
    watching = guard.Guard(0, Processes({}), lambda: {1}, dict, lambda: next(came), lambda: 0.0)
    error = watching.told(1)
    assert (type(error), error.ranks) == (gc.RankFailedError, (2,))
    assert "rank 1 has failed in its call 4" in str(error)


def test_a_rank_that_ended_after_a_failure_has_shown_the_culprit():
    """Rank 1 has ended without a farewell; the mark of rank 1 in shared memory names rank 2."""
    words = {0: numpy.zeros(8, "i8"), 1: numpy.zeros(8, "i8")}
    node = SimpleNamespace(rank=0, words=words)
    for failure, culprit in ((failures.EXPIRED_FOR - 2, 2), (failures.DOWN - 2, 2), (failures.DOWN - 1, None),
                             (failures.DOWN, None), (failures.ASTRAY, None), (0, None)):
        words[1][FAILURE] = failure
        assert failures.culprit_of(node, 1) == culprit
    assert failures.culprit_of(node, 5) is None  # of another node


def test_a_store_that_ends_with_its_process_names_the_rank():
    """The connection breaks before the end of rank 0's process is visible; the end comes within the wait."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as rank_0:
        def broken():
            rank_0.stdin.close()  # the process ends soon
            raise gc.BackendError("the store cannot be reached")

        watching = guard.Guard(1, Processes({0: rank_0.pid}), lambda: {2}, dict, broken, lambda: 0.0)
        with pytest.raises(gc.RankFailedError) as failed:
            watching.check()
    assert failed.value.ranks == (0,)
    watching = guard.Guard(1, Processes({}), lambda: {2}, dict, broken, lambda: 0.0)
    with pytest.raises(gc.BackendError, match="cannot be reached"):
        watching.check()
