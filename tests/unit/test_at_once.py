"""Schedules made for all ranks at once equal the schedules made rank by rank."""

import itertools

import pytest

from gpucoll.algorithms import all_ranks, registry, schedule
from gpucoll.core.schedule import Slice, moved
from grids import generator, naming

ROWS = sorted(registry())
# Made at once, these steps are listed by distance, as no rank comes first on all ranks; one rank lists in rank order.
IN_RANK_ORDER = [("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("reduce_scatter", "direct"),
                 ("reduce_scatter_v", "direct")]


def of_rank(rounds, rank):
    def number(value):
        return value if isinstance(value, int) else int(value[rank])

    def part(value):
        return Slice(value.buffer, number(value.first), number(value.count))

    there = [tuple(step for step in steps if isinstance(step[0].count, int) or step[0].count[rank]) for steps in rounds]
    return list(moved(there, part, number))


@pytest.mark.parametrize("rows", [
    pytest.param(generator(8).sample(ROWS, 25), id="few"), pytest.param(ROWS, id="all", marks=pytest.mark.nightly)])
def test_made_at_once_is_made_one_by_one(rows):
    for (collective, algorithm), size, segments in itertools.product(rows, (2, 3, 6, 8, 12, 20), (1, 2)):
        together = all_ranks(collective, algorithm, size=size, segments=segments)
        ordered = (collective, algorithm) in IN_RANK_ORDER
        for rank in range(size) if together is not None and not ordered else ():
            with naming((collective, algorithm, size, segments, rank)):
                alone = schedule(collective, algorithm, rank=rank, size=size, segments=segments)
                assert (of_rank(together, rank), together.chunks) == (list(alone), alone.chunks)
