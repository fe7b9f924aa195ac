"""The search for an algorithm of given steps, rounds and chunks, or the proof that none exists.

SCCL's question (Cai et al., Synthesizing Optimal Collective Algorithms, PPoPP 2021). An algorithm has steps, one after
the other; a step lasts one or more rounds; in a round the slowest link of the graph carries one chunk, and a link of
k times its bandwidth k chunks. Every rank receives a chunk at most once, and sends it on in later steps only.

The unknowns are bits, each for a chunk, a link and a step. CP-SAT of OR-Tools (extra `solver`) finds values, or proves
that there are none. The search begins with algorithms that are alike under the symmetries of the graph: the unknowns
are fewer, but a failure proves nothing. The solver has a single thread and a fixed seed: equal questions have equal
answers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import math
import time
from fractions import Fraction
from typing import Any, NamedTuple

from gpucoll.analysis.graphs.link_graph import LinkGraph
from gpucoll.analysis.graphs.symmetry import Permutation, free_group
from gpucoll.analysis.simulate.graph_routes import GraphRoutes
from gpucoll.core.transfers import Message, pieces_of
from gpucoll.errors import ArgumentError

CODE = "GC-SYNTHESIS"
MOST_UNKNOWNS = 1 << 18
SHARES = 1 << 10  # equal ways share the bytes by fractions of at most this denominator


class Point(NamedTuple):
    """Steps, rounds of all steps together, and chunks of a block (of the array, where ranks have no blocks)."""

    steps: int
    rounds: int
    chunks: int

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.rounds} rounds, {self.chunks} chunks"


class Undecided(Exception):
    """Neither an algorithm nor a proof was found in the time, or the question has too many unknowns."""


class StepSearch:
    """The questions about a graph and a collective that copies: all_gather, broadcast, gather, scatter, all_to_all."""

    def __init__(self, graph: LinkGraph, collective: str) -> None:
        if graph.multicast:
            raise ArgumentError(f"graph {graph.name}: its switches copy, and algorithms of few steps need "
                                "switches that only forward", code=CODE)
        self.graph, self.collective = graph, collective
        self._check_number(len(graph.edges))
        self.hops = [graph.hops(rank) for rank in range(graph.ranks)]
        routes, keys = GraphRoutes(graph, graph.ranks), [*graph.edges]
        pairs = [(src, dst) for src, far in enumerate(self.hops) for dst, hops in enumerate(far) if hops == 1]
        self._check_number(len(pairs))
        # By pair of ranks: the links of a message, and the share of the message on each link.
        self.ways = {pair: [(keys[link], Fraction(float(share)).limit_denominator(SHARES))
                            for link, share in zip(way.links, way.shares, strict=True)]
                     for pair in pairs for way in [routes.way(*pair)]}
        self.slowest = min(graph.edges[link].GBps for way in self.ways.values() for link, _ in way)
        self.least_steps = max(max(self.hops[source]) if target is None else self.hops[source][target]
                               for source, target in pieces_of(collective, graph.ranks, 1))

    def _check_number(self, links: int) -> None:
        pieces = len(pieces_of(self.collective, self.graph.ranks, 1))
        if links * pieces > MOST_UNKNOWNS:
            raise ArgumentError(f"graph {self.graph.name}: {pieces} chunks and {links} links between ranks are too "
                                "many for algorithms of few steps", code=CODE)
    @functools.cached_property
    def direct_rounds(self) -> Fraction:
        """The rounds for each chunk where every message goes to its target at once."""
        loads: dict[tuple[int, int], Fraction] = collections.defaultdict(Fraction)
        for source, target in pieces_of(self.collective, self.graph.ranks, 1):
            for rank in range(self.graph.ranks) if target is None else (target,):
                for link, share in self.ways.get((source, rank), ()):
                    loads[link] += share
        return max(load * self.slowest / self.graph.edges[link].GBps for link, load in loads.items())

    @functools.cached_property
    def group(self) -> list[Permutation]:
        """The symmetries in use; a root has to keep its place, so that none are left."""
        is_rooted = self.collective in ("broadcast", "gather", "scatter")
        return [tuple(range(self.graph.size))] if is_rooted else free_group(self.graph)

    def answer(self, point: Point, seconds: float, work: float = math.inf) -> list[list[Message]] | None:
        """Return the messages of each step; None with a proof that no algorithm exists; raise Undecided.

        `work` limits the solver by a measure of its own, about ten seconds each, which is the same on a busy machine.
        """
        began = time.monotonic()
        if point.steps < self.least_steps or point.rounds < point.steps:
            return None
        if len(self.group) > 1:
            with contextlib.suppress(Undecided):
                found = _Question(self, point, self.group).solved(began + seconds / 2, work)
                if found is not None:
                    return found
        return _Question(self, point, [tuple(range(self.graph.size))]).solved(began + seconds, work)


class _Question:
    """A question in the form of CP-SAT, for algorithms that are alike under the permutations of `group`."""

    def __init__(self, search: StepSearch, point: Point, group: list[Permutation]) -> None:
        self.cp_model = solver()
        self.search, self.point, self.group = search, point, group
        self.pieces = pieces_of(search.collective, search.graph.ranks, point.chunks)
        self.numbers = {(piece, number % point.chunks): number for number, piece in enumerate(self.pieces)}
        self.model = self.cp_model.CpModel()
        self.rounds = [self.model.new_int_var(1, point.rounds - point.steps + 1, f"rounds{step}")
                       for step in range(point.steps)]
        self.model.add(sum(self.rounds) == point.rounds)
        self.sent: dict[tuple[int, int, int, int], Any] = {}  # by piece, sender, receiver, step
        for number in range(len(self.pieces)):
            self._paths(number)
        self._links()

    def _image(self, one: Permutation, number: int) -> int:
        """Return the number of a piece after a permutation."""
        source, target = self.pieces[number]
        piece = type(self.pieces[number])(one[source], None if target is None else one[target])
        return self.numbers[piece, number % self.point.chunks]

    def _paths(self, number: int) -> None:
        """Add the bits of a piece, for the steps in which its sender can have it and the rest of the way fits."""
        search, (source, target) = self.search, self.pieces[number]
        if source == target or any(self._image(one, number) < number for one in self.group):
            return  # at its place, or decided by the bits of another piece
        ranks = range(search.graph.ranks)
        targets = ranks if target is None else (target,)
        came, gone = [collections.defaultdict[int, list[tuple[int, Any]]](list) for _ in range(2)]
        for src, dst in search.ways:
            if dst == source or src == target:
                continue
            left = min(search.hops[dst][rank] for rank in targets)
            for step in range(search.hops[source][src], self.point.steps - left):
                bit = self.sent[number, src, dst, step] = self.model.new_bool_var("")
                came[dst].append((step, bit))
                gone[src].append((step, bit))
        if len(self.sent) * len(self.group) > MOST_UNKNOWNS:
            raise Undecided
        for rank in ranks:
            if rank != source:
                self._passes(came[rank], gone[rank], is_needed=rank in targets)
            elif target is not None:
                self.model.add_exactly_one(bit for _, bit in gone[rank])

    def _passes(self, came: list[tuple[int, Any]], gone: list[tuple[int, Any]], *, is_needed: bool) -> None:
        """Let a piece come to a rank once, and leave the rank in later steps.

        A rank without need of the piece lies on the path to the only target, and passes the piece on once.
        """
        bits = [bit for _, bit in came]
        if is_needed:
            self.model.add_exactly_one(bits)
        else:
            self.model.add_at_most_one(bits)
            total = self.cp_model.LinearExpr.sum
            self.model.add(total([bit for _, bit in gone]) == total(bits))
        for step, bit in gone:
            self.model.add_bool_or([*(one for before, one in came if before < step), bit.negated()])

    def _links(self) -> None:
        """Copy the bits to the images of their pieces, and bound the chunks on each link in each step."""
        for (number, src, dst, step), bit in [*self.sent.items()]:
            for one in self.group:
                self.sent[self._image(one, number), one[src], one[dst], step] = bit
        loads: dict[tuple[tuple[int, int], int], list[tuple[Fraction, Any]]] = collections.defaultdict(list)
        for (_, src, dst, step), bit in self.sent.items():
            for link, share in self.search.ways[src, dst]:
                loads[link, step].append((share, bit))
        scale = math.lcm(*(share.denominator for way in self.search.ways.values() for _, share in way))
        for (link, step), terms in loads.items():
            room = self.search.graph.edges[link].GBps / self.search.slowest
            load = self.cp_model.LinearExpr.weighted_sum([bit for _, bit in terms], [
                share.numerator * (scale // share.denominator) * room.denominator for share, _ in terms])
            self.model.add(load <= scale * room.numerator * self.rounds[step])

    def solved(self, deadline: float, work: float) -> list[list[Message]] | None:
        """Return the messages of each step, or None with a proof that there are none; raise Undecided.

        `deadline` is a time of `time.monotonic`.
        """
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise Undecided
        solving = self.cp_model.CpSolver()
        solving.parameters.num_workers = 1
        solving.parameters.random_seed = 1
        solving.parameters.max_time_in_seconds = seconds
        solving.parameters.max_deterministic_time = work
        status = solving.solve(self.model)
        if status == self.cp_model.INFEASIBLE:
            return None
        if status not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            raise Undecided
        steps: list[list[Message]] = [[] for _ in self.rounds]
        for (number, src, dst, step), bit in self.sent.items():
            if solving.value(bit):
                steps[step].append((number, src, dst))
        return steps


def solver() -> Any:
    """Return OR-Tools' CP-SAT; raise ArgumentError without the package."""
    try:
        return importlib.import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise ArgumentError('algorithms of few steps need OR-Tools: pip install "gpucoll[solver]"',
                            code=CODE) from None
