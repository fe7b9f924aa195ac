"""Programs for the step kernel: both ends of a message are cut alike, and no step changes what it reads."""

import collections
import itertools

import pytest

from gpucoll.algorithms import algorithms
from gpucoll.core.collectives import COLLECTIVES
from harness.grids import batches, naming
from peer.schedules import Case

ALIKE = [(row.name, name) for row in COLLECTIVES.values() if row.ragged is None for name in algorithms(row.name)]
SIZES = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("cases", batches(list(itertools.product(ALIKE, SIZES, ((1, 1), (3, 40)), (1, 3))), 60,
                                          keep=120, seed=41))
def test_both_ends_of_a_message_are_cut_alike(cases):
    """Else a block would wait for ever: schedules end without any buffer, if each part sent is a part received."""
    for (collective, algorithm), size, (segments, count), channels in cases:
        with naming((collective, algorithm, size, segments, channels)):
            ends = collections.defaultdict(list)
            for rank, one in enumerate(Case(collective, algorithm, size, count, segments=segments).programs(channels)):
                for lane in (lane for step in one.steps for lane in step.lanes):
                    pair = (lane.peer, rank) if lane.receives else (rank, lane.peer)
                    ends[pair, lane.receives] += [span.stop - span.start for span, _ in lane.parts]
            assert all(ends[pair, True] == ends[pair, False] for pair, _ in [*ends])


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
