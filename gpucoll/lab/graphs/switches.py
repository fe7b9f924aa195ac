"""Switches replaced by direct links between their neighbours, without loss of the rate of all roots.

A switch that only forwards joins a link in to a link out. Splitting off replaces a pair of links u -> w -> t by a link
u -> t, for as much capacity as every cut allows. Where as much enters a switch as leaves it, the whole switch can be
replaced without lowering the rate (Bang-Jensen, Frank, Jackson, 1995; ForestColl, arXiv:2402.06787, section 5.3).
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterable, Mapping

from gpucoll.errors import ArgumentError
from gpucoll.lab.graphs.max_flow import FlowNetwork

Capacities = dict[tuple[int, int], int]


class Demand:
    """The trees asked for: ``roots[rank]`` trees from each rank, over all ranks; the test whether capacities serve.

    The search for the trees ends at `deadline` (of `time.monotonic`) with an ArgumentError.
    """

    def __init__(self, size: int, ranks: int, roots: Mapping[int, int], deadline: float = math.inf) -> None:
        self.size: int = size
        self.ranks: int = ranks
        self.roots: dict[int, int] = dict(roots)
        self.deadline: float = deadline
        self.trees: int = sum(roots.values())

    def among_ranks(self) -> Demand:
        """Return the same trees asked of a graph without switches."""
        return Demand(self.ranks, self.ranks, self.roots, self.deadline)

    def check(self) -> None:
        """Raise ArgumentError after the deadline."""
        if time.monotonic() > self.deadline:
            raise ArgumentError("no trees were found within the time limit: give more time, or a graph of fewer nodes",
                                code="GC-SYNTHESIS")

    def network(self, capacities: Capacities) -> tuple[FlowNetwork, int]:
        """Return a network of the links and of a source that feeds the roots; and the source."""
        network = FlowNetwork(self.size, {link: capacity for link, capacity in capacities.items() if capacity})
        source = network.node()
        for root, trees in self.roots.items():
            network.add(source, root, trees)
        return network, source

    def is_served(self, capacities: Capacities) -> bool:
        """Return whether the trees fit: the flow from the roots to every rank has the number of trees."""
        self.check()
        network, source = self.network(capacities)
        return all(network.flow(source, rank, self.trees) == self.trees for rank in range(self.ranks))


def without_switches(capacities: Capacities, demand: Demand) -> Capacities:
    """Return capacities of links between ranks alone, on which the demanded trees fit as before."""
    left = {key: capacity for key, capacity in capacities.items() if capacity}
    for switch in range(demand.ranks, demand.size):
        evenly = _split_evenly(left, switch)
        # A flow to each rank instead of some flows for each pair of links. Further switches must keep their balance.
        if _are_balanced(evenly, range(switch + 1, demand.size)) and demand.is_served(evenly):
            left = evenly
        else:
            _split_off(left, switch, demand)
    return {(src, dst): capacity for (src, dst), capacity in left.items() if src != dst and capacity}


def _split_evenly(capacities: Capacities, switch: int) -> Capacities:
    """Return capacities with even direct links instead of a switch, between neighbours that nothing else joins.

    If all are joined otherwise, all pairs of neighbours share. The trees may not fit any more: the caller looks.
    """
    made = {key: capacity for key, capacity in capacities.items() if switch not in key}
    part = _parts(made)
    into = {src: capacity for (src, dst), capacity in capacities.items() if dst == switch}
    out = {dst: capacity for (src, dst), capacity in capacities.items() if src == switch}
    is_apart = len({part.get(node, node) for node in (*into, *out)}) > 1
    pairs = [(src, dst) for src in into for dst in out
             if src != dst and (not is_apart or part.get(src, src) != part.get(dst, dst))]
    pairs.sort(key=lambda pair: ((pair[1] - pair[0]) % switch, pair))  # round and round, so that shares are even
    share = max(1, min(sum(into.values()), sum(out.values())) // max(1, len(pairs)))
    while pairs:
        for src, dst in pairs:
            amount = min(share, into[src], out[dst])
            into[src] -= amount
            out[dst] -= amount
            made[src, dst] = made.get((src, dst), 0) + amount
        pairs, share = [(src, dst) for src, dst in pairs if into[src] and out[dst]], 1
    return {key: capacity for key, capacity in made.items() if capacity}


def _are_balanced(capacities: Capacities, nodes: range) -> bool:
    """Return whether as much enters each of the nodes as leaves it."""
    balance: dict[int, int] = collections.defaultdict(int)
    for (src, dst), capacity in capacities.items():
        balance[src] += capacity
        balance[dst] -= capacity
    return not any(balance[node] for node in nodes)


def _parts(capacities: Capacities) -> dict[int, int]:
    """Return for each node with links a node of its part, the same for all nodes that links join."""
    near, part = neighbours(capacities), dict[int, int]()
    for first in near:
        if first not in part:
            part |= dict.fromkeys(reached(near, first), first)
    return part


def neighbours(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the neighbours of each node, in the order of the pairs."""
    near = collections.defaultdict(list)
    for one, other in sorted(pairs):
        near[one].append(other)
        near[other].append(one)
    return near


def reached(near: dict[int, list[int]], root: int) -> dict[int, int]:
    """Return the parent of each rank reached from `root`, nearest ranks first; the root is its own parent."""
    parents, waiting = {root: root}, collections.deque([root])
    while waiting:
        rank = waiting.popleft()
        for other in near.get(rank, ()):
            if other not in parents:
                parents[other] = rank
                waiting.append(other)
    return parents


def _split_off(left: Capacities, switch: int, demand: Demand) -> None:
    """Replace the links of a switch, in place; what no pair can take stays out of use."""
    targets = sorted(dst for src, dst in left if src == switch)
    sources = sorted(src for src, dst in left if dst == switch)
    # Even shares first: direct links between all neighbours make flat trees. Then any pair takes what is left.
    for is_even in (True, False):
        for distance, target in enumerate(targets):
            share = max(1, left[switch, target] // max(1, len(sources) - 1)) if is_even else left[switch, target]
            for source in sources[distance + 1:] + sources[:distance + 1]:
                most = min(left[source, switch], left[switch, target], share)
                # A way there and back is of no use, and comes last.
                if most and (source != target or not is_even):
                    _replace(left, source, switch, target, _spare(left, source, switch, target, most, demand))
    for key in [key for key in left if switch in key]:
        del left[key]


def _replace(left: Capacities, source: int, switch: int, target: int, amount: int) -> None:
    left[source, switch] -= amount
    left[switch, target] -= amount
    if source != target:
        left[source, target] = left.get((source, target), 0) + amount


def _spare(left: Capacities, source: int, switch: int, target: int, most: int, demand: Demand) -> int:
    """Return how much of two links can be replaced, at most `most`.

    Two kinds of cuts lose capacity: those with source and target on the side of the roots but not the switch, and those
    with the switch on that side but neither source nor target. Both must keep the capacity of all trees.
    """
    ends = {source, target}
    most = _excess(left, ends, {switch}, most, demand)
    return most and _excess(left, {switch}, ends, most, demand)


def _excess(left: Capacities, near: set[int], far: set[int], most: int, demand: Demand) -> int:
    """Return the capacity beyond all trees, at most `most`, of cuts with `near` beside the roots and `far` opposite.

    A cut has at least one rank opposite, too.
    """
    demand.check()
    network, source = demand.network(left)
    sink, endless = network.node(), sum(left.values()) + demand.trees + most
    for node in near:
        network.add(source, node, endless)
    for node in far:
        network.add(node, sink, endless)
    for rank in [rank for rank in range(demand.ranks) if rank not in near]:
        needed = network.add(rank, sink, endless)
        most = min(most, network.flow(source, sink, demand.trees + most) - demand.trees)
        if most <= 0:
            return 0
        network.capacity[needed] = 0
    return most
