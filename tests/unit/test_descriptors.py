"""A file descriptor passed between processes of one user through Unix sockets."""

import os
import threading

import pytest

from gpucoll.executors.peer import descriptors


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
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def offer():
    made = descriptors.DescriptorOffer()
    yield made
    made.close()


def test_a_descriptor_arrives(offer, pipe):
    """Each of two connections gets a descriptor of its own for the same pipe."""
    connected = [descriptors.reach(offer.name) for _ in range(2)]
    giver = threading.Thread(target=ended, args=(offer.give(pipe[1], 2),))
    giver.start()
    for number, one in enumerate(connected):
        taken = ended(descriptors.take(one))
        os.write(taken, bytes([number]))
        os.close(taken)
        assert os.read(pipe[0], 9) == bytes([number])
    giver.join()


def test_a_connection_of_another_user_gets_nothing(offer, pipe, monkeypatch):
    stranger, own = descriptors.reach(offer.name), descriptors.reach(offer.name)
    answers = iter([False, True])
    monkeypatch.setattr(descriptors, "belongs_to_user", lambda connected: next(answers))
    ended(offer.give(pipe[1], 1))
    with pytest.raises(OSError, match="closed the connection"):
        ended(descriptors.take(stranger))
    os.close(ended(descriptors.take(own)))


def test_an_offer_of_another_user_is_refused(offer, monkeypatch):
    monkeypatch.setattr(descriptors, "belongs_to_user", lambda connected: False)
    with pytest.raises(OSError, match="another user"):
        descriptors.reach(offer.name)


def test_an_offer_that_has_gone_is_refused(offer):
    connected = descriptors.reach(offer.name)
    offer.close()
    with pytest.raises(OSError, match=r"closed the connection|reset"):
        ended(descriptors.take(connected))
    with pytest.raises(OSError, match="refused"):
        descriptors.reach(offer.name)
