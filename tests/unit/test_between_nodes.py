"""Plans with messages between nodes by the engine: what begins before the calls of all nodes have been compared."""

import collections
import random

import pytest

from engine import written
from gpucoll.algorithms import registry
from gpucoll.executors.engine.between_nodes import WireRoles
from gpucoll.executors.engine.tables import (
    AGREE,
    END,
    OPEN,
    OPENING,
    OUTPUT,
    PUBLISH,
    RECEIVE,
    REDUCE,
    RESULT,
    SEND,
    TAKE,
    WAIT,
)

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


@pytest.mark.parametrize("nodes", NODES)
def test_every_message_is_sent_and_received_alike(nodes):
    """In order: first the data of a greeting, known to both ranks, then the others."""
    openings = 0
    for calls in drawn(nodes, 30):
        sent, received = (collections.defaultdict(list) for _ in range(2))
        for rank, rows in enumerate(calls):
            for opcode, peer, _, _, nbytes, *_ in rows:
                if opcode in (OPEN, SEND):
                    sent[rank, peer].append((opcode == OPEN, nbytes))
                elif opcode == TAKE:
                    received[peer, rank].insert(0, (True, nbytes))
                elif opcode == RECEIVE:
                    received[peer, rank].append((False, nbytes))
        assert sent == received
        first = [one for messages in sent.values() for one in messages if one[0]]
        assert all(nbytes <= OPENING for _, nbytes in first)
        openings += len(first)
    assert openings


@pytest.mark.parametrize("nodes", NODES)
def test_every_message_that_begins_is_awaited(nodes):
    for calls in drawn(nodes, 20):
        for rows in calls:
            begun = [row[2] for row in rows if row[0] in (SEND, RECEIVE)]
            assert begun == [*range(len(begun))]
            assert sorted(row[2] for row in rows if row[0] == END) == begun


def test_only_the_first_rank_of_a_node_greets_the_others():
    roles = [WireRoles.of(rank, (0, 1, 0, 1), compares=True) for rank in range(4)]
    assert [(one.leader, one.partners) for one in roles] == [(0, (1,)), (1, (0,)), (0, ()), (1, ())]
    assert WireRoles.of(0, (0, 1), compares=False).partners == ()
