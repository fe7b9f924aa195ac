"""Programs for the step kernel: a rank's part of a chunk stays with a single block, and all programs end."""

import itertools

import pytest

from gpucoll.algorithms import algorithms
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.executors.peer.tables import check
from gpucoll.verify.symbolic import ScheduleError
from harness.grids import batches, naming
from peer.schedules import Case

ALIKE = [(row.name, name) for row in COLLECTIVES.values() if row.ragged is None for name in algorithms(row.name)]
SIZES = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("cases", batches(list(itertools.product(ALIKE, SIZES, ((1, 1), (3, 40)), (1, 3))), 60,
                                          keep=120, seed=41))
def test_every_schedule_ends_on_a_single_slot_of_one_element(cases):
    for (collective, algorithm), size, (segments, count), channels in cases:
        with naming((collective, algorithm, size, segments, channels)):
            check(Case(collective, algorithm, size, count, segments=segments).programs(channels), channels, 1, 1)


@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", "ring"), ("broadcast", "tree"),
                                                       ("all_to_all", "direct"), ("scan", "linear")])
def test_a_missing_step_is_noticed(collective, algorithm):
    programs = Case(collective, algorithm, 4, 40, segments=2).programs(2)
    for rank, one in enumerate(programs):
        for number in (number for number, step in enumerate(one.steps) if step.lanes):
            mutant = one._replace(steps=one.steps[:number] + one.steps[number + 1:])
            with pytest.raises(ScheduleError):
                check([*programs[:rank], mutant, *programs[rank + 1:]], 2, 2, 8)


def test_a_message_of_another_length_is_noticed():
    programs, other = (Case("broadcast", "linear", 2, count).programs(1) for count in (40, 39))
    with pytest.raises(ScheduleError, match="a different number comes"):
        check([programs[0], other[1]], 1, 2, 64)


def meet(spans, others):
    return [(a, b) for a, b in itertools.product(spans, others)
            if a.buffer == b.buffer and a.start < b.stop and b.start < a.stop]


def test_what_is_read_in_a_step_is_not_changed_meanwhile():
    """A step receives into no span sent by the step, nor into operands of its last writes, except a target."""
    for (collective, algorithm), in_place in itertools.product(ALIKE, (False, True)):
        case = Case(collective, algorithm, 5, 64, in_place=in_place and collective == "all_reduce")
        for step in (step for made in case.programs(2) for step in made.steps):
            with naming((collective, algorithm, in_place, step)):
                sent = [span for lane in step.lanes if not lane.receives for span, _ in lane.parts]
                came = [span for lane in step.lanes if lane.receives for span, _ in lane.parts]
                read = [span for write in step.after for span in write[1:] if span != write[0]]
                summed = [span for lane in step.lanes for span, combined in lane.parts if combined]
                assert not meet(came, sent)
                assert not meet([span for span in came if span.buffer != "staging"], read)
                assert not meet(summed, [write[0] for write in step.after])
