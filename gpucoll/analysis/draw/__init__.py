"""Draw a schedule: one SVG file, or one HTML page that steps through the rounds and needs nothing else.

```
            draw()                       proves the schedule, then draws it
    page.py        still.py              the page; the picture
    layout.py   record.py                who stands where; what happens, and how busy all is
```
Pure text, the same for the same call.
"""

from __future__ import annotations

from gpucoll.algorithms import find, schedules
from gpucoll.analysis.draw.page import page
from gpucoll.analysis.draw.placement import layout
from gpucoll.analysis.draw.record import View, record
from gpucoll.analysis.draw.still import Still
from gpucoll.errors import ArgumentError

__all__ = ["draw", "view"]

MOST_RANKS, MOST_CHUNKS, MOST_MESSAGES = 64, 256, 20_000
MOST_CELLS = {"html": 8_000_000, "svg": 100_000}  # states of chunks


def draw(algorithm: str, collective: str = "all_reduce", *, size: int = 8, root: int = 0, segments: int = 1,
         form: str = "html") -> str:
    """Return a drawing of all ranks' schedules as a file's text, `form` "html" or "svg"; each is proved first.

    Raises ArgumentError for what does not exist, and with code GC-DRAW for what would be too much to read.

    >>> draw("ring", size=2, form="svg")[:40]
    '<svg xmlns="http://www.w3.org/2000/svg" '
    """
    if form not in MOST_CELLS:
        raise ArgumentError(f"a drawing is an .html page or an .svg picture, not {form!r}", code="GC-DRAW")
    drawn = view(algorithm, collective, size=size, root=root, segments=segments)
    _check(f"states of chunks in an .{form}", len(drawn.changes) * size * (drawn.scratch + drawn.outputs),
           MOST_CELLS[form])
    return page(drawn) if form == "html" else Still(drawn).document()


def view(algorithm: str, collective: str, *, size: int, root: int = 0, segments: int = 1) -> View:
    """Return what is to be drawn."""
    _check("ranks", size, MOST_RANKS)
    everyone = schedules(collective, algorithm, size=size, root=root, segments=segments)
    _check("chunks", everyone[0].chunks, MOST_CHUNKS)
    drawn = record(collective, everyone, chunks=everyone[0].chunks, root=root)
    _check("chunks of scratch", drawn.scratch, MOST_CHUNKS)
    _check("messages", len(drawn.messages), MOST_MESSAGES)
    pairs = [(message.sender, message.receiver) for message in drawn.messages]
    kind, parameters = find(collective, algorithm).traits.layout, algorithm.partition("(")[2].rstrip(")")
    return drawn._replace(algorithm=algorithm, layout=layout(kind, size, pairs, root, parameters))


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise ArgumentError(f"{count:,} {what} cannot be read in one drawing, {most:,} can: take fewer ranks or "
                            "segments", code="GC-DRAW")
