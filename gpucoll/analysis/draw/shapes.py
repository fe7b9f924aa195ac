"""The few shapes of drawings, as SVG; colours are classes, which a style sheet sets for light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpucoll.analysis.document import picture_file
from gpucoll.analysis.draw.colours import DARK, LIGHT, rank_colour

ON_RANK = "#12161b"  # text on a rank's colour, in light and in dark


def number(value: float) -> str:
    """Return a coordinate in as few characters as a hundredth needs.

    >>> number(12.0), number(1 / 3), number(-0.001)
    ('12', '0.33', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rect(x: float, y: float, width: float, height: float, kind: str, corner: float = 0) -> str:
    """Return a rectangle of class `kind`."""
    round_off = f' rx="{number(corner)}"' if corner else ""
    return (f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{round_off} '
            f'class="{kind}"/>')


def path(points: str, kind: str) -> str:
    """Return a path of class `kind`."""
    return f'<path d="{points}" class="{kind}"/>'


def words(x: float, y: float, text: object, kind: str, *, size: float = 13, anchor: str = "start") -> str:
    """Return a line of text; `anchor` is what of it lies at x."""
    return (f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}" class="{kind}">'
            f"{escape(str(text))}</text>")


def ranks(size: int) -> str:
    """Return the style sheet of the ranks' colours: .r0 is an area, .a0 a line, and so on.

    >>> ranks(1)
    '.r0{fill:#fc9191}.a0{fill:none;stroke:#fc9191}'
    """
    return "".join(f".r{rank}{{fill:{colour}}}.a{rank}{{fill:none;stroke:{colour}}}"
                   for rank, colour in enumerate(rank_colour(rank, size) for rank in range(size)))


def document(width: float, height: float, title: str, size: int, shapes: Sequence[str]) -> str:
    """Return a whole SVG file, light, and dark where the reader prefers it; programs without style sheets see light."""
    light, dark = ("".join(f".{role}{{fill:{colour}}}.s-{role}{{fill:none;stroke:{colour}}}"
                           for role, colour in palette.items()) for palette in (LIGHT, DARK))
    style = (f"{light}{ranks(size)}.disc{{fill:{ON_RANK}}}path{{stroke-width:1.6}}"
             ".light{opacity:.5}rect.idle{opacity:.6}rect.axis{opacity:.7}")
    inside = [f"<style>{style}\n@media (prefers-color-scheme:dark){{{dark}}}</style>",
              rect(0, 0, width, height, "paper"), *shapes, ""]
    return picture_file(width, height, title, "\n".join(inside))


def heading(title: str, key: str) -> list[str]:
    """Return the first part of the title in large, the others beside it, and the line that explains the picture."""
    name, *details = title.split(" · ")
    beside = f'<tspan font-size="14" font-weight="400" class="muted" dx="12">{escape(" · ".join(details))}</tspan>'
    return [f'<text x="24" y="38" font-size="22" font-weight="650" class="ink">{escape(name)}{beside}</text>',
            words(24, 60, key, "muted", size=12)]
