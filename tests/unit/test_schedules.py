"""Every schedule of the registry is proved, and the proof finds every planted fault."""

import itertools
import random

import pytest

from gpucoll import lab
from gpucoll.algorithms import algorithms, all_ranks, registry, schedule
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Send, Slice
from gpucoll.errors import ArgumentError
from gpucoll.lab.verify import prove_registry, verify
from gpucoll.verify.symbolic import ScheduleError, prove
from harness.grids import SEED, naming, sampled
from oracles.schedule_faults import FAULTS, NEED_REDUCTIONS

ROWS = sorted(registry())
ONE = Slice("output", 0)


def roots(collective, size):
    return {0, size // 2, size - 1} if COLLECTIVES[collective].rooted else {0}


@pytest.mark.parametrize("sizes", [
    pytest.param((*range(1, 10), 17), id="few"),
    pytest.param((*range(10, 17), 18, 31, 32, 33, 64), id="many", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_every_schedule_is_proved(collective, algorithm, sizes):
    for size in sizes:
        for root, segments in itertools.product(roots(collective, size), (1, 3)):
            with naming((size, root, segments)):
                verify(collective, algorithm, size, root=root, segments=segments)


# --- seeded faults -------------------------------------------------------------------------------------------------


@pytest.mark.mutant
@pytest.mark.parametrize("times", [pytest.param(1, id="once"), pytest.param(40, id="often", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_seeded_faults_are_caught(collective, algorithm, times):
    """Each kind of fault is planted `times` times, in schedules of random size, segments and root."""
    for fault in FAULTS if COLLECTIVES[collective].reduces else [*{*FAULTS} - {*NEED_REDUCTIONS}]:
        planted, seeds = 0, itertools.count()
        while planted < times:
            random_ = random.Random(f"{SEED}/{next(seeds)}")
            size, segments = random_.choice([2, 3, 4, 5, 7, 8]), random_.choice([1, 2])
            root = random_.choice(sorted(roots(collective, size)))
            schedules = [schedule(collective, algorithm, rank=rank, size=size, segments=segments, root=root)
                         for rank in range(size)]
            (chunks,), plans = {one.chunks for one in schedules}, [[list(steps) for steps in one] for one in schedules]
            if fault(random_, plans, size):
                planted += 1
                with naming((fault.__name__, size, segments, root)), pytest.raises(ScheduleError):
                    prove(collective, [[tuple(steps) for steps in plan] for plan in plans], chunks=chunks, root=root)


IN = Slice("input", 0)


@pytest.mark.parametrize(("collective", "plans", "words"), [("all_reduce", *case) for case in [
    ([[(Copy(ONE, IN),)], []], "writes to input"),
    ([[(Copy(Slice("input", 2), ONE),)], []], "not in the 2 chunks"),
    ([[(Copy(IN, ONE), RecvReduce(ONE, 1), Recv(ONE, 1))], [(Send(IN, 0), Send(IN, 0))]],
     "earlier step of the round"),
    ([[(Send(Slice("scratch", 0), 1),)], [(Recv(ONE, 0),)]], "written by no step"),
    ([[(RecvReduce(ONE, 1),)], [(Send(IN, 0),)]], "combines chunk 0 into nothing"),
    ([[(Recv(ONE, 1),), (Send(ONE, 1),)], [(Recv(ONE, 0),), (Send(ONE, 0),)]], "waits for ever"),
    ([[(Copy(Slice("input", 0, 2), Slice("output", 0, 2)),)]] * 2, r"chunk 0 with contributions \[1, 0\], not"),
    ([[(Send(IN, 1),)], [(Recv(Slice("scratch", 1), 0),)]], "length differs"),  # chunks 0 and 1 may have unlike lengths
]] + [("all_gather_v", [[(Copy(IN, Slice("output", 1)),)], []], "lengths"),  # rank 1's block may differ in length
        ("reduce_scatter", [[(Copy(IN, ONE),), (RecvReduce(ONE, 1),)], [(Send(Slice("input", 1), 0),)]],
         "combines chunk 1 into chunk 0"),
        ("barrier", [[(Send(Slice("scratch", 0, 0), 1),)], [(Recv(Slice("scratch", 0, 0), 0),)]],
         r"rank 0, .* contributions \[1, 0\], not")])  # rank 0 does not wait for rank 1
def test_a_fault_is_named(collective, plans, words):
    with pytest.raises(ScheduleError, match=words):
        prove(collective, plans, chunks=2)


# --- guarantees for callers outside the package ---------------------------------------------------------------------


def test_a_schedule_can_be_iterated_again_and_made_for_one_rank_or_all_of_many():
    ring = schedule("all_reduce", "ring", rank=5, size=65536)
    assert next(iter(ring)) == next(iter(ring))
    assert len(list(schedule("all_reduce", "tree", rank=65535, size=65536))) < 80
    rounds = list(all_ranks("all_reduce", "halving_doubling", size=1 << 16))
    assert len(rounds) == 32
    assert rounds[0][0].src.count == 1 << 15
    assert all_ranks("all_reduce", "tree", size=4) is None
    assert all_ranks("all_reduce", "swing", size=6) is None


# --- parameters in names, nodes --------------------------------------------------------------------------------------


def test_wrong_parameters_are_refused():
    for name, words in (
            ("torus(4x2)", "4 x 2 is 8"), ("torus(4x)", "whole numbers"), ("torus()", "whole numbers"),
            ("torus(0x8)", "whole numbers"), ("torus(2x2x2x1)", "whole numbers"), ("torus(4x2", "no algorithm"),
            ("ring(4)", "takes no parameters"), ("hierarchical(ring)", "two names"),
            ("hierarchical(rng,tree)", "cannot be a part here"), ("hierarchical(ring,rng)", "no algorithm 'rng'"),
            ("hierarchical(ring,hierarchical)", "cannot be"), ("hierarchical(ring,torus(2x2))", "2 x 2 is 4")):
        with naming(name), pytest.raises(ArgumentError, match=words) as refused:
            schedule("all_reduce", name, rank=0, size=9)
        assert refused.value.code == "GC-ALGO"
    with pytest.raises(ArgumentError, match="no algorithm"):
        schedule("all_gather", "torus(4x2)", rank=0, size=8)


NODES = [[0] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [*range(6)], [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0],
         [7, 7, 7, 7, 7, 3]]
INSIDE = ["ring", "circulant", "halving_doubling", "two_shot", "tree", "double_tree", "chain", "star", "binomial"]
ACROSS = ["ring", "tree", "double_tree", "recursive_doubling", "swing", "one_shot", "torus", "star"]


@pytest.mark.parametrize("nodes", sampled([(nodes,) for nodes in NODES], keep=2, seed=7), ids=str)
def test_hierarchical_on_any_nodes(nodes):
    for number, (inner, outer) in enumerate(itertools.product(INSIDE, ACROSS)):
        verify("all_reduce", f"hierarchical({inner},{outer})", 6, nodes=nodes, segments=1 + number % 3)
    for collective, gives in (("reduce_scatter", "recursive_halving"), ("all_gather", "recursive_doubling")):
        for inner, outer in itertools.product(("ring", "circulant", "direct", gives), repeat=2):
            verify(collective, f"hierarchical({inner},{outer})", 6, nodes=nodes)
    for inner, outer in itertools.product(("direct", "pairwise", "bruck"), repeat=2):
        verify("all_to_all", f"hierarchical({inner},{outer})", 6, nodes=nodes)
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        verify(collective, "hierarchical", 6, nodes=nodes)


def test_names_that_are_returned_work_and_others_are_refused():
    for collective in COLLECTIVES:
        for name in algorithms(collective, size=4, op="sum", dtype="float32"):
            assert list(schedule(collective, name, rank=0, size=4))
    assert algorithms("all_reduce", op="avg", dtype="int32") == ()
    assert algorithms("broadcast", op="avg", dtype="int32") == algorithms("broadcast")
    for size in (0, -1, 2.5, True):
        with pytest.raises(ArgumentError, match="size"):
            algorithms("all_reduce", size=size)
    for wrong in ({"algorithm": "rng"}, {"rank": 4}, {"size": 0}, {"segments": 0}, {"root": 9}):
        arguments = {"collective": "all_reduce", "algorithm": "ring", "rank": 0, "size": 4} | wrong
        with pytest.raises(ArgumentError, match="GC-ALGO"):
            schedule(**arguments)
    with pytest.raises(ArgumentError, match="did you mean ring"):
        schedule("all_reduce", "rng", rank=0, size=4)


def test_plans_are_proved_where_asked(monkeypatch):
    proved = []

    def noted(made, elements, *, root, in_place, nodes):
        proved.append((len(made), elements, in_place, nodes))

    monkeypatch.setattr(lab.verify, "prove_plans", noted)
    list(prove_registry((3,), (1,), "all_reduce", "ring"))
    assert not proved
    list(prove_registry((3,), (1,), "all_reduce", "ring", plans=True))
    assert sorted(proved, key=repr) == sorted(
        [(3, elements, in_place, nodes) for elements in (2, 5) for in_place in (False, True)
         for nodes in (None, (0, 0, 0), (0, 1, 1))], key=repr)


@pytest.mark.parametrize("name", ["torus", "hierarchical"])
def test_all_that_a_name_can_say_is_proved(name):
    rows = list(prove_registry(range(1, 9), (1,), algorithm=name))
    assert {row.fault for row in rows} == {None}
    assert min(row.schedules for row in rows) > 30
