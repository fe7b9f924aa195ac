"""The store for ranks to meet without MPI: strangers, garbage and doubles are refused, nothing is unpickled."""

import pickle
import secrets
import socket
import threading
import time

import pytest

import gpucoll as gc
from gpucoll.health.farewell import Farewell, Sent, Why
from gpucoll.launch import launchers, places
from gpucoll.progress.waits import Progress, limited
from gpucoll.transport import kvstore
from gpucoll.transport.connections import LENGTHS, Connection, proof
from gpucoll.transport.mailbox import StoreMessages, StoreRanks, decode, encode
from gpucoll.transport.rendezvous import becomes
from gpucoll.transport.tags import Tag
from harness.pace import seconds

NONCE = "1" * 32
HELLO = {"group": "", "name": 1, "size": 3, "version": gc.__version__, "nonce": NONCE}


@pytest.fixture
def token():
    return secrets.token_hex(8)


@pytest.fixture
def server(token):
    server = kvstore.StoreServer.at(None, 3, token)
    yield server
    server.abandon()


def answer_to(token, what):
    """Return the store's JSON answer to bytes, or to a hello with a token's proof; None if the store only closes."""
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(60)
        connected.connect(kvstore.socket_name(token))
        connection = Connection(connected)
        nonce = connection.read()[0]["nonce"]
        if isinstance(what, bytes):
            connected.sendall(what)
            connected.shutdown(socket.SHUT_WR)
        else:
            known = what.pop("token", token)
            connection.send(what | proven(known, what["name"], nonce))
        try:
            return connection.read()[0]
        except (EOFError, ConnectionError):
            return None


def proven(token, rank, nonce):
    return {} if token is None else {"proof": proof(token, "rank", rank, (nonce, NONCE))}


@pytest.fixture
def silent(token):
    """Return the client of a store that lets ranks in, and then answers nothing, as if its process were stopped."""
    server, goes_on = kvstore.StoreServer.at(None, 2, token), threading.Event()
    answer = server.answer
    server.answer = lambda rank, frame: (goes_on.wait(seconds(60)), answer(rank, frame))[1]
    client = kvstore.StoreClient.at(None, 1, 2, token, seconds(60))
    client.goes_on, client.server = goes_on.set, server
    yield client
    goes_on.set()
    client.close()
    server.abandon()


def test_a_wait_and_its_requests_have_one_deadline(silent, monkeypatch):
    monkeypatch.setattr(kvstore, "REQUEST_TIMEOUT", seconds(60))
    waits, began = Progress(0.2), time.monotonic()

    def operation():
        silent.set("key", b"1")
        yield lambda: silent.get("key") is not None

    with pytest.raises(gc.CollectiveTimeout), limited(began + 0.2):
        waits.run(operation(), "wait")
    with pytest.raises(gc.CollectiveTimeout):
        StoreRanks(silent, "ranks", 1, 2, 0.2).allgather("here")
    for key in map(str, range(20)):  # as in `close`
        silent.set(key, b"2")
    assert time.monotonic() < began + seconds(30)
    silent.goes_on()
    assert becomes(lambda: silent.get("19") is not None, seconds(60))  # nothing was lost
    assert silent.get("key") == b"1"
    assert not silent._is_silent


def test_a_silent_store_is_asked_once(silent, monkeypatch):
    """Questions without an answer would fill the connection, and then block."""
    monkeypatch.setattr(kvstore, "REQUEST_TIMEOUT", 0.01)
    for _ in range(20):
        assert silent.get("key") is None
    assert silent._numbers == 1


@pytest.mark.parametrize(("hello", "words"), [
    ({"token": "guessed"}, "another token"), ({"token": None}, "another token"),
    ({"token": "guessed", "name": 3}, "another token"), ({"proof": 1}, "another token"),
    ({"size": 2}, "with the same version and number"), ({"version": "0.0"}, "with the same version and number"),
    ({"name": 0}, "not in 1..2"), ({"nonce": "1"}, "the nonce is missing"), ({"name": 3}, "not in 1..2"),
    ({"name": True}, "the rank or the nonce"), ({"name": 1.0}, "the rank or the nonce"),
    ({"name": "1"}, "not in 1..2")])
def test_strangers_are_sent_away(server, token, hello, words):
    right = {"token": None} if "proof" in hello else {}
    assert words in answer_to(token, {**HELLO, **right, **hello})["error"]
    kvstore.StoreClient.at(None, 1, 3, token, 60.0).close()  # the store still accepts ranks


@pytest.mark.parametrize("garbage", [
    b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, LENGTHS.pack(4, 0) + b"\xff\xfe{}", LENGTHS.pack(2, 0) + b"[]",
    LENGTHS.pack(2, 1 << 20) + b"{}", LENGTHS.pack(5000, 0) + b"[" * 5000])
def test_garbage_is_a_typed_error_and_the_store_goes_on(server, token, garbage):
    assert "not a frame of gpucoll's store" in answer_to(token, garbage)["error"]
    client = kvstore.StoreClient.at(None, 1, 3, token, 60.0)
    for wrong in (("set", 3), ("eval", "x"), ("get", "x")):
        with pytest.raises(kvstore.StoreError, match="not a call of gpucoll's store"):
            client._call(*wrong)
        client._connection.socket.close()
        assert server.is_left(60)
        client = kvstore.StoreClient.at(None, 1, 3, token, 60.0)
    client.close()


def test_one_rank_of_a_number_and_one_rank_0(server, token):
    with_it = kvstore.StoreClient.at(None, 1, 3, token, 60.0)
    with pytest.raises(gc.BackendError, match=r"GC-STORE.*is taken; RANK must differ"):
        kvstore.StoreClient.at(None, 1, 3, token, 60.0)
    with pytest.raises(gc.BackendError, match="give each job a separate port"):
        kvstore.StoreServer.at(None, 3, token)
    with_it.close()


def test_what_ranks_tell_is_json_and_nothing_is_run():
    told = [1.5, None, ["a", b"\xff"], {"key": [True], "tuple": 1}, []]
    assert decode(encode(told)) == told
    for garbage in (pickle.dumps(1.5), b"", b"__import__('os')._exit(3)", b"Trap()", b"1 +", b"\0", b"[" * 100_000,
                    b'{"bytes in hex": "?"}', b'{"bytes in hex": 1}'):
        with pytest.raises(gc.BackendError, match="not written by gpucoll"):
            decode(garbage)


class Told:
    """A lock that tells when it is asked for."""

    def __init__(self, asked):
        self.lock, self.asked = threading.Lock(), asked

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            self.asked.set()
            self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()


def test_two_threads_may_look_for_farewells_at_once(monkeypatch):
    """A second thread looks once the first has found a farewell, and before it has received it."""
    store, looks, both = kvstore.MemoryStore(), [], threading.Event()
    wire, get, found = StoreMessages(store, "wire", 0, 2), store.get, {}

    def look():
        for rank, row in wire.farewells([1]).items():
            found.setdefault(rank, []).append(Farewell.decode(row))

    def looked(key, wait=0.0):
        value = get(key, wait)
        if f" {Tag.FAREWELL.value} " in key:
            looks.append(threading.Thread(target=look))
            if len(looks) == 1:
                looks[0].start()
                assert both.wait(seconds(60))
            both.set()
        return value

    monkeypatch.setattr(store, "get", looked)
    wire._looking = Told(both)
    farewell = Farewell(Why.CLOSES, calls=3, words="has closed")
    Sent(StoreMessages(store, "wire", 1, 2), [0], farewell)
    look()
    looks[0].join()
    assert found == {1: [farewell]}


PLACE = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5"}


def test_who_meets_without_mpi():
    assert places.store_place(PLACE)[:2] == (1, 4)
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}
    names = {places.store_place({**PLACE, **more}).token for more in (
        {}, {"MASTER_PORT": "6"}, torchrun, {**torchrun, "TORCHELASTIC_RESTART_COUNT": "2"})}
    assert len(names) == 4  # no attempt meets the leftovers of another attempt
    mpi = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    assert places.store_place({**PLACE, **mpi}) is None
    assert places.store_place({**PLACE, "PMIX_RANK": "1"}) is None  # an unknown launcher
    assert places.store_place({**PLACE, "PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"}) is not None  # srun -n 1
    assert places.store_place({**PLACE, **mpi, launchers.RUN: "t"}) == (1, 4, "a:5 t ", None)
    for lone in ({}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}):
        assert places.store_place(lone) is None
    for wrong, words in (({"RANK": "4"}, "RANK='4' is not one of"), ({"RANK": "x"}, "set both, or neither"),
                         ({"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "x"}, "give no address"),
                         ({"MASTER_PORT": ""}, "gpucoll run --standalone -n 4")):
        with pytest.raises(gc.UsageError, match=words):
            places.store_place({**PLACE, **wrong})
    assert [places.store_place(one)[:2] for one in launchers.rank_variables(3)] == [(0, 3), (1, 3), (2, 3)]
