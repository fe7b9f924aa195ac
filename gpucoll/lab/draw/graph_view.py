"""A schedule on a drawn graph of links: the load of every link in every round, along the simulator's routes."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any, NamedTuple

from gpucoll.lab.draw.graph_places import GraphPlaces, placed
from gpucoll.lab.graphs.graph_routes import GraphRoutes
from gpucoll.lab.graphs.link_graph import LinkGraph

DIGITS = 3  # digits of a load: messages with several equal ways have fractions of chunks on a link


class GraphView(NamedTuple):
    """A drawn graph, and by round the chunks on each link in use, by the link's number in `places.lanes`.

    `longest` is the longest time of a link in any round, in chunks per GB/s.
    """

    places: GraphPlaces
    loads: tuple[dict[int, float], ...]
    longest: float

    def share(self, lane: int, load: float) -> float:
        """Return the time of a load on a link, as a share of the longest time."""
        return load / self.places.lanes[lane].GBps / self.longest

    @property
    def busiest(self) -> tuple[float, ...]:
        """By round: the chunks on the link with the longest time; 0 in a round without messages."""
        return tuple(max(loads.items(), key=lambda item: self.share(*item))[1] if loads else 0 for loads in self.loads)

    def data(self) -> dict[str, Any]:
        """Return the data of the page's script."""
        (graph, places, _, lanes), labels = self.places, self.places.labels()
        return {"names": graph.names, "switches": places[graph.ranks:],
                "lanes": [[lane.src, lane.dst, lane.GBps, lane.width, lane.path, labels[number]]
                          for number, lane in enumerate(lanes)],
                "flows": [[[lane, load, round(self.share(lane, load), 3)] for lane, load in loads.items()]
                          for loads in self.loads]}


def graph_view(messages: Iterable[tuple[int, int, int, int]], rounds: int, graph: LinkGraph) -> GraphView:
    """Return the loads of `messages` (round, sender, receiver, chunks) on a graph."""
    routes = GraphRoutes(graph, graph.ranks)
    loads: list[dict[int, float]] = [collections.defaultdict(float) for _ in range(rounds)]
    for turn, sender, receiver, chunks in messages:
        way = routes.way(sender, receiver)
        for lane, share in zip(way.links.tolist(), way.shares.tolist(), strict=True):
            loads[turn - 1][lane] += chunks * share
    places = placed(graph)
    longest = max((load / places.lanes[lane].GBps for one in loads for lane, load in one.items()), default=1.0)
    return GraphView(places, tuple({lane: round(load, DIGITS) for lane, load in sorted(one.items())} for one in loads),
                     longest)


def legend(view: GraphView) -> str:
    """Return the sentence that explains lines and numbers."""
    speeds = sorted({lane.GBps for lane in view.places.lanes})
    widths = f"{speeds[0]:g} GB/s" if len(speeds) == 1 else f"{speeds[0]:g} to {speeds[-1]:g} GB/s"
    return f"A line is a link, its width the bandwidth, {widths}. Links in use: the stronger, the longer they take."
