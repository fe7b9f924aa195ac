"""Classes of ranks with equal times: against the replay of every rank, and a million ranks by hand."""

import itertools

import numpy
import pytest

from gpucoll.algorithms import algorithms, find, registry
from gpucoll.analysis.simulate import Level, Topology, simulate
from gpucoll.analysis.simulate.clock import Clock, priced
from gpucoll.analysis.simulate.rank_classes import RankClasses, simulate_classes
from gpucoll.analysis.simulate.rank_kinds import MOST_PEERS, Kind, PeerMessage, Unlike, kinds
from gpucoll.analysis.simulate.routes import Routes
from gpucoll.analysis.simulate.waves import Case, one_by_one
from gpucoll.core.schedule import Recv, Send, Slice
from gpucoll.errors import ArgumentError
from harness.grids import sampled

# Seconds are powers of two, so that every sum is exact.
A, B, G, GAP = 2**-10, 2**-20, 2**-22, 2**-13
LINK = Level("link", alpha=A, beta=B, gamma=G, gap=GAP)
SWITCH = Topology("switch", (LINK,))
UNIT = 64  # bytes of a chunk
ROWS = [row for row in sorted(registry()) if not registry()[row].own]


def name_of(value):
    return "-".join(value) if isinstance(value, tuple) else None


def case_of(collective, algorithm, size, root=0, segments=1):
    entry = find(collective, algorithm)
    return Case(entry, algorithm, size, entry.given(root, segments, None))


def of_every_rank(case):
    clock = Clock(case.size, UNIT)
    for wave in priced(one_by_one(case), Routes(SWITCH, case.size)):
        clock.advance(wave)
    return clock.parts()


def of_classes(case):
    return simulate_classes([*kinds(case.make, case.size)], case.size, LINK, [UNIT])[0]


# Each rank is a class, or there are too many rounds for few ranks.
NEVER = {"bine", "chain", "linear", "ring", "bidirectional_ring"}


@pytest.mark.parametrize(("row", "size"), sampled(
    itertools.product(ROWS, (2, 3, 7, 12, 33, 65, 100, 255, 300)), 0, 72, *(
        ((kind, name), size) for kind, name in ROWS for size in (7, 33)), (("all_reduce", "tree"), 33),
    (("all_reduce", "double_tree"), 33), (("all_reduce", "swing"), 100), (("all_reduce", "halving_doubling"), 12)),
    ids=name_of)
def test_classes_have_the_times_of_every_rank(row, size):
    collective, algorithm = row
    if algorithm not in algorithms(collective, size=size):
        return
    for root, segments in ((0, 1), (size // 2, 3)):
        case = case_of(collective, algorithm, size, root, segments)
        try:
            found = of_classes(case)
        except Unlike:
            assert algorithm in NEVER or size > MOST_PEERS, (root, segments)
        else:
            assert sum(found) == sum(of_every_rank(case)), (root, segments)


LG = 20  # rounds to reach 1,000,000 ranks


@pytest.mark.parametrize(("algorithm", "wanted"), [
    # By the same formulas as for a few ranks, whose rounds are replayed one by one.
    ("reduce_broadcast", (2 * LG * A, 2 * LG * UNIT * B, LG * UNIT * G)),
    ("recursive_doubling", ((LG + 1) * A, (LG + 1) * UNIT * B, LG * UNIT * G))])
def test_a_million_ranks(algorithm, wanted):
    found = simulate("all_reduce", algorithm, 1_000_000, UNIT, SWITCH)
    assert found[5:] == wanted
    assert simulate("all_reduce", algorithm, 300, UNIT, SWITCH).seconds < found.seconds


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_a_million_ranks_by_every_algorithm(algorithm):
    size, segments = 1_000_000, 32
    if algorithm in ("double_tree", "star"):
        with pytest.raises(ArgumentError, match="too many kinds of ranks"):
            simulate("all_reduce", algorithm, size, size, SWITCH, segments=segments)
    else:
        assert simulate("all_reduce", algorithm, size, size, SWITCH, segments=segments).seconds > 0


def test_few_classes_stand_for_many_ranks():
    assert len([*kinds(case_of("all_reduce", "halving_doubling", 3000).make, 3000)]) == 3
    assert len([*kinds(case_of("all_reduce", "circulant", 3000).make, 3000)]) == 1
    found = [*kinds(case_of("broadcast", "binomial", 1000, root=7).make, 1000)]
    assert sorted(itertools.chain(*(kind.ranks.tolist() for kind in found))) == [*range(1000)]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_send_without_a_receive_of_equal_length_is_no_class(chunks):
    """A pair: rank 0 sends a chunk, rank 1 receives `chunks`."""
    pair = [Kind(numpy.array([rank]), numpy.array([[1 - rank]]), [PeerMessage(0, 0, rank == 0, count)], [0])
            for rank, count in enumerate((1, chunks))]
    if chunks == 1:
        assert simulate_classes(pair, 2, LINK, [UNIT]) == [[A, UNIT * B, 0]]
    else:
        with pytest.raises(Unlike):
            RankClasses(pair, 2)


def two_ways(rank):
    """Two chains 0, 2, 4, 7 and 1, 3, 5: ranks 2 and 3 are equal, rank 1 is late, rank 4 goes on with ten chunks."""
    if rank == 1:
        yield (Send(Slice("input", 0), 6),)
    if 2 <= rank <= 5:
        yield (Recv(Slice("output", 0), rank - 2),)
    if rank <= 3:
        yield (Send(Slice("input", 0), rank + 2),)
    if rank == 4:
        yield (Send(Slice("input", 0, 10), 7),)
    if rank == 6:
        yield (Recv(Slice("output", 0), 1),)
    if rank == 7:
        yield (Recv(Slice("output", 0, 10), 4),)


def test_equal_ranks_with_unlike_times_are_two_classes():
    """Rank 2 is early and rank 3 late: together they would make rank 4 late."""
    found = [*kinds(two_ways, 8)]
    assert [2, 3] in [kind.ranks.tolist() for kind in found]
    one, ten = A + UNIT * B, A + 10 * UNIT * B
    assert sum(simulate_classes(found, 8, LINK, [UNIT])[0]) == 2 * one + ten
