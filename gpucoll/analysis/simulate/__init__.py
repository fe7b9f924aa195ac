"""Predict how long a schedule takes on a topology: virtual time, in seconds, for any number of ranks.

What time means:

- A rank's round begins when its previous one has ended; its first begins at 0.
- A message moves from when both its ends have begun their rounds. It takes the alpha of the level of links that it
  reaches, and the time of its bytes through the slowest link of its way; nothing is buffered.
- The messages that share a link share its bandwidth: each takes as long as all bytes of its wave through that link.
  A wave is all messages with equally many messages before them on their longest chain (for an algorithm that is
  alike on all ranks: those of a round). Messages of different waves do not slow each other, even where ranks have
  drifted apart so that they overlap; those of one wave do, even where one begins later.
- Several messages of a round from one rank to another are one: they pay one alpha. Those to and from
  several ranks pay theirs at the same time, and one `gap` for each of them after the first.
- A round ends when its last message has ended, and then what it combines has been combined: gamma of the level that
  the operand came by (the innermost for a local one) for every byte. Copies take no time.
- The schedule ends with its last rank.

Hence ``rounds * alpha + path * beta + reduced * gamma``, with the registry's formulas, is what an algorithm alike on
all ranks takes where every pair has a link of its own and messages no gap (the topology ``mesh``); on a switch `sent`
stands for `path`.

Algorithms alike on all ranks are made for all of them at once, up to 2^27 messages (2^22 in a round). Beyond, on one
switch, where all such ranks end each round at the same time, the formulas serve. Any others, and those that heed
a topology's nodes, are replayed rank by rank, up to 2^20 messages (and 1,024 ranks on nodes). What is beyond is
refused.
(one_shot is listed otherwise for all ranks at once: its own operand then counts as one that came. That is the same
where all levels have one gamma.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpucoll.algorithms import find
from gpucoll.analysis.simulate.clock import Clock, Parts, priced
from gpucoll.analysis.simulate.network import DEFAULT, Level, Topology, checked, load, names, shipped
from gpucoll.analysis.simulate.routes import Routes
from gpucoll.analysis.simulate.waves import Case, NotAlike, Wave, few_enough, one_by_one, together
from gpucoll.errors import ArgumentError

__all__ = ["DEFAULT", "Level", "Prediction", "Topology", "checked", "load", "names", "shipped", "simulate",
           "simulate_sizes"]

MOST_RANKS = 1 << 17


class Prediction(NamedTuple):
    """What is predicted; the last three are the seconds of the chain that the last rank has waited for."""

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    segments: int
    latency: float
    bandwidth: float
    reduction: float

    @property
    def seconds(self) -> float:
        """The time of the whole."""
        return self.latency + self.bandwidth + self.reduction


def simulate(collective: str, algorithm: str, size: int, nbytes: int, topology: Topology | None = None, *,
             root: int = 0, segments: int = 1) -> Prediction:
    """Return the predicted time of `collective` by `algorithm` for `size` ranks.

    `nbytes` is that of the larger of input and output, `topology` by default one switch of equal links. Where the
    topology has nodes, algorithms heed them. Raises ArgumentError for unknown names, and where there are more
    messages than are simulated.

    >>> [round(part, 9) for part in simulate("broadcast", "tree", 3, 10_000)[5:]]  # the root's two share its link
    [2.5e-06, 2e-06, 0.0]
    """
    return simulate_sizes(collective, algorithm, size, [nbytes], topology, root=root, segments=segments)[0]


def simulate_sizes(collective: str, algorithm: str, size: int, sizes: Sequence[int],
                   topology: Topology | None = None, *, root: int = 0, segments: int = 1) -> list[Prediction]:
    """Return a prediction for each of `sizes` in bytes, for little more work than for one; see `simulate`."""
    case, routes = _case(collective, algorithm, size, topology, root, segments)
    chunks = case.schedule(0).chunks
    parts = _run(case, routes, [nbytes / chunks for nbytes in sizes])
    return [Prediction(collective, algorithm, size, nbytes, case.options.get("segments", 1), *times)
            for nbytes, times in zip(sizes, parts, strict=True)]


def _case(collective: str, algorithm: str, size: int, topology: Topology | None, root: int,
          segments: int) -> tuple[Case, Routes]:
    topology = shipped(DEFAULT) if topology is None else checked(topology)
    if size > MOST_RANKS:
        raise ArgumentError(f"{size} ranks are more than the {MOST_RANKS} that are simulated", code="GC-RANKS")
    entry, nodes = find(collective, algorithm), topology.nodes(size)
    given = {"root": root, "segments": segments, "nodes": nodes}
    case = Case(entry, algorithm, size, {name: given[name] for name in sorted(entry.options)})
    return case, Routes(topology, size)


def _run(case: Case, routes: Routes, chunks: Sequence[float]) -> list[Parts]:
    """Return what makes up the time for each length of a chunk, by the quickest way that the algorithm allows."""
    if case.size == 1:
        return [Parts(0.0, 0.0, 0.0) for _ in chunks]
    everyone = case.everyone()
    if everyone is not None and few_enough(case):
        with contextlib.suppress(NotAlike):  # rank by rank, then
            return _replayed(case, together(everyone), routes, chunks)
    elif everyone is not None and routes.uniform:
        return _equal(case, routes, chunks)
    return _replayed(case, one_by_one(case), routes, chunks)


def _replayed(case: Case, waves: Iterable[Wave], routes: Routes, chunks: Sequence[float]) -> list[Parts]:
    clocks = [Clock(case.size, chunk) for chunk in chunks]
    for wave in priced(waves, routes):
        for clock in clocks:
            clock.advance(wave)
    return [clock.parts() for clock in clocks]


def _equal(case: Case, routes: Routes, chunks: Sequence[float]) -> list[Parts]:
    """Return the same where all ranks are at the same time: on equal links, what the registry's formulas say."""
    count, segments = case.schedule(0).chunks, case.options.get("segments", 1)
    cost, level = case.entry.price(case.size, count, segments), routes.levels[0]
    latency = cost["rounds"] * level.alpha + cost["beside"] * level.gap
    moved = max(cost["sent"], cost["received"])
    return [Parts(latency, moved * level.beta * chunk, cost["reduced"] * level.gamma * chunk) for chunk in chunks]
