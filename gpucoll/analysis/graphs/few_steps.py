"""Algorithms of few steps: SCCL's question for given steps, and the best point for a size.

`ask` answers for given steps, rounds and chunks, with the reason where no algorithm exists. `best` looks for the point
of the least predicted time. A reduction is the copying collective of the reversed graph, backwards. An all-reduce has
two forms: a reduce-scatter with an all-gather, for chunks that all ranks can share, or all arrays at every rank.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from gpucoll.analysis.graphs.bounds import FORMULAS, bound
from gpucoll.analysis.graphs.link_graph import LinkGraph
from gpucoll.analysis.graphs.max_flow import FlowNetwork
from gpucoll.analysis.graphs.step_search import CODE, Point, StepSearch, Undecided, solver
from gpucoll.core.collectives import collective
from gpucoll.core.transfers import DUALS, Message, Transfers, backwards
from gpucoll.errors import ArgumentError

SERVED = ("all_gather", "broadcast", "gather", "scatter", "all_to_all", "reduce_scatter", "reduce", "all_reduce")
FURTHER = 2         # steps beyond the least that `best` looks at
MOST_CHUNKS = 8     # of a block
WORK = 0.1          # of the solver for a question of `best`, in its own measure: about a second
MOST_QUESTIONS, MOST_UNDECIDED = 64, 8  # of `best`
WORTH = 0.99        # of the time so far: a point must promise less
Steps = list[list[Message]]


class StepAnswer(NamedTuple):
    """An algorithm, or the reason why there is none; `is_proved` tells whether none can exist."""

    transfers: Transfers | None
    reason: str = ""
    is_proved: bool = False


class FewSteps:
    """The questions about a graph and a collective."""

    def __init__(self, graph: LinkGraph, name: str, most_chunks: int | None = None) -> None:
        collective(name)
        if name not in SERVED:
            raise ArgumentError(f"no algorithm is synthesised for {name}, only for {', '.join(SERVED)}", code=CODE)
        solver()
        self.graph, self.name, self.most_chunks = graph, name, min(MOST_CHUNKS, most_chunks or MOST_CHUNKS)
        copied = "all_gather" if name == "all_reduce" else DUALS.get(name, name)
        self.copies = StepSearch(graph if name not in DUALS else graph.reversed(), copied)
        is_even = graph.edges == graph.reversed().edges  # links alike in both directions
        self.sums = self.copies if name != "all_reduce" or is_even else StepSearch(graph.reversed(), copied)
        self.bound = bound(graph, name) if name in FORMULAS else None
        self.has_blocks = collective(name).blocks

    @functools.cached_property
    def rounds_per_chunk(self) -> Fraction:
        """The least rounds for each chunk of a block, by the bound of the collective."""
        if self.bound is None:
            return self._rounds_of_cuts
        return (self.graph.ranks if self.has_blocks else 1) * self.copies.slowest / self.bound.algbw

    @functools.cached_property
    def _rounds_of_arrays(self) -> Fraction:
        """The least rounds for each chunk where every rank receives all arrays."""
        return self.graph.ranks * self.copies.slowest / bound(self.graph, "all_gather").algbw

    @functools.cached_property
    def _rounds_of_cuts(self) -> Fraction:
        """Rounds for each chunk of an all-to-all that some cuts need: ranks in a row, alone, a quarter and a half."""
        ranks, edges = self.graph.ranks, self.graph.edges
        scale = math.lcm(*(edge.GBps.denominator for edge in edges.values()))
        endless = sum(int(edge.GBps * scale) for edge in edges.values())
        most = Fraction(0)
        for first, count in itertools.product(range(ranks), {1, ranks - 1, ranks // 4 or 1, ranks // 2}):
            network = FlowNetwork(self.graph.size, {link: int(edge.GBps * scale) for link, edge in edges.items()})
            source, sink = network.node(), network.node()
            for rank in range(ranks):
                network.add(*((source, rank) if (rank - first) % ranks < count else (rank, sink)), endless)
            crossing = Fraction(network.flow(source, sink), scale)
            most = max(most, count * (ranks - count) * self.copies.slowest / crossing)
        return most

    def ask(self, point: Point, seconds: float = math.inf) -> StepAnswer:
        """Return an algorithm of this point, or the reason why there is none; ArgumentError after `seconds`."""
        if min(point) < 1:
            raise ArgumentError(f"{point}: steps, rounds and chunks must be at least 1", code=CODE)
        reason = self._too_few(point)
        if reason:
            return StepAnswer(None, reason, True)
        try:
            found = self._found(point, seconds)
        except Undecided:
            raise ArgumentError(f"{self.name} on {self.graph.name} in {point}: neither an algorithm nor a proof was "
                                "found: give more time, or ask for fewer steps and chunks", code=CODE) from None
        if found is not None:
            return StepAnswer(found)
        if self.name == "all_reduce":
            return StepAnswer(None, "neither a reduce-scatter with an all-gather nor all arrays at every rank fit, but "
                          "other algorithms may", False)
        if self.graph.size > self.graph.ranks:
            return StepAnswer(None, "the solver has tried every order of the messages, on the ways of `simulate` alone",
                              False)
        return StepAnswer(None, "the solver has tried every way of the chunks", True)

    def _too_few(self, point: Point) -> str:
        """Return why a point is impossible by steps or bandwidth alone; "" if the solver has to tell."""
        least = self.bound.rounds if self.bound else self.copies.least_steps
        if point.steps < least:
            return f"some data have to cross {least} links, so {least} steps are the least"
        if point.rounds < point.steps:
            return "a step takes a round or more"
        if Fraction(point.rounds, point.chunks) < self.rounds_per_chunk:
            return f"the links allow no less than {self.rounds_per_chunk} rounds a chunk"
        return ""

    def _found(self, point: Point, seconds: float, work: float = math.inf) -> Transfers | None:
        """Return an algorithm of this point, or None; raise Undecided after so many seconds or so much work."""
        ranks = self.graph.ranks
        if self.name == "all_reduce":
            return self._all_reduce(point, seconds, work)
        steps = self.copies.answer(point, seconds, work)
        if steps is None:
            return None
        if self.name in DUALS:
            return Transfers(self.name, ranks, point.chunks, backwards(steps), point.steps)
        return Transfers(self.name, ranks, point.chunks, steps)

    def _all_reduce(self, point: Point, seconds: float, work: float) -> Transfers | None:
        """Return an all-reduce: of chunks that ranks share, a reduce-scatter with an all-gather; or of whole arrays."""
        ranks, ends = self.graph.ranks, time.monotonic() + seconds
        if point.chunks % ranks == 0:
            first = Point(point.steps // 2, point.rounds // 2, point.chunks // ranks)
            last = Point(point.steps - first.steps, point.rounds - first.rounds, first.chunks)
            sums = copies = self.sums.answer(first, seconds, work)
            if sums is not None and (first != last or self.sums is not self.copies):
                copies = self.copies.answer(last, ends - time.monotonic(), work)
            if sums is not None and copies is not None:
                return Transfers(self.name, ranks, first.chunks, [*backwards(sums), *copies], first.steps)
        if Fraction(point.rounds, point.chunks) < self._rounds_of_arrays:
            return None
        copies = self.copies.answer(point, ends - time.monotonic(), work)
        return None if copies is None else Transfers(self.name, ranks, point.chunks, copies)

    def best(self, nbytes: int, limit: float, price: Callable[[Transfers], float],
             seconds: float) -> tuple[Transfers, Point] | None:
        """Return the algorithm with the least time for `nbytes` that is found, and its point.

        None: no algorithm was found with a time below `limit`. `price` returns the predicted time of an algorithm.
        Points where all messages go to their targets at once are easy, and come first; the others in the order of the
        time that they promise, and of their chunks where the promise is nearly the same. As SCCL does, the search takes
        for granted that a point without an algorithm rules out fewer rounds for each chunk in the same steps. Without a
        limit of time it ends after `MOST_UNDECIDED` questions that the solver leaves open, and finds the same on a busy
        machine.
        """
        work, most = (WORK, MOST_UNDECIDED) if seconds == math.inf else (max(WORK, seconds / 200), math.inf)
        deadline, found = time.monotonic() + seconds, None
        failed, reached = dict[int, Fraction](), dict[int, Fraction]()  # by steps: rounds for each chunk
        waiting: list[tuple[bool, int, int, Point, int]] = []

        def wait(point: Point, more: int) -> None:
            promise = max(self._promise(point, nbytes), 1e-12)
            if promise < WORTH * limit:
                rank = round(math.log(promise) / math.log(1 / WORTH))
                heapq.heappush(waiting, (point.steps > more, rank, point.chunks, point, more))

        for first in self._first_points():
            wait(*first)
        questions = undecided = 0
        while (waiting and questions < MOST_QUESTIONS and undecided < most
               and time.monotonic() < deadline):
            *_, point, more = heapq.heappop(waiting)
            per_chunk, made, growth = Fraction(point.rounds, point.chunks), None, 8
            if self._promise(point, nbytes) >= WORTH * limit or any(
                    steps <= point.steps and least <= per_chunk for steps, least in reached.items()):
                continue
            if per_chunk > failed.get(point.steps, 0):
                questions += 1
                try:
                    made = self._found(point, deadline - time.monotonic(), work)
                except Undecided:
                    undecided, growth = undecided + 1, 4
            if made is None:
                failed[point.steps] = max(per_chunk, failed.get(point.steps, per_chunk))
                wait(point._replace(rounds=point.rounds + more * max(1, point.rounds // (growth * more))), more)
                continue
            reached[point.steps] = per_chunk
            predicted = price(made)
            if predicted < limit:
                limit, found = predicted, (made, point)
        return found

    def _promise(self, point: Point, nbytes: int) -> float:
        """Return the seconds of the steps on the fastest links, and of the rounds."""
        pieces = point.chunks * (self.graph.ranks if self.has_blocks else 1)
        return point.steps * self._latency + point.rounds * nbytes / pieces / (float(self.copies.slowest) * 1e9)

    @functools.cached_property
    def _latency(self) -> float:
        """The seconds of the fastest message."""
        edges = self.copies.graph.edges
        return min(sum(float(edges[link].us) for link, _ in way) for way in self.copies.ways.values()) * 1e-6

    def _first_points(self) -> Iterator[tuple[Point, int]]:
        """Yield for numbers of steps and chunks the point with the least rounds, and the rounds to the next point."""
        least, ranks = self.copies.least_steps, self.graph.ranks
        halves, shared = (2, ranks) if self.name == "all_reduce" else (1, 1)
        for further, chunks in itertools.product(range(FURTHER + 1), range(1, self.most_chunks + 1)):
            steps = least + further
            per_chunk = self.copies.direct_rounds if steps == 1 else self.rounds_per_chunk * shared / halves
            rounds = max(steps, math.ceil(per_chunk * chunks))
            yield Point(halves * steps, halves * rounds, shared * chunks), halves
        if self.name == "all_reduce":
            per_chunk = self.copies.direct_rounds if least == 1 else self._rounds_of_arrays
            yield Point(least, max(least, math.ceil(per_chunk)), 1), 1

