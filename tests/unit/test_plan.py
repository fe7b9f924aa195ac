"""Plans are proved, and wrong plans refused; ranks of several nodes come to their ends."""

import collections
import contextlib
import functools
import itertools
from types import SimpleNamespace

import pytest

from gpucoll.algorithms import algorithms, schedule, schedules
from gpucoll.arrays import Cut
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Schedule, Send, Slice
from gpucoll.executors.engine.between_nodes import WireRoles
from gpucoll.executors.engine.instructions import Writer
from gpucoll.executors.engine.tables import END, PUBLISH, RECEIVE, SEND, WAIT
from gpucoll.plan import PEER, Layout, Layouts, Message, Plan, Reduction, Span, proof
from gpucoll.plan.proof import prove_plans
from gpucoll.verify.symbolic import ScheduleError
from harness.grids import generator, naming

ALIKE = [(row.name, name) for row in COLLECTIVES.values() if row.ragged is None for name in algorithms(row.name)]
CASES = [(*case, size, segments, elements) for case in ALIKE for size, segments, elements in
         ((1, 1, 7), (2, 1, 64), (2, 3, 64), (3, 2, 50), (4, 4, 640), (5, 3, 11), (8, 2, 0))]

TASK = SimpleNamespace(collective="", dtype=DTYPES["float32"], op=None, cut=Cut(0), in_place=False)


def plans(collective, algorithm, size, segments, elements, in_place=False, nodes=0):
    """Yield the plans of all ranks. With `nodes`, rank r is on node r % nodes; `same_node` are the same-node ranks."""
    def of(rank):
        return schedule(collective, algorithm, rank=rank, size=size, segments=segments)

    for rank in range(size):
        per_block = of(rank).chunks // size if COLLECTIVES[collective].blocks else of(rank).chunks
        layout = Layout(elements, per_block)
        same_node = range(rank % nodes, size, nodes) if nodes else ()
        yield Plan(of(rank), Layouts(layout, layout), in_place=in_place, schedules=of, same_node=same_node)


SOME = [pytest.param(generator(10).sample(CASES, 60), id="few"),
        pytest.param(CASES, id="all", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("cases", SOME)
def test_plans_are_proved(cases):
    for (collective, algorithm, size, segments, elements), in_place in itertools.product(cases, (False, True)):
        made = schedules(collective, algorithm, size=size, segments=segments)
        for nodes in (None, (0,) * size, tuple(rank % 2 for rank in range(size))):
            with naming((collective, algorithm, size, segments, elements, in_place, nodes)):
                assert prove_plans(made, elements, in_place=in_place, nodes=nodes) > 0 or size == 1


def exchanged(*cuts):
    """Return an all-reduce of two ranks that send each other the chunks between `cuts`; a pair of cuts is a round."""
    def rounds(rank):
        yield (Copy(Slice("input", 0, 4), Slice("output", 0, 4)),)
        for steps in cuts:
            parts = [Slice("input", first, stop - first) for first, stop in itertools.pairwise(steps)]
            yield (*(Send(part, 1 - rank) for part in parts),
                   *(RecvReduce(part._replace(buffer="output"), 1 - rank) for part in parts))

    return [Schedule("all_reduce", "test", rank, 2, 4, functools.partial(rounds, rank)) for rank in range(2)]


def test_staging_is_read_before_it_is_written_again():
    """A chunk is read from staging before a message of other lengths overwrites the memory, two rounds later."""
    assert prove_plans(exchanged((0, 1, 2), (), (2, 4)), 8) == 20
    assert prove_plans(exchanged((0, 1, 2), (), (), (), (2, 4)), 8) == 20  # a round between leaves the half unused


def altered(what, **changes):
    """Return a function that changes the steps of a kind; the values of `changes` are computed from the step."""
    def alter(step):
        return step._replace(**{name: make(step) for name, make in changes.items()}) if what(step) else step

    return alter


def reduces(step):
    return isinstance(step, Reduction) and len(step.sources) > 1


def sends(step):
    return isinstance(step, Message) and step.sends


def moved(span, by):
    return span._replace(start=span.start + by, stop=span.stop + by)


ALTERED = {
    "order": (altered(reduces, after=lambda step: frozenset()), "without an order"),
    "source": (altered(reduces, sources=lambda step: step.sources[:1]), "wrong content"),
    "partner": (lambda step: None if sends(step) else step, "0 sends meet 2 receives"),
    "circle": (altered(sends, after=lambda step: frozenset([2, 3])), "circle of steps"),
    "number": (altered(sends, after=lambda step: frozenset([7])), "follows step 7, which is not before"),
    "length": (altered(sends, span=lambda step: step.span._replace(stop=step.span.stop - 1)), "differ in length"),
    "place": (altered(reduces, dst=lambda step: moved(step.dst, 16)), "beyond the end"),
    "operand": (altered(reduces, sources=lambda step: step.sources[::-1]), "overwrites an operand"),
    "input": (lambda step: [step, Reduction(8, frozenset(range(1, 8)), whole("input"), (whole("output"),))]
              if step.number == 7 else step, "writes to the input"),
    "content": (altered(sends, span=lambda step: moved(step.span, 8 if step.span.start == 0 else -8)), "combines"),
}


def whole(buffer):
    return Span(buffer, 0, 16, Slice(buffer, 0, 4))


@contextlib.contextmanager
def altered_plans(monkeypatch, alter, ranks):
    """Let the proof meet plans of these ranks with the steps returned by `alter`: one for each, none, or a list."""
    class Altered(Plan):
        @property
        def rounds(self):
            right = super().rounds
            if self._made_of[0].rank not in ranks:
                return right
            found = [[one if isinstance(one, list) else [one] for one in map(alter, steps) if one is not None]
                     for steps in right]
            return tuple(tuple(itertools.chain.from_iterable(steps)) for steps in found)

    with monkeypatch.context() as patch:
        patch.setattr(proof, "Plan", Altered)
        yield


@pytest.mark.parametrize("name", ALTERED)
def test_a_wrong_plan_is_refused(name, monkeypatch):
    """In the plan of rank 1, for a circle of both ranks, one property is wrong; the schedule itself is right."""
    alter, reason = ALTERED[name]

    right, ranks = exchanged((0, 2, 4)), {0, 1} if name == "circle" else {1}
    assert prove_plans(right, 16) == 14
    with altered_plans(monkeypatch, alter, ranks), pytest.raises(ScheduleError, match=reason):
        prove_plans(right, 16)


def test_a_read_of_memory_that_is_not_sent_is_refused(monkeypatch):
    """On rank 1 the input of rank 0 is read from the output, where rank 0 writes at the same time."""
    def rounds(rank):
        yield (Copy(Slice("input", 0), Slice("output", rank)),)
        yield Send(Slice("input", 0), 1 - rank), Recv(Slice("output", 1 - rank), 1 - rank)

    right = [Schedule("all_gather", "test", rank, 2, 2, functools.partial(rounds, rank)) for rank in range(2)]
    assert prove_plans(right, 3, nodes=(0, 0)) == 6

    def alter(step):
        return step._replace(sources=(step.sources[0]._replace(like=Slice("output", 0)),)) \
            if isinstance(step, Reduction) and step.sources[0].buffer == PEER else step

    with altered_plans(monkeypatch, alter, {1}), pytest.raises(ScheduleError, match="of rank 0, which is not sent"):
        prove_plans(right, 3, nodes=(0, 0))


class Mailbox:
    """A rank's messages to other nodes: a message ends when both ends have begun."""

    def __init__(self, rank, begun):
        self.rank, self.begun, self.ends = rank, begun, {}

    def begin(self, number, peer, *, sends):
        pair = (self.rank, peer) if sends else (peer, self.rank)
        self.ends[number] = (*pair, not sends), self.begun[*pair, sends]
        self.begun[*pair, sends] += 1

    def has_come(self, number):
        end, before = self.ends[number]
        return self.begun[end] > before


def stuck(everyone):
    """Return the ranks that never end in the engine. One order suffices, as an awaited event never disappears."""
    marks, begun, left = [0] * len(everyone), collections.Counter(), []
    for rank, plan in enumerate(everyone):
        writer = Writer(TASK, rank, plan, WireRoles(False, 0, ()), apart=rank % 2 == 0)
        left.append((collections.deque(writer.rows()), Mailbox(rank, begun)))

    def goes_on(rank):
        rows, mail = left[rank]
        opcode, peer, mark, _, _, sources, _ = rows[0]
        if opcode == PUBLISH:
            marks[rank] = mark
        assert marks[rank] % 2 == 0 or all(source[0] == rank for source in sources), "it has said that it reads no more"
        if (opcode == WAIT and marks[peer] < mark) or (opcode == END and not mail.has_come(mark)):
            return False
        if opcode in (SEND, RECEIVE):
            mail.begin(mark, peer, sends=opcode == SEND)
        rows.popleft()
        return True

    while any([left[rank][0] and goes_on(rank) for rank in range(len(everyone))]):
        pass
    return [rank for rank, (rows, _) in enumerate(left) if rows]


@pytest.mark.parametrize("cases", SOME)
def test_ranks_of_nodes_come_to_their_ends(cases):
    for case, in_place, nodes in itertools.product(cases, (False, True), (1, 2, 3)):
        with naming((*case, in_place, nodes)):
            assert not stuck([*plans(*case, in_place, nodes)])
