"""The connections by which ranks of several hosts watch each other: who may make one, and what its end means."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpucoll.guard import network
from gpucoll.guard.network import Hub, Watch
from gpucoll.store import LENGTHS, FrameReader, send_frame
from pace import seconds

TOKEN = b"0123456789abcdef"


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
    with hub._lock:
        here = dict(hub._here)
        hub._here.clear()
    for connection in here.values():  # as if its process had ended
        connection.shutdown(socket.SHUT_RDWR)
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
    assert becomes({0: 5, 2: 4, 3: 6}, watches[0]._hub.heard)
    assert [watches[rank].silent(5) for rank in (0, 2, 3)] == [{1, 2}, {1}, {1, 2}]
    assert watches[1].silent(4) == set()


@pytest.mark.parametrize("said", [
    b"GET / HTTP/1.1\r\n\r\n", LENGTHS.pack(1 << 30, 0), LENGTHS.pack(2, 9) + b"{}", LENGTHS.pack(4, 0) + b"1234",
    {"rank": 1, "proof": "0" * 64}, {"rank": 1, "proof": "\u00e9"}, {"rank": 1}, {"rank": 7, "proof": ""},
    {"rank": True}])
def test_strangers_are_sent_away(said):
    """What is no frame, too long, or does not know the token; the ranks notice nothing."""
    hub = Hub(3, TOKEN)
    with socket.create_connection(("127.0.0.1", hub.port), 20) as stranger:
        reader = FrameReader(stranger)
        assert reader.read(0)[0].keys() == {"nonce"}
        send_frame(stranger, said) if isinstance(said, dict) else stranger.sendall(said)
        with pytest.raises((EOFError, ConnectionResetError)):
            reader.read(0)
    assert (hub.gone, hub._here) == (set(), {})
    hub.close()


def test_a_hub_that_does_not_know_the_token_is_no_hub():
    hub = Hub(2, TOKEN)
    watch = Watch.__new__(Watch)
    watch._rank, watch._gone = 1, set()
    assert watch._connected("127.0.0.1", hub.port, b"another") is None
    connection = watch._connected("127.0.0.1", hub.port, TOKEN)
    assert connection is not None
    assert watch._connected("127.0.0.1", hub.port, TOKEN) is None  # rank 1 is there
    connection.close()
    hub.close()
