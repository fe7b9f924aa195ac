"""The descriptions of calls in mapped memory: offers, tokens, and slots used in turn."""

import time

import numpy
import pytest

from gpucoll.executors.engine.extension import library
from gpucoll.health.mapped import MappedDescriptions
from gpucoll.health.preflight import MESSAGE_BYTES, MappedExchange
from gpucoll.health.shares import NO_STAMPS

NBYTES = 8
pytestmark = pytest.mark.skipif(library() is None, reason="the engine's module is not built")


def ranks(size=3, nodes=None, nbytes=NBYTES):
    return [MappedDescriptions(rank, nodes or (0,) * size, nbytes) for rank in range(size)]


def met(everyone):
    """Let all ranks accept the offers of all ranks."""
    offers = numpy.array([one.offer for one in everyone])
    for one in everyone:
        one.accept(offers)
    return everyone


def row(value):
    return bytes([value] * NBYTES)


def test_every_rank_reads_the_descriptions_of_every_rank():
    everyone = met(ranks())
    for number in (3, 4, 5):
        arrived = []
        for rank, one in enumerate(everyone):
            began = time.time_ns()
            one.published.publish(number, row(10 * number + rank), (number - 3, rank, 0, 0))
            arrived.append(one.published.arrivals(number)[rank])
            assert began <= arrived[rank] <= time.time_ns()
        for one in everyone:
            assert [set(text) for text in one.rows[number % 2]] == [{10 * number + rank} for rank in range(3)]
            assert one.published.arrivals(number) == arrived
            stamps = [(number - 3, rank, 0, 0) for rank in range(3)]
            assert one.published.stamps(number) == (None if number == 3 else stamps)
            assert one.published.number == number
            assert one.published.missing(number) == frozenset()
            assert one.published.missing(number + 1) == {0, 1, 2}


def test_the_description_of_a_call_stays_during_the_next_call():
    first, second = met(ranks(2))
    first.published.publish(3, row(1), NO_STAMPS)
    first.published.publish(4, row(2), NO_STAMPS)
    assert [texts[0].tobytes() for texts in (second.rows[1], second.rows[0])] == [row(1), row(2)]
    assert second.published.missing(4) == {1}
    assert first.published.missing(3) == {1}


def test_a_segment_with_another_token_is_not_used():
    everyone = ranks()
    offers = numpy.array([one.offer for one in everyone])
    offers[2, 2] += 1  # as from a process of the same number in another container
    everyone[0].accept(offers)
    assert not everyone[0].rows
    assert everyone[0].offer[3] == 0


def test_a_thread_with_an_earlier_call_judges_no_rows_of_later_calls():
    everyone = met(ranks(2, nbytes=MESSAGE_BYTES))

    def begun(rank, number, text):
        everyone[rank].published.publish(number, text.encode().ljust(MESSAGE_BYTES, b"\0"), NO_STAMPS)
        return MappedExchange(everyone[rank], number, text, moves=True)

    stale = begun(0, 3, "one")
    begun(1, 3, "one")
    assert stale.has_ended()
    begun(0, 4, "two")
    begun(1, 4, "two")
    begun(1, 5, "three")
    assert stale.difference() is None
    assert begun(0, 5, "four").difference() is not None
