"""Positions of ranks in a drawing: ring, tree, hub, groups or grid, depending on the links between ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gpucoll.internal import factors, group, in_order_tree, members_of

Point: TypeAlias = tuple[float, float]
Points: TypeAlias = Mapping[int, Point]
Neighbours: TypeAlias = dict[int, set[int]]
Groups: TypeAlias = Sequence[Sequence[int]]

SIDE = 640.0  # side of the square of the drawing
RADII = (34.0, 30.0, 26.0, 22.0, 18.0, 14.0, 11.0, 9.0, 7.0, 5.0)  # of a rank's disc, the largest fitting is taken
MARGIN, LEAST_MARGIN, GRID_MARGIN = 14.0, 46.0, 100.0  # around the outermost discs; a grid's links curve outwards
LAYER = (0.36, -0.3)  # offset of the next layer of a three-dimensional torus


class GraphLayout(NamedTuple):
    """A position for every rank, the radius of the discs, and the groups to be outlined."""

    name: str
    places: tuple[Point, ...]
    radius: float
    groups: Groups = ()


def layout(kind: str, size: int, pairs: Iterable[tuple[int, int]], root: int = 0, sides: str = "") -> GraphLayout:
    """Return the layout of `size` ranks: of a `kind` named by `Traits.layout`; for "" chosen by the links in `pairs`.

    `sides` are the sides of a grid, as in "4x2"; empty means the most even sides.

    >>> layout("", 3, [(0, 1), (1, 2), (2, 0)]).name, layout("", 5, [(0, 1), (1, 2), (1, 3), (3, 4)]).name
    ('circle', 'levels')
    """
    if kind == "groups":
        groups = members_of([rank // group(size) for rank in range(size)])
        return fitted("groups", _clusters(groups), groups=groups)
    if kind == "grid" and size > 1:
        lengths = tuple(map(int, sides.split("x"))) if sides else factors(size)
        if len(lengths) > 1:  # rows along the last side, stacked into layers, each layer shifted
            across, down = lengths[-1], lengths[-2]
            layers = {rank: rank // across // down for rank in range(size)}
            return fitted("grid", {rank: (rank % across + LAYER[0] * layer, rank // across % down + LAYER[1] * layer)
                                    for rank, layer in layers.items()})
        return fitted("circle", _circle(range(size)))
    if kind == "in_order" and size > 1:
        # Draw the first of the algorithm's two trees: ranks in order from left to right, at their depth in this tree.
        return fitted("levels", {(place + root) % size: (float(place), float(in_order_tree(place, size).depth))
                                for place in range(size)})
    links: Neighbours = {rank: set() for rank in range(size)}
    for one, other in pairs:
        links[one].add(other)
        links[other].add(one)
    ends = sum(map(len, links.values()))
    if ends != 2 * (size - 1) or max(map(len, links.values())) <= 2:
        return fitted("circle", _circle(range(size)))
    hub = max(links, key=lambda rank: len(links[rank]))
    if len(links[hub]) == size - 1:
        return fitted("hub", {hub: (0.0, 0.0), **_circle([rank for rank in range(size) if rank != hub])})
    return fitted("levels", _tree(links, root))


def _circle(ranks: Sequence[int], turn: float = 0.0) -> dict[int, Point]:
    """Return positions on a circle, clockwise; the first rank is `turn` radians from the top."""
    turns = {rank: turn + 2 * math.pi * place / len(ranks) for place, rank in enumerate(ranks)}
    return {rank: (math.sin(angle), -math.cos(angle)) for rank, angle in turns.items()}


def _clusters(groups: Groups) -> dict[int, Point]:
    """Return positions on small circles, one per group; the groups lie on a large circle, two groups side by side."""
    places: dict[int, Point] = {}
    turn = -math.pi / 2 if len(groups) == 2 else 0.0
    reach = 0.6 * math.sin(math.pi / max(2, len(groups)))
    for middle, members in zip(_circle(range(len(groups)), turn).values(), groups, strict=True):
        for rank, (x, y) in _circle(members).items():
            places[rank] = (middle[0] + reach * x, middle[1] + reach * y)
    return places


def _tree(links: Neighbours, root: int) -> dict[int, Point]:
    """Return positions by depth: leaves side by side, a parent above the middle of the children."""
    places: dict[int, Point] = {}
    leaves = 0

    def place(rank: int, parent: int, depth: int) -> float:
        nonlocal leaves
        middles = [place(child, rank, depth + 1) for child in sorted(links[rank] - {parent})]
        leaves += not middles
        x = (middles[0] + middles[-1]) / 2 if middles else float(leaves)
        places[rank] = (x, float(depth))
        return x

    place(root, root, 0)
    return places


def fitted(name: str, places: Points, groups: Groups = ()) -> GraphLayout:
    """Return positions scaled to the square, with the largest radius keeping discs apart."""
    points = [places[rank] for rank in sorted(places)]
    spans = [max(values) - min(values) for values in zip(*points, strict=True)]
    if name in ("circle", "hub", "groups"):
        spans = [max(spans)] * 2  # one scale for both axes keeps circles round
    for radius in RADII:
        margin = GRID_MARGIN if name == "grid" else max(LEAST_MARGIN, radius + (24 if groups else MARGIN))
        axes = (_stretched([point[axis] for point in points], spans[axis], margin) for axis in (0, 1))
        fitted = tuple(zip(*axes, strict=True))
        room = min((math.dist(*pair) for pair in itertools.combinations(fitted, 2)), default=SIDE)
        if room >= 2.8 * radius:
            break
    return GraphLayout(name, fitted, min(radius, round(room / 2.8, 1)), groups)


def _stretched(values: list[float], span: float, margin: float) -> list[float]:
    middle = (min(values) + max(values)) / 2
    return [round(SIDE / 2 + (SIDE - 2 * margin) * (value - middle) / (span or 1), 1) for value in values]
