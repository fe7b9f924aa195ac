"""Positions of the nodes of a graph of links, and the lines of its links.

A ring lies on a circle, a torus and a grid on a lattice. Other graphs are laid out by stress majorisation: the distance
of two nodes on the paper approaches the length of the shortest path, where a narrow link is longer than a wide link
(Gansner, Koren and North, "Graph drawing by stress majorization", 2004). So the ranks of a box gather around the switch
of the box, and networks between boxes lie in the middle. No random number is drawn.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy

from gpucoll.lab.draw.placement import LAYER, Point, Points, fitted
from gpucoll.lab.graphs.link_graph import LinkGraph
from gpucoll.lab.graphs.named import LATTICES, SIDES

SMALLER = 0.85  # of the largest discs, so that rings of progress around them do not touch
LONGEST = 2.2  # length of the narrowest link, in lengths of the widest
ITERATIONS = 400
BENDS = (0.0, 0.1, -0.1, 0.2, -0.2, 0.32, -0.32, 0.45, -0.45)  # of a line, in its length: the first free bend is taken
THIN, THICK = 1.2, 3.6  # width of a line: of no bandwidth, and added for the largest
PARTS = (0.38, 0.3, 0.46, 0.22, 0.55, 0.7)  # of the way of a link: where a number may stand
LABEL = (30.0, 16.0)  # room of a number
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
            free = (spot for spot in (lane.at(part, 10.0) for part in PARTS)
                    if all(abs(spot[0] - x) > wide or abs(spot[1] - y) > high for x, y, wide, high in taken))
            place = next(free, None)
            found.append(place)
            if place is not None:
                taken.append((*place, *LABEL))
        return found


def placed(graph: LinkGraph) -> GraphPlaces:
    """Return the drawing of a graph.

    >>> from gpucoll.lab.graphs.link_graph import load_graph
    >>> [round(x) for x, _ in placed(load_graph("grid(3)")).places]
    [100, 320, 540]
    """
    lattice = _lattice(graph)
    name, spots = ("links", _by_stress(graph)) if lattice is None else lattice
    found = fitted(name, spots)
    radius = round(SMALLER * found.radius, 1)
    return GraphPlaces(graph, found.places, radius, tuple(_lanes(graph, found.places, radius)))


def _lattice(graph: LinkGraph) -> tuple[str, Points] | None:
    """Return the lattice of a ring, torus or grid by its name; None for other links than the name's."""
    match = SIDES.fullmatch(graph.name)
    if match is None or match[1] not in LATTICES or match[2] is None:
        return None
    sides = [int(side) for side in match[2].split("x")]
    cells = [*itertools.product(*map(range, sides))]
    if len(cells) != graph.size or len(sides) > 3:
        return None
    for src, dst in graph.edges:
        steps = [min((one - other) % side, (other - one) % side)
                 for one, other, side in zip(cells[src], cells[dst], sides, strict=True)]
        if sorted(steps) != [0] * (len(sides) - 1) + [1]:
            return None
    if len(sides) == 1 and (0, graph.size - 1) in graph.edges:
        turns = [2 * math.pi * rank / sides[0] for rank in range(sides[0])]
        return "circle", {rank: (math.sin(turn), -math.cos(turn)) for rank, turn in enumerate(turns)}
    padded = [(*[0] * (3 - len(cell)), *cell) for cell in cells]
    return "grid", {rank: (x + LAYER[0] * layer, y + LAYER[1] * layer) for rank, (layer, y, x) in enumerate(padded)}


def _by_stress(graph: LinkGraph) -> Points:
    far = _distances(graph)
    size, turns = graph.size, 2 * numpy.pi * numpy.arange(graph.ranks) / graph.ranks
    spots = numpy.zeros((size, 2))
    spots[:graph.ranks] = far.max() / 2 * numpy.stack((numpy.sin(turns), -numpy.cos(turns)), 1)
    for switch in range(graph.ranks, size):  # begin in the middle of the nearest ranks
        near = far[switch, :graph.ranks]
        spots[switch] = spots[:graph.ranks][near <= near.min() + 1e-9].mean(0) + 1e-3 * (switch - graph.ranks + 1)
    pull = numpy.where(far > 0, 1 / numpy.maximum(far, 1e-9) ** 2, 0.0)
    for _ in range(ITERATIONS):
        apart = spots[:, None] - spots[None]
        length = numpy.maximum(numpy.sqrt((apart ** 2).sum(2)), 1e-9)
        wanted = spots[None] + apart * (far / length)[:, :, None]
        spots = (pull[:, :, None] * wanted).sum(1) / pull.sum(1)[:, None]
    spots = _turned(spots)
    return {node: (float(x), float(y)) for node, (x, y) in enumerate(spots)}


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


def _distances(graph: LinkGraph) -> numpy.ndarray:
    """Return the lengths of the shortest paths between all nodes, by Floyd and Warshall."""
    most = max(float(edge.GBps) for edge in graph.edges.values())
    far = numpy.full((graph.size, graph.size), numpy.inf)
    numpy.fill_diagonal(far, 0.0)
    for (src, dst), edge in graph.edges.items():
        length = min(LONGEST, 1 + math.log2(most / float(edge.GBps)) / 2)
        far[src, dst] = far[dst, src] = min(far[src, dst], length)
    for node in range(graph.size):
        far = numpy.minimum(far, far[:, node, None] + far[None, node])
    return far


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
