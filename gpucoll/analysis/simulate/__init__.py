"""Predict the time of a schedule on a topology, in seconds, for any number of ranks.

The model of time:

- A rank's first round begins at time 0, and every further round at the end of the previous round.
- A message starts when both ranks have begun its round, because no data is buffered. The message takes alpha of the
  outermost level of links crossed, plus the time of its bytes on the slowest link of the route.
- Messages on the same link share its bandwidth: each takes the time of all bytes of its wave on the link. A wave is the
  set of messages with equally many predecessors on their longest chain (in a symmetric algorithm: a round). Messages of
  one wave slow each other, even if they begin at different times. Messages of different waves never do, even if they
  overlap in time.
- Several messages of a round from one rank to another count as one message, with one alpha. For messages to and from
  several ranks a rank pays one alpha, plus one `gap` for each message after the first.
- A round ends after its last message and its reductions. Reductions take, for every byte, gamma of the level crossed by
  the operand (the innermost level for a local operand). Copies take no time.
- The schedule ends with the last rank.

In a symmetric algorithm all ranks make the same steps, up to the numbering of ranks (`Algorithm.alike`). With a link
for every pair and no gap (the topology ``mesh``) the time of a symmetric algorithm is
``rounds * alpha + path * beta + reduced * gamma``, by the registry's formulas; on a switch `sent` replaces `path`.

There are three methods:

- Schedules of symmetric algorithms are generated for all ranks at once, up to 2^27 messages (2^22 in a round).
- On one switch, beyond this limit or 16,384 ranks, the formulas of the registry give the time: exactly for a symmetric
  algorithm, because all ranks end each round at the same time, otherwise a lower bound.
- All other cases are replayed rank by rank, up to 2^20 messages (and 1,024 ranks on nodes). Larger cases are refused.

(For one_shot, the first method treats the rank's own operand as received. The result is the same if all levels have the
same gamma.)

On a graph of links (`gpucoll.analysis.graphs`) a message has the latency of its route, and reductions take no time.
With `sharing`, as of hosts joined by sockets, messages of up to 32 ranks are flows (`flows`) in place of waves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gpucoll.algorithms import find
from gpucoll.analysis.graphs.link_graph import LinkGraph, is_graph, load_graph
from gpucoll.analysis.graphs.named import is_named
from gpucoll.analysis.simulate import flows
from gpucoll.analysis.simulate.clock import AnyRoutes, Clock, priced
from gpucoll.analysis.simulate.graph_routes import GraphRoutes
from gpucoll.analysis.simulate.routes import Routes
from gpucoll.analysis.simulate.topologies import DEFAULT, Level, Topology, checked, load, names, shipped
from gpucoll.analysis.simulate.waves import Case, NotAlike, Wave, few_enough, one_by_one, together, waves_of
from gpucoll.core.schedule import Schedule
from gpucoll.errors import ArgumentError

__all__ = ["DEFAULT", "Level", "LinkGraph", "Prediction", "Topology", "checked", "load", "load_links", "names",
           "seconds_on", "shipped", "simulate", "simulate_sizes"]

MOST_RANKS, MOST_UNLIKE = 1 << 20, 1 << 17  # on one switch of equal links, and on other topologies
MANY = 1 << 14  # ranks: beyond, ranks on one switch are not replayed
Links: TypeAlias = Topology | LinkGraph


class Prediction(NamedTuple):
    """A predicted time, in three parts in seconds: the parts add up along the chain ending at the last rank."""

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
        """The predicted time of the collective."""
        return self.latency + self.bandwidth + self.reduction


def load_links(name_or_file: str) -> Links:
    """Return a graph of links, or a topology of levels, by name or from a TOML file; raise ArgumentError.

    >>> load_links("torus(4x4)").ranks, load_links("two_hosts").name
    (16, 'two_hosts')
    """
    path = Path(name_or_file)
    with contextlib.suppress(OSError):
        if is_named(name_or_file) or (path.suffix == ".toml" and is_graph(path.read_bytes())):
            return load_graph(name_or_file)
    return load(name_or_file)


def simulate(collective: str, algorithm: str, size: int, nbytes: int, topology: Links | None = None, *,
             root: int = 0, segments: int = 1) -> Prediction:
    """Return the predicted time of `collective` by `algorithm` for `size` ranks.

    `nbytes` is the size of the larger of input and output; `topology` is by default one switch of equal links, and may
    be a graph of links. If the topology has nodes, algorithms use the nodes. Raises ArgumentError for unknown names,
    for too many messages, and for a graph of another number of ranks.

    >>> [round(part, 9) for part in simulate("broadcast", "tree", 3, 10_000)[5:]]  # the root's two share its link
    [2.5e-06, 2e-06, 0.0]
    """
    return simulate_sizes(collective, algorithm, size, [nbytes], topology, root=root, segments=segments)[0]


def simulate_sizes(collective: str, algorithm: str, size: int, sizes: Sequence[int],
                   topology: Links | None = None, *, root: int = 0, segments: int = 1) -> list[Prediction]:
    """Return a prediction for each of `sizes` in bytes, at little more cost than one prediction; see `simulate`."""
    case, routes = _case(collective, algorithm, size, topology, root, segments)
    chunks = case.schedule(0).chunks
    parts = _run(case, routes, [nbytes / chunks for nbytes in sizes])
    return [Prediction(collective, algorithm, size, nbytes, case.options.get("segments", 1), *times)
            for nbytes, times in zip(sizes, parts, strict=True)]


def seconds_on(graph: LinkGraph, schedules: Sequence[Schedule], nbytes: int) -> float:
    """Return the predicted time of the schedules of all ranks on a graph, in seconds; see `simulate`.

    The schedules need no name in the registry: `gpucoll synthesize` compares algorithms before it keeps one.
    """
    if flows.serves(graph):
        return sum(flows.seconds(graph, schedules, nbytes / schedules[0].chunks))
    clock = Clock(graph.ranks, nbytes / schedules[0].chunks)
    for wave in priced(waves_of(schedules), GraphRoutes(graph, len(schedules))):
        clock.advance(wave)
    return sum(clock.parts())


def _case(collective: str, algorithm: str, size: int, topology: Links | None, root: int,
          segments: int) -> tuple[Case, AnyRoutes]:
    entry, nodes = find(collective, algorithm), None
    if isinstance(topology, LinkGraph):
        return Case(entry, algorithm, size, entry.given(root, segments, None)), GraphRoutes(topology, size)
    topology = shipped(DEFAULT) if topology is None else checked(topology)
    most = MOST_RANKS if topology.is_uniform else MOST_UNLIKE
    if size > most:
        raise ArgumentError(f"at most {most} ranks are simulated on {topology.name}, not {size}", code="GC-SIZE")
    nodes = topology.nodes(size)
    return Case(entry, algorithm, size, entry.given(root, segments, nodes)), Routes(topology, size)


def _run(case: Case, routes: AnyRoutes, chunks: Sequence[float]) -> list[list[float]]:
    """Return latency, bandwidth and reduction for each length of a chunk, by the fastest method available."""
    if case.size == 1:
        return [[0.0, 0.0, 0.0] for _ in chunks]
    if isinstance(routes, GraphRoutes) and flows.serves(routes.graph):
        ranks = [case.schedule(rank) for rank in range(case.size)]
        return [flows.seconds(routes.graph, ranks, chunk) for chunk in chunks]
    everyone = case.everyone()
    if isinstance(routes, Routes) and routes.uniform and (
            case.size > MANY and not case.entry.own if everyone is None else case.size > MANY or not few_enough(case)):
        return _by_formulas(case, routes, chunks)
    if everyone is not None and few_enough(case):
        with contextlib.suppress(NotAlike):  # replay rank by rank instead, below
            return _replayed(case, together(everyone), routes, chunks)
    return _replayed(case, one_by_one(case), routes, chunks)


def _replayed(case: Case, waves: Iterable[Wave], routes: AnyRoutes, chunks: Sequence[float]) -> list[list[float]]:
    clocks = [Clock(case.size, chunk) for chunk in chunks]
    for wave in priced(waves, routes):
        for clock in clocks:
            clock.advance(wave)
    return [clock.parts() for clock in clocks]


def _by_formulas(case: Case, routes: Routes, chunks: Sequence[float]) -> list[list[float]]:
    """Return the parts by the registry's formulas, on equal links: of ranks that end each round together the time.

    Of other ranks a lower bound: the formulas count on the longest path, and at the busiest rank.
    """
    count, segments = case.schedule(0).chunks, case.options.get("segments", 1)
    cost, level = case.entry.price(case.size, count, segments), routes.levels[0]
    latency = cost["rounds"] * level.alpha + cost["gaps"] * level.gap
    moved = max(cost["path"], cost["sent"], cost["received"])
    return [[latency, moved * level.beta * chunk, cost["reduced"] * level.gamma * chunk] for chunk in chunks]
