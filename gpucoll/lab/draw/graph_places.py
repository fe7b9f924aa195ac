"""Positions of the nodes of a graph of links, and the lines of its links.

networkx places the nodes: the distance of two nodes on the paper approaches the length of the shortest path, where a
narrow link is longer than a wide link (Kamada and Kawai, 1989). So the ranks of a box gather around the switch of the
box, and networks between boxes lie in the middle. No random number is drawn.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy

from gpucoll.errors import UsageError
from gpucoll.lab.draw.placement import Point, Points, fitted
from gpucoll.lab.graphs.link_graph import LinkGraph

SMALLER = 0.85  # of the largest discs, so that rings of progress around them do not touch
LONGEST_LINK = 2.2  # length of the narrowest link, in lengths of the widest
BENDS = (0.0, 0.1, -0.1, 0.2, -0.2, 0.32, -0.32, 0.45, -0.45)  # of a line, in its length: the first free bend is taken
THIN, THICK = 1.2, 3.6  # width of a line: of no bandwidth, and added for the largest
LABEL_POSITIONS = (0.38, 0.3, 0.46, 0.22, 0.55, 0.7)  # of the way of a link: where a number may stand
LABEL_ROOM = (30.0, 16.0)  # room of a number
CLEARANCE = 7.0  # between a line and the disc of a node that is not an end


class LinkLine(NamedTuple):
    """A directed link as a curve: `points` are start, control point and end of a quadratic Bezier curve."""

    src: int
    dst: int
    GBps: float
    width: float
    points: tuple[Point, Point, Point]

    @property
    def path(self) -> str:
        """The curve as the data of an SVG path."""
        (x, y), (u, v), (z, w) = self.points
        return f"M{x:g} {y:g}Q{u:g} {v:g} {z:g} {w:g}"

    def at(self, part: float, aside: float = 0.0) -> Point:
        """Return a point of the curve, `part` of the way, moved to the right of the way by `aside`."""
        a, b, c = (numpy.array(point) for point in self.points)
        place = (1 - part) ** 2 * a + 2 * part * (1 - part) * b + part ** 2 * c
        x, y = place + aside * _right(c - a)
        return round(float(x), 1), round(float(y), 1)


class GraphPlaces(NamedTuple):
    """A graph with a position for every node, the radius of the discs, and the lines of the links."""

    graph: LinkGraph
    places: tuple[Point, ...]
    radius: float
    lanes: tuple[LinkLine, ...]

    @property
    def span(self) -> tuple[float, float]:
        """The least and the largest y of the drawing, with room for rings and names: a longish drawing is low."""
        heights = [lane.at(part)[1] for lane in self.lanes for part in (0.25, 0.5, 0.75)]
        heights += [y + side * self.radius for _, y in self.places for side in (-1, 1)]
        return round(min(heights) - 20, 1), round(max(heights) + 20, 1)

    def labels(self) -> list[Point | None]:
        """Return a place beside every link for a number, free of nodes and of other numbers; None without room."""
        taken = [(x, y, self.radius + 12, self.radius + 12) for x, y in self.places]
        # The name of a switch stands below the switch.
        taken += [(x, y + self.radius + 6, 45.0, 14.0) for x, y in self.places[self.graph.ranks:]]
        found = list[Point | None]()
        for lane in self.lanes:
            free = (spot for spot in (lane.at(part, 10.0) for part in LABEL_POSITIONS)
                    if all(abs(spot[0] - x) > wide or abs(spot[1] - y) > high for x, y, wide, high in taken))
            place = next(free, None)
            found.append(place)
            if place is not None:
                taken.append((*place, *LABEL_ROOM))
        return found


def placed(graph: LinkGraph) -> GraphPlaces:
    """Return the drawing of a graph; raise UsageError without networkx.

    >>> from gpucoll.lab.graphs.link_graph import load_graph
    >>> len(placed(load_graph("grid(3)")).places)
    3
    """
    found = fitted("links", _by_paths(graph))
    radius = round(SMALLER * found.radius, 1)
    return GraphPlaces(graph, found.places, radius, tuple(_lanes(graph, found.places, radius)))


def _by_paths(graph: LinkGraph) -> Points:
    try:
        import networkx
        import scipy.optimize  # noqa: F401 (which the layout needs)
    except ImportError as error:
        raise UsageError(f"a drawing of a graph needs networkx ({error}): pip install gpucoll[plot]",
                         code="GC-DRAW") from None
    most, drawn = max(float(edge.GBps) for edge in graph.edges.values()), networkx.Graph()
    drawn.add_nodes_from(range(graph.size))
    for (src, dst), edge in graph.edges.items():
        drawn.add_edge(src, dst, weight=min(LONGEST_LINK, 1 + math.log2(most / float(edge.GBps)) / 2))
    spots = networkx.kamada_kawai_layout(drawn)
    turned = _turned(numpy.array([spots[node] for node in range(graph.size)]))
    return {node: (float(x), float(y)) for node, (x, y) in enumerate(turned)}


def _turned(spots: numpy.ndarray) -> numpy.ndarray:
    """Return positions turned so that a longish drawing lies, with rank 0 on the left."""
    spots = spots - spots.mean(0)
    (xx, xy), (_, yy) = spots.T @ spots
    spread = math.hypot(xx - yy, 2 * xy)
    if spread < 0.2 * (xx + yy):  # about round
        return spots
    angle = math.atan2(2 * xy, xx - yy) / 2
    if spots[0] @ (math.cos(angle), math.sin(angle)) > 0:
        angle += math.pi
    turn = numpy.array(((math.cos(angle), -math.sin(angle)), (math.sin(angle), math.cos(angle))))
    turned: numpy.ndarray = spots @ turn
    return turned


def _lanes(graph: LinkGraph, places: tuple[Point, ...], radius: float) -> list[LinkLine]:
    """Return the lines of the links: each direction on its right side, bent where another node is in the way."""
    most, spots = max(float(edge.GBps) for edge in graph.edges.values()), numpy.array(places)
    lanes = []
    for (src, dst), edge in graph.edges.items():
        width = THIN + THICK * math.sqrt(float(edge.GBps) / most)
        low, high = min(src, dst), max(src, dst)  # both directions bend alike
        middle = _control(spots, low, high, radius)
        aside = (width / 2 + 0.8) * _right(spots[dst] - spots[src]) if (dst, src) in graph.edges else numpy.zeros(2)
        ends = [spots[end] + (radius + 2) * _unit(middle - spots[end]) + aside for end in (src, dst)]
        points = tuple((round(float(x), 1), round(float(y), 1)) for x, y in (ends[0], middle + aside, ends[1]))
        lanes.append(LinkLine(src, dst, float(edge.GBps), round(width, 2), points))  # type: ignore[arg-type] # of three
    return lanes


def _control(spots: numpy.ndarray, src: int, dst: int, radius: float) -> numpy.ndarray:
    """Return the control point of the first bend whose curve keeps clear of all other nodes."""
    begin, end = spots[src], spots[dst]
    others = numpy.delete(spots, (src, dst), 0)
    parts = numpy.linspace(0.05, 0.95, 19)[:, None]
    best, room = (begin + end) / 2, -1.0
    for bend in BENDS:
        middle = (begin + end) / 2 + 2 * bend * math.dist(begin, end) * _right(end - begin)
        curve = (1 - parts) ** 2 * begin + 2 * parts * (1 - parts) * middle + parts ** 2 * end
        clear = float(numpy.sqrt(((curve[:, None] - others[None]) ** 2).sum(2)).min()) if len(others) else math.inf
        if clear >= radius + CLEARANCE:
            return middle
        if clear > room:
            best, room = middle, clear
    return best


def _unit(vector: numpy.ndarray) -> numpy.ndarray:
    return vector / max(1e-9, float(numpy.hypot(*vector)))


def _right(way: numpy.ndarray) -> numpy.ndarray:
    """Return the direction to the right of a way; y points down."""
    x, y = _unit(way)
    return numpy.array((-y, x))
