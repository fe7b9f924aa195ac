"""Ranks of several hosts without MPI: a store joins the ranks, and UCX carries the messages between hosts."""

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

import gpucoll as gc
from gpucoll.launch import launchers, places
from gpucoll.transport import ucx
from gpucoll.transport.kvstore import MemoryStore
from gpucoll.transport.mailbox import StoreRanks
from gpucoll.transport.tags import TAGS
from harness.jobs import outputs_of
from harness.pace import seconds
from multirank.ucx_hosts import ENVIRONMENT, JOB, on_hosts

MODULE, REASON = ucx.library()

pytestmark = pytest.mark.skipif(MODULE is None, reason=f"UCX is not installed: {REASON}")


@pytest.mark.parametrize(("hosts", "ranks", "program"), [
    (2, 2, ["calls"]), (2, 1, ["points"]), (2, 1, ["unlike"]),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (2, 2, ["calls", "ucx"]), (2, 1, ["calls"]), (2, 2, ["points"]), (4, 1, ["calls"]), (2, 2, ["unlike"]),
        (3, 1, ["unlike"]), (2, 2, ["unlike", "ucx"])])])
def test_calls_and_messages(hosts, ranks, program):
    outputs, codes = on_hosts(ranks, *program, secrets=["s"] * hosts)
    assert codes == [0] * hosts, outputs


@pytest.mark.parametrize(("how", "error"), [
    ("kill", "RankFailedError"), pytest.param("idle", "CollectiveTimeout", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_is_named_on_both_hosts(how, error):
    """Started by hand: a launcher would end the other ranks of its host at once."""
    port, jobs = launchers.free_port(), []
    for node in range(2):
        for own in launchers.node_variables(2, node, 2, "127.0.0.1", port):
            jobs.append(subprocess.Popen([sys.executable, JOB, "lost", how], stdout=subprocess.PIPE, text=True,
                                         stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT, **own}))
    outputs = outputs_of(jobs, seconds(60))
    assert [f"{error} (3,)" in output for output, _ in outputs[:3]] == [True] * 3, outputs


def test_every_rank_names_the_rank_without_ucx():
    outputs, codes = on_hosts(1, "without_ucx")
    assert codes == [0, 0], outputs
    assert ["GC-UCX (1,)" in output for output in outputs] == [True, True], outputs


def test_a_host_with_another_secret_is_refused():
    outputs, codes = on_hosts(1, "meets", secrets=("s", "t"))
    assert codes[1] == 1
    assert "another token" in outputs[1]


@pytest.fixture
def pair():
    """Return the carriers of users' messages of two ranks, each with a worker of its own."""
    processes = [ucx.UcxProcess() for _ in range(2)]
    everyone = [one.address for one in processes]
    user = 1 << MODULE.USER_SHIFT
    yield [ucx.UcxMessages(one, user, rank, everyone, matches=True) for rank, one in enumerate(processes)]
    for one in processes:
        one.worker.close(1.0)


def until(condition, pair):
    """Let both workers move data until the condition holds."""
    for _ in range(1_000_000):
        for one in pair:
            one._worker.progress()
        if condition():
            return
    raise AssertionError("nothing has arrived")


def test_receives_take_messages_in_order_and_leave_other_tags(pair):
    rows = [numpy.zeros(4, numpy.uint8) for _ in range(3)]
    receives = [pair[1].Irecv([row, "B"], 0, tag) for row, tag in zip(rows, (5, 5, 6), strict=True)]
    sends = [pair[0].Isend([numpy.full(4, value, numpy.uint8), "B"], 1, tag) for value, tag in ((1, 6), (2, 5), (3, 5))]
    until(lambda: all([one.Test() for one in (*receives, *sends)]), pair)
    assert [row.tolist() for row in rows] == [[2] * 4, [3] * 4, [1] * 4]


@pytest.mark.parametrize(("nbytes", "dtype"), [(8, 3), (4, 2)])
def test_a_message_that_does_not_fit_is_received_and_not_written(pair, nbytes, dtype):
    row = numpy.full(4, 9, numpy.uint8)
    receive = pair[1].Irecv([row, "B"], 0, 5, 3)
    pair[0].Isend([numpy.ones(nbytes, numpy.uint8), "B"], 1, 5, dtype)
    until(receive.Test, pair)
    assert (receive.length, receive.came, row.tolist()) == (nbytes, dtype, [9] * 4)
    assert pair[1].seen(0, 5) is None


def test_a_probe_sees_the_message_that_no_receive_waits_for(pair):
    row = numpy.zeros(1, numpy.uint8)
    receive = pair[1].Irecv([row, "B"], 0, 5)
    for tag in (5, 7):
        pair[0].Isend([numpy.full(tag, tag, numpy.uint8)[:tag - 4], "B"], 1, tag)
    until(lambda: pair[1].seen(None, 7) is not None, pair)
    assert [pair[1].seen(*key) for key in ((0, None), (None, None), (0, 5), (1, 7))] == [
        (0, 7, 3), (0, 7, 3), None, None]
    until(receive.Test, pair)
    assert row.tolist() == [5]


def test_any_tag_is_a_tag_of_users(pair):
    pair[0].Isend([numpy.ones(1, numpy.uint8), "B"], 1, TAGS)
    until(lambda: pair[1].seen(None, TAGS) is not None, pair)
    assert pair[1].seen(None, None) is None


def test_a_cancelled_receive_takes_no_message(pair):
    row = numpy.zeros(1, numpy.uint8)
    pair[1].Irecv([row, "B"], 0, 5).Cancel()
    pair[0].Isend([numpy.ones(1, numpy.uint8), "B"], 1, 5)
    until(lambda: pair[1].seen(0, 5) is not None, pair)
    assert row.tolist() == [0]


@pytest.fixture
def unconnected(monkeypatch):
    """Return a function making a process without a worker; UCX itself is left out."""
    monkeypatch.setattr(ucx, "library", lambda: (None, "left out"))
    return ucx.UcxProcess


def test_communicators_made_by_threads_have_numbers_of_their_own(unconnected):
    """Two threads of each rank make two communicators at once, the later name first; rank 1 has made others before.

    No thread ends before all four have begun.
    """
    processes, store, wave = [unconnected() for _ in range(2)], MemoryStore(), threading.Barrier(4)
    later = [threading.Event() for _ in range(2)]
    processes[1].contexts = 11

    def agreed(rank, name):
        ranks, rounds = StoreRanks(store, name, rank, 2, seconds(60)), itertools.count()

        def everyone(mine):
            if next(rounds) == 1:  # after the round in which the ranks wait for each other
                later[rank].set()
                wave.wait(seconds(60))
            return ranks.allgather(mine)

        if name == "a":
            assert later[rank].wait(seconds(60))
        return processes[rank].context(name, everyone)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(agreed, (0, 0, 1, 1), "abba"))
    assert found[0] == found[3]
    assert found[1] == found[2]
    assert {found[0], found[1]} == {11, 12}
    assert [one.contexts for one in processes] == [13, 13]


PLACE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_the_place_of_ranks_on_several_hosts():
    there = (5, 8, "tcp://a:29500", ("a", 29500))
    assert places.store_place(PLACE) == there
    assert places.store_place({**PLACE, "GPUCOLL_SECRET": "s"}).token == "s"
    assert places.store_place({**PLACE, "TORCHELASTIC_RUN_ID": "x"}) == (5, 8, "a:29500 x ", ("a", 29500))
    alone = {name: value for name, value in PLACE.items() if name != "LOCAL_WORLD_SIZE"}
    assert places.store_place(alone) == there
    for here in ("localhost", "127.0.0.1", "::1"):
        assert places.store_place({**alone, "MASTER_ADDR": here}).address is None
    slurm = {"MASTER_ADDR": "b", "MASTER_PORT": "7", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
    assert places.store_place(slurm) == (3, 4, "tcp://b:7", ("b", 7))
    assert places.store_place({**slurm, "PMIX_RANK": "3"}) is None
    places.follow("tcp://[::1]:7")
    try:
        assert places.store_place(PLACE) == (5, 8, "tcp://[::1]:7", ("::1", 7))
    finally:
        places._told.clear()


@pytest.mark.parametrize(("options", "said"), [
    (dict(store="udp://a:1"), "tcp://host:port"), (dict(store="tcp://a:65536"), "tcp://host:port"),
    (dict(store="tcp://a:1"), "needs its rank"), (dict(store="tcp://a:1", rank=0), "needs its size"),
    (dict(store="tcp://a:1", rank=2, size=2), "not one of 2"), (dict(rank=0, size=2), "need store=")])
def test_incomplete_places_are_refused(options, said, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(places, "started", lambda environment: None)
    with pytest.raises(gc.UsageError, match=said) as refused:
        gc.init(**options)
    assert refused.value.code == "GC-STORE"
