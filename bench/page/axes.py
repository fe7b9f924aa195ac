"""Where values lie on logarithmic axes, which of them are written there, and how numbers are written everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WIDE, NARROW = (620.0, 400.0), (360.0, 320.0)  # for a desk and for a phone
LADDERS: tuple[tuple[float, ...], ...] = ((1, 1.2, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1,))
TICKS = 9
NOTHING, BY = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"  # no such number; the unit of ratios
TIMES = (("s", 1e6), ("ms", 1e3), ("µs", 1.0), ("ns", 1e-3))


class Axis(NamedTuple):
    """A logarithmic axis from `low` at `start` to `high` at `end`, in pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return where `value` lies."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


class Frame(NamedTuple):
    """The two axes of a picture."""

    x: Axis
    y: Axis

    def through(self, places: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the pixels of values."""
        return [(self.x.at(x), self.y.at(y)) for x, y in places]


def time_text(microseconds: float) -> str:
    """Return a time with a unit that suits it.

    >>> time_text(0.5), time_text(20.0), time_text(1500.0)
    ('500 ns', '20 µs', '1.5 ms')
    """
    name, unit = next(((name, unit) for name, unit in TIMES if microseconds >= unit), TIMES[-1])
    return f"{figure(microseconds / unit)} {name}"


def figure(value: float) -> str:
    """Return a number with at least three digits that count and no zeros at its end.

    >>> figure(1234.5), figure(0.012345), figure(8.0)
    ('1234', '0.0123', '8')
    """
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def digits(value: float) -> str:
    """Return a number with at least three digits that count, also where they are zeros: for columns.

    >>> digits(1234.5), digits(0.01), digits(9.0)
    ('1234', '0.0100', '9.00')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NOTHING
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def rounded(low: float, high: float) -> tuple[float, float]:
    """Return round ends for an axis that holds both values.

    >>> rounded(0.034, 34.0), rounded(0.93, 1.77)
    ((0.03, 40.0), (0.8, 2.0))
    """
    first, last = (math.floor(math.log10(value) + 1e-9) for value in (low, high))
    below = (step * 10.0**first for step in reversed(LADDERS[0]))
    above = (step * 10.0**last for step in (*LADDERS[0], 10))
    return (next(value for value in below if value <= low * (1 + 1e-9)),
            next(value for value in above if value >= high * (1 - 1e-9)))


def ticks(low: float, high: float) -> list[float]:
    """Return what is written on an axis: as many round numbers of each decade as there is room for.

    >>> ticks(1, 1e6), ticks(2, 40)
    ([1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0, 1000000.0], [2.0, 5.0, 10.0, 20.0])
    """
    powers = range(math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9) + 1)
    found: list[float] = []
    for ladder in LADDERS:
        every = (step * 10.0**power for power in powers for step in ladder)
        found = [tick for tick in every if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(found) <= TICKS:
            return found
    return found[::math.ceil(len(found) / TICKS)]


def size_ticks(low: float, high: float, room: int) -> list[int]:
    """Return at most `room` powers of two, evenly apart.

    >>> size_ticks(8, 128 << 20, 9)
    [8, 64, 512, 4096, 32768, 262144, 2097152, 16777216, 134217728]
    """
    first, last = math.ceil(math.log2(low) - 1e-9), math.floor(math.log2(high) + 1e-9)
    step = next(step for step in range(1, 65) if (last - first) // step + 1 <= room)
    return [2**power for power in range(max(first, 0), last + 1, step)]


def shorten(text: str, room: int) -> str:
    """Return at most `room` characters.

    >>> shorten("hierarchical(ring,tree)", 15)
    'hierarchical(r…'
    """
    return text if len(text) <= room else f"{text[:room - 1]}…"


def apart(heights: Sequence[float], distance: float, top: float, bottom: float) -> list[float]:
    """Return the heights, sorted already, moved as little as it takes to be `distance` apart and not below `bottom`.

    >>> apart([10, 11, 30], 5, 0, 32)
    [10, 15, 30]
    """
    down: list[float] = []
    for height in heights:
        down.append(max(height, top, down[-1] + distance if down else top))
    up: list[float] = []
    for height in reversed(down):
        up.append(min(height, up[-1] - distance if up else bottom))
    return up[::-1]
