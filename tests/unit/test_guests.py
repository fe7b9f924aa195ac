"""Guests and doors: proofs, the hidden secret, ranks that have left, dead and silent processes."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from gpucoll.errors import CollectiveTimeout
from gpucoll.transport.connections import StoreError
from gpucoll.transport.doors import Door, ask, ask_for_a_place
from gpucoll.transport.guests import GUESTS, NEWCOMERS
from gpucoll.transport.rendezvous import becomes
from pace import seconds

KEY, TOKEN = "key of test_guests", "token of test_guests"


def late(limit=60):
    return time.monotonic() + seconds(limit)


@pytest.fixture
def door():
    """Return a served door where guests of KEY are expected; afterwards no guest is left."""
    GUESTS.expect(KEY, TOKEN)
    door = Door(("127.0.0.1", 0))
    door.serve()
    yield door
    door.close()
    GUESTS.expect(KEY, None)
    assert becomes(lambda: not GUESTS.here(KEY), seconds(60))


@contextlib.contextmanager
def asking(door, **more):
    """Ask in another thread; yield the list of answers and errors, complete after the context."""
    found = []

    def run():
        try:
            found.append(ask(door.address, KEY, TOKEN, late(4), **more))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        thread.join()
        for one in found:
            if hasattr(one, "connection"):
                one.connection.socket.close()


def test_a_guest_gets_the_secret_and_the_network_does_not(door):
    secret = bytes(range(32))
    with asking(door, was=7) as found:
        assert becomes(lambda: GUESTS.here(KEY), seconds(60))
        (guest,) = GUESTS.here(KEY)
        assert guest.rank == 7
        guest.tell({"sealed": guest.seal(secret)})
    (answer,) = found
    assert answer.secret() == secret.hex()
    assert answer.frame["sealed"] != secret.hex()


@pytest.mark.parametrize(("key", "token"), [(KEY, "guessed"), ("another key", TOKEN), (NEWCOMERS, TOKEN), (KEY, "")])
def test_strangers_are_refused(door, key, token):
    with pytest.raises(StoreError, match="another token"):
        ask(door.address, key, token, late(2))
    assert GUESTS.here(KEY) == []


@pytest.mark.parametrize("key", [None, 1, ["a"], {"b": 1}, "\ud800"])
def test_keys_that_are_none_are_refused(door, key):
    with pytest.raises(StoreError):
        ask(door.address, key, TOKEN, late(2))


@pytest.mark.parametrize("before", [True, False])
def test_guests_learn_of_a_rank_that_has_left(door, before):
    if before:
        GUESTS.leave(KEY)
    with asking(door) as found:
        if not before:
            assert becomes(lambda: GUESTS.here(KEY), seconds(60))
            GUESTS.leave(KEY)
    assert found[0].frame == {"left": True}
    GUESTS._left.discard(KEY)


ENDS = """
import sys
from gpucoll.transport.doors import Door
door = Door(("127.0.0.1", 0))
print(door.address[1], flush=True)
sys.stdin.read()
"""


def test_a_dead_process_is_told_from_a_silent_one():
    """A process that does not serve its door is alive until its end, which ends the wait at once."""
    with subprocess.Popen([sys.executable, "-c", ENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        address = "127.0.0.1", int(process.stdout.readline())
        with pytest.raises(CollectiveTimeout):
            ask(address, KEY, TOKEN, time.monotonic() + 0.1)
        threading.Timer(0.1, process.kill).start()
        assert ask(address, KEY, TOKEN, late()) is None  # the connection ends with the process
    assert ask(address, KEY, TOKEN, late()) is None  # and is refused from then on


def test_a_newcomer_waits_where_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
    with pytest.raises(CollectiveTimeout, match="no rank lets newcomers in"):
        ask_for_a_place(address, TOKEN, time.monotonic() + 0.1)
