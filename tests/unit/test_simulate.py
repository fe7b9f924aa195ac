"""Virtual time: by hand, against a slow simulator that knows nothing of arrays, and against the registry's formulas."""

import functools
import itertools
import json
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

from gpucoll.algorithms import all_ranks, find, registry, schedule
from gpucoll.analysis.replay import ScheduleError, replay
from gpucoll.analysis.simulate import (
    MOST_RANKS,
    Level,
    Prediction,
    Topology,
    checked,
    load,
    names,
    shipped,
    simulate,
    simulate_sizes,
    timeline,
    waves,
)
from gpucoll.analysis.simulate.clock import Clock
from gpucoll.analysis.simulate.command import algorithm_names, answer, byte_sizes
from gpucoll.analysis.simulate.network import parse
from gpucoll.analysis.simulate.plot import svg
from gpucoll.analysis.simulate.routes import Routes
from gpucoll.analysis.simulate.sweep import Crossover, crossovers, sweep
from gpucoll.errors import ArgumentError
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Send, Slice
from grids import sampled

ROWS = sorted(registry())
SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16)
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


def is_alike(collective, algorithm, size, segments=1):
    """Whether the algorithm can be made for all ranks at once."""
    case = case_of(collective, algorithm, size, segments)
    try:
        return size > 1 and bool([*waves.together(case)])
    except waves.NotAlike:
        return False


def case_of(collective, algorithm, size, segments=1, root=0, nodes=None):
    found = find(collective, algorithm)
    given = {"root": root, "segments": segments, "nodes": nodes}
    return waves.Case(found, algorithm, size, {name: given[name] for name in found.options})


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


def test_a_message_pays_for_every_hop_and_shares_each_link():
    """In a ring of four, scatter's blocks for 1 and 2 leave 0 by the same link; the one for 2 goes a hop further."""
    ring = Topology("ring", (LINK._replace(medium="torus", dimensions=1, hop=2**-12),))
    found = timeline("scatter", "linear", 4, N, ring).moves
    assert {(move.receiver, move.end) for move in found} == {
        (1, A + 2 * N / 4 * B), (2, A + 2**-12 + 2 * N / 4 * B), (3, A + N / 4 * B)}


def test_a_message_waits_for_both_its_ends():
    """Rank 0 is of one node with 1, and far from 2 and 3: the message from 1 to 2 waits for what comes to 1."""
    found = timeline("broadcast", "tree", 4, N, Topology("nodes", (LINK._replace(ranks=2), NETWORK)))
    ends = {(move.sender, move.receiver): (move.start, move.end) for move in found.moves}
    come = A + 2 * N * B  # two messages leave rank 0 by its link
    assert ends[0, 1] == (0, come)
    assert ends[1, 2] == (come, come + NA + N * NB)
    assert ends[0, 3] == (0, NA + N * NB)
    assert found.rounds[2] == [(0, come + NA + N * NB)]


def test_one_rank_takes_no_time():
    assert simulate("all_reduce", "ring", 1, N).seconds == 0


def test_the_segments_of_a_round_are_one_message():
    one, three = (simulate("all_reduce", "ring", 4, 3 * N, TOPOLOGIES["switch"], segments=pieces) for pieces in (1, 3))
    assert one[5:] == three[5:]
    assert (one.segments, three.segments) == (1, 3)


def test_nodes_are_those_of_the_topology():
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


@pytest.mark.parametrize(("row", "where"), sampled(list(itertools.product(ROWS, TOPOLOGIES)), keep=180, seed=4))
def test_the_slow_simulator_agrees(row, where):
    collective, algorithm = row
    if where == "slow network" and (algorithm in ("one_shot", "two_shot") or "reduce_scatter" in collective):
        return  # where ranks add in their order: for all at once its own operand counts as one that came
    for size, segments in ((2, 1), (7, 2), (12, 1)):
        if accepted(collective, algorithm, size):
            assert agrees(collective, algorithm, size, where, root=size // 2, segments=segments), (size, segments)


def sharing_nothing(monkeypatch):
    monkeypatch.setattr("gpucoll.analysis.simulate.routes._added", lambda left, right: numpy.full(1 << 12, UNIT / UNIT))


def one_level_only(monkeypatch):
    monkeypatch.setattr(Routes, "reach", lambda self, src, dst: numpy.zeros(len(src), numpy.intp))


def free_reductions(monkeypatch):
    monkeypatch.setattr(Routes, "gamma", lambda self, src, dst: numpy.zeros(len(src)))


def no_rendezvous(monkeypatch):
    def moved(self, wave):
        parts = self.began.take(wave.src, 1)
        parts[0] += wave.alpha
        parts[1] += wave.beta * self.chunk
        return parts

    monkeypatch.setattr(Clock, "_moved", moved)


def first_message_ends_the_round(monkeypatch):
    monkeypatch.setattr("gpucoll.analysis.simulate.clock.Priced.last", lambda self, ends: numpy.array(
        [numpy.flatnonzero((self.src == rank) | (self.dst == rank))[0] for rank in self.ranks]))


def all_ports_alike(monkeypatch):
    monkeypatch.setattr("gpucoll.analysis.simulate.routes._port", lambda rank, below, links: rank // below * links)


@pytest.mark.mutant
@pytest.mark.parametrize("plant", [sharing_nothing, one_level_only, free_reductions, no_rendezvous,
                                   first_message_ends_the_round, all_ports_alike])
def test_the_slow_simulator_finds(plant, monkeypatch):
    plant(monkeypatch)
    cases = [("all_reduce", "star"), ("all_reduce", "tree"), ("all_reduce", "ring"), ("all_to_all", "direct"),
             ("gather", "binomial")]
    assert not all(agrees(*case, size, where) for case in cases for size in (7, 8)
                   for where in ("shared NIC", "two NICs", "switch"))


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize(("collective", "algorithm"), ROWS)
def test_closed_forms(collective, algorithm, segments):
    """Rounds alone and bytes alone are the registry's on links of their own; all together where all ranks are alike."""
    found = find(collective, algorithm)
    pieces = segments if "segments" in found.options else 1
    mesh, switch = TOPOLOGIES["mesh"].levels[0], TOPOLOGIES["switch"].levels[0]
    for size in SIZES:
        if not accepted(collective, algorithm, size):
            continue
        nbytes = nbytes_of(collective, algorithm, size, segments)
        cost = found.cost.price(size, Fraction(nbytes), pieces)

        def seconds(level):
            return Fraction(simulate(collective, algorithm, size, nbytes, Topology("equal", (level,)),  # noqa: B023
                                     segments=segments).seconds)

        assert seconds(mesh._replace(beta=0, gamma=0)) == cost["rounds"] * Fraction(A), size
        assert seconds(mesh._replace(alpha=0, gamma=0)) == cost["path"] * Fraction(B), size
        if is_alike(collective, algorithm, size, segments):
            rest = cost["rounds"] * Fraction(A) + cost["reduced"] * Fraction(G)
            assert seconds(mesh) == rest + cost["path"] * Fraction(B), size
            assert seconds(switch) == rest + cost["sent"] * Fraction(B), size


def test_the_parts_are_the_three_terms():
    found = simulate("all_reduce", "ring", 8, 8 * UNIT, TOPOLOGIES["switch"])
    assert found[5:] == (14 * A, 14 * UNIT * B, 7 * UNIT * G)


# --- three ways to the same time -------------------------------------------------------------------------------------


ALIKE = [row for row in ROWS if accepted(*row, 8) and is_alike(*row, 8)]


def test_what_the_registry_says_is_alike_is_made_at_once():
    """Also where pieces wrap on some ranks only; for 8 and 16 ranks all of these are alike."""
    assert {*ALIKE} == {row for row in ROWS if accepted(*row, 8) and all_ranks(*row, size=8) is not None}
    assert {("all_reduce", "circulant"), ("all_gather", "bruck"), ("all_reduce", "swing")} <= {*ALIKE}
    assert ("all_reduce", "tree") not in ALIKE


@pytest.mark.parametrize("where", ["switch", "shared NIC", "2-D torus"])
@pytest.mark.parametrize(("collective", "algorithm"), ALIKE)
def test_all_ranks_at_once_and_one_by_one(collective, algorithm, where, monkeypatch):
    for size in (2, 8, 16):
        sizes = [nbytes_of(collective, algorithm, size, 2) * factor for factor in (0, 1, 1024)]
        at_once = simulate_sizes(collective, algorithm, size, sizes, TOPOLOGIES[where], segments=2)
        with monkeypatch.context() as patched:
            patched.setattr("gpucoll.analysis.simulate.few_enough", lambda case: False)
            patched.setattr(Routes, "uniform", False)
            one_by_one = simulate_sizes(collective, algorithm, size, sizes, TOPOLOGIES[where], segments=2)
        assert [row.seconds for row in at_once] == [row.seconds for row in one_by_one]


@pytest.mark.parametrize(("collective", "algorithm"), ALIKE)
def test_one_rank_stands_for_all_on_a_switch(collective, algorithm, monkeypatch):
    for size in (2, 8, 16):
        sizes = [nbytes_of(collective, algorithm, size) * factor for factor in (0, 1, 1024)]
        everyone = simulate_sizes(collective, algorithm, size, sizes, TOPOLOGIES["switch"])
        with monkeypatch.context() as patched:
            patched.setattr("gpucoll.analysis.simulate.few_enough", lambda case: False)
            patched.setattr("gpucoll.analysis.simulate._replayed", None)
            assert simulate_sizes(collective, algorithm, size, sizes, TOPOLOGIES["switch"]) == everyone


class Planted(waves.Case):
    def alike(self, ranks):
        return self.found.make(ranks, self.size)


def planted(make):
    return Planted(find("all_gather", "ring")._replace(make=make), "planted", 4, {})


@pytest.mark.mutant
@pytest.mark.parametrize("steps", [
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4),),
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4), Recv(Slice("output", 0), (rank + 1) % 4)),
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4), Recv(Slice("output", 0, 2), (rank - 1) % 4)),
    lambda rank: (Send(Slice("input", 0), (rank + 1) % 4), Recv(Slice("output", 0, rank), (rank - 1) % 4)),
])
def test_sends_and_receives_must_match(steps):
    with pytest.raises(ScheduleError, match="round 1: sends and receives differ"):
        [*waves.together(planted(lambda rank, size: iter([steps(rank)])))]


def test_pieces_of_a_message_may_be_cut_otherwise_at_the_other_end():
    def rounds(rank, size):
        right, left = (rank + 1) % size, (rank - 1) % size
        yield (Send(Slice("input", 0, 2), right), Recv(Slice("output", 0), left), Recv(Slice("output", 1), left + 0),
               Copy(Slice("input", 0), Slice("output", 2)))

    (wave,) = waves.together(planted(rounds))
    assert (wave.chunks == 2).all()
    assert wave.dst.tolist() == [1, 2, 3, 0]


def test_counts_that_differ_between_ranks_have_no_rank_that_stands_for_all():
    def rounds(rank, size):
        yield (Send(Slice("input", 0, rank), (rank + 1) % size), Recv(Slice("output", 0, 1), (rank - 1) % size))

    with pytest.raises(waves.NotAlike):
        [*waves.one_for_all(planted(rounds))]


# --- large -----------------------------------------------------------------------------------------------------------


def seconds_of(*arguments, **options):
    began = time.process_time()
    found = simulate(*arguments, **options)
    return found, time.process_time() - began


def test_a_ring_of_4096_ranks_is_quick():
    found, seconds = seconds_of("all_reduce", "ring", 4096, 4096 * UNIT, TOPOLOGIES["switch"])
    assert found[5:] == (8190 * A, 8190 * UNIT * B, 4095 * UNIT * G)
    assert seconds < 10


@pytest.mark.parametrize("where", ["switch", "shared NIC", "2-D torus"])
@pytest.mark.parametrize("algorithm", ["halving_doubling", "recursive_doubling", "circulant"])
def test_65536_ranks_are_quick(algorithm, where):
    if ("all_reduce", algorithm) not in registry():
        pytest.skip(f"the registry has no all_reduce:{algorithm} yet")
    found, seconds = seconds_of("all_reduce", algorithm, 65536, 65536 * UNIT, TOPOLOGIES[where])
    assert found.latency > 15 * A
    assert seconds < 10


@pytest.mark.slow
def test_65536_ranks_by_one_and_one_by_one():
    found, seconds = seconds_of("all_reduce", "ring", 65536, 65536 * UNIT, TOPOLOGIES["switch"])
    assert found[5:] == (131070 * A, 131070 * UNIT * B, 65535 * UNIT * G)
    assert seconds < 20
    assert simulate("broadcast", "tree", 65536, N, TOPOLOGIES["switch"]).latency == 16 * A


@pytest.mark.parametrize(("arguments", "words"), [
    (("all_reduce", "ring", 65536, N, TOPOLOGIES["2-D torus"]), "more than 128 Mi messages"),
    (("all_to_all", "direct", 16384, N, TOPOLOGIES["mesh"]), "more than 128 Mi messages"),
    (("all_reduce", "ring", MOST_RANKS + 1, N), "are more than the 131072"),
    (("all_reduce", "ring", 9, N, load("nvlink_node")), "nvlink_node joins at most 8 ranks, not 9"),
    (("all_reduce", "rng", 8, N), "did you mean ring"),
    (("all_reduse", "ring", 8, N), "did you mean all_reduce"),
])
def test_what_cannot_be_simulated_is_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        simulate(*arguments)


# --- topologies ------------------------------------------------------------------------------------------------------


def test_the_package_brings_topologies():
    assert {"switch", "mesh", "nvlink_node", "pcie_node", "fat_tree", "torus_2d", "torus_3d", "two_hosts"} == {*names()}
    for name in names():
        topology = shipped(name)
        assert (topology.name, topology.about.endswith(".")) == (name, True)
        assert simulate("all_reduce", "ring", 8, 1 << 20, topology).seconds > 0


LEVEL = "[[level]]\nname = 'x'\nalpha = 1e-6\nbeta = 1e-9\n"


@pytest.mark.parametrize(("text", "words"), [
    ("[[level", "is no TOML: .*Expected"),
    ("[[level]]\nalpha = = 1", "is no TOML: .*line 2"),
    ("\udcff", "is no TOML"),
    ("", r"no \[\[level\]\]"),
    ("level = 3", r"no \[\[level\]\]"),
    ("level = []", r"no \[\[level\]\]"),
    ("level = [1]", r"no \[\[level\]\]"),
    ("about = 3\n" + LEVEL, "about 3 is no text"),
    ("abuot = 'x'\n" + LEVEL, "unknown key 'abuot'; did you mean about"),
    (LEVEL + "bta = 1", "level 1: unknown key 'bta'; did you mean beta"),
    ("[[level]]\nname = 'x'\nalpha = 1e-6", "level 1: beta is missing"),
    (LEVEL.replace("'x'", "3"), "name 3 is not a name"),
    (LEVEL.replace("1e-6", "-1e-6"), "alpha -1e-06 is not a number of seconds"),
    (LEVEL.replace("1e-6", "nan"), "alpha nan is not"),
    (LEVEL.replace("1e-9", "inf"), "beta inf is not"),
    (LEVEL.replace("1e-9", "true"), "beta True is not"),
    (LEVEL.replace("1e-9", "'1'"), "beta '1' is not"),
    (LEVEL + "gamma = []", r"gamma \[\] is not"),
    (LEVEL + "medium = 'ring'", "unknown medium 'ring'.* known: switch, bus, mesh, torus"),
    (LEVEL + "medium = ['bus']", r"medium \['bus'\] is not a name"),
    (LEVEL + "medium = 'bus'\nlinks = 2", "links belongs to a switch, not to a bus"),
    (LEVEL + "dimensions = 3", "dimensions belongs to a torus, not to a switch"),
    (LEVEL + "hop = 1e-7", "hop belongs to a torus, not to a switch"),
    (LEVEL + "ranks = 0", "ranks 0 is not a whole number"),
    (LEVEL + "links = 1.5", "links 1.5 is not a whole number"),
    (LEVEL + "groups = 2", "groups belongs to the first of several levels"),
    (LEVEL + LEVEL, "level 1: ranks is missing"),
    (LEVEL + "ranks = 4\n" + LEVEL + "ranks = 6", "level 2: ranks 6 is no multiple of 4"),
    (LEVEL + "groups = 2\n" + LEVEL + "ranks = 6", "ranks cannot stand above groups"),
    (LEVEL + "ranks = 4\ngroups = 2\n" + LEVEL, "groups belongs to the first of several levels"),
])
def test_a_malformed_topology_is_refused(text, words, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ArgumentError, match=words) as caught:
        load(str(file))
    assert (caught.value.code, "mine" in str(caught.value)) == ("GC-TOPOLOGY", True)


@pytest.mark.parametrize(("name", "words"), [
    ("fat_tre", "did you mean fat_tree"), ("no/such.toml", "cannot read topology no/such.toml: No such file"),
])
def test_an_unknown_topology_is_refused(name, words):
    with pytest.raises(ArgumentError, match=words):
        load(name)


def test_topologies_of_a_program_are_checked_as_well():
    with pytest.raises(ArgumentError, match="has no level"):
        checked(Topology("mine", ()))
    with pytest.raises(ArgumentError, match="alpha -1"):
        simulate("all_reduce", "ring", 4, N, Topology("mine", (LINK._replace(alpha=-1),)))


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "mine.toml").write_text(LEVEL + "gamma = 1e-10\nmedium = 'torus'\ndimensions = 1\n")
    topology = load(str(tmp_path / "mine.toml"))
    assert topology == parse("mine", (tmp_path / "mine.toml").read_bytes())
    assert topology.levels == (Level("x", 1e-6, 1e-9, 1e-10, "torus", dimensions=1),)


# --- many predictions, the table, the picture ------------------------------------------------------------------------


def row(name, nbytes, seconds, ranks=8):
    return Prediction("all_reduce", name, ranks, nbytes, 1, 0.0, seconds, 0.0)


def test_crossovers_are_where_the_lines_meet():
    """10 + n meets 20 + n/2 at 20; the third is never the quickest."""
    rows = [row(name, nbytes, start + slope * nbytes) for nbytes in (8, 16, 32, 64)
            for name, start, slope in (("one", 10, 1), ("two", 20, 0.5), ("three", 40, 1))]
    assert crossovers(rows) == [Crossover(8, "one", "two", 20.0)]
    assert crossovers(rows[:3]) == crossovers([]) == []


def test_the_tree_is_for_small_and_the_ring_for_large_arrays():
    """Tree (P = 8, no pipelining): 6 rounds of all bytes; ring: 14 rounds of 7/4. They meet at a computed size."""
    rows = [one for nbytes in (64, 1 << 16) for one in (simulate("all_reduce", name, 8, nbytes, TOPOLOGIES["mesh"])
                                                         for name in ("ring", "tree"))]
    (found,) = crossovers(rows)
    tree, ring = (simulate("all_reduce", name, 8, round(found.nbytes), TOPOLOGIES["mesh"]) for name in ("tree", "ring"))
    assert (found.first, found.then) == ("tree", "ring")
    assert tree.seconds == pytest.approx(ring.seconds, rel=1e-3)


def test_a_sweep_is_sorted_and_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr(waves, "ONE_BY_ONE", 1 << 11)
    found = sweep("all_reduce", [], [64, 8], [1 << 26, 8], shipped("switch"),
                  lambda name, nbytes, size: 64 if name == "tree" and nbytes > 8 else 1)
    assert [(one.ranks, one.nbytes) for one in found.rows] == sorted((one.ranks, one.nbytes) for one in found.rows)
    small = [one for one in found.rows if (one.ranks, one.nbytes) == (8, 8)]
    assert small == sorted(small, key=lambda one: one.seconds)
    assert ("tree", 64) in {(left.algorithm, left.ranks) for left in found.left_out}
    assert not [one for one in found.rows if (one.algorithm, one.ranks) == ("tree", 64)]
    assert {one.segments for one in found.rows if one.algorithm == "tree"} == {1, 64}


def test_what_is_named_is_not_left_out():
    with pytest.raises(ArgumentError, match="all_reduce:tree for 65536 ranks: more than"):
        sweep("all_reduce", ["tree"], [8, 65536], [8], shipped("switch"), lambda name, nbytes, size: 64)


def test_sizes_and_names():
    assert byte_sizes("64M, 8,1KiB") == [8, 1024, 1 << 26]
    assert byte_sizes("0") == [0]
    assert algorithm_names("torus(4x2), ring") == ["torus(4x2)", "ring"]
    for wrong in ("", "5X", "9999999T", "1,,2"):
        with pytest.raises(ArgumentError, match="GC-SIZE"):
            byte_sizes(wrong)


def test_the_picture_holds_every_algorithm_and_crossover():
    rows = [row(name, 64, seconds, ranks) for ranks in (8, 64) for name, seconds in (("one", 1e-3), ("two", 2e-3))]
    by_size = [row(name, nbytes, seconds) for nbytes in (8, 64) for name, seconds in (("one", 1e-3), ("two", 2e-3))]
    text = svg("a <title>", rows, by_size, [Crossover(8, "one", "two", 16.0)])
    root = xml.etree.ElementTree.fromstring(text)
    assert [text.count(f'id="line {name}"') for name in ("one", "two")] == [2, 2]
    words = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "time against ranks, 64 B", "time against size, 8 ranks"} <= {*words}
    assert {"16 B: two", "one", "two"} <= {*words}
    assert svg("nothing", [], [], []).count("nothing to draw") == 2
    assert svg("no time", [row("one", 0, 0.0)], [], []).count("nothing to draw") == 2


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "gpucoll", "simulate", *arguments], capture_output=True, text=True,
                          timeout=120)


def test_the_command_prints_a_table_and_an_object(tmp_path):
    plot = tmp_path / "f.svg"
    table = command("all_reduce", "64M", "--ranks", "8,16", "--algorithm", "ring,tree", "--topology", "fat_tree",
                    "--plot", str(plot))
    assert (table.returncode, table.stderr) == (0, "")
    lines = table.stdout.splitlines()
    assert lines[0].startswith("all_reduce on fat_tree: Nodes of eight GPUs")
    assert [line.split()[:3] for line in lines[2:4]] == [["8", "67108864", "ring"], ["8", "67108864", "tree"]]
    assert any(line.startswith("8 ranks: tree up to ") and line.endswith("then ring") for line in lines)
    assert xml.etree.ElementTree.parse(plot).getroot().tag.endswith("svg")
    found = json.loads(command("all_reduce", "64M", "--algorithm", "ring", "--json").stdout)
    (only,) = found["predictions"]
    assert (found["topology"], only["algorithm"], only["ranks"], only["nbytes"]) == ("switch", "ring", 8, 1 << 26)
    assert only["seconds"] == simulate("all_reduce", "ring", 8, 1 << 26).seconds
    assert only["seconds"] == only["latency"] + only["bandwidth"] + only["reduction"]


def options(**changed):
    return SimpleNamespace(**{"collective": "all_reduce", "size": "1M", "ranks": [8], "algorithm": None, "root": 0,
                              "topology": "switch", "segments": None, "json": False, "plot": None, **changed})


def test_every_collective_has_a_table():
    for collective in sorted({kind for kind, _ in registry()}):
        lines = answer(options(collective=collective), lambda name, nbytes, size: 1).splitlines()
        assert len(lines) >= 3, lines


@pytest.mark.parametrize("changed", [
    {"collective": "foo"}, {"size": "5X"}, {"algorithm": "rng"}, {"topology": "nope"}, {"topology": "/nope.toml"},
    {"collective": "reduce", "root": 8}, {"collective": "reduce", "root": -1}, {"segments": 0}, {"plot": "x.png"},
    {"plot": "/nope/x.svg"}, {"topology": "nvlink_node", "ranks": [16]}, {"ranks": [200000]},
])
def test_wrong_options_are_refused(changed):
    with pytest.raises(ArgumentError):
        answer(options(**changed), lambda name, nbytes, size: 1)


@pytest.mark.parametrize("arguments", [["foo"], ["all_reduce", "5X"], ["all_reduce", "--ranks", "0"],
                                       ["all_reduce", "--topology", "nope"], ["all_reduce", "8", "--root", "x"]])
def test_wrong_arguments_are_one_line(arguments):
    job = command(*arguments)
    assert (job.returncode, job.stdout, job.stderr.count("\n")) == (2, "", 1)
    assert job.stderr.startswith("gpucoll simulate: ")


def test_everything_is_in_the_package():
    folder = Path(__file__).parents[2] / "gpucoll" / "analysis" / "topologies"
    assert {file.stem for file in folder.glob("*.toml")} == {*names()}
