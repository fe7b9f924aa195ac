"""Virtual time: by hand, against a slow simulator that knows nothing of arrays, and against the registry's formulas."""

import functools
import itertools
from collections import defaultdict
from fractions import Fraction

import numpy
import pytest

from gpucoll.algorithms import find, registry, schedule
from gpucoll.analysis.replay import ScheduleError, replay
from gpucoll.analysis.simulate import (
    MOST_RANKS,
    Level,
    Topology,
    clock,
    load,
    routes,
    simulate,
    simulate_sizes,
    timeline,
    waves,
)
from gpucoll.analysis.simulate.routes import Routes
from gpucoll.errors import ArgumentError
from gpucoll.schedule import Recv, RecvReduce, Reduce, Send, Slice
from grids import sampled

ROWS = sorted(registry())
SIZES = (1, 2, 3, 4, 7, 8, 16)
UNIT = 64  # bytes of a chunk: sums of these and of powers of two are exact

# Powers of two for seconds, so that every sum is exact.
LINK = Level("link", alpha=2**-10, beta=2**-20, gamma=2**-22)
NETWORK = Level("network", alpha=2**-7, beta=2**-17, gamma=2**-22)
TOPOLOGIES = {
    "switch": Topology("switch", (LINK,)),
    "mesh": Topology("mesh", (LINK._replace(medium="mesh"),)),
    "bus": Topology("bus", (LINK._replace(medium="bus"),)),
    "shared NIC": Topology("nodes", (LINK._replace(ranks=4), NETWORK)),
    "two NICs": Topology("nodes", (LINK._replace(ranks=4), NETWORK._replace(links=2))),
    "three levels": Topology("pcie", (LINK._replace(ranks=2), NETWORK._replace(ranks=4, alpha=2**-8),
                                      NETWORK._replace(links=3, beta=2**-18))),
    "two hosts": Topology("hosts", (LINK._replace(medium="bus", groups=2), NETWORK)),
    "2-D torus": Topology("torus", (LINK._replace(medium="torus", dimensions=2, hop=2**-12),)),
    "3-D torus": Topology("torus", (LINK._replace(medium="torus", dimensions=3, hop=2**-12),)),
    "nodes in a ring": Topology("nodes", (LINK._replace(ranks=2), NETWORK._replace(medium="torus", dimensions=1))),
    "nodes in a mesh": Topology("nodes", (LINK._replace(ranks=2), NETWORK._replace(medium="mesh"))),
    "slow network": Topology("nodes", (LINK._replace(ranks=4), NETWORK._replace(gamma=2**-20))),
}


def nbytes_of(collective, algorithm, size, segments=1, nodes=None):
    return UNIT * schedule(collective, algorithm, rank=0, size=size, segments=segments, nodes=nodes).chunks


def case_of(collective, algorithm, size, segments=1, root=0, nodes=None):
    found = find(collective, algorithm)
    given = {"root": root, "segments": segments, "nodes": nodes}
    return waves.Case(found, algorithm, size, {name: given[name] for name in found.options})


def is_alike(collective, algorithm, size, segments=1):
    """Whether the algorithm can be made for all ranks at once."""
    try:
        return size > 1 and bool([*waves.together(case_of(collective, algorithm, size, segments))])
    except waves.NotAlike:
        return False


def accepted(collective, algorithm, size):
    """Whether there is such a schedule: some algorithms are for some numbers of ranks only."""
    try:
        [*schedule(collective, algorithm, rank=0, size=size)]
    except ArgumentError:
        return False
    return True


# --- by hand ---------------------------------------------------------------------------------------------------------


A, B, G = LINK.alpha, LINK.beta, LINK.gamma
NA, NB = NETWORK.alpha, NETWORK.beta
N = 4096

BY_HAND = [
    # Six rounds of a quarter; three of them combine it.
    ("all_reduce", "ring", 4, "switch", (6 * A, 6 * N / 4 * B, 3 * N / 4 * G)),
    # Three inputs at once through the master's port, and back; on links of their own no one waits for another.
    ("all_reduce", "star", 4, "switch", (2 * A, (3 + 3) * N * B, 3 * N * G)),
    ("all_reduce", "star", 4, "mesh", (2 * A, (1 + 1) * N * B, 3 * N * G)),
    ("all_reduce", "star", 4, "bus", (2 * A, (3 + 3) * N * B, 3 * N * G)),
    # Each rank waits for the sum of those before it.
    ("scan", "linear", 4, "switch", (3 * A, 3 * N * B, 3 * N * G)),
    # All twelve quarters through one bus.
    ("all_to_all", "direct", 4, "bus", (A, 12 * N / 4 * B, 0)),
    # Eight ranks on two nodes: 4 x 4 blocks leave each node, through one NIC or through two; the last is one of those.
    ("all_to_all", "direct", 8, "shared NIC", (NA, 16 * N / 8 * NB, 0)),
    ("all_to_all", "direct", 8, "two NICs", (NA, 8 * N / 8 * NB, 0)),
    ("reduce_scatter", "direct", 8, "slow network", (NA, 16 * N / 8 * NB, N / 8 * (3 * G + 4 * 2**-20))),
    ("gather", "linear", 5, "switch", (A, 4 * N / 5 * B, 0)),
    ("barrier", "dissemination", 8, "switch", (3 * A, 0, 0)),
]


@pytest.mark.parametrize(("collective", "algorithm", "size", "where", "wanted"), BY_HAND)
def test_by_hand(collective, algorithm, size, where, wanted):
    found = simulate(collective, algorithm, size, N, TOPOLOGIES[where])
    assert found[5:] == pytest.approx(wanted, rel=1e-12, abs=0)
    assert found.seconds == pytest.approx(sum(wanted), rel=1e-12)
    if size & (size - 1) == 0:
        assert found[5:] == wanted


def test_a_message_pays_for_every_hop_and_waits_for_both_its_ends():
    """In a ring of four, scatter's blocks for 1 and 2 leave 0 by the same link; the one for 2 goes a hop further."""
    ring = Topology("ring", (LINK._replace(medium="torus", dimensions=1, hop=2**-12),))
    found = timeline("scatter", "linear", 4, N, ring).moves
    assert {(move.receiver, move.end) for move in found} == {
        (1, A + 2 * N / 4 * B), (2, A + 2**-12 + 2 * N / 4 * B), (3, A + N / 4 * B)}
    # Rank 0 is of one node with 1, and far from 2 and 3: the message from 1 to 2 waits for what comes to 1.
    found = timeline("broadcast", "tree", 4, N, Topology("nodes", (LINK._replace(ranks=2), NETWORK)))
    ends, come = {(move.sender, move.receiver): (move.start, move.end) for move in found.moves}, A + 2 * N * B
    assert ends == {(0, 1): (0, come), (1, 2): (come, come + NA + N * NB), (0, 3): (0, NA + N * NB)}
    assert found.rounds[2] == [(0, come + NA + N * NB)]


def test_little_things():
    assert simulate("all_reduce", "ring", 1, N).seconds == 0
    assert simulate("broadcast", "tree", 1024, N, TOPOLOGIES["switch"]).latency == 10 * A
    one, three = (simulate("all_reduce", "ring", 4, 3 * N, TOPOLOGIES["switch"], segments=n) for n in (1, 3))
    assert one[5:] == three[5:], "the segments of a round are one message"
    assert (one.segments, three.segments) == (1, 3)
    assert TOPOLOGIES["shared NIC"].nodes(6) == (0, 0, 0, 0, 1, 1)
    assert TOPOLOGIES["two hosts"].nodes(5) == (0, 0, 0, 1, 1)
    assert TOPOLOGIES["switch"].nodes(6) is None


# --- a slow simulator: one message after the other, in fractions -----------------------------------------------------


def reached(topology, size, one, other):
    spans = topology.spans(size)
    return next(index for index, span in enumerate(spans) if one // span == other // span)


def way(topology, size, sender, receiver):
    """The links that a message takes, as (level, name of the link)."""
    spans, links = topology.spans(size), []
    top = reached(topology, size, sender, receiver)
    for index, level in enumerate(topology.levels[:top + 1]):
        below = spans[index - 1] if index else 1
        if level.medium == "switch":
            for side, rank in (("out", sender), ("in", receiver)):
                links.append((index, (side, rank // below, rank % below * level.links // below)))
        elif level.medium == "bus":
            links += [(index, bus) for bus in {sender // spans[index], receiver // spans[index]}]
        elif index == top:
            units = -(-min(spans[index], size) // below)
            links += [(index, link) for link in between(level, units, sender // below, receiver // below)]
    return top, links


def between(level, units, sender, receiver):
    if level.medium == "mesh":
        return [(sender, receiver)]
    group, links = sender // units * units, []
    shape = squarest(units, level.dimensions)
    here, there = (list(map(int, numpy.unravel_index(unit % units, shape))) for unit in (sender, receiver))
    for axis, length in reversed([*enumerate(shape)]):
        up = 2 * ((there[axis] - here[axis]) % length) <= length
        while here[axis] != there[axis]:
            links.append((group, tuple(here), axis, up))
            here[axis] = (here[axis] + (1 if up else -1)) % length
    return links


@functools.cache
def squarest(number, dimensions):
    shapes = [()]
    for _ in range(dimensions):
        shapes = [(*shape, factor) for shape in shapes for factor in range(1, number + 1)]
    shapes = [shape for shape in shapes if numpy.prod(shape) == number and list(shape) == sorted(shape)[::-1]]
    return min(shapes, key=lambda shape: (shape[0], shape))


class Oracle:
    """Watches a replay twice: first to learn which messages go together, then to tell the time."""

    def __init__(self, topology, size, chunk, loads=None):
        self.topology, self.size, self.chunk = topology, size, Fraction(chunk)
        self.known, self.loads = loads, defaultdict(Fraction)
        self.depth, self.time = [0] * size, [Fraction(0)] * size
        self.deep, self.late, self.steps = [0] * size, [Fraction(0)] * size, [()] * size

    def begin(self, rank, steps):
        self.steps[rank], self.deep[rank], self.late[rank] = steps, self.depth[rank], self.time[rank]

    def meet(self, sender, sent, receiver, received):
        depth = max(self.depth[sender], self.depth[receiver]) + 1
        size = self.steps[sender][sent].src.count * self.chunk
        top, links = way(self.topology, self.size, sender, receiver)
        for link in links:
            self.loads[depth, link] += size
        level = self.topology.levels[top]
        slowest = max((self.known[depth, link] * Fraction(self.topology.levels[link[0]].beta) for link in links),
                      default=0) if self.known else 0
        hops = max(0, sum(link[0] == top for link in links) - 1) if level.medium == "torus" else 0
        end = max(self.time[sender], self.time[receiver]) + Fraction(level.alpha) + hops * Fraction(level.hop) + slowest
        for rank in (sender, receiver):
            self.deep[rank], self.late[rank] = max(self.deep[rank], depth), max(self.late[rank], end)

    def finish(self, rank):
        for step in self.steps[rank]:
            if isinstance(step, Reduce | RecvReduce):
                index = reached(self.topology, self.size, rank, step.peer) if isinstance(step, RecvReduce) else 0
                self.late[rank] += Fraction(self.topology.levels[index].gamma) * step.dst.count * self.chunk
        self.depth[rank], self.time[rank] = self.deep[rank], self.late[rank]


def slowly(collective, algorithm, size, topology, *, root=0, segments=1, nodes=None):
    """The time by the oracle, in exact fractions of a second."""
    loads = None
    for _ in range(2):
        oracle = Oracle(topology, size, UNIT, loads)
        replay([schedule(collective, algorithm, rank=rank, size=size, root=root, segments=segments, nodes=nodes)
                for rank in range(size)], oracle)
        loads = oracle.loads
    return max(oracle.time)


def agrees(collective, algorithm, size, where, *, root=0, segments=1):
    topology = TOPOLOGIES[where]
    nodes = topology.nodes(size)
    nbytes = nbytes_of(collective, algorithm, size, segments, nodes)
    found = simulate(collective, algorithm, size, nbytes, topology, root=root, segments=segments)
    return Fraction(found.seconds) == slowly(collective, algorithm, size, topology, root=root, segments=segments,
                                             nodes=nodes)


@pytest.mark.parametrize(("row", "where"), sampled(itertools.product(ROWS, TOPOLOGIES), keep=70, seed=4))
def test_the_slow_simulator_agrees(row, where):
    collective, algorithm = row
    if where == "slow network" and (algorithm in ("one_shot", "two_shot") or "reduce_scatter" in collective):
        return  # where ranks add in their order: for all at once its own operand counts as one that came
    for size, segments in ((2, 1), (7, 2), (8, 1)):
        if accepted(collective, algorithm, size):
            assert agrees(collective, algorithm, size, where, root=size // 2, segments=segments), (size, segments)


def moved_without_rendezvous(clock, wave):
    parts = clock.began.take(wave.src, 1)
    parts[0] += wave.alpha
    parts[1] += wave.beta * clock.chunk
    return parts


def first_message(priced, ends):
    return numpy.array([numpy.flatnonzero((priced.src == rank) | (priced.dst == rank))[0] for rank in priced.ranks])


PLANTED = {
    "links shared by nobody": (routes, "_added", lambda left, right: numpy.full(1 << 12, 1.0)),
    "one level only": (Routes, "reach", lambda self, src, dst: numpy.zeros(len(src), numpy.intp)),
    "free reductions": (Routes, "gamma", lambda self, src, dst: numpy.zeros(len(src))),
    "no rendezvous": (clock.Clock, "_moved", moved_without_rendezvous),
    "the first message ends the round": (clock.Priced, "last", first_message),
    "all ports alike": (routes, "_port", lambda rank, below, links: rank // below * links),
}


@pytest.mark.mutant
@pytest.mark.nightly
@pytest.mark.parametrize("plant", PLANTED)
def test_the_slow_simulator_finds(plant, monkeypatch):
    monkeypatch.setattr(*PLANTED[plant])
    cases = [("all_reduce", "star"), ("all_reduce", "tree"), ("all_reduce", "ring"), ("all_to_all", "direct"),
             ("gather", "binomial")]
    assert not all(agrees(*case, size, where) for case in cases for size in (7, 8)
                   for where in ("shared NIC", "two NICs", "switch"))


# --- three ways to the same time -------------------------------------------------------------------------------------


ALIKE = [row for row in ROWS if accepted(*row, 8) and is_alike(*row, 8)]


@pytest.mark.parametrize(("row", "where"), sampled(
    itertools.product(ALIKE, ("switch", "shared NIC", "2-D torus")), keep=18, seed=6))
def test_all_ranks_at_once_and_one_by_one(row, where, monkeypatch):
    """On a switch one rank stands for all."""
    for size in (2, 8, 16):
        sizes = [nbytes_of(*row, size, 2) * factor for factor in (0, 1, 1024)]
        at_once = simulate_sizes(*row, size, sizes, TOPOLOGIES[where], segments=2)
        monkeypatch.setattr("gpucoll.analysis.simulate.few_enough", lambda case: False)
        if where == "switch":
            everyone = simulate_sizes(*row, size, sizes, TOPOLOGIES[where], segments=2)
            assert everyone == at_once
        with monkeypatch.context() as patched:
            patched.setattr(Routes, "uniform", False)
            one_by_one = simulate_sizes(*row, size, sizes, TOPOLOGIES[where], segments=2)
        monkeypatch.undo()
        assert [found.seconds for found in at_once] == [found.seconds for found in one_by_one]


@pytest.mark.parametrize("steps", [  # of which something does not match
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4),),
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4), Recv(Slice("output", 0), (rank + 1) % 4)),
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4), Recv(Slice("output", 0, 2), (rank - 1) % 4)),
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4), Recv(Slice("output", 0, rank), (rank - 1) % 4)),
])
def test_sends_and_receives_must_match(steps):
    with pytest.raises(ScheduleError, match="round 1: sends and receives differ"):
        [*waves.together(Planted.of(steps))]


class Planted(waves.Case):
    """A case of four ranks, all of which do one round."""

    def alike(self, ranks):
        return self.found.make(ranks, self.size)

    @classmethod
    def of(cls, steps):
        found = find("all_gather", "ring")._replace(make=lambda rank, size: iter([steps(rank)]))
        return cls(found, "planted", 4, {})


# --- large -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1024, pytest.param(65536, marks=pytest.mark.nightly)])
def test_many_ranks(size):
    found = simulate("all_reduce", "ring", size, size * UNIT, TOPOLOGIES["switch"])
    assert found[5:] == (2 * (size - 1) * A, 2 * (size - 1) * UNIT * B, (size - 1) * UNIT * G)
    for where in ("switch", "shared NIC", "2-D torus"):
        assert simulate("all_reduce", "halving_doubling", size, size * UNIT, TOPOLOGIES[where]).latency > 10 * A


@pytest.mark.parametrize(("arguments", "words"), [
    (("all_reduce", "ring", 65536, N, TOPOLOGIES["2-D torus"]), "more than 128 Mi messages"),
    (("all_reduce", "ring", MOST_RANKS + 1, N), "are more than the 131072"),
    (("all_reduce", "ring", 9, N, load("nvlink_node")), "nvlink_node joins at most 8 ranks, not 9"),
    (("all_reduce", "rng", 8, N), "did you mean ring"),
    (("all_reduse", "ring", 8, N), "did you mean all_reduce"),
])
def test_what_cannot_be_simulated_is_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        simulate(*arguments)
