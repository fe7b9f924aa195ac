"""The words of calls in mapped memory: offers, tokens, and rows used in turn."""

import numpy
import pytest

from gpucoll.health import mapped
from gpucoll.health.mapped import MappedDescriptions
from gpucoll.health.preflight import MESSAGE_BYTES, MappedExchange

NBYTES = 8


def ranks(size=3, nodes=None):
    return [MappedDescriptions(rank, nodes or (0,) * size, NBYTES) for rank in range(size)]


def met(everyone):
    """Let all ranks accept the offers of all ranks."""
    offers = numpy.array([one.offer for one in everyone])
    for one in everyone:
        one.accept(offers)
    return everyone


def row(value):
    return numpy.full(NBYTES, value, numpy.uint8)


def test_every_rank_reads_the_words_of_every_rank():
    everyone = met(ranks())
    for number in (3, 4, 5):
        for rank, one in enumerate(everyone):
            one.publish(number, row(10 * number + rank), 100 * number + rank)
        for one in everyone:
            assert [set(words) for words in one.rows[number % 2]] == [{10 * number + rank} for rank in range(3)]
            assert one.arrivals(number) == [100 * number + rank for rank in range(3)]
            assert one.later(one.others, number) == frozenset()
            assert one.later(one.others, number + 1) == one.others


def test_the_words_of_a_call_stay_during_the_next_call():
    first, second = met(ranks(2))
    first.publish(3, row(1), 1)
    first.publish(4, row(2), 2)
    assert [words[0] for words in (second.rows[1][0], second.rows[0][0])] == [1, 2]
    assert second.later({0}, 4) == frozenset()
    assert first.later({1}, 3) == {1}


def test_a_segment_with_another_token_is_not_used():
    everyone = ranks()
    offers = numpy.array([one.offer for one in everyone])
    offers[2, 2] += 1  # as from a process of the same number in another container
    everyone[0].accept(offers)
    assert not everyone[0].rows
    assert everyone[0].offer[3] == 0


@pytest.mark.parametrize("nbytes", [0, 8, 12, 2 * mapped.PAGE])
def test_a_file_of_another_size_is_not_used(monkeypatch, nbytes):
    everyone = ranks()
    monkeypatch.setattr(mapped, "attach", lambda process, key: numpy.zeros(nbytes, numpy.uint8))
    assert not met(everyone)[0].rows


def test_a_thread_with_an_earlier_call_judges_no_rows_of_later_calls():
    everyone = met([MappedDescriptions(rank, (0, 0), MESSAGE_BYTES) for rank in range(2)])

    def begun(rank, number, text):
        return MappedExchange(everyone[rank], number, text, moves=True)

    stale = begun(0, 3, "one")
    begun(1, 3, "one")
    assert stale.has_ended()
    begun(0, 4, "two")
    begun(1, 4, "two")
    begun(1, 5, "three")
    assert stale.difference() is None
    assert begun(0, 5, "four").difference() is not None


def test_a_rank_without_memory_is_not_used(monkeypatch):
    def refused(nbytes):
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(mapped, "Segment", refused)
        poor = MappedDescriptions(1, (0, 0), NBYTES)
    everyone = met([ranks(2)[0], poor])
    assert [one.offer[3] for one in everyone] == [0, 0]


@pytest.mark.parametrize(("nodes", "machine"), [((0, 0, 1), "x86_64"), ((0, 0, 0), "aarch64")])
def test_several_nodes_and_weakly_ordered_processors_get_no_offer(monkeypatch, nodes, machine):
    monkeypatch.setattr(mapped.platform, "machine", lambda: machine)
    assert not any(one.offer.any() for one in ranks(3, nodes))
