"""Virtual time: by hand, against a slow simulator without arrays, and against the registry's formulas."""

import functools
import itertools
import math
from collections import defaultdict
from fractions import Fraction

import numpy
import pytest

from gpucoll.algorithms import algorithms, registry, schedule
from gpucoll.analysis.simulate import MOST_RANKS, Level, Topology, load, simulate, simulate_sizes
from gpucoll.core.schedule import RecvReduce, Reduce
from gpucoll.errors import ArgumentError
from gpucoll.verify.symbolic import replay
from harness.grids import naming, sampled

ROWS = sorted(registry())
UNIT = 64  # bytes of a chunk: a power of two, so that sums are exact

# Seconds are powers of two, so that every sum is exact.
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
    "torus": Topology("torus", (LINK._replace(medium="torus", dimensions=3, hop=2**-12),)),
    "nodes in a ring": Topology("nodes", (LINK._replace(ranks=2), NETWORK._replace(medium="torus", dimensions=1))),
    "slow network": Topology("nodes", (LINK._replace(ranks=4), NETWORK._replace(gamma=2**-20))),
}


A, B, G = LINK.alpha, LINK.beta, LINK.gamma
NA, NB = NETWORK.alpha, NETWORK.beta
N = 4096

BY_HAND = [
    # Six rounds carry a quarter each; three of the rounds also reduce.
    ("all_reduce", "ring", 4, "switch", (6 * A, 6 * N / 4 * B, 3 * N / 4 * G)),
    # Three inputs share the master's one port, and so do three results; a mesh has a link for each pair.
    ("all_reduce", "star", 4, "switch", (2 * A, (3 + 3) * N * B, 3 * N * G)),
    ("all_reduce", "star", 4, "mesh", (2 * A, (1 + 1) * N * B, 3 * N * G)),
    # Each rank waits for the sum of the ranks before.
    ("scan", "linear", 4, "switch", (3 * A, 3 * N * B, 3 * N * G)),
    # All twelve quarters pass through one bus.
    ("all_to_all", "direct", 4, "bus", (A, 12 * N / 4 * B, 0)),
    # Eight ranks on two nodes: 4 x 4 blocks leave each node, by one NIC or by two; the slow network has one NIC.
    ("all_to_all", "direct", 8, "shared NIC", (NA, 16 * N / 8 * NB, 0)),
    ("all_to_all", "direct", 8, "two NICs", (NA, 8 * N / 8 * NB, 0)),
    ("reduce_scatter", "direct", 8, "slow network", (NA, 16 * N / 8 * NB, N / 8 * (3 * G + 4 * 2**-20))),
]


def test_by_hand():
    for *call, where, wanted in BY_HAND:
        with naming((*call, where)):
            found = simulate(*call, N, TOPOLOGIES[where])
            assert found[5:] == wanted
            assert found.seconds == pytest.approx(sum(wanted), rel=1e-12)


def test_a_message_pays_for_every_hop_and_waits_for_both_its_ends():
    """In a ring of four, scatter's blocks for 1 and 2 leave rank 0 by one link; the block for 2 goes a hop further."""
    ring = Topology("ring", (LINK._replace(medium="torus", dimensions=1, hop=2**-12),))
    assert simulate("scatter", "linear", 4, N, ring).seconds == A + 2**-12 + 2 * N / 4 * B
    # Rank 0 shares a node with 1, but not with 2 and 3: the message from 1 to 2 waits for the message to 1.
    nodes = Topology("nodes", (LINK._replace(ranks=2), NETWORK))
    assert simulate("broadcast", "tree", 4, N, nodes).seconds == A + 2 * N * B + NA + N * NB


# --- a slow simulator: one message after the other, in fractions -----------------------------------------------------


def reached(topology, size, one, other):
    spans = topology.spans(size)
    return next(index for index, span in enumerate(spans) if one // span == other // span)


def way(topology, size, sender, receiver):
    """Return the level reached, and the links taken by a message as (level, name of the link)."""
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
    shapes = itertools.product(range(1, number + 1), repeat=dimensions)
    return min(shape for shape in shapes if math.prod(shape) == number and list(shape) == sorted(shape)[::-1])


class Oracle:
    """An observer of two replays: the first sums the loads of the links, the second tells the time."""

    def __init__(self, topology, size, chunk, loads=None):
        self.topology, self.size, self.chunk = topology, size, Fraction(chunk)
        self.known, self.loads = loads, defaultdict(Fraction)
        self.depth, self.time = [0] * size, [Fraction(0)] * size
        self.deep, self.late, self.steps = [0] * size, [Fraction(0)] * size, [()] * size

    def begin(self, rank, steps):
        self.steps[rank], self.deep[rank], self.late[rank] = steps, self.depth[rank], self.time[rank]

    def meet(self, turn, sender, sent, receiver, received):
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

    def finish(self, turn, rank):
        for step in self.steps[rank]:
            if isinstance(step, Reduce | RecvReduce):
                index = reached(self.topology, self.size, rank, step.peer) if isinstance(step, RecvReduce) else 0
                self.late[rank] += Fraction(self.topology.levels[index].gamma) * step.dst.count * self.chunk
        self.depth[rank], self.time[rank] = self.deep[rank], self.late[rank]


def agrees(collective, algorithm, size, where, *, root=0, segments=1):
    """Return whether the time equals the oracle's, in exact fractions of a second."""
    topology, loads = TOPOLOGIES[where], None
    options = {"root": root, "segments": segments, "nodes": topology.nodes(size)}
    schedules = [schedule(collective, algorithm, rank=rank, size=size, **options) for rank in range(size)]
    for _ in range(2):
        oracle = Oracle(topology, size, UNIT, loads)
        replay(schedules, oracle)
        loads = oracle.loads
    found = simulate(collective, algorithm, size, UNIT * schedules[0].chunks, topology, root=root, segments=segments)
    return Fraction(found.seconds) == max(oracle.time)


@pytest.mark.parametrize(("row", "where"), sampled(itertools.product(ROWS, TOPOLOGIES), keep=70, seed=4))
def test_the_slow_simulator_agrees(row, where):
    collective, algorithm = row
    if where == "slow network" and (algorithm in ("one_shot", "two_shot") or "reduce_scatter" in collective):
        return  # ranks add in rank order: made for all at once, a rank's own operand counts as received
    for size, segments in ((2, 1), (7, 2), (8, 1)):
        if algorithm in algorithms(collective, size=size):
            assert agrees(collective, algorithm, size, where, root=size // 2, segments=segments), (size, segments)


@pytest.mark.parametrize(("row", "where"), [
    (("all_reduce", "ring"), "switch"), (("all_reduce", "halving_doubling"), "shared NIC"),
    (("all_to_all", "pairwise"), "torus"), (("all_gather", "bruck"), "switch")])
def test_all_ranks_at_once_and_one_by_one(row, where, monkeypatch):
    def seconds():
        return [found.seconds for size in (2, 8, 16) for found in simulate_sizes(
            *row, size, [2 * size * UNIT * factor for factor in (0, 1, 1024)], TOPOLOGIES[where], segments=2)]

    at_once = seconds()
    monkeypatch.setattr("gpucoll.analysis.simulate.few_enough", lambda case: False)
    assert seconds() == at_once
    monkeypatch.setattr(Topology, "is_uniform", False)
    assert seconds() == at_once


@pytest.mark.parametrize("size", [1024, pytest.param(65536, marks=pytest.mark.nightly)])
def test_many_ranks(size):
    found = simulate("all_reduce", "ring", size, size * UNIT, TOPOLOGIES["switch"])
    assert found[5:] == (2 * (size - 1) * A, 2 * (size - 1) * UNIT * B, (size - 1) * UNIT * G)


LG = 20  # rounds to reach 1,000,000 ranks


@pytest.mark.parametrize(("algorithm", "wanted"), [
    ("reduce_broadcast", (2 * LG * A, 2 * LG * UNIT * B, LG * UNIT * G)),
    ("recursive_doubling", ((LG + 1) * A, (LG + 1) * UNIT * B, LG * UNIT * G))])
def test_a_million_ranks(algorithm, wanted):
    found = simulate("all_reduce", algorithm, 1_000_000, UNIT, TOPOLOGIES["switch"])
    assert found[5:] == wanted


# Two messages share a port while others wait for them, or the last sums wait for all others.
BELOW = {"double_tree": 0.68, "tree": 0.59, "star": 0.55, "linear": 0.88, "chain": 0.88, "recursive_doubling": 0.97}


@pytest.mark.parametrize("size", [12, 33, 100])
def test_the_formulas_of_many_ranks_are_a_lower_bound_and_mostly_exact(size, monkeypatch):
    calls = [(*row, size, UNIT, TOPOLOGIES["switch"]) for row in ROWS if row[1] in algorithms(row[0], size=size)]
    replayed = [simulate(*call, segments=4).seconds for call in calls]
    monkeypatch.setattr("gpucoll.analysis.simulate.MANY", 1)
    for call, exact in zip(calls, replayed, strict=True):
        share = simulate(*call, segments=4).seconds / exact if exact else 1
        assert BELOW.get(call[1], 1 - 1e-9) <= share <= 1 + 1e-9, call


@pytest.mark.parametrize(("arguments", "words"), [
    (("all_reduce", "ring", 65536, N, TOPOLOGIES["torus"]), "more than 128 Mi messages"),
    (("all_reduce", "ring", MOST_RANKS + 1, N), "at most 1048576 ranks are simulated on switch"),
    (("all_reduce", "circulant", MOST_RANKS, N, TOPOLOGIES["mesh"]), "at most 131072 ranks are simulated on mesh"),
    (("all_reduce", "ring", 9, N, load("nvlink_node")), "nvlink_node joins at most 8 ranks, not 9"),
    (("all_reduce", "rng", 8, N), "did you mean ring"),
    (("all_reduse", "ring", 8, N), "did you mean all_reduce"),
])
def test_what_cannot_be_simulated_is_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        simulate(*arguments)


@pytest.mark.parametrize("levels", [(LINK,), (LINK._replace(ranks=4), NETWORK)])
def test_links_beyond_one_for_each_rank_stay_idle(levels):
    """The array of loads has no element for an idle link; with such elements this call raised a MemoryError."""
    def seconds(links):
        topology = Topology("mine", (*levels[:-1], levels[-1]._replace(links=links)))
        return [simulate("all_to_all", name, 12, N, topology) for name in ("direct", "pairwise")]

    assert seconds(4) == seconds(1 << 40)
    assert (seconds(4) == seconds(1)) == (len(levels) == 1)
