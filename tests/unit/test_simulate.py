"""Virtual time: by hand, one rank after the other, and for many ranks."""

import pytest

from gpucoll.algorithms import algorithms, registry
from gpucoll.errors import ArgumentError
from gpucoll.simulator import MOST_ON_SWITCH, Level, Topology, load, simulate, simulate_sizes
from harness.grids import naming

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
    "torus": Topology("torus", (LINK._replace(medium="torus", dimensions=3, hop=2**-12),)),
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


@pytest.mark.parametrize(("row", "where"), [
    (("all_reduce", "ring"), "switch"), (("all_reduce", "halving_doubling"), "shared NIC"),
    (("all_to_all", "pairwise"), "torus"), (("all_gather", "bruck"), "switch")])
def test_all_ranks_at_once_and_one_by_one(row, where, monkeypatch):
    def seconds():
        return [found.seconds for size in (2, 8, 16) for found in simulate_sizes(
            *row, size, [2 * size * UNIT * factor for factor in (0, 1, 1024)], TOPOLOGIES[where], segments=2)]

    at_once = seconds()
    monkeypatch.setattr("gpucoll.simulator.few_enough", lambda case: False)
    assert seconds() == at_once
    monkeypatch.setattr(Topology, "is_uniform", False)
    assert seconds() == at_once


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
    monkeypatch.setattr("gpucoll.simulator.MANY", 1)
    for call, exact in zip(calls, replayed, strict=True):
        share = simulate(*call, segments=4).seconds / exact if exact else 1
        assert BELOW.get(call[1], 1 - 1e-9) <= share <= 1 + 1e-9, call


@pytest.mark.parametrize(("arguments", "words"), [
    (("all_reduce", "ring", 65536, N, TOPOLOGIES["torus"]), "GC-SIMULATE.*more than 128 Mi messages"),
    (("all_reduce", "ring", MOST_ON_SWITCH + 1, N), "at most 1048576 ranks are simulated on switch"),
    (("all_reduce", "circulant", MOST_ON_SWITCH, N, TOPOLOGIES["mesh"]), "at most 131072 ranks are simulated on mesh"),
    (("all_reduce", "ring", 9, N, load("nvlink_node")), "nvlink_node joins at most 8 ranks, not 9"),
    (("all_reduce", "rng", 8, N), "did you mean ring"),
    (("all_reduse", "ring", 8, N), "did you mean all_reduce"),
])
def test_what_cannot_be_simulated_is_refused(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        simulate(*arguments)
