"""Ports and applicants: proofs, ranks that have left, and the connection that becomes the one to a new store."""

import time

import pytest

from gpucoll.launch import regroup
from gpucoll.transport import kvstore, ports
from gpucoll.transport.connections import CHANGED, StoreError, keyed_digest
from gpucoll.transport.process import PROCESS
from gpucoll.transport.rendezvous import becomes
from harness.pace import seconds

KEY, TOKEN = "key of test_ports", "token of test_ports"


@pytest.fixture
def port():
    """Return a served port where applicants of KEY are expected; afterwards no applicant is left."""
    applicants, port = ports.applicants(KEY, TOKEN, 1), ports.Port(("127.0.0.1", 0))
    port.serve()
    yield port
    port.close()
    assert becomes(lambda: not applicants.members, seconds(60))
    PROCESS.applicants.pop(KEY, None)


def applicant(port, name, key=KEY, token=TOKEN):
    return ports.apply(port.address, key, name, token, time.monotonic() + seconds(60))


def heard(connection):
    return connection.read(0, time.monotonic() + seconds(60))[0]


def names():
    with CHANGED:  # whoever has been welcomed is among them
        return [*PROCESS.applicants[KEY].members]


def test_the_connection_of_an_applicant_becomes_the_one_to_a_store(port):
    first, second = applicant(port, "first"), applicant(port, "second")
    assert names() == ["first", "second"]
    store, came = kvstore.StoreServer(3, own=1), [*PROCESS.applicants[KEY].members.values()]
    store.take(came[0], 0)
    client = kvstore.StoreClient(first, seconds(60))
    client.set("key", b"1" * 1000)
    assert client.get("key") == store.get("key") == b"1" * 1000
    first.socket.close()  # without a goodbye
    second.socket.close()
    assert becomes(lambda: [*store.gone] == [0] and not names(), seconds(60))
    store.take(came[1], 2)  # has left before it was taken
    assert [*store.gone] == [0, 2]


def test_an_applicant_that_comes_again_is_the_one_that_counts(port):
    with applicant(port, "name").socket, applicant(port, "other").socket, (again := applicant(port, "name")).socket:
        assert names() == ["other", "name"]
        ports.applicants(KEY, TOKEN).notify("name", {"here": 1})
        assert heard(again) == {"here": 1}


@pytest.mark.parametrize(("key", "token"), [
    (KEY, "guessed"), ("another key", TOKEN), (ports.NEWCOMERS, TOKEN), (KEY, ""),
    *((key, TOKEN) for key in (None, 1, ["a"], {"b": 1}, "\ud800"))])
def test_strangers_are_refused(port, key, token):
    with pytest.raises(StoreError, match="another token" if isinstance(key, str) and key.isascii() else None):
        applicant(port, "name", key, token)
    assert names() == []


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("before", [True, False])
def test_applicants_learn_of_a_rank_that_has_left_its_last_communicator(port, before, uses):
    ports.applicants(KEY, TOKEN, uses - 1)
    if before:
        ports.release(KEY, leaves=True)
    with (one := applicant(port, "name")).socket:
        if not before:
            ports.release(KEY, leaves=True)
        assert (heard(one) == kvstore.HAS_LEFT) if uses == 1 else (names() == ["name"])


@pytest.mark.parametrize(("proofs", "token"), [(("same", "same"), "secret"), (("same", "other"), "of the ranks")])
def test_a_newcomer_computes_the_token_of_the_ranks(port, proofs, token):
    """Nothing secret is sent. Where the ranks' secrets differ, no newcomer comes, and the ranks' own token counts."""
    offers = [[["127.0.0.1", 1], False, name, one] for name, one in zip("ab", proofs, strict=True)]
    ranks = regroup.membership(0, offers, regroup.Lineage("of the ranks", "secret"), "").lineage
    assert (ranks.token, bool(regroup.proves(ranks))) == (keyed_digest(token, "a"), token == "secret")
    told = {"place": [2, 3, 0, "", "a", [0, 1], None, []]}
    connection = applicant(port, "name")
    ports.applicants(KEY, TOKEN).notify("name", told)
    place = regroup._place_of(connection, regroup.Lineage(secret="secret"), time.monotonic() + seconds(60), 1)
    assert (place.rank, place.size, place.lineage.key, place.lineage.elders) == (2, 3, ranks.key, ranks.elders)
    assert (place.lineage.token == ranks.token) == (token == "secret")
    place.store.abandon()
    ports.release("a", leaves=False)
    del PROCESS.applicants[ports.NEWCOMERS]
