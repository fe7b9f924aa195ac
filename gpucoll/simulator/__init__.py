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

In a symmetric algorithm all ranks make the same steps, up to the numbering of ranks (`Algorithm.vectorised`). With a
link for every pair and no gap (the topology ``mesh``) the time of a symmetric algorithm is
``rounds * alpha + path * beta + reduced * gamma``, by the registry's formulas; on a switch `sent` replaces `path`.

There are three methods:

- Schedules of symmetric algorithms are generated for all ranks at once, up to 2^27 messages (2^22 in a round).
- On one switch, beyond this limit or 16,384 ranks, the formulas of the registry give the time: exactly for a symmetric
  algorithm, because all ranks end each round at the same time, otherwise a lower bound.
- All other cases are replayed rank by rank, up to 2^20 messages (and 1,024 ranks on nodes). Larger cases are refused.

(For one_shot, the first method treats the rank's own operand as received. The result is the same if all levels have the
same gamma.)

Instead of a topology, `simulate` takes other links with routes of their own (`Links`), as the graphs of links of
`gpucoll bound` are: a message has the latency of its route, and reductions take no time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from gpucoll.algorithms import find
from gpucoll.core.schedule import Schedule
from gpucoll.errors import ArgumentError
from gpucoll.simulator.routes import AnyRoutes, Routes
from gpucoll.simulator.topologies import DEFAULT, Level, Topology, checked, load, names, shipped
from gpucoll.simulator.waves import Clock, NotAlike, Scenario, Wave, few_enough, one_by_one, priced, together, waves_of

MOST_ON_SWITCH, MOST_UNLIKE = 1 << 20, 1 << 17  # on one switch of equal links, and on other topologies
MANY = 1 << 14  # ranks: beyond, ranks on one switch are not replayed


class Links(Protocol):
    """Links other than the levels of a topology."""

    def routes(self, size: int) -> AnyRoutes:
        """Return the routes between `size` ranks; raise ArgumentError for another number of ranks than theirs."""
        ...


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


def simulate(collective: str, algorithm: str, size: int, nbytes: int, topology: Topology | Links | None = None, *,
             root: int = 0, segments: int = 1) -> Prediction:
    """Return the predicted time of `collective` by `algorithm` for `size` ranks.

    Parameters
    ----------
    collective : str
        The name of the collective.
    algorithm : str
        A name from `gpucoll.algorithms`.
    size : int
        The number of ranks.
    nbytes : int
        Bytes of the larger of input and output.
    topology : Topology, Links or None, optional
        The links between the ranks; None is one switch of equal links. If the topology has nodes, algorithms use the
        nodes.
    root : int, optional
        The root of a rooted collective.
    segments : int, optional
        The number of messages for a rank's part (pipelining).

    Returns
    -------
    Prediction
        The time, in seconds, and its parts: latency, transfer and reduction.

    Raises
    ------
    ArgumentError
        An unknown name (GC-ALGO, GC-COLLECTIVE), too many messages (GC-SIMULATE), or a graph of another number of ranks
        (GC-TOPOLOGY).

    See Also
    --------
    simulate_sizes : For many sizes.
    load : A topology.

    Examples
    --------
    >>> from gpucoll.simulator import simulate
    >>> [round(part, 9) for part in simulate("broadcast", "tree", 3, 10_000)[5:]]  # the root's two share its link
    [2.5e-06, 2e-06, 0.0]
    """
    return simulate_sizes(collective, algorithm, size, [nbytes], topology, root=root, segments=segments)[0]


def simulate_sizes(collective: str, algorithm: str, size: int, sizes: Sequence[int],
                   topology: Topology | Links | None = None, *, root: int = 0, segments: int = 1) -> list[Prediction]:
    """Return a prediction for each of `sizes`, at little more cost than one prediction.

    Parameters
    ----------
    collective : str
        The name of the collective.
    algorithm : str
        A name from `gpucoll.algorithms`.
    size : int
        The number of ranks.
    sizes : sequence of int
        Bytes of the larger of input and output, for each prediction.
    topology : Topology, Links or None, optional
        The links between the ranks; None is one switch of equal links. If the topology has nodes, algorithms use the
        nodes.
    root : int, optional
        The root of a rooted collective.
    segments : int, optional
        The number of messages for a rank's part (pipelining).

    Returns
    -------
    list of Prediction
        A prediction for each size.

    Raises
    ------
    ArgumentError
        An unknown name (GC-ALGO, GC-COLLECTIVE), too many messages (GC-SIMULATE), or a graph of another number of ranks
        (GC-TOPOLOGY).

    See Also
    --------
    simulate : For one size.

    Examples
    --------
    >>> from gpucoll.simulator import simulate_sizes
    >>> [found.nbytes for found in simulate_sizes("all_reduce", "ring", 4, [1024, 4096])]
    [1024, 4096]
    """
    case, routes = _case(collective, algorithm, size, topology, root, segments)
    chunks = case.schedule(0).chunks
    parts = _run(case, routes, [nbytes / chunks for nbytes in sizes])
    return [Prediction(collective, algorithm, size, nbytes, case.options.get("segments", 1), *times)
            for nbytes, times in zip(sizes, parts, strict=True)]


def replayed_seconds(schedules: Sequence[Schedule], routes: AnyRoutes, nbytes: int) -> float:
    """Return the predicted time of the schedules of all ranks, which need no name in the registry, in seconds."""
    return sum(_replayed(waves_of(schedules), routes, [nbytes / schedules[0].chunks])[0])


def _case(collective: str, algorithm: str, size: int, topology: Topology | Links | None, root: int,
          segments: int) -> tuple[Scenario, AnyRoutes]:
    entry = find(collective, algorithm)
    if topology is not None and not isinstance(topology, Topology):
        return Scenario(entry, algorithm, size, entry.given(root, segments, None)), topology.routes(size)
    topology = shipped(DEFAULT) if topology is None else checked(topology)
    most = MOST_ON_SWITCH if topology.is_uniform else MOST_UNLIKE
    if size > most:
        raise ArgumentError(f"at most {most} ranks are simulated on {topology.name}, not {size}", code="GC-SIZE")
    nodes = topology.nodes(size)
    return Scenario(entry, algorithm, size, entry.given(root, segments, nodes)), Routes(topology, size)


def _run(case: Scenario, routes: AnyRoutes, chunks: Sequence[float]) -> list[list[float]]:
    """Return latency, bandwidth and reduction for each length of a chunk, by the fastest method available."""
    if case.size == 1:
        return [[0.0, 0.0, 0.0] for _ in chunks]
    everyone = case.everyone()
    if isinstance(routes, Routes) and routes.uniform and (
            case.size > MANY and not case.entry.own if everyone is None else case.size > MANY or not few_enough(case)):
        return _by_formulas(case, routes, chunks)
    if everyone is not None and few_enough(case):
        with contextlib.suppress(NotAlike):  # replay rank by rank instead, below
            return _replayed(together(everyone), routes, chunks)
    return _replayed(one_by_one(case), routes, chunks)


def _replayed(waves: Iterable[Wave], routes: AnyRoutes, chunks: Sequence[float]) -> list[list[float]]:
    clocks = [Clock(routes.size, chunk) for chunk in chunks]
    for wave in priced(waves, routes):
        for clock in clocks:
            clock.advance(wave)
    return [clock.parts() for clock in clocks]


def _by_formulas(case: Scenario, routes: Routes, chunks: Sequence[float]) -> list[list[float]]:
    """Return the parts by the registry's formulas, on equal links: of ranks that end each round together the time.

    Of other ranks a lower bound: the formulas count on the longest path, and at the busiest rank.
    """
    count, segments = case.schedule(0).chunks, case.options.get("segments", 1)
    cost, level = case.entry.price(case.size, count, segments), routes.levels[0]
    latency = cost["rounds"] * level.alpha + cost["gaps"] * level.gap
    moved = max(cost["path"], cost["sent"], cost["received"])
    return [[latency, moved * level.beta * chunk, cost["reduced"] * level.gamma * chunk] for chunk in chunks]
