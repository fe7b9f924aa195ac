"""What waits for what, in a plan and on two streams: what conflicts is ordered, on every rank messages still meet."""

import itertools

import pytest

from gpucoll.algorithms import algorithms, schedule
from gpucoll.analysis.replay import replay
from gpucoll.chunks import Layout
from gpucoll.collectives import COLLECTIVES
from gpucoll.executors.nccl import Node, nodes_of
from gpucoll.plan import Form, Layouts, Plan
from gpucoll.schedule import Recv, RecvReduce, Send, Slice
from grids import generator, naming

ALIKE = [(row.name, name) for row in COLLECTIVES.values() if row.ragged is None for name in algorithms(row.name)]
CASES = [(*case, size, segments, elements) for case in ALIKE for size, segments, elements in
         ((1, 1, 7), (2, 1, 64), (2, 3, 64), (3, 2, 50), (4, 4, 640), (5, 3, 11), (8, 2, 0))]


def plans(collective, algorithm, size, segments, elements, in_place=False):
    for rank in range(size):
        made = schedule(collective, algorithm, rank=rank, size=size, segments=segments)
        per_block = made.chunks // size if COLLECTIVES[collective].blocks else made.chunks
        layout = Layout(elements, per_block)
        yield Plan(made, Layouts(layout, layout), in_place=in_place)


def touched(node):
    """What a node reads and writes: its own reading of messages and results."""
    return ({m.span for m in node.sends} | {span for form in node.forms for span in form.sources},
            {m.span for m in node.receives} | {form.dst for form in node.forms})


def conflict(first, then):
    def meet(some, others):
        return any(a.buffer == b.buffer and max(a.start, b.start) < min(a.stop, b.stop)
                   for a, b in itertools.product(some, others))

    (reads, writes), (others_reads, others_writes) = touched(first), touched(then)
    return meet(writes, others_reads | others_writes) or meet(reads, others_writes)


def of_step(step):
    if isinstance(step, Form):
        return Node(forms=[step])
    return Node(sends=[step]) if step.sends else Node(receives=[step])


def unordered(plan):
    """Pairs of steps of which one writes what the other touches, though it follows it by no way."""
    steps, follows = [step for steps in plan.rounds for step in steps], {}
    for step in steps:
        follows[step.number] = step.after.union(*(follows[number] for number in step.after))
    return [(first, then) for first, then in itertools.combinations(steps, 2)
            if first.number not in follows[then.number] and conflict(of_step(first), of_step(then))]


def faults(nodes):
    """What is wrong with a program: conflicts in no order, work that the end does not wait for, events not recorded."""
    follows = []  # for each node all that it follows
    last = {True: None, False: None}
    for node in nodes:
        direct = {one for one in (last[node.side], node.after) if one is not None}
        follows.append(direct.union(*(follows[one] for one in direct)))
        last[node.side] = len(follows) - 1
    wrong = [(a, b) for a, b in itertools.combinations(range(len(nodes)), 2)
             if a not in follows[b] and conflict(nodes[a], nodes[b])]
    side = {number for number, node in enumerate(nodes) if node.side}
    lost = side - follows[-1] if side else set()
    silent = [node.after for node in nodes if node.after is not None and not nodes[node.after].awaited]
    return wrong or lost or silent


class Lengths:
    """Watches a replay: the two ends of a message are equally long."""

    def __init__(self):
        self.rounds = {}

    def begin(self, rank, steps):
        self.rounds[rank] = steps

    def meet(self, sender, sent, receiver, received):
        assert self.rounds[sender][sent].src.count == self.rounds[receiver][received].dst.count

    def finish(self, rank):
        pass


def exchanges(nodes):
    for node in nodes:
        if node.sends or node.receives:
            yield (*(Send(Slice("input", 0, m.span.stop - m.span.start), m.peer) for m in node.sends),
                   *(Recv(Slice("output", 0, m.span.stop - m.span.start), m.peer) for m in node.receives))


SOME = [pytest.param(generator(10).sample(CASES, 60), id="few"),
        pytest.param(CASES, id="all", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("cases", SOME)
def test_steps_follow_what_they_conflict_with(cases):
    for case, in_place in itertools.product(cases, (False, True)):
        with naming((*case, in_place)):
            assert not any(map(unordered, plans(*case, in_place)))


def test_what_is_aside_is_read_before_something_else_comes_there():
    """Two rounds later, where the lengths of what comes are others."""
    apart = [RecvReduce(Slice("output", chunk), 1) for chunk in range(2)]
    rounds = [apart, (), [RecvReduce(Slice("output", 2, 2), 1)]]
    layout = Layout(8, 4)
    assert unordered(Plan(rounds, Layouts(layout, layout), in_place=False)) == []


@pytest.mark.parametrize("cases", SOME)
def test_conflicts_are_ordered_and_groups_of_messages_meet(cases):
    """As strict as NCCL can be: a group ends when all its messages have met, and groups come one after the other."""
    for case, in_place in itertools.product(cases, (False, True)):
        with naming((*case, in_place)):
            everyone = [nodes_of(plan) for plan in plans(*case, in_place)]
            assert not any(map(faults, everyone))
            rounds = [list(exchanges(nodes)) for nodes in everyone]
            sent = sum(isinstance(step, Send) for one in rounds for steps in one for step in steps)
            assert replay(rounds, Lengths()) == sent
