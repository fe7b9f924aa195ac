"""Buckets without ranks: the order of the collectives, and the choice whether to overlap collectives with computing."""

import functools
import os
from types import SimpleNamespace

import numpy
import pytest

from gpucoll.training.buckets import PhaseQueue, can_overlap
from gpucoll.training.parameters import Like

HOST, GPU = (Like((2,), numpy.dtype("f4"), is_gpu) for is_gpu in (False, True))


@pytest.mark.parametrize("overlaps", [True, False])
def test_every_queue_makes_the_same_collectives_in_one_order(overlaps):
    made, asked, came = [], [], []

    def collective(name, *, async_op=False):
        made.append(name)
        asked.append(async_op)
        return SimpleNamespace(wait=lambda: name) if async_op else name

    def reduction(name, collectives):
        for number in range(collectives):
            came.append((yield functools.partial(collective, f"{name}{number}")))

    queue = PhaseQueue(overlaps=overlaps)
    for name, collectives in (("a", 2), ("b", 1), ("c", 3), ("d", 0), ("e", 2)):
        queue.start(reduction(name, collectives), collectives)
    queue.finish()
    assert made == ["a0", "b0", "a1", "c0", "c1", "e0", "c2", "e1"]
    assert sorted(came) == sorted(made)  # each result was sent back to the reduction
    assert asked == [overlaps] * len(made)


@pytest.mark.parametrize(("own", "all_", "ranks", "room"), [
    (2, 2, 1, True), (2, 2, 2, False), (2, 2, 4, False), (16, 16, 8, True), (15, 16, 8, False), (1, 16, 8, False),
    (2, 16, 8, True), (8, 16, 4, True), (8, 16, 8, False)])
def test_collectives_go_on_beside_computing_where_a_rank_has_two_processors(own, all_, ranks, room, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(own)))
    monkeypatch.setattr(os, "cpu_count", lambda: all_)

    def decided(other, arrays=(HOST,), nodes=1):
        def gathered(mine, call, error):
            return [mine, {"room": other}]

        core = SimpleNamespace(metadata=SimpleNamespace(all_gather=gathered))
        return can_overlap(SimpleNamespace(local_size=ranks, nodes=nodes, _core=core), arrays)

    assert decided(True) == room
    assert not decided(False)  # all ranks of a call decide alike: a rank without room decides for all
    assert decided(False, (HOST, GPU))
    assert decided(False, nodes=2)
