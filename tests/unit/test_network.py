"""The connections by which ranks of several hosts watch each other: who may make one, and what its end means."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpucoll.guard import network
from gpucoll.guard.network import Watch
from gpucoll.store import LENGTHS, Connection, Hub, StoreError, proof
from pace import seconds

TOKEN = "0123456789abcdef"


class Ranks:
    """What `Watch` needs of MPI, for threads."""

    def __init__(self, size):
        self.size, self._rows, self._barrier = size, [None] * size, threading.Barrier(size)

    def of(self, rank):
        ranks = Ranks.__new__(Ranks)
        vars(ranks).update(vars(self), rank=rank)
        return ranks

    def allgather(self, value):
        self._rows[self.rank] = value
        self._barrier.wait(20)
        rows = list(self._rows)
        self._barrier.wait(20)
        return rows

    def bcast(self, value):
        return self.allgather(value)[0]


@pytest.fixture
def watches():
    ranks = Ranks(4)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rank: Watch(ranks.of(rank), (0, 0, 1, 1)), range(4)))
    yield found
    for watch in reversed(found):
        watch.close()


def becomes(value, of):
    """Whether `of()` is `value` within some seconds, in which it is nothing else than it was at first."""
    give_up, first = time.monotonic() + 20, of()
    while (found := of()) != value and time.monotonic() < give_up:
        assert found == first
    return found == value


def test_a_connection_that_breaks_off_is_a_death(watches):
    assert [watch.gone() for watch in watches] == [set()] * 4
    watches[2].drop()
    for rank in (0, 1, 3):
        assert becomes({2}, watches[rank].gone)
    hub = watches[0]._hub
    with hub._changed:
        here = dict(hub._here)
        hub._here.clear()
    for connection in here.values():  # as if its process had ended
        connection.socket.shutdown(socket.SHUT_RDWR)
    for rank in (1, 3):
        assert becomes({0, 2}, watches[rank].gone)
        assert watches[rank].silent(1) is None


def test_who_leaves_in_order_has_not_died(watches):
    watches[1].close()
    assert becomes(True, lambda: 1 not in watches[0]._hub._here)
    watches[0].close()
    assert becomes(None, watches[3].fileno) or watches[3].gone() == set()
    assert [watch.gone() for watch in watches] == [set()] * 4


def test_who_does_not_wait_is_told(watches, monkeypatch):
    monkeypatch.setattr(network, "SILENT", seconds(60))
    for rank, number in ((0, 5), (2, 4), (3, 6)):
        watches[rank].tell(number)
    assert becomes({0: 5, 2: 4, 3: 6}, watches[0].heard)
    assert [watches[rank].silent(5) for rank in (0, 2, 3)] == [{1, 2}, {1}, {1, 2}]
    assert watches[1].silent(4) == set()


@pytest.mark.parametrize("said", [
    b"GET / HTTP/1.1\r\n\r\n", LENGTHS.pack(1 << 30, 0), LENGTHS.pack(2, 9) + b"{}", LENGTHS.pack(4, 0) + b"1234",
    {"rank": 1, "proof": "0" * 64}, {"rank": 1, "proof": "\u00e9"}, {"rank": 1}, {"rank": 7, "proof": ""},
    {"rank": True}])
def test_strangers_are_sent_away(said):
    """What is no frame, too long, or does not know the token; the ranks notice nothing."""
    hub, port = listening(3)
    with socket.create_connection(("127.0.0.1", port), 20) as connected:
        stranger = Connection(connected)
        assert stranger.read(0)[0].keys() == {"nonce"}
        stranger.send(said) if isinstance(said, dict) else connected.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.read(0)[0].keys() == {"error"}
        with pytest.raises((EOFError, ConnectionResetError)):
            stranger.read(0)
    assert (hub.gone, hub._here) == (set(), {})
    hub.close()


def listening(size):
    """A hub that only knows the token, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    hub = Hub(listener, size, TOKEN, lambda rank, frame: None)
    hub.serve()
    return hub, listener.getsockname()[1]


def test_a_hub_that_does_not_know_the_token_is_no_hub():
    hub, port = listening(2)
    watch = Watch.__new__(Watch)
    watch._rank, watch._gone, watch._connection = 1, set(), None
    assert not watch._connects("127.0.0.1", port, 2, "another")
    assert watch._connects("127.0.0.1", port, 2, TOKEN)
    assert not watch._connects("127.0.0.1", port, 2, TOKEN)  # rank 1 is there
    watch._connection.socket.close()
    hub.close()


def test_a_stranger_in_the_place_of_rank_0_is_not_believed():
    listener = socket.create_server(("127.0.0.1", 0))

    def answers():
        connected, _ = listener.accept()
        with connected:
            stranger = Connection(connected)
            stranger.send({"nonce": "0"})
            stranger.read()
            stranger.send({"proof": proof("guessed", "0", 0), "gone": []})

    thread = threading.Thread(target=answers)
    thread.start()
    with listener, socket.create_connection(listener.getsockname(), 20) as connected:
        with pytest.raises(StoreError, match="does not know the token"):
            Connection(connected).join(1, 2, TOKEN)
        thread.join(20)
