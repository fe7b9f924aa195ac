"""The few shapes of drawings, as SVG; colours are classes, which a style sheet sets for light and dark.

Every rank has a hue that is seen on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from gpucoll.analysis.document import DARK as PAGE_DARK
from gpucoll.analysis.document import FONT
from gpucoll.analysis.document import LIGHT as PAGE_LIGHT

LIGHT = {**PAGE_LIGHT, "cell": "#e9edf1", "done": "#27323e", "idle": "#c02f1d"}
DARK = {**PAGE_DARK, "cell": "#262e37", "done": "#e3e9ef", "idle": "#ff8b7a"}

CHROMA = 0.13
LIGHTNESS = (0.77, 0.68)  # in turn, so that neighbours differ for those as well who see no hue


def rank_colour(rank: int, size: int) -> str:
    """Return the colour of a rank: once round the circle of hues for all ranks.

    >>> rank_colour(0, 8), rank_colour(4, 8)
    ('#fc9191', '#0accd5')
    """
    return _hex(LIGHTNESS[rank % 2], CHROMA, 2 * math.pi * rank / size + 0.35)


def _hex(lightness: float, chroma: float, hue: float) -> str:
    """Return a colour of OKLCH as sRGB (Ottosson, "A perceptual color space for image processing", 2020)."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
              -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
              -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short)
    return "#" + "".join(f"{round(255 * _gamma(min(1.0, max(0.0, part)))):02x}" for part in linear)


def _gamma(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055


ON_RANK = "#12161b"  # text on a rank's colour, in light and in dark


def number(value: float) -> str:
    """Return a coordinate in as few characters as a hundredth needs.

    >>> number(12.0), number(1 / 3), number(-0.001)
    ('12', '0.33', '0')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rect(x: float, y: float, width: float, height: float, kind: str, corner: float = 0) -> str:
    round_off = f' rx="{number(corner)}"' if corner else ""
    return (f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{round_off} '
            f'class="{kind}"/>')


def path(points: str, kind: str) -> str:
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
    style = f"{light}{ranks(size)}.disc{{fill:{ON_RANK}}}path{{stroke-width:1.6}}"
    inside = [f"<style>{style}\n@media (prefers-color-scheme:dark){{{dark}}}</style>",
              rect(0, 0, width, height, "paper"), *shapes, ""]
    shown = "\n".join(inside)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="{FONT}">'
            f"<title>{escape(title)}</title>{shown}</svg>\n")


def heading(title: str, key: str) -> list[str]:
    """Return the first part of the title in large, the others beside it, and the line that explains the picture."""
    name, *details = title.split(" · ")
    beside = f'<tspan font-size="14" font-weight="400" class="muted" dx="12">{escape(" · ".join(details))}</tspan>'
    return [f'<text x="24" y="38" font-size="22" font-weight="650" class="ink">{escape(name)}{beside}</text>',
            words(24, 60, key, "muted", size=12)]
