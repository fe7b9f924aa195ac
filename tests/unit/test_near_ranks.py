"""Algorithms for near ranks: published counts, and rounds on rings."""

from fractions import Fraction

import pytest

from gpucoll.algorithms import Traits, algorithms, find, schedule
from gpucoll.algorithms.bine import branch
from gpucoll.core.schedule import Send
from gpucoll.tuner.choice import scheduled
from oracles.counting import count


def messages(collective, name, size):
    """Yield sender, receiver and share of the data of every message, with the round of the sender."""
    for rank in range(size):
        made = schedule(collective, name, rank=rank, size=size)
        for number, steps in enumerate(made):
            for step in steps:
                if isinstance(step, Send):
                    yield rank, step.peer, step.src.count / made.chunks, number


def test_distances_are_those_of_the_paper():
    """Partners are 1, 1, 3, 5, 11 ranks apart around the ring, the longest distance first in a tree."""
    for kind, expected in (("broadcast", [11, 5, 3, 1, 1]), ("reduce_scatter", [1, 1, 3, 5, 11]),
                           ("all_gather", [11, 5, 3, 1, 1])):
        apart = {}
        for rank, peer, _, number in messages(kind, "bine", 32):
            if kind != "broadcast" or rank == 0:
                apart.setdefault(number, set()).add(min((rank - peer) % 32, (peer - rank) % 32))
        assert [*apart.values()] == [{distance} for distance in expected]


def test_every_subtree_is_an_interval_and_gives_away_at_most_half():
    for size in (*range(2, 40), 64, 100):
        led = {rank: branch(rank, size) for rank in range(size)}
        for rank, place in led.items():
            assert (rank - place.first) % size < place.ranks
            left = place.ranks
            for child, first, ranks in place.children:
                assert (led[child].parent, led[child].first, led[child].ranks) == (rank, first, ranks)
                assert ranks <= left / 2
                left -= ranks
            assert left == 1


@pytest.mark.parametrize("size", [6, 10, 12, 18, 74])
def test_even_numbers_of_ranks_fold_nothing(size):
    """Blocks leave in a single step for 74 ranks too, where the rule of libbine loses contributions."""
    for kind, times in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        costs = count(kind, "bine", size)
        assert (costs.rounds, costs.sent) == (times * (size - 1).bit_length(), times * Fraction(size - 1, size))


def test_a_ring_in_both_directions_takes_three_times_the_distance():
    """With 27 ranks a message goes 1, 3 or 9 places on or back, with 9, 3 and 1 of 27 blocks."""
    sent = {}
    for rank, peer, share, number in messages("all_reduce", "trivance", 27):
        sent.setdefault((number, (peer - rank + 13) % 27 - 13), []).append(share * 27)
    loads = {key: sum(shares) / 27 for key, shares in sent.items()}
    assert loads == pytest.approx({(number, way * 3 ** step): 9 / 3 ** step for number, step in
                                   enumerate((0, 1, 2, 2, 1, 0)) for way in (1, -1)})
    for size, rounds in ((2, 2), (3, 2), (4, 4), (9, 4), (10, 6), (27, 6), (28, 8)):
        assert count("all_reduce", "trivance", size).rounds == rounds


def test_auto_takes_algorithms_for_groups_on_several_nodes_only():
    near = [name for name in algorithms("all_gather") if find("all_gather", name).traits.groups]
    assert near
    assert not {*near} & {*scheduled("all_gather", 8, 1)}
    assert scheduled("all_gather", 8, 2)[-len(near):] == near  # the last of equals
    assert not Traits().groups
