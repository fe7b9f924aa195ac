"""When each rank sends and receives: a lane for every rank, time to the right, with the load of links above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpucoll.analysis.draw.shapes import document, heading, number, rect, words
from gpucoll.analysis.draw.view import Span, View, time_text

MOST_LINES = 70  # rounds that lines tell apart
LEFT, RIGHT, TOP, WIDTH, BARS = 64.0, 116.0, 84.0, 1000.0, 32.0


def lanes(view: View, width: float, lane: float) -> Iterator[str]:
    """Yield a lane for every rank, `lane` high: above what it sends, below, in lighter, what it receives."""
    across, space = width / (view.last or 1), min(3.0, lane / 5)
    for rank in range(view.recording.size):
        top, half = rank * lane, (lane - space) / 2
        yield rect(0, top, width, lane - space, "cell")
        yield _spans(view.loads.sends[rank], across, top, half, f"r{rank}")
        yield _spans(view.loads.receives[rank], across, top + half, half, f"r{rank} light")
    if view.topology is None and len(view.recording.times) <= MOST_LINES:
        bottom = number(view.recording.size * lane)
        lines = "".join(f"M{number(time * across)} 0V{bottom}" for time in view.recording.times[1:-1])
        yield f'<path d="{lines}" class="s-paper"/>'


def _spans(spans: Sequence[Span], across: float, top: float, height: float, kind: str) -> str:
    points = "".join(f"M{number(start * across)} {number(top)}h{number((end - start) * across)}v{number(height)}"
                     f"H{number(start * across)}Z" for start, end in spans)
    return f'<path d="{points}" class="{kind}"/>' if points else ""


def bars(view: View, values: Sequence[float], width: float, height: float, kind: str) -> Iterator[str]:
    """Yield a bar for every span between two moments, the largest value `height` high."""
    times, most = view.recording.times, max(values, default=0)
    across = width / (view.last or 1)
    for start, end, value in zip(times, times[1:], values, strict=False):
        high = height * value / most if most else 0
        space = min(1.0, (end - start) * across / 5) if view.topology is None else 0.0
        if high:
            yield rect(start * across, height - high, (end - start) * across - space, high, kind)


def picture(view: View) -> str:
    """Return an SVG file of the lanes, with the loads of links above and idle ranks below."""
    lane = min(26.0, max(9.0, 400 / view.recording.size))
    bottom, most = TOP + BARS + 16 + view.recording.size * lane, max(view.loads.busiest, default=0)
    body = [*heading(view.title, "Each lane: a rank; above what it sends, below, in lighter, what it receives."),
            *_moved(LEFT, TOP, bars(view, view.loads.busiest, WIDTH, BARS, "axis")),
            words(LEFT - 10, TOP + BARS, "link load", "muted", size=11, anchor="end"),
            words(LEFT + WIDTH + 8, TOP + 10, f"at most {most} chunk{'s' if most != 1 else ''}", "muted", size=11),
            *_moved(LEFT, TOP + BARS + 16, lanes(view, WIDTH, lane)), *_sides(view, lane),
            *_moved(LEFT, bottom + 8, bars(view, view.loads.idle, WIDTH, 20, "idle")),
            words(LEFT - 10, bottom + 28, "idle", "muted", size=11, anchor="end"), *_axis(view, bottom + 48)]
    return document(LEFT + WIDTH + RIGHT, bottom + 64, view.title, view.recording.size, body)


def _moved(x: float, y: float, shapes: Iterator[str]) -> list[str]:
    return [f'<g transform="translate({number(x)} {number(y)})">{"".join(shapes)}</g>']


def _sides(view: View, lane: float) -> Iterator[str]:
    """Yield the ranks' names on the left, as many as there is room for, and how long they idle on the right."""
    for rank in range(0, view.recording.size, every(view.recording.size, lane)):
        y = TOP + BARS + 16 + (rank + 0.5) * lane + 3
        yield words(LEFT - 10, y, rank, "ink", size=11, anchor="end")
        yield words(LEFT + WIDTH + 8, y, f"{view.loads.rank_idle[rank]:.0%} idle", "muted", size=11)


def every(size: int, lane: float) -> int:
    """Return how many lanes are passed over by one name.

    >>> every(8, 18), every(64, 6)
    (1, 4)
    """
    return next((step for step in (1, 2, 4, 8, 16) if step * lane >= 13), size)


def _axis(view: View, y: float) -> Iterator[str]:
    """Yield some moments by name."""
    times = view.recording.times
    if view.topology is None:
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 1000) if len(times) <= 26 * step)
        for turn in range(step, len(times), step):
            yield words(LEFT + (turn - 0.5) * WIDTH / view.last, y, turn, "muted", size=11, anchor="middle")
    else:
        for part in range(5):
            yield words(LEFT + part * WIDTH / 4, y, time_text(view, view.last * part / 4), "muted", size=11,
                        anchor="middle")
