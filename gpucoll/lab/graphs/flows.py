"""The time of schedules whose messages are flows, as on hosts joined by sockets: events in order of time.

A message begins when both ranks have begun the message's round, and latency has passed. The flows through a link have
equal shares of the bandwidth (max-min fairness), and rates change at once when flows begin and end. A round ends with
the receives of the round: the system buffers sent data, so that sends of later rounds compete with sends of earlier
rounds. Flows that meet other flows at the first and at the last link of the way are slowed to the graph's `sharing`:
connections have unequal shares, the slowest ends last, and links idle meanwhile.
"""

from __future__ import annotations

import collections
import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence

from gpucoll.internal import Round, Schedule, ends, replayed_seconds
from gpucoll.lab.graphs.graph_routes import GraphRoutes, Way
from gpucoll.lab.graphs.link_graph import LinkGraph

MOST_FLOW_RANKS = 32  # beyond, waves serve
EMPTY = 1e-6  # bytes left of a flow that has ended, after rounding


class Flow:
    """A message under way."""

    def __init__(self, receiver: int, nbytes: float, way: Way) -> None:
        self.receiver: int = receiver
        self.left: float = nbytes
        self.links: list[int] = way.links.tolist()
        self.rate: float = 0.0


class FlowReplay:
    """The replay of all ranks' schedules, with `chunk` bytes for each chunk."""

    def __init__(self, graph: LinkGraph, schedules: Sequence[Schedule], chunk: float) -> None:
        self._routes, self._chunk, self._time = GraphRoutes(graph, len(schedules)), chunk, 0.0
        self._sharing = float(graph.sharing or 1)
        self._speeds = [1e9 * float(edge.GBps) for edge in graph.edges.values()]
        self._rounds: list[Iterator[Round]] = [iter(one) for one in schedules]
        self._missing = [0] * len(schedules)  # receives of each rank's round
        # Sends without a receive yet (their bytes), and receives without a send (-1), by sender and receiver
        self._posted: dict[tuple[int, int], collections.deque[float]] = collections.defaultdict(collections.deque)
        self._starting: list[tuple[float, int, Flow]] = []
        self._numbers = itertools.count()
        self._flows: list[Flow] = []
        for rank in range(len(schedules)):
            self._begin(rank)

    def seconds(self) -> float:
        """Return the time of the last message's end."""
        while self._starting or self._flows:
            ends = min((flow.left / flow.rate for flow in self._flows), default=float("inf"))
            passed = min(ends, self._starting[0][0] - self._time if self._starting else ends)
            self._time += passed
            for flow in self._flows:
                flow.left -= flow.rate * passed
            ended = [flow for flow in self._flows if flow.left <= EMPTY]
            self._flows = [flow for flow in self._flows if flow.left > EMPTY]
            while self._starting and self._starting[0][0] <= self._time:
                flow = heapq.heappop(self._starting)[2]
                (self._flows if flow.left > EMPTY else ended).append(flow)
            for flow in ended:
                self._missing[flow.receiver] -= 1
                if not self._missing[flow.receiver]:
                    self._begin(flow.receiver)
            self._share()
        return self._time

    def _begin(self, rank: int) -> None:
        """Begin the rank's next rounds, up to the first round with a receive."""
        while not self._missing[rank] and (steps := next(self._rounds[rank], None)) is not None:
            for (sends, peer), parts in ends(steps).items():
                self._missing[rank] += not sends
                pair, nbytes = (rank, peer) if sends else (peer, rank), -1.0
                if sends:
                    nbytes = self._chunk * sum(part.count for part in parts)
                posted = self._posted[pair]
                if not posted or (posted[0] < 0) != sends:
                    posted.append(nbytes)
                    continue
                way, nbytes = self._routes.way(*pair), max(posted.popleft(), nbytes)
                flow = Flow(pair[1], nbytes, way)
                heapq.heappush(self._starting, (self._time + way.alpha, next(self._numbers), flow))

    def _share(self) -> None:
        """Set the rates: the link with the least bandwidth for a flow decides its flows' rates, then the next link."""
        users: dict[int, set[Flow]] = collections.defaultdict(set)
        for flow in self._flows:
            for link in flow.links:
                users[link].add(flow)
        free = {link: self._speeds[link] for link in users}
        waiting = {link: {*flows} for link, flows in users.items()}
        while waiting:
            least = min(waiting, key=lambda link: free[link] / len(waiting[link]))
            rate = free[least] / len(waiting[least])
            for flow in waiting.pop(least):
                flow.rate = rate
                for link in flow.links:
                    if link in waiting and flow in waiting[link]:
                        waiting[link].discard(flow)
                        free[link] -= rate
                        if not waiting[link]:
                            del waiting[link]
        for flow in self._flows:
            if min(len(users[flow.links[0]]), len(users[flow.links[-1]])) > 1:
                flow.rate *= self._sharing


def serves(graph: LinkGraph) -> bool:
    """Return whether messages on a graph are flows."""
    return graph.sharing is not None and graph.ranks <= MOST_FLOW_RANKS


def seconds(graph: LinkGraph, schedules: Sequence[Schedule], chunk: float) -> list[float]:
    """Return the seconds of latency, of bandwidth, and of reductions, which take no time on a graph."""
    latency = FlowReplay(graph, schedules, 0.0).seconds()
    return [latency, FlowReplay(graph, schedules, chunk).seconds() - latency, 0.0]


def routes_of(graph: LinkGraph, size: int) -> GraphRoutes:
    """Return the routes of a graph for the simulator; raise ArgumentError for another number of ranks."""
    return GraphRoutes(graph, size, functools.partial(seconds, graph) if serves(graph) else None)


def seconds_on(graph: LinkGraph, schedules: Sequence[Schedule], nbytes: int) -> float:
    """Return the predicted time of the schedules of all ranks on a graph, in seconds."""
    return replayed_seconds(schedules, routes_of(graph, len(schedules)), nbytes)
