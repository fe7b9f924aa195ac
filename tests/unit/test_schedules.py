"""Every schedule of the registry is proved, and every planted fault is found."""

import itertools
import random

import numpy
import pytest

from gpucoll.algorithms import algorithms, all_ranks, registry, schedule
from gpucoll.analysis import verify as verifying
from gpucoll.analysis.at_once import agreed, of_rank, wanted
from gpucoll.analysis.count import count
from gpucoll.analysis.replay import ScheduleError, replay
from gpucoll.analysis.verify import prove, verify
from gpucoll.collectives import COLLECTIVES
from gpucoll.errors import ArgumentError
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Send, Slice, relabel
from grids import naming

SIZES = [*range(1, 18), 31, 32, 33, 64]
ROWS = sorted(registry())


def roots(collective, size):
    return {0, size // 2, size - 1} if COLLECTIVES[collective].rooted else {0}


FEW = (*range(1, 10), 16, 17)  # the other numbers of ranks are proved where there is time


@pytest.mark.parametrize("sizes", [pytest.param(FEW, id="few"), pytest.param(
    [size for size in SIZES if size not in FEW], id="many", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_every_schedule_is_proved(collective, algorithm, sizes):
    for size in sizes:
        for root, segments in itertools.product(roots(collective, size), (1, 3)):
            with naming((size, root, segments)):
                verify(collective, algorithm, size, root=root, segments=segments)


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


# --- the proof of all ranks at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_both_proofs_agree(monkeypatch, collective, algorithm):
    cases = [(size, segments) for size in (2, 3, 4, 6, 8, 9) for segments in (1, 3)]
    monkeypatch.setattr(verifying, "FEW", 99)
    one_by_one = [verify(collective, algorithm, size, segments=segments) for size, segments in cases]
    monkeypatch.setattr(verifying, "FEW", 0)
    assert [verify(collective, algorithm, size, segments=segments) for size, segments in cases] == one_by_one


def is_there(step):
    """Whether any rank has it: where nothing wraps, the second part of a range is empty on all."""
    count = (step.src if isinstance(step, Send) else step.dst).count
    return isinstance(count, int) or count.any()


@pytest.mark.mutant
@pytest.mark.parametrize("fault", [drop, wrong_peer, twice, copy_for_reduce])
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_seeded_faults_on_all_ranks_are_caught(collective, algorithm, fault):
    for seed in range(40):
        random_ = random.Random(seed)
        size, segments = random_.choice([2, 3, 4, 5, 7, 8]), random_.choice([1, 2])
        together = all_ranks(collective, algorithm, size=size, segments=segments)
        if together is None:
            continue
        row, plan = COLLECTIVES[collective], [[step for step in steps if is_there(step)] for steps in together]
        assert agreed(row, size, together.chunks, plan) is not None
        if fault(random_, [plan], size):
            assert agreed(row, size, together.chunks, plan) is None, (size, segments)


@pytest.mark.mutant
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


@pytest.mark.mutant
def test_what_one_rank_does_otherwise_is_not_proved_at_once(monkeypatch):
    """What is proved for all ranks is what every rank does by itself: where they differ, each one is run."""
    whole = registry()["all_reduce", "ring"]

    def broken(rank, size, segments=1):
        rounds = list(whole.make(rank, size, segments))
        return iter(rounds if numpy.ndim(rank) or rank else rounds[:-1])

    monkeypatch.setitem(registry(), ("all_reduce", "ring"), whole._replace(make=broken))
    with pytest.raises(ScheduleError):
        verify("all_reduce", "ring", 20)


def test_what_is_wanted_is_what_collectives_promise():
    for row in COLLECTIVES.values():
        for size, root, pieces in itertools.product((1, 2, 5, 70), (0, 1), (1, 3)):
            count = pieces * size if row.output.blocks else pieces
            if root < size and row.output.where != "nowhere":
                per_block = pieces if row.output.blocks or row.input.blocks else count
                found = wanted(row, size, root, per_block, count)
                for rank in {0, size // 2, size - 1}:
                    pieces_ = [row.result(rank, size, root, per_block, index) for index in range(count)]
                    assert found.chunks[rank].tolist() == [piece.chunk for piece in pieces_]
                    assert [sum(int(word) << 64 * at for at, word in enumerate(words)) for words in found.ranks[rank]] \
                        == [sum(1 << other for other in piece.ranks) for piece in pieces_]


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


ALIKE = {"all_reduce": ["ring", "bidirectional_ring", "circulant", "torus", "two_shot", "one_shot", "hierarchical"],
         "reduce_scatter": ["ring", "circulant", "direct", "hierarchical"],
         "all_gather": ["ring", "circulant", "bruck", "direct", "hierarchical"],
         "all_to_all": ["pairwise", "bruck", "direct", "hierarchical"], "barrier": ["dissemination"]}
IN_RANK_ORDER = [("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("reduce_scatter", "direct"),
                 ("reduce_scatter_v", "direct")]
HYPERCUBE = {"all_reduce": ["recursive_doubling", "halving_doubling", "swing"],
             "reduce_scatter": ["recursive_halving"], "all_gather": ["recursive_doubling"]}


def test_ranks_may_be_an_array():
    """Where an algorithm is alike on all ranks it computes with rank only, and all ranks are made at once."""
    for size in range(2, 18):
        expected = [(collective, name) for table in ((ALIKE, HYPERCUBE) if size in (2, 4, 8, 16) else (ALIKE,))
                    for collective, names in table.items() for name in names]
        assert all(all_ranks(collective, name, size=size) is not None for collective, name in expected)
    assert all_ranks("all_reduce", "tree", size=4) is None
    assert all_ranks("all_reduce", "swing", size=6) is None


@pytest.mark.parametrize(("collective", "algorithm"), [row for row in ROWS if row not in IN_RANK_ORDER])
def test_made_at_once_is_made_one_by_one(collective, algorithm):
    for size, segments in itertools.product((*range(2, 10), 12, 16, 31, 32), (1, 2)):
        together = all_ranks(collective, algorithm, size=size, segments=segments)
        for rank in range(size) if together is not None else ():
            alone = schedule(collective, algorithm, rank=rank, size=size, segments=segments)
            assert of_rank(together, rank) == list(alone), (size, rank)
            assert together.chunks == alone.chunks


@pytest.mark.parametrize(("collective", "algorithm"), IN_RANK_ORDER)
def test_who_adds_in_rank_order_does_the_same_made_at_once_but_for_the_order(collective, algorithm):
    """No rank is the first on all ranks: the array lists by distance, what one rank does is in rank order."""
    for size in range(2, 9):
        together = all_ranks(collective, algorithm, size=size)
        for rank in range(size):
            (made, *rest) = of_rank(together, rank)
            (alone, *same) = schedule(collective, algorithm, rank=rank, size=size)
            assert rest == same
            sends, others = ([step for step in steps if isinstance(step, Send)] for steps in (made, alone))
            assert sends == others
            peers, others = ([step.peer for step in steps if isinstance(step, Recv | RecvReduce)]
                             for steps in (made, alone))
            assert sorted(peers) == others == [peer for peer in range(size) if peer != rank]
            assert len(made) == len(alone)


def test_many_ranks_at_once():
    rounds = list(all_ranks("all_reduce", "halving_doubling", size=1 << 16))
    assert len(rounds) == 32
    assert rounds[0][0].src.count == 1 << 15


# --- parameters in names, nodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "name", "size", "words"), [
    ("all_reduce", "torus(4x2)", 9, "4 x 2 is 8"), ("all_reduce", "torus(4)", 8, "4 is 4"),
    ("all_reduce", "torus(4x)", 8, "whole numbers"), ("all_reduce", "torus()", 8, "whole numbers"),
    ("all_reduce", "torus(0x8)", 8, "whole numbers"), ("all_reduce", "torus(2x2x2x1)", 8, "whole numbers"),
    ("all_reduce", "ring(4)", 8, "takes no parameters"), ("all_reduce", "hierarchical(ring)", 8, "two names"),
    ("all_reduce", "hierarchical(ring,tree,ring)", 8, "two names"),
    ("all_reduce", "hierarchical(rng,tree)", 8, "cannot be part of it"),
    ("all_reduce", "hierarchical(ring,rng)", 8, "no algorithm 'rng'"),
    ("all_reduce", "hierarchical(ring,hierarchical)", 8, "part of itself"),
    ("all_reduce", "hierarchical(ring,torus(2x2))", 4, "2 x 2 is 4"),
    ("all_gather", "hierarchical(ring,bruck)", 8, "cannot be part of it"),
    ("all_gather", "torus(4x2)", 8, "no algorithm"), ("all_reduce", "torus(4x2", 8, "no algorithm")])
def test_wrong_parameters_are_refused(collective, name, size, words):
    with pytest.raises(ArgumentError, match=words) as refused:
        schedule(collective, name, rank=0, size=size)
    assert refused.value.code == "GC-ALGO"


NODES = [[0] * 6, [0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2], [*range(6)], [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0],
         [7, 7, 7, 7, 7, 3], [5, 0, 0, 5, 0, 5]]
INSIDE = ["ring", "circulant", "halving_doubling", "two_shot", "tree", "double_tree", "chain", "star", "binomial"]
ACROSS = ["ring", "tree", "double_tree", "recursive_doubling", "swing", "one_shot", "torus", "star"]


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_hierarchical_on_any_nodes(nodes):
    for inner, outer in itertools.product(INSIDE, ACROSS):
        verify("all_reduce", f"hierarchical({inner},{outer})", 6, nodes=nodes)
    for collective, gives in (("reduce_scatter", "recursive_halving"), ("all_gather", "recursive_doubling")):
        for inner, outer in itertools.product(("ring", "circulant", "direct", gives), repeat=2):
            verify(collective, f"hierarchical({inner},{outer})", 6, nodes=nodes)
    for inner, outer in itertools.product(("direct", "pairwise", "bruck"), repeat=2):
        verify("all_to_all", f"hierarchical({inner},{outer})", 6, nodes=nodes)
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        verify(collective, "hierarchical", 6, nodes=nodes)


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0] * 4 + [1] * 4, [0, 1] * 4, [0, 0, 0, 1, 1]], ids=str)
def test_hierarchical_carries_every_byte_once(nodes):
    """Between two nodes of an all-reduce: N bytes each way, however many ranks they have."""
    for name in ("hierarchical", "hierarchical(ring,ring)", "hierarchical(tree,halving_doubling)"):
        for node in (0, 1):
            out = [(step.src.count, made.chunks) for rank in range(len(nodes)) if nodes[rank] == node
                   for made in [schedule("all_reduce", name, rank=rank, size=len(nodes), nodes=nodes)]
                   for steps in made for step in steps if isinstance(step, Send) and nodes[step.peer] != node]
            assert sum(count for count, _ in out) == out[0][1], name


def test_partners_form_the_same_bits():
    """The lower rank's operand comes first on both, so that an op may depend on their order."""
    for size in (2, 4, 8, 6):
        assert len({result_of("all_reduce", "recursive_doubling", rank, size) for rank in range(size)}) == 1
        assert len({result_of("all_reduce", "one_shot", rank, size) for rank in range(size)}) == 1


def result_of(collective, algorithm, rank, size):
    """The expression that `rank` forms of all inputs, in words."""
    memories = [{("input", 0): str(other)} for other in range(size)]
    plans = [list(schedule(collective, algorithm, rank=other, size=size)) for other in range(size)]

    class Words:
        came = steps = [()] * size

        def begin(self, owner, steps):
            self.steps = [*self.steps[:owner], steps, *self.steps[owner + 1:]]
            read = {index: memories[owner][step.src[:2]] for index, step in enumerate(steps) if hasattr(step, "src")}
            self.came = [*self.came[:owner], read, *self.came[owner + 1:]]

        def meet(self, sender, sent, receiver, received):
            self.came[receiver][received] = self.came[sender][sent]

        def finish(self, owner):
            memory = memories[owner]
            for index, step in enumerate(self.steps[owner]):
                if isinstance(step, Copy | Recv):
                    memory[step.dst[:2]] = self.came[owner][index]
                elif not isinstance(step, Send):
                    memory[step.dst[:2]] = f"({memory[step.dst[:2]]} {self.came[owner][index]})"

    replay(plans, Words())
    return memories[rank]["output", 0]


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
