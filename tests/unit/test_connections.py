"""Ports for ranks to meet at: strangers lose only their own connections, and both ends prove their identity."""

import contextlib
import errno
import itertools
import json
import secrets
import socket
import threading
import time

import pytest

import gpucoll as gc
from gpucoll.health import remote
from gpucoll.transport import connections, kvstore
from gpucoll.transport.connections import LENGTHS, STRANGERS, Connection, Hub, StoreError, proof
from harness.pace import seconds
from harness.watch_threads import TOKEN, Ranks, becomes, listening, made
from unit.strangers import attack, connected_to

NONCES = "0" * 32, "1" * 32
GREETING = {"group": "", "name": 1, "size": 3, "version": gc.__version__, "nonce": NONCES[1], "proof": "0" * 64}


@pytest.fixture(autouse=True)
def uncaught(monkeypatch):
    """Fail on any uncaught exception in a thread: in a job all ranks would end (`bootstrap.end_together`).

    The fixture of all tests, `nothing_is_left`, finds threads and sockets that outlive a test.
    """
    found = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    yield found
    assert found == []


def comes(connect, rank=1, size=3):
    """Return a rank's connection, joined to the hub."""
    connection = Connection(connect())
    connection.join(rank, size, TOKEN, seconds(60))
    return connection


@pytest.mark.parametrize("said", [
    b"GET / HTTP/1.1\r\n\r\n", LENGTHS.pack(1 << 30, 0), LENGTHS.pack(2, 9) + b"{}", LENGTHS.pack(4, 0) + b"1234",
    {}, *({"name": rank} for rank in (None, True, 0, -1, 3, 10 ** 4000, 1.0, 1e999, "1", "\ud800", [[[1]]])),
    *({"nonce": nonce} for nonce in (None, 1, "", "1" * 31, "\ud800" * 32, "A" * 32, ["1"] * 32)),
    *({"proof": right} for right in (None, 1, "", "\u00e9", "\ud800", [], proof(TOKEN, "rank", 1, NONCES),
                                     proof("guessed", "rank", 1, NONCES))),
    *({"group": key} for key in (None, 1, [], "another", "\ud800"))])
def test_strangers_are_sent_away(said):
    """Malformed or too long frames, wrong types and unknown tokens are answered by an error; no rank notices."""
    with listening() as (ranks, connect), connect() as connected:
        stranger = Connection(connected)
        assert stranger.read(0)[0].keys() == {"nonce"}
        stranger.send({**GREETING, **said}) if isinstance(said, dict) else connected.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.read(0)[0].keys() == {"error"}
        with pytest.raises((EOFError, ConnectionResetError)):
            stranger.read(0)
        assert ({*ranks.gone}, ranks.members) == (set(), {})


def test_a_greeting_has_one_deadline(monkeypatch):
    """Single bytes do not extend the one deadline of a greeting: the announced frame would take 20 minutes."""
    monkeypatch.setattr(connections, "GREETING", 0.2)
    with listening() as (_, connect), connect() as slow:
        slow.sendall(LENGTHS.pack(60_000, 0))
        patience = time.monotonic() + seconds(20)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < patience:
                slow.sendall(b" ")
                time.sleep(0.02)
        assert time.monotonic() < patience


def test_silent_strangers_keep_no_rank_out():
    with listening() as (ranks, connect), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect()) for _ in range(3 + STRANGERS)]
        assert becomes(lambda: len(ranks.hub._unproved) == len(silent))
        comes(connect).socket.close()
        assert becomes(lambda: {*ranks.gone} == {1})
        oldest = Connection(silent[0])
        assert oldest.read()[0].keys() == {"nonce"}
        with pytest.raises(EOFError):  # only the stranger connected for longest was dropped
            oldest.read()
        assert becomes(lambda: len(ranks.hub._unproved) == len(silent) - 1)


def test_a_flood_does_not_drive_out_a_rank_that_greets(monkeypatch):
    """A newly connected rank keeps a place during the grace period, although strangers wait for places."""
    monkeypatch.setattr(connections, "GREETING_TIME", seconds(600))
    with listening() as (ranks, connect), contextlib.ExitStack() as stack:
        rank = Connection(stack.enter_context(connect()))
        assert becomes(lambda: len(ranks.hub._unproved) == 1)
        for _ in range(STRANGERS + 12):
            stack.enter_context(connect())
        assert becomes(lambda: len(ranks.hub._unproved) == 3 + STRANGERS)
        rank.join(1, 3, TOKEN, seconds(60))
        assert becomes(lambda: [*ranks.members] == [1])
        assert becomes(lambda: len(ranks.hub._unproved) == 3 + STRANGERS)  # a waiting stranger has taken the free place


def test_a_hub_goes_on_without_threads_and_descriptors(monkeypatch):
    """Strangers using up threads and descriptors end neither the job nor the port."""
    class Denied(socket.socket):
        left = 3

        def accept(self):
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listener, start, denied = Denied(), threading.Thread.start, [None] * 3
    listener.bind(("127.0.0.1", 0))

    def starts(thread):
        if denied and thread.name == "gpucoll hub" and thread._target.__name__ == "_serve":
            denied.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    with listening(listener=listener) as (_, connect):
        for _ in range(3):
            with connect() as refused, contextlib.suppress(ConnectionResetError):
                assert refused.recv(1) == b""
        assert (listener.left, denied) == (0, [])
        comes(connect).socket.close()


def test_an_error_of_a_connections_thread_ends_that_connection(caplog):
    def answer(rank, frame):
        raise KeyError("\ud800")

    with listening(answer=answer) as (ranks, connect):
        first, second = comes(connect), comes(connect, 2)
        first.send({})
        with pytest.raises(EOFError):
            first.read()
        assert becomes(lambda: {*ranks.gone} == {1})
        assert [*ranks.members] == [2]
        assert "of rank 1, after an error: KeyError('\\ud800')" in caplog.text
        for connection in (first, second):
            connection.socket.close()


def test_a_stranger_that_is_heard_out_is_no_rank():
    """Recorded greetings prove nothing: neither a rank's towards rank 0, nor rank 0's towards a rank."""
    with listening() as (ranks, connect), connect() as connected, connect() as again:
        rank, said, heard = Connection(connected), [], []
        send, read = rank.send, rank.read
        rank.send = lambda head: said.append(head) or send(head)
        rank.read = lambda *given: heard.append(read(*given)) or heard[-1]
        rank.join(1, 3, TOKEN, seconds(60))
        connected.close()
        assert becomes(lambda: {*ranks.gone} == {1})
        stranger = Connection(again)
        stranger.read(0)
        stranger.send(said[0])
        assert "another token" in stranger.read(0)[0]["error"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for head, body in heard:
            Connection(theirs).send(head, body)
        with pytest.raises(StoreError, match="does not know the token"):
            Connection(ours).join(1, 3, TOKEN, seconds(60))


@pytest.mark.parametrize(("answers", "words"), [
    ([b"SSH-2.0-OpenSSH_9.7\r\n"], "not a frame of gpucoll's store"), ([{"nonce": "\ud800"}], "no nonce came"),
    ([{"nonce": [[["0"]]]}], "no nonce came"), ([{}], "no nonce came"),
    ([{"nonce": NONCES[0]}, {"proof": proof("guessed", "hub", 1, NONCES)}], "does not know the token"),
    ([{"nonce": NONCES[0]}, {"proof": proof(TOKEN, "hub", 1, NONCES)}], "does not know the token"),
    ([{"nonce": NONCES[0]}, {}], "does not know the token"),
    ([{"nonce": NONCES[0]}, {"error": "\x1b[2J\ud800 no"}], r"refused this process: \?\[2J\? no$"),
    ([{"nonce": NONCES[0]}, {"error": [[]]}], "it does not say why")])
def test_a_stranger_in_the_place_of_rank_0_is_not_believed(answers, words):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for answer in answers:
            theirs.sendall(answer) if isinstance(answer, bytes) else Connection(theirs).send(answer)
        with pytest.raises(StoreError, match=words):
            Connection(ours).join(1, 3, TOKEN, seconds(60))


def test_neither_ends_proof_serves_as_the_others():
    assert len({proof(TOKEN, end, rank, nonces) for end in ("rank", "hub") for rank in (1, 2)
                for nonces in (NONCES, NONCES[::-1])}) == 8


def test_a_hub_that_closes_ends_what_is_there(monkeypatch):
    """Closing ends all connections at once: a stranger's greeting would have a later deadline."""
    monkeypatch.setattr(connections, "GREETING", seconds(600))
    with listening() as (ranks, connect), connect() as silent:
        silent.settimeout(seconds(30))
        rank, stranger = comes(connect), Connection(silent)
        assert stranger.read(0)[0].keys() == {"nonce"}
        ranks.end()
        ranks.hub.close()
        for connection in (rank, stranger):
            with pytest.raises(EOFError):
                connection.read(0)
        assert becomes(lambda: "gpucoll hub" not in {thread.name for thread in threading.enumerate()})
        assert ({*ranks.gone}, ranks.members, ranks.hub._unproved) == (set(), {}, {})
        rank.socket.close()


def test_another_users_process_is_not_heard(monkeypatch):
    monkeypatch.setattr(Connection, "is_own_users", lambda connection: False)
    with listening() as (ranks, connect), connect() as connected, contextlib.suppress(ConnectionResetError):
        assert connected.recv(1) == b""
        assert ranks.hub._unproved == {}


# ---------------------------------------------------------------- fuzzing


COUNTS = [100, pytest.param(20_000, marks=pytest.mark.nightly)]


def recorded(token):
    """Return greetings of ranks recorded under the same token with other nonces."""
    found = []
    for rank in (1, 2, 3):
        nonces = secrets.token_hex(16), secrets.token_hex(16)
        found.append({"group": "", "name": rank, "size": 4, "version": gc.__version__, "nonce": nonces[1],
                      "proof": proof(token, "rank", rank, nonces)})
    return json.loads(json.dumps(found))


class Besieged(Ranks):
    """Ranks; the last rank calls `siege` after every broadcast, so that strangers reach rank 0 first."""

    def bcast(self, value):
        told = super().bcast(value)
        if self.rank == self.size - 1:
            try:
                self.siege(told)
            except BaseException:
                self._barrier.abort()  # the other ranks must not wait for this rank
                raise
        return told


@pytest.mark.parametrize("count", COUNTS)
def test_strangers_at_the_watch_of_several_hosts(count, monkeypatch):
    ranks, told, hubs, answers, silent = Besieged(4, 7200), [], [], set(), contextlib.ExitStack()
    serve = Hub.serve
    monkeypatch.setattr(Hub, "serve", lambda hub: hubs.append(hub) or serve(hub))
    monkeypatch.setattr(remote, "ANSWER_TIMEOUT", seconds(60))
    monkeypatch.setattr(remote, "CONNECT", seconds(600))

    def siege(heard):
        told.append(heard)
        if type(heard) is int:
            (where, token), port = told
            connect = connected_to(socket.AF_INET, (where[0], port))
            answers.update(attack(connect, recorded(token), count, lambda: within(hubs[0])))
            for _ in range(STRANGERS + 8):  # these strangers are still connected when the last rank comes
                silent.enter_context(connect())

    ranks.siege = siege
    with made(ranks, (0, 1, 2, 3)) as watches:
        assert [{*watch._ranks} for watch in watches] == [{0, 1, 2, 3}] * 4
        watches[3].report(7)
        assert becomes(lambda: watches[0].heard() == {3: 7})
        assert [watch.silent(7) for watch in watches] == [{1, 2}, {0, 2}, {0, 1}, {0, 1, 2}]
        assert [watch.gone() for watch in watches] == [[]] * 4
        assert answers == {"nonce", "error"}
        silent.close()


@pytest.mark.parametrize("count", COUNTS)
def test_strangers_at_the_store(count, monkeypatch):
    monkeypatch.setattr(kvstore, "REQUEST_TIMEOUT", seconds(60))
    token = secrets.token_hex(8)
    server = kvstore.StoreServer.at(None, 4, token)
    clients = [kvstore.StoreClient.at(None, rank, 4, token, seconds(60)) for rank in (1, 2)]
    connect, numbers = connected_to(socket.AF_UNIX, kvstore.socket_name(token)), itertools.count()

    def look():
        within(server.hub)
        if not (number := next(numbers)) % 100:
            clients[0].set("key", str(number).encode())
            assert clients[1].get("key") == str(number).encode()

    assert attack(connect, recorded(token), count, look) == {"nonce", "error"}
    silent = contextlib.ExitStack()
    for _ in range(STRANGERS + 8):
        silent.enter_context(connect())
    clients.append(kvstore.StoreClient.at(None, 3, 4, token, seconds(60)))
    clients[2].set("last", b"3")
    assert [client.get("last") for client in clients] == [b"3"] * 3
    assert {*server._values} == {"key", "last"}
    assert [[*one.gone] for one in (server, *clients)] == [[]] * 4
    silent.close()
    for client in clients:
        client.close()
    assert server.is_left(seconds(60))
    server.abandon()


def within(hub):
    """Assert the limit of unproved connections."""
    assert len(hub._unproved) <= hub._size + STRANGERS
