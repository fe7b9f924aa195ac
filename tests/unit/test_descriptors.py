"""A file descriptor passed between processes of one user through Unix sockets."""

import os

import pytest

from gpucoll.executors.peer import multicast


def ended(operation):
    """Run a generator to its end, and return the result."""
    while True:
        try:
            done = next(operation)
        except StopIteration as stop:
            return stop.value
        while not done():
            pass


@pytest.fixture
def offer():
    made = multicast.DescriptorOffer([*os.pipe()])
    yield made
    made.close()


def test_a_connection_of_another_user_gets_nothing(offer, monkeypatch):
    stranger, own = multicast.reach(offer.name), multicast.reach(offer.name)
    answers = iter([False, True])
    monkeypatch.setattr(multicast, "belongs_to_user", lambda connected: next(answers))
    ended(offer.give(1))
    with pytest.raises(OSError, match="closed the connection"):
        ended(multicast.take(stranger, 2))
    source, target = ended(multicast.take(own, 2))
    os.write(target, b"came")
    assert os.read(source, 9) == b"came"
    os.close(source), os.close(target)


def test_an_offer_of_another_user_is_refused(offer, monkeypatch):
    monkeypatch.setattr(multicast, "belongs_to_user", lambda connected: False)
    with pytest.raises(OSError, match="another user"):
        multicast.reach(offer.name)
