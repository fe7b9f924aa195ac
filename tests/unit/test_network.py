"""The connections for ranks of several hosts to watch each other: addresses, and the meaning of a broken connection."""

import secrets
import socket
import time
from types import SimpleNamespace

import pytest

from gpucoll.communicator import elastic
from gpucoll.errors import RankFailedError
from gpucoll.health import remote
from gpucoll.health.remote import Watch, client_at, reachable
from gpucoll.transport.connections import Connection, Hub
from gpucoll.transport.kvstore import StoreClient, StoreServer
from gpucoll.transport.mailbox import StoreRanks
from harness.pace import seconds
from harness.watch_threads import TOKEN, Ranks, becomes, listening, made


@pytest.fixture
def watches(monkeypatch):
    monkeypatch.setattr(remote, "CONNECT", seconds(60))  # so long that no verdict depends on the machine's load
    monkeypatch.setattr(remote, "GREETING", seconds(60))
    monkeypatch.setattr(remote, "ANSWER_TIMEOUT", seconds(60))
    monkeypatch.setattr(remote, "REPORT_EXPIRY", seconds(600))
    with made(Ranks(4)) as found:
        yield found


def grows_to(whole, of):
    """Return whether `of()`, a set or a dictionary, becomes `whole` within some seconds, with only parts before."""
    give_up = time.monotonic() + seconds(20)
    while (found := of()) != whole and time.monotonic() < give_up:
        assert {*found} <= {*whole}
        assert all(found[key] == whole[key] for key in found) if isinstance(whole, dict) else True
        time.sleep(1e-3)
    return found == whole


def test_a_connection_that_breaks_off_is_a_death(watches):
    assert [watch.gone() for watch in watches] == [[]] * 4
    watches[2]._store.abandon()
    for rank in (0, 1, 3):
        assert grows_to([2], watches[rank].gone)
    watches[0]._store.end()  # as if rank 0's process had ended
    for rank in (1, 3):
        assert grows_to([2, 0], watches[rank].gone)
        assert watches[rank].silent(1) is None


def test_who_waits_in_an_earlier_call_is_silent_only_if_all_wait(watches):
    for rank in (1, 2, 3):
        watches[rank].report(5 if rank < 3 else 4)
    assert grows_to({1: 5, 2: 5, 3: 4}, watches[0].heard)
    assert [watches[rank].silent(5) for rank in (0, 1, 2)] == [{3}, {0}, {0}]
    watches[0].report(5)
    assert grows_to({0: 5, 1: 5, 2: 5, 3: 4}, watches[0].heard)
    assert [watches[rank].silent(5) for rank in (0, 1, 2)] == [{3}] * 3


def test_who_leaves_in_order_has_not_died(watches):
    watches[1].close()
    assert becomes(lambda: 1 not in watches[0]._store.members)
    watches[0].close()
    assert becomes(lambda: watches[3].gone() or watches[3]._store.is_lost)  # rank 0's farewell has arrived
    assert [watch.gone() for watch in watches] == [[]] * 4


def test_a_part_counts_its_own_ranks(monkeypatch):
    """Ranks 2, 3 and 0 of a job are ranks 0, 1 and 2 of a part: the store counts the job's, all errors the part's."""
    monkeypatch.setattr(remote, "REPORT_EXPIRY", seconds(600))
    token, numbers = secrets.token_hex(8), (2, 3, 0)
    job = [StoreServer.at(None, 4, token), *(StoreClient.at(None, rank, 4, token, seconds(60)) for rank in (1, 2, 3))]
    ranks = [StoreRanks(job[number], "part", rank, 3, seconds(60), numbers) for rank, number in enumerate(numbers)]
    watches = [Watch(one, (0, 1, 1), one._store, "part") for one in ranks]
    job[1].abandon()
    assert becomes(lambda: job[0].news() == [1])
    ranks[2]._read(["0"], time.monotonic() + 0.5)  # rank 1 of the part has not ended
    assert [watch.gone() for watch in watches] == [[]] * 3
    watches[0].report(5)
    assert grows_to({0: 5}, watches[2].heard)
    assert [watch.silent(5) for watch in watches] == [{1, 2}, {2}, {1}]
    job[3].abandon()
    assert all(grows_to([1], watches[rank].gone) for rank in (0, 2))
    with pytest.raises(RankFailedError, match="rank 1 ended") as error:
        ranks[2]._read(["0"], time.monotonic() + seconds(60))
    assert error.value.ranks == (1,)
    job[0].end()  # as if the process of the store had ended
    assert grows_to([1, 2], watches[0].gone)
    link = SimpleNamespace(processes=SimpleNamespace(ended=lambda: (1,)))
    assert elastic._lost("shrink", RankFailedError("of a group under way", ranks=(0,)), link).ranks == (1,)
    for one in job:
        one.abandon()


def test_a_hub_that_does_not_know_the_token_is_no_hub():
    with listening(2) as (ranks, _):
        place = ("127.0.0.1", ranks.hub.port), 1, 2
        assert client_at(*place, "another", seconds(60)) is None
        client = client_at(*place, TOKEN, seconds(60))
        assert client_at(*place, TOKEN, seconds(60)) is None  # rank 1 is connected already
        client.close()


def test_a_rank_whose_place_strangers_take_comes_again(monkeypatch):
    """The first greetings of a rank end without an answer, as in a flood of connections; the rank tries again."""
    joined, tries = Connection.join, []

    def join(connection, *given):
        tries.append(given)
        if len(tries) < 3:
            raise (EOFError, ConnectionResetError)[len(tries) - 1]
        return joined(connection, *given)

    monkeypatch.setattr(Connection, "join", join)
    with listening(2) as (ranks, _):
        client_at(("127.0.0.1", ranks.hub.port), 1, 2, TOKEN, seconds(60)).close()
        assert len(tries) == 3


def test_rank_0_listens_where_it_says_until_all_have_come(monkeypatch):
    monkeypatch.setattr(remote, "addresses", lambda: ["127.0.0.3", "127.0.0.2"])
    monkeypatch.setattr(remote, "CONNECT", seconds(60))
    serve, connects, bound, told = Hub.serve, client_at, [], []

    monkeypatch.setattr(Hub, "serve", lambda hub: bound.append(hub._listener.getsockname()) or serve(hub))
    monkeypatch.setattr(remote, "client_at", lambda address, *given: told.append(address) or connects(address, *given))
    with made(Ranks(3), (0, 1, 2)) as watches:
        assert [address for address, _ in bound] == ["127.0.0.2"]
        assert told == bound * 2
        assert [{*watch._ranks} for watch in watches] == [{0, 1, 2}] * 3
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(bound[0], seconds(20))


def test_a_rank_that_is_not_watched_is_neither_dead_nor_silent(monkeypatch, caplog):
    """Rank 1 takes the answer to the greeting for late; rank 0 has accepted rank 1, and sees the connection end."""
    monkeypatch.setattr(remote, "addresses", lambda: ["127.0.0.2", "127.0.0.3"])
    monkeypatch.setattr(remote, "ANSWER_TIMEOUT", seconds(60))
    joined, greetings = Connection.join, []

    def late(connection, rank, *given):
        greetings.append(rank)
        welcome = joined(connection, rank, *given)
        if rank == 1:
            raise TimeoutError
        return welcome

    monkeypatch.setattr(Connection, "join", late)
    with made(Ranks(3), (0, 1, 2)) as watches:
        assert "ranks [1] cannot reach rank 0" in caplog.text
        assert sorted(greetings) == [1, 2]  # no second greeting: rank 0 would find rank 1 connected already
        assert becomes(lambda: watches[0]._store.news() == [1])
        assert [watch.gone() for watch in watches] == [[]] * 3
        assert [watch.silent(1) for watch in watches] == [{2}, None, {0}]


def test_where_other_hosts_reach_rank_0(monkeypatch):
    mine = ["127.0.0.1", "172.17.0.1", "10.1.0.1", "10.2.0.1"]
    assert reachable(mine, [mine, mine]) == ["127.0.0.1", "10.1.0.1", "10.2.0.1", "172.17.0.1"]  # all on one host
    assert remote.route("127.0.0.9") == "127.0.0.1"
    networks = {"10.1": "10.1.0.1", "10.2": "10.2.0.1", "10.9": "10.2.0.1"}
    monkeypatch.setattr(remote, "route", lambda other: networks.get(other[:4]))
    theirs = ["127.0.0.1", "127.0.1.1", "172.17.0.1", "10.1.0.2", "10.2.0.2", "10.9.0.2", "192.168.0.2"]
    assert reachable(mine, [mine, theirs]) == ["10.2.0.1", "10.1.0.1", "172.17.0.1"]
