"""An algorithm of spanning trees that reaches the bound of a graph of links.

ForestColl's steps (arXiv:2402.06787): the largest common rate of all roots; links in units of a common divisor, so that
rates and capacities are whole numbers; switches replaced by direct links; trees that fill the links; a schedule that
pipelines segments along the trees. A reduce-scatter is an all-gather of the reversed graph, backwards. An all-reduce is
both in turn, or, where that falls short of the bound on a graph without switches, trees that carry sums and results at
the same time.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from gpucoll.errors import ArgumentError
from gpucoll.internal import Forest, SpanningTree, collective, turned
from gpucoll.lab.graphs.bounds import Bound, Rates, bound, common_rate
from gpucoll.lab.graphs.link_graph import LinkGraph
from gpucoll.lab.graphs.switches import Capacities, Demand, without_switches
from gpucoll.lab.graphs.symmetry import Symmetric, rotations
from gpucoll.lab.graphs.tree_packing import forests, pack

NO_TREES = "GC-SYNTHESIS"
MOST_TREES = 32        # of a root: bandwidths without a large common divisor are rounded down
ENOUGH = Fraction(99, 100)  # a rounded rate of this share of the best ends the search for more trees
MOST_EDGES = 1 << 19   # of all trees together: beyond, fewer trees are looked for
MOST_TREE_MESSAGES = 1 << 17  # of a schedule: bounds the pipelining, and so the time of proof and simulation
SCHEDULES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")


class Found(NamedTuple):
    """Trees for a collective: the rate in GB/s (algbw without latency), and the method of `Forest` that runs them.

    With `sides` the trees are those of rank 0, turned (see `gpucoll.core.forest.turned`).
    """

    trees: list[SpanningTree]
    algbw: Fraction
    method: str
    has_blocks: bool
    sides: tuple[int, ...] = ()


def trees_for(graph: LinkGraph, name: str, root: int = 0, most: int = MOST_TREES, seconds: float = math.inf) -> Found:
    """Return trees for a collective with the largest rate found, with at most `most` trees of a root.

    Raises ArgumentError for a collective without trees, and after `seconds` without a result.

    >>> from gpucoll.lab.graphs.link_graph import load_graph
    >>> found = trees_for(load_graph("ring(4, GBps=25, us=0.7)"), "all_gather")
    >>> len(found.trees), str(found.algbw)
    (8, '200/3')
    """
    collective(name)
    deadline = time.monotonic() + seconds
    if name not in SCHEDULES:
        raise ArgumentError(f"no algorithm is synthesised for {name}, only for {', '.join(SCHEDULES)}", code=NO_TREES)
    if name in ("broadcast", "reduce"):
        trees, rate, _ = _packed(graph.reversed() if name == "reduce" else graph, (root,), most, deadline)
        return Found(trees, rate, name, False)
    everyone = tuple(range(graph.ranks))
    if name != "all_reduce":
        trees, rate, sides = _packed(graph.reversed() if name == "reduce_scatter" else graph, everyone, most, deadline)
        return Found(trees, rate * graph.ranks, name, True, sides)
    both = _both_ways(graph)
    trees, rate, sides = _packed(both, everyone, most, deadline)
    found = Found(trees, rate * graph.ranks / 2, name, True, sides)
    if graph.size == graph.ranks and found.algbw < bound(both, name, reached=found.algbw).algbw:
        return max(found, _undirected(both, most) or found, key=lambda one: one.algbw)
    return found


def _both_ways(graph: LinkGraph) -> LinkGraph:
    """Return the graph with the smaller bandwidth of both directions in each: sums and results take the same links."""
    edges = {key: edge._replace(GBps=min(edge.GBps, graph.edges[key[1], key[0]].GBps))
             for key, edge in graph.edges.items() if (key[1], key[0]) in graph.edges}
    made = graph._replace(edges=edges)
    if min(made.hops(0)) < 0:
        raise ArgumentError(f"graph {graph.name}: an all-reduce by trees needs links in both directions", code=NO_TREES)
    return made


def _packed(graph: LinkGraph, roots: tuple[int, ...], most: int,
            deadline: float) -> tuple[list[SpanningTree], Fraction, tuple[int, ...]]:
    """Return trees from each root with a common rate in GB/s; the rate; and the sides of the digits if turned."""
    turns = rotations(graph) if len(roots) > 1 else None
    targets = (0,) if turns else tuple(rank for rank in range(graph.ranks) if rank not in roots or len(roots) > 1)
    rate, _ = common_rate(graph, Rates(roots, targets))
    if turns:
        trees, reached = _turned(Symmetric(graph, turns), rate, most)
        if reached >= ENOUGH * rate:
            return trees, reached, turns.sides
    for capacities, count, reached in _whole(graph, rate, most, roots, deadline):
        demand = Demand(graph.size, graph.ranks, dict.fromkeys(roots, count), deadline)
        direct, served = without_switches(capacities, demand), demand.among_ranks()
        if served.is_served(direct):
            return pack(direct, served), reached, ()
    raise ArgumentError(f"graph {graph.name}: its switches have different bandwidths in and out, and no trees were "
                        "found through them", code=NO_TREES)


def _turned(symmetric: Symmetric, rate: Fraction, most: int) -> tuple[list[SpanningTree], Fraction]:
    """Return trees of rank 0 turned to all ranks, and the rate: exact, or enough with the fewest trees."""
    unit = functools.reduce(_divisor, symmetric.budgets, rate)
    ranks = symmetric.graph.ranks
    best: tuple[list[SpanningTree], Fraction] = [], Fraction(0)
    for count in (*([int(rate / unit)] if rate / unit <= most else ()), *range(1, most + 1)):
        if count > 1 and count * ranks * ranks > MOST_EDGES:
            continue
        found = symmetric.trees(count)
        best = max(best, found, key=lambda one: one[1])
        if best[1] >= ENOUGH * rate:
            break
    return turned(best[0], symmetric.sides), best[1]


def _whole(graph: LinkGraph, rate: Fraction, most: int, roots: tuple[int, ...],
           deadline: float) -> Iterator[tuple[Capacities, int, Fraction]]:
    """Yield capacities and trees of a root in whole numbers, and the rate reached, the best first."""
    unit = functools.reduce(_divisor, (edge.GBps for edge in graph.edges.values()), rate)
    if rate / unit <= most:
        yield {key: int(edge.GBps / unit) for key, edge in graph.edges.items()}, int(rate / unit), rate
    rounded = []
    for count in range(1, most + 1):
        demand = Demand(graph.size, graph.ranks, dict.fromkeys(roots, count), deadline)
        capacities, reached = _rounded(graph, count, rate, demand)
        rounded.append((reached, count, capacities))
        if reached >= ENOUGH * rate:
            break
    for reached, count, capacities in sorted(rounded, key=lambda one: (-one[0], one[1])):
        yield capacities, count, reached


def _divisor(one: Fraction, other: Fraction) -> Fraction:
    """Return the largest number with whole multiples `one` and `other`."""
    return Fraction(math.gcd(one.numerator * other.denominator, other.numerator * one.denominator),
                    one.denominator * other.denominator)


def _rounded(graph: LinkGraph, count: int, rate: Fraction, demand: Demand) -> tuple[Capacities, Fraction]:
    """Return capacities rounded down to whole trees, for `count` trees of a root at the largest rate that they allow.

    Trees per GB/s grow until a bandwidth is worth one tree more: only these numbers are tried, by bisection.
    """
    speeds = {edge.GBps for edge in graph.edges.values()}
    least, largest = count / rate, count / rate + 1 / min(speeds)
    tried = sorted({Fraction(trees) / speed for speed in speeds
                    for trees in range(math.ceil(least * speed), math.floor(largest * speed) + 1)} | {least})

    def capacities(scale: Fraction) -> Capacities:
        return {key: math.floor(edge.GBps * scale) for key, edge in graph.edges.items()}

    first, last = 0, len(tried) - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if demand.is_served(capacities(tried[middle])) else (middle + 1, last)
    return capacities(tried[first]), count / tried[first]


def _undirected(graph: LinkGraph, most: int) -> Found | None:
    """Return trees for sums and results at once, on a graph of ranks with equal links in both directions.

    In units that divide bound and bandwidths, the trees fit (Tutte; Nash-Williams). None: more than `most` trees.
    """
    best = bound(graph, "all_reduce").algbw
    unit = functools.reduce(_divisor, (edge.GBps for edge in graph.edges.values()), best)
    if best / unit > most:
        return None
    capacities = {key: int(edge.GBps / unit) for key, edge in graph.edges.items() if key[0] < key[1]}
    trees = forests(capacities, graph.ranks, int(best / unit))
    return None if trees is None else Found(trees, best, "tree_all_reduce", False)


class Synthesis(NamedTuple):
    """A schedule: the trees, the pipelining, and the prediction for `nbytes`."""

    found: Found
    forest: Forest
    limit: Bound


def synthesis(graph: LinkGraph, name: str, nbytes: int, root: int = 0, seconds: float = math.inf) -> Synthesis:
    """Return an algorithm for messages of `nbytes`, cut into the segments of the least time."""
    found = trees_for(graph, name, root, seconds=seconds)
    return pipelined(graph, Synthesis(found, _cut(found), bound(graph, name, root, found.algbw)), nbytes)


def pipelined(graph: LinkGraph, made: Synthesis, nbytes: int) -> Synthesis:
    """Return the trees of `made` with the pipelining for messages of `nbytes`."""
    return made._replace(forest=_cut(made.found, _segments(graph, _cut(made.found), made.found, nbytes)))


def _cut(found: Found, segments: int = 1) -> Forest:
    return Forest(found.trees, segments, has_blocks=found.has_blocks)


def _segments(graph: LinkGraph, plain: Forest, found: Found, nbytes: int) -> int:
    """Return the number of segments of the least time: filling the pipeline costs bandwidth, every segment latency."""
    latency = 1e-6 * max(float(edge.us) for edge in graph.edges.values())
    seconds = nbytes / (float(found.algbw) * 1e9)
    rounds = 2 * plain.height if found.method in ("all_reduce", "tree_all_reduce") else plain.height
    best = math.sqrt(max(0, rounds - 1) * seconds / latency) if latency else math.inf
    messages = sum(len(tree.edges) for tree in found.trees) * (2 if rounds > plain.height else 1)
    smallest = max(1, nbytes // (plain.chunks * 64))  # a chunk of fewer than 64 bytes gains nothing
    return max(1, min(round(best) if best < smallest else smallest, MOST_TREE_MESSAGES // messages))
