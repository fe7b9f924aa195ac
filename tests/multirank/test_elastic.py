"""Groups of ranks that change: survivors of killed ranks, growth by newcomers, lost ranks replaced; no litter."""

import json

import numpy
import pytest

import gpucoll as gc
from harness.pace import seconds

SHRINKS = """
comm, dies = world(), json.loads(how[0])
if rank in dies:
    die(comm)
lost = broken(comm)
assert {*lost} <= {*dies}, lost
rest = comm.shrink()
assert comm.closed and gc.init() is rest
shows(rest, rank)
rest.close()
"""


@pytest.mark.parametrize("dies", [[0], *(pytest.param(dies, marks=pytest.mark.slow) for dies in ([1], [0, 1]))])
def test_survivors_go_on(group, dies):
    group.start_all(SHRINKS, 4, json.dumps(dies))
    left = [rank for rank in range(4) if rank not in dies]
    said = sorted(group.said(), key=lambda one: one["was"])
    assert [(one["was"], one["rank"], one["size"], one["all"]) for one in said] == [
        (rank, place, len(left), left) for place, rank in enumerate(left)]


MEETS = """
import socket
from gpucoll.communicator.links import StoreLink
from gpucoll.transport.process import PROCESS
comm, meets = world(), StoreLink.regrouped
(port,) = PROCESS.ports.values()
def regrouped(*given, **more):
    socket.create_connection(port.address, timeout).close()  # as a newcomer does at this moment
    return meets(*given, **more)
StoreLink.regrouped = regrouped
if rank == 1:
    die(comm)
assert broken(comm) == [1]
shows(comm.shrink(), rank)
"""


def test_newcomers_find_the_port_open_while_survivors_meet(group):
    group.start_all(MEETS, 3)
    assert sorted(one["was"] for one in group.said()) == [0, 2]


REPLACES = """
comm, was = world(), rank
for victim in json.loads(how[0]):
    if comm.rank == victim:
        die(comm)
    assert broken(comm) == [victim]
    comm = comm.replace(timeout)
    shows(comm, rank)
comm.close()
"""

@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_newcomer_takes_the_number_of_the_lost_rank(group, victim):
    group.start_all(REPLACES, 3, json.dumps([victim]))
    group.start(NEWCOMER)
    said = group.said()
    assert sorted(one["rank"] for one in said) == [0, 1, 2]
    assert {(one["size"], tuple(one["all"])) for one in said} == {(3, (0, 1, 2))}
    assert len({one["address"] for one in said}) == 1


def test_the_address_outlives_two_first_ranks(group):
    """Rank 0 dies, and then the newcomer that took its number; the second newcomer finds the same address."""
    group.start_all(REPLACES, 3, "[0, 0]")
    first = group.start(JOINS_TWICE)
    first.stdout.readline()  # has a rank: the second newcomer takes the next place
    group.start(JOINS_TWICE, 0, 0, "stays")
    said = group.said()
    assert len(said) == 2 + 2 + 1  # of ranks 1 and 2, twice, and of the second newcomer
    assert {tuple(one["all"]) for one in said} == {(0, 1, 2)}
    assert len({one["address"] for one in said}) == 1


JOINS_TWICE = """
comm = gc.join(place, timeout)
shows(comm, comm.rank)
if not how:
    die(comm)
comm.close()
"""

GROWS = """
comm = world()
grown = comm.grow(size + 2, timeout)
assert (comm.closed, grown.rank) == (False, rank)
shows(grown, rank)
assert comm.all_gather(numpy.array([rank])).ravel().tolist() == list(range(size))
grown.close()
comm.close()
"""

NEWCOMER = """
comm = gc.join(place, timeout)
assert gc.init() is comm
shows(comm, comm.rank)
comm.close()
"""


def test_members_keep_their_ranks_and_newcomers_come_after(group):
    group.start_all(GROWS, 2)
    for _ in range(2):
        group.start(NEWCOMER)
    said = sorted(group.said(), key=lambda one: one["rank"])
    assert [(one["rank"], one["size"], one["all"]) for one in said] == [(rank, 4, [0, 1, 2, 3]) for rank in range(4)]


REFUSALS = """
comm, codes = world(), []
def refused(call, *arguments):
    try:
        call(*arguments)
    except gc.GpucollError as error:
        codes.append([type(error).__name__, error.code])
refused(comm.grow, True if rank == 0 else 3)
refused(comm.grow, 3 + rank)
refused(comm.grow, 1)
refused(comm.grow, 3, 0.2)
refused(gc.join, "127.0.0.1:1")
refused(gc.join, "tcp://127.0.0.1:1", 0.2)
say(rank=rank, codes=codes, sum=comm.all_reduce(numpy.array([rank + 1])).tolist())
comm.close()
"""


def test_wrong_growth_is_refused_on_every_rank(group):
    group.start_all(REFUSALS, 2)
    for one in group.said():
        first = ["ArgumentError", "GC-GROW"] if one["rank"] == 0 else ["PeerError", "GC-PEER"]
        assert one["codes"] == [first, ["MismatchError", "GC-GROW"], ["ArgumentError", "GC-GROW"],
                                ["CollectiveTimeout", "GC-TIMEOUT"], ["UsageError", "GC-STORE"],
                                ["CollectiveTimeout", "GC-TIMEOUT"]]
        assert one["sum"] == [3]  # the communicator is as usable as before


STRANGER = """
try:
    gc.join(place, timeout)
except gc.BackendError as error:
    say(code=error.code, text=str(error))
"""


def test_a_newcomer_with_another_secret_is_refused(group):
    member = group.start("comm = world(); say(); sys.stdin.read()", 0, 1)
    assert member.stdout.readline() == "{}\n"
    found = json.loads(group.start(STRANGER, secret="another").stdout.readline())
    assert found["code"] == "GC-STORE"
    assert "GPUCOLL_SECRET" in found["text"]


LEAVES = """
comm = world()
if rank == 0:  # leaves, and lives on
    try:
        with comm:
            comm.all_reduce(numpy.arange(1000))
            raise KeyError
    except KeyError:
        say(left=True)
        sys.stdin.read()
else:
    assert broken(comm) == [0]
    shows(comm.shrink(), rank)
"""


def test_a_rank_that_left_is_not_awaited(group):
    jobs = group.start_all(LEAVES, 3)
    said = [json.loads(job.stdout.readline()) for job in jobs]
    assert [one.get("all") for one in said] == [None, [1, 2], [1, 2]]


STAYS = """
comm = world()
comm.barrier()
if rank == 1:
    sys.stdin.read()
else:
    try:
        comm.shrink()
    except gc.CollectiveTimeout as error:
        say(ranks=error.ranks)
"""


def test_a_living_rank_that_stays_away_is_named(group):
    jobs = group.start_all(STAYS, 3, timeout=1.0)
    assert [json.loads(jobs[rank].stdout.readline()) for rank in (0, 2)] == [{"ranks": [1]}] * 2


DIES_IN_GROW = """
comm = world()
comm.barrier()
if rank == int(how[0]):  # the other ranks wait for a newcomer
    gc.communicator.elastic.regroup.grown = lambda *_, **more: os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    comm.grow(size + 1, timeout)
except gc.RankFailedError as error:
    say(ranks=error.ranks, prompt=time.monotonic() < began + timeout / 2)
"""


@pytest.mark.parametrize("dies", [0, 1])
def test_a_member_that_dies_while_the_group_grows_is_named(group, dies):
    group.start_all(DIES_IN_GROW, 3, str(dies))
    assert group.said() == [{"ranks": [dies], "prompt": True}] * 2


AWAITS_TWO = """
from gpucoll.launch import regroup
comm, waits, grown = world(), [], regroup.grown
def is_broken(given):  # asked by the rank that waits for newcomers
    if not waits:
        say(waits=True)
        waits.append(True)
    return given()
regroup.grown = lambda *given, **more: grown(*given[:4], lambda: is_broken(given[4]), *given[5:], **more)
began = time.monotonic()
try:
    comm.grow(size + 2, timeout)
except gc.RankFailedError as error:
    say(prompt=time.monotonic() < began + timeout / 4, sum=comm.all_reduce(numpy.array([rank + 1])).tolist())
comm.close()
"""
COMES_AND_DIES = """
from gpucoll.launch import regroup
regroup._place_of = lambda *_: sys.stdin.readline() and os.kill(os.getpid(), signal.SIGKILL)
gc.join(place, timeout)
"""


def test_a_newcomer_that_dies_while_another_is_awaited_is_told(group):
    first, _ = group.start_all(AWAITS_TWO, 2)
    newcomer = group.start(COMES_AND_DIES)
    assert json.loads(first.stdout.readline()) == {"waits": True}
    newcomer.stdin.write("now\n")
    newcomer.stdin.flush()
    assert group.said() == [{"prompt": True, "sum": [3]}] * 2


# ---------------------------------------------------------------- threads


def test_threads_go_on_without_a_thread_that_left():
    def program(comm):
        if comm.rank == 1:
            comm.close()
            return None
        rest = comm.shrink()
        with pytest.raises(gc.UsageError, match="GC-GROW"):
            rest.grow(4)
        with rest:
            return rest.rank, rest.all_gather(numpy.array([comm.rank])).ravel().tolist()

    assert gc.run_local(program, 4, timeout=seconds(60)) == [(0, [0, 2, 3]), None, (1, [0, 2, 3]), (2, [0, 2, 3])]
