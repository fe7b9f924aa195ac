"""Pictures of a graph of links, as SVG: a small picture of every round, or the cut that limits a collective."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpucoll.lab.draw.graph_places import GraphPlaces, LinkLine, placed
from gpucoll.lab.draw.graph_view import GraphView, legend
from gpucoll.lab.draw.placement import SIDE
from gpucoll.lab.draw.still import number, picture, rank_colour, rect, words
from gpucoll.lab.graphs.link_graph import LinkGraph

MOST_DRAWN_ROUNDS = 48  # of one picture
GRID_COLUMNS, TOP, EDGE = 4, 76.0, 16.0


def rounds_on_graph(title: str, view: GraphView) -> str:
    """Return the picture of all rounds, each with the links in use."""
    columns, side, (top, bottom) = min(GRID_COLUMNS, max(1, len(view.loads))), SIDE / 2, view.places.span
    high = (bottom - top) / 2 + 2 * EDGE
    shapes = []
    for turn, loads in enumerate(view.loads):
        x, y = EDGE + turn % columns * (side + EDGE), TOP + turn // columns * high
        used = {lane: 0.3 + 0.7 * view.share(lane, load) for lane, load in loads.items()}
        shapes.append(f'<g transform="translate({number(x)} {number(y)})">'
                      f"{words(0, 10, f'round {turn + 1}', 'muted')}"
                      f'<g transform="translate(0 {number(EDGE - top / 2)}) scale(0.5)">'
                      f"{''.join(_graph(view.places, used, {}))}</g></g>")
    rows = math.ceil(len(view.loads) / columns)
    width, height = max(760.0, EDGE + columns * (side + EDGE)), TOP + rows * high
    return _document(title, legend(view), width, height, shapes)


def cut_on_graph(title: str, graph: LinkGraph, parts: Sequence[Collection[int]], *, inward: bool) -> str:
    """Return the picture of the sets of nodes that limit a collective, with the links out of the sets, or into them."""
    places = placed(graph)
    top, bottom = places.span
    used, numbers = dict[int, float](), dict[int, str]()
    for turn, lane in enumerate(places.lanes):
        src, dst = (lane.dst, lane.src) if inward else (lane.src, lane.dst)
        if any(src in part and dst not in part for part in parts):
            used[turn], numbers[turn] = 1.0, f"{lane.GBps:g}"
    total = sum(float(graph.edges[places.lanes[turn].src, places.lanes[turn].dst].GBps) for turn in used)
    note = (f"Limiting: the {len(used)} links {'into' if inward else 'out of'} the ringed "
            f"{'set' if len(parts) == 1 else f'{len(parts)} sets, each of a colour'}, {total:g} GB/s together.")
    shapes = [f'<g transform="translate({number(EDGE)} {number(TOP - top)})">'
              f"{''.join(_graph(places, used, numbers, parts, 'idle'))}</g>"]
    return _document(title, note, SIDE + 2 * EDGE, TOP + bottom - top, shapes)


def _document(title: str, note: str, width: float, height: float, shapes: Sequence[str]) -> str:
    halo = ".halo{paint-order:stroke;stroke-width:4;stroke-linejoin:round}"
    return picture(title, width, height, halo, [
        words(EDGE, 32, title, "ink", size=20), words(EDGE, 54, note, "muted", size=12), *shapes])


def _graph(places: GraphPlaces, used: Mapping[int, float], numbers: Mapping[int, str],
           parts: Sequence[Collection[int]] = (), role: str = "focus") -> Iterator[str]:
    """Yield the shapes of a graph: sets of nodes, links, links in use with their strength, numbers, nodes."""
    graph, spots, radius, lanes = places
    for turn, part in enumerate(parts):
        for node in sorted(part):
            x, y = spots[node]
            yield (f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius + 9)}" fill="none" '
                   f'stroke="{rank_colour(turn, len(parts))}" stroke-width="7"/>')
    for turn, lane in enumerate(lanes):
        if turn not in used:
            yield _line(lane, "s-axis", 0.45)
    for turn, strength in used.items():
        yield _line(lanes[turn], f"s-{role}", strength)
        yield _head(lanes[turn], role)
    for node, (x, y) in enumerate(spots):
        if node < graph.ranks:
            size = max(9.0, min(24.0, radius))
            yield (f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" '
                   f'fill="{rank_colour(node, graph.ranks)}"/>')
            yield words(x, y + 0.36 * size, node, "disc", size=size, anchor="middle")
        else:
            side = 1.5 * radius
            yield rect(x - side / 2, y - side / 2, side, side, "border", side / 5)
            yield words(x, y + side / 2 + 13, graph.names[node], "ink halo", size=13, anchor="middle")
    labels = places.labels() if numbers else []
    for turn, text in numbers.items():
        place = labels[turn]
        if place is not None:
            yield words(place[0], place[1] + 4, text, f"{role} halo", size=13, anchor="middle")


def _line(lane: LinkLine, kind: str, strength: float) -> str:
    return f'<path d="{lane.path}" class="{kind}" stroke-width="{lane.width:g}" stroke-opacity="{strength:.3g}"/>'


def _head(lane: LinkLine, role: str) -> str:
    (x, y), (u, v) = lane.at(0.64), lane.at(0.6)
    turn, size = math.degrees(math.atan2(y - v, x - u)), 3 + lane.width
    return (f'<path d="M{number(-size)} {number(-0.8 * size)}L{number(size)} 0L{number(-size)} {number(0.8 * size)}Z" '
            f'transform="translate({number(x)} {number(y)}) rotate({number(turn)})" class="{role}"/>')
