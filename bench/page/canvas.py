"""A picture is data: a few kinds of shapes, with roles in place of colours. Here they become SVG.

One drawing serves a page in light and in dark, a file of its own and, by `gpucoll.bench.plot`, matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import singledispatch
from html import escape
from typing import Any, NamedTuple, TypeAlias

from gpucoll.analysis import document

Colours: TypeAlias = Callable[[str], str]
Places: TypeAlias = Sequence[tuple[float, float]]

LINES = len(document.LINES)  # colours for lines; a line's marker tells it apart as well

LIGHT = {
    **document.LIGHT, "bound": "#3c4650", "peer": "#6a737c", "good": "#0a7a4b", "bad": "#c02f1d",
    **{f"line-{line}": colour for line, colour in enumerate(document.LINES)},
}
DARK = {
    **document.DARK, "bound": "#c3ccd5", "peer": "#98a3ae", "good": "#4fd19a", "bad": "#ff8b7a",
    # The same hues, moved until they stand out here.
    "line-0": "#509bf1", "line-1": "#ff8a47", "line-2": "#33cf9f", "line-3": "#f0a1e4",
    "line-4": "#f3dd6a", "line-5": "#7d6bf0", "line-6": "#bfeaff", "line-7": "#b8563c",
}


class Path(NamedTuple):
    """A line through points; `dash` are the lengths of strokes and gaps."""

    points: Places
    role: str
    width: float = 1.0
    dash: tuple[float, ...] = ()


class Area(NamedTuple):
    """A filled polygon, seen through where `opacity` is below 1."""

    points: Places
    role: str
    opacity: float = 1.0


class Mark(NamedTuple):
    """The sign of one measurement; `shape` counts through `OUTLINES`."""

    x: float
    y: float
    shape: int
    role: str
    hollow: bool = False


class Words(NamedTuple):
    """A line of text; `anchor` is what of it lies at x: start, middle or end."""

    x: float
    y: float
    text: str
    role: str = "ink"
    size: float = 12.0
    anchor: str = "start"
    bold: bool = False


class Group(NamedTuple):
    """Shapes that belong together, such as a line and its marks."""

    name: str
    shapes: Sequence[Any]


class Picture(NamedTuple):
    """All that is drawn; `columns` are the places across where something can be read off."""

    width: float
    height: float
    title: str
    description: str
    shapes: Sequence[Any]
    columns: Sequence[float] = ()


def regular(corners: int, turn: float = 0.0, radius: float = 4.2) -> Places:
    """Return the corners of a regular polygon around the origin, the first one on top, turned by `turn` of a circle."""
    angles = [2 * math.pi * (corner / corners + turn) for corner in range(corners)]
    return [(radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles]


OUTLINES: Sequence[Places] = (
    regular(20, radius=3.4), regular(4, 1 / 8, 4.4), regular(3, radius=4.8), regular(4, radius=4.8),
    regular(3, 1 / 2, 4.8), ((-5, -2.2), (5, -2.2), (5, 2.2), (-5, 2.2)), ((-2.2, -5), (2.2, -5), (2.2, 5), (-2.2, 5)),
    regular(5, 1 / 2, 4.6),
)


def outline(mark: Mark) -> Places:
    """Return the corners of the sign where it stands."""
    return [(mark.x + dx, mark.y + dy) for dx, dy in OUTLINES[mark.shape % len(OUTLINES)]]


def fixed(palette: dict[str, str]) -> Colours:
    """Return the colours of a file that stands alone; a role that is a colour already stays as it is."""
    return lambda role: palette.get(role, role)


def variables(role: str) -> str:
    """Return the colours of a page, which its style sheet sets: they follow the reader's choice of light or dark."""
    return role if role.startswith("#") else f"var(--{role})"


def svg(picture: Picture, colours: Colours) -> str:
    """Return `picture` as an SVG element of a page."""
    columns = f' data-columns="{",".join(map(number, picture.columns))}"' if picture.columns else ""
    label = escape(f"{picture.title}: {picture.description}")
    return (f'<svg viewBox="0 0 {number(picture.width)} {number(picture.height)}" role="img" aria-label="{label}"'
            f'{columns} font-family="{document.FONT}">{_elements(picture.shapes, colours)}</svg>\n')


def alone(picture: Picture, colours: Colours) -> str:
    """Return `picture` as an SVG file, with a background of its own."""
    paper = Area(((0, 0), (picture.width, 0), (picture.width, picture.height), (0, picture.height)), "paper")
    inside = f"<desc>{escape(picture.description)}</desc>{_elements((paper, *picture.shapes), colours)}"
    return document.picture_file(picture.width, picture.height, picture.title, inside)


def _elements(shapes: Iterable[Any], colours: Colours) -> str:
    return "".join(element(shape, colours) for shape in shapes)


def number(value: float) -> str:
    """Return a coordinate in as few characters as a tenth of a pixel needs.

    >>> number(12.0), number(1 / 3), number(-0.01)
    ('12', '0.3', '0')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _through(points: Places) -> str:
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


@singledispatch
def element(shape: Any, colours: Colours) -> str:
    """Return the SVG of one shape."""
    raise TypeError(f"{type(shape).__name__} is no shape")


@element.register
def _(shape: Path, colours: Colours) -> str:
    dash = f' stroke-dasharray="{" ".join(map(number, shape.dash))}"' if shape.dash else ""
    return (f'<polyline points="{_through(shape.points)}" fill="none" style="stroke:{colours(shape.role)}" '
            f'stroke-width="{number(shape.width)}" stroke-linejoin="round"{dash}/>')


@element.register
def _(shape: Area, colours: Colours) -> str:
    opacity = f' fill-opacity="{shape.opacity:g}"' if shape.opacity < 1 else ""
    return f'<polygon points="{_through(shape.points)}" style="fill:{colours(shape.role)}"{opacity}/>'


@element.register
def _(shape: Mark, colours: Colours) -> str:
    fill = colours("paper" if shape.hollow else shape.role)
    style = f'style="fill:{fill};stroke:{colours(shape.role)}" stroke-width="1.5"'
    if shape.shape % len(OUTLINES) == 0:
        return f'<circle cx="{number(shape.x)}" cy="{number(shape.y)}" r="3.4" {style}/>'
    return f'<polygon points="{_through(outline(shape))}" {style}/>'


@element.register
def _(shape: Words, colours: Colours) -> str:
    anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
    bold = ' font-weight="600"' if shape.bold else ""
    return (f'<text x="{number(shape.x)}" y="{number(shape.y)}" font-size="{number(shape.size)}"{anchor}{bold} '
            f'style="fill:{colours(shape.role)}">{escape(shape.text)}</text>')


@element.register
def _(shape: Group, colours: Colours) -> str:
    return f'<g data-line="{escape(shape.name)}">{_elements(shape.shapes, colours)}</g>'


def flat(shapes: Iterable[Any]) -> Iterable[Any]:
    """Return the shapes without their groups, in the order in which they are drawn."""
    for shape in shapes:
        if isinstance(shape, Group):
            yield from flat(shape.shapes)
        else:
            yield shape
