"""The colours of drawings: roles, in light and in dark, and a hue for every rank that is seen on both."""

from __future__ import annotations

import math

from gpucoll.analysis import document

LIGHT = {**document.LIGHT, "cell": "#e9edf1", "done": "#27323e", "idle": "#c02f1d"}
DARK = {**document.DARK, "cell": "#262e37", "done": "#e3e9ef", "idle": "#ff8b7a"}

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
