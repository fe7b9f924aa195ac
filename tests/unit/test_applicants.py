"""Applicants and ports: proofs, the hidden secret, and ranks that have left."""

import contextlib
import threading
import time

import pytest

from gpucoll.transport.applicants import ANY, APPLICANTS, NEWCOMERS
from gpucoll.transport.connections import StoreError
from gpucoll.transport.join_ports import JoinPort, ask
from gpucoll.transport.rendezvous import becomes
from harness.pace import seconds

KEY, TOKEN = "key of test_applicants", "token of test_applicants"


def late(limit=60):
    return time.monotonic() + seconds(limit)


@pytest.fixture
def port():
    """Return a served port where applicants of KEY are expected; afterwards no applicant is left."""
    APPLICANTS.expect(KEY, TOKEN)
    port = JoinPort(("127.0.0.1", 0))
    port.serve()
    yield port
    port.close()
    APPLICANTS.expect(KEY, None)
    assert becomes(lambda: not APPLICANTS.here(KEY), seconds(60))


@contextlib.contextmanager
def asking(port, **more):
    """Ask in another thread; yield the list of answers and errors, complete after the context."""
    found = []

    def run():
        try:
            found.append(ask(port.address, KEY, TOKEN, late(4), **more))
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


def test_an_applicant_gets_the_secret_and_the_network_does_not(port):
    secret = bytes(range(32))
    with asking(port, was="name", call="shrink") as found:
        assert becomes(lambda: APPLICANTS.here(KEY), seconds(60))
        (applicant,) = APPLICANTS.here(KEY)
        assert (applicant.name, applicant.call) == ("name", "shrink")
        applicant.notify({"sealed": applicant.seal(secret)})
    (answer,) = found
    assert answer.secret() == secret.hex()
    assert answer.frame["sealed"] != secret.hex()


@pytest.mark.parametrize(("key", "token"), [
    (KEY, "guessed"), ("another key", TOKEN), (NEWCOMERS, TOKEN), (KEY, ""),
    *((key, TOKEN) for key in (None, 1, ["a"], {"b": 1}, "\ud800"))])
def test_strangers_are_refused(port, key, token):
    with pytest.raises(StoreError, match="another token" if isinstance(key, str) and key.isascii() else None):
        ask(port.address, key, token, late(2))
    assert APPLICANTS.here(KEY) == []


@pytest.mark.parametrize("before", [True, False])
def test_applicants_learn_of_a_rank_that_has_left(port, before):
    if before:
        APPLICANTS.leave(KEY)
    with asking(port) as found:
        if not before:
            assert becomes(lambda: APPLICANTS.here(KEY), seconds(60))
            APPLICANTS.leave(KEY)
    assert found[0].frame == {"left": True}
    APPLICANTS._left.discard((KEY, ANY))
