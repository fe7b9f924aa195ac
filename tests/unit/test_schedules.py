"""Every schedule of the registry is proved, and every planted fault is found."""

import random

import pytest

from gpucoll.algorithms import algorithms, registry, schedule
from gpucoll.analysis.count import count
from gpucoll.analysis.replay import ScheduleError
from gpucoll.analysis.verify import prove, verify
from gpucoll.collectives import COLLECTIVES
from gpucoll.errors import ArgumentError
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Send, Slice, relabel

SIZES = [*range(1, 18), 31, 32, 33, 64]
ROWS = sorted(registry())


def roots(collective, size):
    return {0, size // 2, size - 1} if COLLECTIVES[collective].rooted else {0}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_every_schedule_is_proved(collective, algorithm, size):
    for root in roots(collective, size):
        for segments in (1, 3):
            verify(collective, algorithm, size, root=root, segments=segments)


@pytest.mark.parametrize("segments", [1, 2, 5])
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_counted_costs_equal_the_formulas(collective, algorithm, segments):
    found = registry()[collective, algorithm]
    pieces = segments if "segments" in found.options else 1
    for size in SIZES:
        counted = count(collective, algorithm, size, segments=segments)
        assert counted._asdict() == found.cost.price(size, 1 * counted.path.__class__(1), pieces), size


def test_the_seeds_costs():
    """Ring 2(P-1)N/P a rank; tree log2(P) N up and as much down; star (P-1)N into and out of the master."""
    for size in (2, 4, 8, 16, 32, 64):
        ring, tree, star = (count("all_reduce", name, size) for name in ("ring", "tree", "star"))
        assert ring.sent * size == ring.received * size == 2 * (size - 1)
        assert tree.path == tree.rounds == 2 * (size.bit_length() - 1)
        assert star.sent == star.received == size - 1


# --- seeded faults -------------------------------------------------------------------------------------------------


def rounds_of(collective, algorithm, size, segments, root):
    schedules = [schedule(collective, algorithm, rank=rank, size=size, segments=segments, root=root)
                 for rank in range(size)]
    return schedules[0].chunks, [[list(steps) for steps in one] for one in schedules]


def pick(random_, plans, kind):
    """Return (round, index) of a random step of `kind` with something in it."""
    places = [(steps, index) for plan in plans for steps in plan for index, step in enumerate(steps)
              if isinstance(step, kind)]
    return random_.choice(places) if places else None


def drop(random_, plans, size):
    place = pick(random_, plans, Send | Recv | RecvReduce | Copy | Reduce)
    return place and (place[0].pop(place[1]), True)[1]


def wrong_peer(random_, plans, size):
    place = pick(random_, plans, Send | Recv | RecvReduce)
    if place is None or size < 3:
        return False
    steps, index = place
    steps[index] = steps[index]._replace(peer=(steps[index].peer + random_.randrange(1, size)) % size)
    return True


def twice(random_, plans, size):
    place = pick(random_, plans, Send | Recv | RecvReduce | Copy | Reduce)
    return place and (place[0].insert(place[1], place[0][place[1]]), True)[1]


def copy_for_reduce(random_, plans, size):
    place = pick(random_, plans, RecvReduce | Reduce)
    if place is None:
        return False
    steps, index = place
    step = steps[index]
    steps[index] = Recv(*step) if isinstance(step, RecvReduce) else Copy(*step)
    return True


def receive_after_reduction(random_, plans, size):
    """A Recv on a chunk that the round has reduced into: message and sender are there, the order is wrong."""
    place = pick(random_, plans, RecvReduce | Reduce)
    if place is None:
        return False
    steps, index = place
    owner = next(rank for rank, plan in enumerate(plans) if any(one is steps for one in plan))
    peer, target = (owner + 1) % size, steps[index].dst
    steps.insert(index + 1, Recv(target, peer))
    plans[peer].insert(0, [Send(Slice("input", target.first), owner)])
    return True


FAULTS = [drop, wrong_peer, twice, copy_for_reduce, receive_after_reduction]


@pytest.mark.mutant
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_seeded_faults_are_caught(collective, algorithm, fault):
    planted = 0
    for seed in range(60):
        random_ = random.Random(seed)
        size, segments = random_.choice([2, 3, 4, 5, 7, 8]), random_.choice([1, 2])
        root = random_.choice(sorted(roots(collective, size)))
        chunks, plans = rounds_of(collective, algorithm, size, segments, root)
        if not fault(random_, plans, size):
            continue
        planted += 1
        with pytest.raises(ScheduleError):
            prove(collective, [[tuple(steps) for steps in plan] for plan in plans], chunks=chunks, root=root)
    reduces = COLLECTIVES[collective].reduces
    assert planted > 20 or (not reduces and fault in (copy_for_reduce, receive_after_reduction))


ONE = Slice("output", 0)


@pytest.mark.mutant
@pytest.mark.parametrize(("plans", "words"), [
    ([[(Copy(ONE, Slice("input", 0)),)], []], "writes to input"),
    ([[(Copy(Slice("input", 1), ONE),)], []], "not in the 1 chunks"),
    ([[(Copy(Slice("input", 0), ONE), RecvReduce(ONE, 1), Recv(ONE, 1))],
      [(Send(Slice("input", 0), 0), Send(Slice("input", 0), 0))]], "earlier step of the round"),
    ([[(Send(Slice("scratch", 0), 1),)], [(Recv(ONE, 0),)]], "nobody has written"),
    ([[(RecvReduce(ONE, 1),)], [(Send(Slice("input", 0), 0),)]], "combines chunk 0 into nothing"),
    ([[(Recv(ONE, 1),), (Send(ONE, 1),)], [(Recv(ONE, 0),), (Send(ONE, 0),)]], "waits for ever"),
    ([[(Copy(Slice("input", 0), ONE),)], [(Copy(Slice("input", 0), ONE),)]], "contributions"),
])
def test_a_fault_is_named(plans, words):
    with pytest.raises(ScheduleError, match=words):
        prove("all_reduce", plans, chunks=1)


@pytest.mark.mutant
def test_ragged_blocks_may_not_be_mixed_up():
    """Blocks of the v-variants have lengths of their own: rank 1's may not arrive as rank 0's."""
    plans = [[(Copy(Slice("input", 0), Slice("output", 1)),)], []]
    with pytest.raises(ScheduleError, match="lengths"):
        prove("all_gather_v", plans, chunks=2)


@pytest.mark.mutant
def test_lengths_that_differ_are_a_fault():
    """Chunks 0 and 1 of an array need not be equally long."""
    plans = [[(Send(Slice("input", 0), 1),)], [(Recv(Slice("scratch", 1), 0),)]]
    with pytest.raises(ScheduleError, match="length differs"):
        prove("all_reduce", plans, chunks=2)


# --- what a reader outside relies on -------------------------------------------------------------------------------


def test_chunks_are_alike_on_all_ranks_and_a_multiple_of_the_blocks():
    for collective, algorithm in ROWS:
        for size in (1, 2, 3, 8):
            chunks = {schedule(collective, algorithm, rank=rank, size=size, segments=3).chunks for rank in range(size)}
            assert len(chunks) == 1
            assert not COLLECTIVES[collective].blocks or chunks.pop() % size == 0


def test_a_schedule_can_be_iterated_again_and_made_for_one_rank_of_many():
    ring = schedule("all_reduce", "ring", rank=5, size=65536)
    assert next(iter(ring)) == next(iter(ring))
    assert len(list(schedule("all_reduce", "tree", rank=65535, size=65536))) < 80


def test_ranks_may_be_a_numpy_array():
    """An algorithm alike on all ranks computes with rank only: all ranks are made at once."""
    import numpy

    from gpucoll.algorithms.ring import ring_all_reduce

    at_once = list(ring_all_reduce(rank=numpy.arange(6), size=6))
    for rank in range(6):
        for together, alone in zip(at_once, ring_all_reduce(rank=rank, size=6), strict=True):
            assert [step.peer[rank] for step in together if not isinstance(step, Copy)] == \
                [step.peer for step in alone if not isinstance(step, Copy)]


def test_an_executor_keeps_aside_what_a_round_still_reads():
    """``Reduce(x, x)`` after another step on x reads the x of before the round."""
    from gpucoll.chunks import Layout
    from gpucoll.executors import Layouts, resolve
    from gpucoll.schedule import Schedule

    def plan(*steps):
        made = Schedule("all_reduce", "test", 0, 2, 1, lambda: [steps])
        return resolve(made, Layouts(Layout(5, 1), Layout(5, 1)), in_place=False).rounds[0]

    assert not plan(Reduce(ONE, ONE)).snapshots
    assert len(plan(RecvReduce(ONE, 1), Reduce(ONE, ONE)).snapshots) == 1
    assert plan(Send(ONE, 1), Recv(ONE, 1)).hold
    assert not plan(Send(Slice("input", 0), 1), Recv(ONE, 1)).hold


def test_relabel_renames_peers_only():
    rounds = [(Send(ONE, 1), Copy(Slice("input", 0), ONE), RecvReduce(ONE, 2))]
    assert list(relabel(rounds, lambda peer: peer + 10)) == [(Send(ONE, 11), rounds[0][1], RecvReduce(ONE, 12))]


def test_names_that_are_returned_work_and_others_are_refused():
    for collective in COLLECTIVES:
        for name in algorithms(collective, size=4, op="sum", dtype="float32"):
            assert list(schedule(collective, name, rank=0, size=4))
    assert algorithms("all_reduce", op="avg", dtype="int32") == ()
    assert algorithms("broadcast", op="avg", dtype="int32") == algorithms("broadcast")
    for wrong in ({"algorithm": "rng"}, {"rank": 4}, {"size": 0}, {"segments": 0}, {"root": 9}):
        arguments = {"collective": "all_reduce", "algorithm": "ring", "rank": 0, "size": 4} | wrong
        with pytest.raises(ArgumentError) as refused:
            schedule(**arguments)
        assert refused.value.code == "GC-ALGO"
    with pytest.raises(ArgumentError, match="did you mean ring"):
        schedule("all_reduce", "rng", rank=0, size=4)
