"""The messages of spanning trees in the order of links: a link sends whenever a piece is there.

A pipeline of segments costs time to fill and to empty, and many ranks leave room for few segments. Here no message
waits for the messages of its depth: in every round each link sends the pieces that its rank holds, those with the
longest way ahead first (list scheduling by critical path). Random numbers of fixed seeds decide ties.
"""

from __future__ import annotations

import collections
import heapq
import math
import random
from collections.abc import Mapping
from fractions import Fraction

from gpucoll.analysis.graphs.link_graph import LinkGraph
from gpucoll.analysis.graphs.synthesis import Found
from gpucoll.core.forest import Forest, SpanningTree
from gpucoll.core.transfers import DUALS, Message, Transfers, backwards

MOST_MESSAGES = 1 << 15  # of a schedule: every message is a line of the file
MOST_PIECES = 8  # of the slowest link in a round: links of unlike bandwidth then send nearly whole numbers of pieces
TRIES = 2  # orders of pieces that are alike in the longest way and in the ranks ahead
METHODS = ("all_gather", "broadcast", "reduce_scatter", "reduce", "all_reduce")  # of `Forest`, with an order of links


def in_link_order(graph: LinkGraph, name: str, found: Found, nbytes: int) -> Transfers | None:
    """Return a schedule of the trees of a collective for `nbytes`, from rank 0 if the collective has a root.

    None: the graph has switches, the trees carry sums and results at once, or the messages are too many.
    """
    plain = Forest(found.trees, 1, has_blocks=found.has_blocks)
    messages = sum(len(tree.edges) * tree.share for tree in plain.trees) * (1 + (found.method == "all_reduce"))
    if graph.size > graph.ranks or found.method not in METHODS or messages > MOST_MESSAGES:
        return None
    pieces, slowest = _pieces(graph, name)
    latency = 1e-6 * max(float(edge.us) for edge in graph.edges.values())

    def seconds(tried: tuple[int, list[list[Message]]]) -> float:
        """Return the time of the rounds with the slowest link busy in each: segments fill links, and cost latency."""
        return len(tried[1]) * (latency + slowest * nbytes / (plain.chunks * tried[0]))

    powers = range((MOST_MESSAGES // messages).bit_length())
    segments, steps = min(((1 << power, _steps(plain, 1 << power, pieces, random.Random(seed)))
                           for power in powers for seed in range(TRIES)), key=seconds)
    combining = 0 if found.method in ("all_gather", "broadcast") else len(steps)
    if name in DUALS:
        steps = backwards(steps)
    elif combining:
        steps = [*backwards(steps), *steps]
    return Transfers(name, graph.ranks, plain.shares * segments, steps, combining)


def _pieces(graph: LinkGraph, name: str) -> tuple[dict[tuple[int, int], int], float]:
    """Return the pieces that each link of the trees carries in a round, and the seconds of a round for each byte."""
    speeds = {(src, dst): edge.GBps for (src, dst), edge in graph.edges.items()}
    if name in DUALS:
        speeds = {(dst, src): speed for (src, dst), speed in speeds.items()}
    elif name == "all_reduce":
        speeds = {(src, dst): min(speed, speeds.get((dst, src), Fraction(0))) for (src, dst), speed in speeds.items()}
    slowest = min(speed for speed in speeds.values() if speed)
    # The fewest pieces of the slowest link with the least bandwidth lost to whole numbers.
    count = min(range(1, MOST_PIECES + 1), key=lambda pieces: max(
        1 - math.floor(pieces * speed / slowest) / (pieces * speed / slowest) for speed in speeds.values() if speed))
    return {link: math.floor(count * speed / slowest) for link, speed in speeds.items()}, count / float(slowest) / 1e9


def _steps(plain: Forest, segments: int, pieces: Mapping[tuple[int, int], int],
           ties: random.Random) -> list[list[Message]]:
    """Return the messages of each round, down the trees."""
    ways = [_ways(tree) for tree in plain.trees]
    ready: dict[tuple[int, int], list[tuple[tuple[float, ...], int, int]]] = collections.defaultdict(list)

    def hold(number: int, piece: int, rank: int) -> None:
        for child, height, below in ways[number][rank]:
            heapq.heappush(ready[rank, child], ((-height, -below, ties.random()), piece, number))

    for number, tree in enumerate(plain.trees):
        for segment in range(segments):
            first, count = plain.place(number, segment, segments)
            for piece in range(first, first + count):
                hold(number, piece, tree.root)
    steps = []
    while ready:
        came = [(number, piece, link) for link, waiting in ready.items()
                for _, piece, number in [heapq.heappop(waiting) for _ in range(min(pieces[link], len(waiting)))]]
        ready = collections.defaultdict(list, {link: waiting for link, waiting in ready.items() if waiting})
        for number, piece, (_, child) in came:
            hold(number, piece, child)
        steps.append([(piece, *link) for _, piece, link in came])
    return steps


def _ways(tree: SpanningTree) -> dict[int, list[tuple[int, int, int]]]:
    """Return for each rank its children, each with the longest way down by the child, and all edges on the ways."""
    heights: dict[int, int] = collections.defaultdict(int)
    below: dict[int, int] = collections.defaultdict(int)
    ways: dict[int, list[tuple[int, int, int]]] = collections.defaultdict(list)
    for parent, child in reversed(tree.edges):
        height, edges = heights[child] + 1, below[child] + 1
        heights[parent], below[parent] = max(heights[parent], height), below[parent] + edges
        ways[parent].append((child, height, edges))
    return ways
