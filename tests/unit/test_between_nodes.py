"""Plans with messages between nodes by the engine: what begins before the calls of all nodes have been compared."""

import random

import pytest

from engine import written
from gpucoll.algorithms import registry
from gpucoll.executors.engine.tables import AGREE, OPEN, OUTPUT, PUBLISH, REDUCE, RESULT, TAKE, WAIT

NODES = [(0, 1), (0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1), (0, 1, 0, 1)]
EARLY = (WAIT, PUBLISH, REDUCE, OPEN, TAKE)  # what may stand before AGREE
NAMES = list(registry())


def drawn(nodes, count):
    """Return the instructions of all ranks for random calls."""
    chance = random.Random(str(nodes))
    for _ in range(count):
        ranks = [written.Rank(rank, len(nodes), copies=True, nodes=nodes) for rank in range(len(nodes))]
        yield [call.plan[-2] for call in written.drawn(chance, ranks, NAMES)]


@pytest.mark.parametrize("nodes", NODES)
def test_no_array_of_the_callers_is_written_before_all_are_known_to_make_the_call(nodes):
    for calls in drawn(nodes, 30):
        for rows in calls:
            opcodes = [row[0] for row in rows]
            assert opcodes.count(AGREE) == 1
            early = rows[:opcodes.index(AGREE)]
            assert {row[0] for row in early} <= {*EARLY}
            assert not [row for row in early if row[0] in (REDUCE, TAKE) and row[3][1] in (OUTPUT, RESULT)]
