"""Draw a schedule: one SVG file, or one self-contained HTML page that steps through the rounds.

```
            draw()                       proves the schedule, then draws it
    page.py        still.py              the page; the picture
    placement.py   record.py             positions of ranks; messages, contents and load by round
```
The same call always returns the same text.
"""

from __future__ import annotations

from gpucoll.errors import ArgumentError
from gpucoll.internal import find, schedules
from gpucoll.lab.draw.page import page
from gpucoll.lab.draw.placement import layout
from gpucoll.lab.draw.record import View, record
from gpucoll.lab.draw.still import Still

__all__ = ["draw", "view"]

MOST_DRAWN_RANKS, MOST_DRAWN_CHUNKS, MOST_DRAWN_MESSAGES = 64, 256, 20_000
MOST_CELLS = {"html": 8_000_000, "svg": 100_000}  # states of chunks


def draw(algorithm: str, collective: str = "all_reduce", *, size: int = 8, root: int = 0, segments: int = 1,
         form: str = "html") -> str:
    """Return the text of a file with all ranks' schedules; the schedules are proved first.

    Parameters
    ----------
    algorithm : str
        A name from `gpucoll.algorithms`.
    collective : str, optional
        The name of the collective.
    size : int, optional
        The number of ranks.
    root : int, optional
        The root of a rooted collective.
    segments : int, optional
        The number of messages for a rank's part (pipelining).
    form : {"html", "svg"}, optional
        A page that steps through the rounds, or a picture.

    Returns
    -------
    str
        The text of the file.

    Raises
    ------
    ArgumentError
        An unknown name (GC-ALGO, GC-COLLECTIVE), or a drawing too large to read (GC-DRAW).

    See Also
    --------
    gpucoll.draw : For notebooks.

    Examples
    --------
    >>> from gpucoll.lab.draw import draw
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
    """Return the recording of a schedule with the layout of the ranks; raise as `draw`."""
    _check("ranks", size, MOST_DRAWN_RANKS)
    claim = find(collective, algorithm).claim(size, root, segments, None)
    _check("chunks", claim.chunks, MOST_DRAWN_CHUNKS)
    everyone = schedules(collective, algorithm, size=size, root=root, segments=segments)
    drawn = record(collective, everyone, chunks=claim.chunks, root=root)
    _check("chunks of scratch", drawn.scratch, MOST_DRAWN_CHUNKS)
    _check("messages", len(drawn.messages), MOST_DRAWN_MESSAGES)
    pairs = [(message.sender, message.receiver) for message in drawn.messages]
    kind, parameters = find(collective, algorithm).traits.layout, algorithm.partition("(")[2].rstrip(")")
    return drawn._replace(algorithm=algorithm, layout=layout(kind, size, pairs, root, parameters))


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise ArgumentError(f"{count:,} {what} are too many to read in one drawing, at most {most:,}: use fewer ranks "
                            "or segments", code="GC-DRAW")
