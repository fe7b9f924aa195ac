"""The largest algbw of a collective on a graph of links, as an exact fraction, with the limiting cut.

P is the number of ranks, and B(S) the bandwidth of all links out of a set S of nodes.

- all_gather: if some rank is outside S, the blocks of all ranks in S must leave S. So algbw is at most P * B(S) /
  |ranks in S|, for each S without all ranks. The least of these bounds can be reached: Edmonds' theorem packs trees
  where ranks copy, and splitting off links removes switches that only forward (ForestColl, arXiv:2402.06787).
- reduce_scatter: as all_gather, on the reversed graph, because a reversed all-gather is a reduce-scatter.
- broadcast, reduce: the maximum flow between the root and the rank with the least flow.
- gather, scatter: as all_gather, for cuts between the root and other ranks.
- all_reduce: divide the ranks into sets S_1 to S_p; switches may be in several sets. Before the sum is complete in one
  set, p - 1 sets must send their contributions; afterwards p - 1 sets must receive the sum. So algbw is at most the sum
  of all B(S_i), divided by 2 (p - 1). The links into the sets give a second bound. Without switches, and with equal
  links in both directions, the trees of Tutte and Nash-Williams reach this bound. Switches that copy save outgoing
  links, not incoming ones.

Maximum flows find each minimum: if a cut has a lower value than the present bound, this value becomes the bound, until
there is no such cut (Dinkelbach's method).
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

from gpucoll.errors import ArgumentError
from gpucoll.internal import collective
from gpucoll.lab.graphs.link_graph import LinkGraph, load_graph
from gpucoll.lab.graphs.max_flow import FlowNetwork
from gpucoll.lab.graphs.symmetry import representatives

ZERO = Fraction(0)
BACKWARDS = {"reduce_scatter": "all_gather", "reduce": "broadcast", "scatter": "gather"}  # with the forward collectives
BOUNDED = (*BACKWARDS.values(), *BACKWARDS, "all_reduce")


class Bound(NamedTuple):
    """The largest algbw in GB/s, the sets of nodes that limit it, and the least number of rounds.

    `parts` has a single set of nodes for a cut, and several for an all-reduce limited by a partition. The links out of
    the sets limit or, with `inward`, the links into the sets. In a round every rank sends to any number of ranks,
    through switches.
    """

    algbw: Fraction
    parts: tuple[frozenset[int], ...]
    rounds: int
    inward: bool = False


def bound(graph: LinkGraph, name: str, root: int = 0, reached: Fraction = ZERO) -> Bound:
    """Return the bound of a collective on a graph; ArgumentError for a collective without a known bound.

    An algbw that is known to be reached shortens the search for the bound of an all-reduce.

    >>> from gpucoll.lab.graphs.link_graph import load_graph
    >>> str(bound(load_graph("ring(4, GBps=25, us=0.7)"), "all_gather").algbw)
    '200/3'
    """
    row = collective(name)
    if name not in BOUNDED:
        raise ArgumentError(f"no bound is known for {name}; known are bounds for {', '.join(BOUNDED)}",
                            code="GC-COLLECTIVE")
    if row.rooted and not 0 <= root < graph.ranks:
        raise ArgumentError(f"{name}: root {root} is not in 0..{graph.ranks - 1}", code="GC-ROOT")
    rounds = max(max(graph.hops(rank)) for rank in ([root] if row.rooted else representatives(graph)))
    if name in ("reduce", "gather"):
        rounds = max(graph.reversed().hops(root))
    algbw, parts, inward = _all_reduce(graph, reached) if name == "all_reduce" else _by_rates(graph, name, root)
    return Bound(algbw, parts, rounds, inward)


class Rates(NamedTuple):
    """A problem of rates: every source sends its own data at a common rate to every target."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def needed(self, target: int) -> int:
        """Return the number of sources whose data reach `target` through links."""
        return len(self.sources) - (target in self.sources)


def common_rate(graph: LinkGraph, rates: Rates) -> tuple[Fraction, frozenset[int]]:
    """Return the largest common rate in GB/s, and the set of nodes whose links limit it."""
    scale = math.lcm(*(edge.GBps.denominator for edge in graph.edges.values()))
    network, base = FlowNetwork(graph.size), []
    for (src, dst), edge in graph.edges.items():
        base.append((network.add(src, dst, 0), int(edge.GBps * scale)))
    source = network.node()
    fed = [(network.add(source, rank, 0), rank) for rank in rates.sources]
    rate, cut = Fraction(sum(capacity for _, capacity in base) + 1), frozenset[int]()
    for target in rates.targets:
        while True:
            for number, capacity in base:
                network.capacity[number] = capacity * rate.denominator
            for number, rank in fed:
                network.capacity[number] = 0 if rank == target else rate.numerator
            needed = rates.needed(target) * rate.numerator
            if network.flow(source, target, needed) >= needed:
                break
            side = network.side(source) - {source}
            inside = sum(rank in side for rank in rates.sources if rank != target)
            rate, cut = graph.leaving(side) * scale / inside, frozenset(side)
    return rate / scale, cut


Cuts: TypeAlias = tuple[Fraction, tuple[frozenset[int], ...], bool]  # algbw, sets of nodes, `Bound.inward`


def _by_rates(graph: LinkGraph, name: str, root: int) -> Cuts:
    forwards = BACKWARDS.get(name, name)
    way = graph.reversed() if name in BACKWARDS else graph  # there the links lead into the sets
    others = tuple(rank for rank in range(graph.ranks) if rank != root)
    if forwards == "all_gather":
        rates = Rates(tuple(range(graph.ranks)), representatives(way))
    else:
        rates = Rates((root,), others) if forwards == "broadcast" else Rates(others, (root,))
    rate, cut = common_rate(way, rates)
    return rate * (1 if forwards == "broadcast" else graph.ranks), (cut,), name in BACKWARDS


def _all_reduce(graph: LinkGraph, reached: Fraction) -> Cuts:
    back = graph.reversed()
    if graph.multicast or back.edges == graph.edges:
        return (*partition_rate(back, reached), bool(graph.multicast))
    both = (*partition_rate(graph, reached), False), (*partition_rate(back, reached), True)
    return min(both, key=lambda found: found[0])


def partition_rate(graph: LinkGraph, reached: Fraction = ZERO) -> tuple[Fraction, tuple[frozenset[int], ...]]:
    """Return the least of sum B(S_i) / (2 (p - 1)) over sets S_1 to S_p with every rank once; and these sets.

    For a rate, the sets with the least sum of B(S_i) / 2 - rate are found one rank after the other: the Dilworth
    truncation of a submodular function (Lovasz, 1977; Cunningham, 1985). No sets are below a rate that is `reached`.
    """
    parts = tuple(frozenset({rank}) for rank in range(graph.ranks))
    while True:
        rate = sum((graph.leaving(part) for part in parts), ZERO) / (2 * (len(parts) - 1))
        found = _best_partition(graph, rate) if rate > reached else ()
        if len(found) < 2 or sum((graph.leaving(part) for part in found), ZERO) / (2 * (len(found) - 1)) >= rate:
            return rate, parts
        parts = found


def _best_partition(graph: LinkGraph, rate: Fraction) -> tuple[frozenset[int], ...]:
    """Return sets with every rank once, with the least sum of B(S) / 2 - rate."""
    least = _LeastSets(graph, rate)
    parts: list[frozenset[int]] = []
    for _ in range(graph.ranks):
        side = least.next()
        # A set that is tight joins all parts with a rank of it: the union of tight sets that meet is tight.
        ranks = {node for node in side if node < graph.ranks}
        met = [part for part in parts if not part.isdisjoint(ranks)]
        parts = [part for part in parts if part not in met] + [frozenset(side.union(*met))]
    return tuple(parts)


class _LeastSets:
    """For each rank in turn the least of B(S) / 2 - rate minus the weights in S, which is the rank's own weight.

    S are the sets with the rank and no later rank. In whole numbers: of a unit that divides half of each bandwidth, and
    the rate.
    """

    def __init__(self, graph: LinkGraph, rate: Fraction) -> None:
        scale = math.lcm(rate.denominator, *(2 * edge.GBps.denominator for edge in graph.edges.values()))
        halves = {key: int(edge.GBps * scale / 2) for key, edge in graph.edges.items()}
        self._rate, self._endless, self._rank = int(rate * scale), 4 * sum(halves.values()) + 1, 0
        self._network = FlowNetwork(graph.size, halves)
        self._source, self._sink = self._network.node(), self._network.node()
        self._into = [self._network.add(self._source, rank, 0) for rank in range(graph.ranks)]
        self._out = [self._network.add(rank, self._sink, self._endless) for rank in range(graph.ranks)]
        self._gained = 0

    def next(self) -> set[int]:
        """Return the least set of the next rank."""
        capacity, rank = self._network.capacity, self._rank
        capacity[self._into[rank]], capacity[self._out[rank]] = self._endless, 0
        weight = self._network.flow(self._source, self._sink) - self._gained - self._rate
        side = self._network.side(self._source) - {self._source}
        # Left out of a later set, a weight above 0 is lost; within a later set, a weight below 0 costs.
        capacity[self._into[rank]], capacity[self._out[rank]] = max(0, weight), max(0, -weight)
        self._gained += max(0, weight)
        self._rank += 1
        return side


def main(options: Any) -> int:
    """Print the bound of a collective on a graph, as text or JSON."""
    graph = load_graph(options.graph)
    found = bound(graph, options.collective, options.root)
    sides = [[graph.names[node] for node in sorted(part)] for part in found.parts]
    text = f"{found.algbw.numerator}/{found.algbw.denominator}"
    if options.json:
        print(json.dumps({"collective": options.collective, "graph": graph.name, "algbw_GBps": float(found.algbw),
                          "fraction": text, "cut": sides[0], "parts": sides, "inward": found.inward,
                          "least_rounds": found.rounds}))
        return 0
    print(f"{options.collective} on {graph.name}, {graph.ranks} ranks: at most {float(found.algbw):.6g} GB/s ({text})")
    way = "into" if found.inward else "out of"
    print(f"limited by the links {way} " + f"; {way} ".join(", ".join(side) for side in sides))
    print(f"at least {found.rounds} rounds")
    return 0
