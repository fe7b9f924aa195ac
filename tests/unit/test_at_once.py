"""The proof of all ranks at once: it agrees with that of one by one, and doubts every planted fault."""

import itertools

import numpy
import pytest

from gpucoll.algorithms import all_ranks, registry, schedule
from gpucoll.analysis import verify as verifying
from gpucoll.analysis.at_once import agreed, of_rank
from gpucoll.analysis.replay import ScheduleError
from gpucoll.analysis.verify import verify
from gpucoll.collectives import COLLECTIVES
from gpucoll.schedule import Copy, Recv, Reduce, Send, Slice
from grids import generator, naming

ROWS = sorted(registry())
ONE = Slice("output", 0)
# No rank is the first on all ranks: made at once they list by distance what one rank does in rank order.
IN_RANK_ORDER = [("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("reduce_scatter", "direct"),
                 ("reduce_scatter_v", "direct")]


@pytest.mark.parametrize("rounds", [
    [[Copy(Slice("input", 0), Slice("input", 1))]],  # it writes to input
    [[Copy(Slice("input", 2), ONE)]],  # beyond the end
    [[Copy(Slice("input", -1), ONE)]],
    [[Copy(Slice("scratch", 0), Slice("scratch", 1))]],  # nobody has written it
    [[Copy(Slice("input", 1), ONE)]],  # lengths differ
    [[Copy(Slice("input", 0), ONE), Send(Slice("input", 0), numpy.array([1, 0])), Recv(ONE, numpy.array([1, 0]))]],
    [[Copy(Slice("input", 0, 2), Slice("output", 0, 2)), Reduce(Slice("input", 0), ONE)]],  # other slices, one place
    [[Send(Slice("input", 0), numpy.array([1, 0]))]],  # no receive
    [[Send(Slice("input", 0, 2), numpy.array([1, 0])), Recv(ONE, numpy.array([1, 0]))]],  # lengths of messages
    [[Send(Slice("input", 0), numpy.array([2, 0])), Recv(ONE, numpy.array([2, 0]))]],  # no such rank
], ids=str)
def test_a_fault_of_all_ranks_is_doubted(rounds):
    whole = [[*steps] for steps in all_ranks("all_reduce", "one_shot", size=2)]
    twice_as_long = [[step._replace(**{name: part._replace(count=2) for name, part in step._asdict().items()
                                       if isinstance(part, Slice)}) for step in steps] for steps in whole]
    assert agreed(COLLECTIVES["all_reduce"], 2, 2, twice_as_long) == 2
    assert agreed(COLLECTIVES["all_reduce"], 2, 2, rounds + twice_as_long) is None
    assert agreed(COLLECTIVES["all_reduce"], 2, 2, twice_as_long + rounds) is None


def test_what_one_rank_does_otherwise_is_not_proved_at_once(monkeypatch):
    """What is proved for all ranks is what every rank does by itself: where they differ, each one is run."""
    whole = registry()["all_reduce", "ring"]

    def broken(rank, size, segments=1):
        rounds = list(whole.make(rank, size, segments))
        return iter(rounds if numpy.ndim(rank) or rank else rounds[:-1])

    monkeypatch.setitem(registry(), ("all_reduce", "ring"), whole._replace(make=broken))
    with pytest.raises(ScheduleError):
        verify("all_reduce", "ring", 20)


@pytest.mark.parametrize("rows", [
    pytest.param(generator(8).sample(ROWS, 25), id="few"), pytest.param(ROWS, id="all", marks=pytest.mark.nightly)])
def test_both_proofs_agree_and_made_at_once_is_made_one_by_one(monkeypatch, rows):
    for (collective, algorithm), size, segments in itertools.product(rows, (2, 3, 6, 8, 12), (1, 2)):
        with naming((collective, algorithm, size, segments)):
            monkeypatch.setattr(verifying, "FEW", 99)
            one_by_one = verify(collective, algorithm, size, segments=segments)
            monkeypatch.setattr(verifying, "FEW", 0)
            assert verify(collective, algorithm, size, segments=segments) == one_by_one
            together = all_ranks(collective, algorithm, size=size, segments=segments)
            ordered = (collective, algorithm) in IN_RANK_ORDER
            for rank in range(size) if together is not None and not ordered else ():
                alone = schedule(collective, algorithm, rank=rank, size=size, segments=segments)
                assert (of_rank(together, rank), together.chunks) == (list(alone), alone.chunks)
