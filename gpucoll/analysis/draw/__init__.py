"""Draw a schedule: one SVG file, or one HTML page that steps through the rounds and needs nothing else.

```
            draw()                       proves the schedule, then draws it
    page.py        still.py              the page; the picture
             lanes.py                    when each rank is busy
    view.py   shapes.py                  words, and how busy links and ranks are; SVG, colours
    layout.py   record.py                who stands where; what happens, and who has contributed to what
```
Pure text, the same for the same call.
"""

from __future__ import annotations

from gpucoll.algorithms import schedule
from gpucoll.analysis.draw.layout import layout
from gpucoll.analysis.draw.page import page
from gpucoll.analysis.draw.record import Recording, TimelineClock, record
from gpucoll.analysis.draw.still import still
from gpucoll.analysis.draw.view import View, loads
from gpucoll.analysis.simulate import load, timeline
from gpucoll.analysis.verify import prove
from gpucoll.errors import ArgumentError

__all__ = ["draw", "view"]

MOST_RANKS, MOST_CHUNKS, MOST_MESSAGES, MOST_CELLS = 64, 256, 20_000, 8_000_000
FORMS = {"html": page, "svg": still}


def draw(algorithm: str, collective: str = "all_reduce", *, size: int = 8, root: int = 0, segments: int = 1,
         form: str = "html", topology: str | None = None, nbytes: int = 1 << 20) -> str:
    """Return a drawing of all ranks' schedules as a file's text, `form` "html" or "svg"; each is proved first.

    With `topology`, a name or a file of `gpucoll simulate`, it shows the predicted time for `nbytes` bytes in place of
    rounds. Raises ArgumentError for what does not exist, and with code GC-DRAW for what would be too much to read.

    >>> draw("ring", size=2, form="svg")[:40]
    '<svg xmlns="http://www.w3.org/2000/svg" '
    """
    if form not in FORMS:
        raise ArgumentError(f"a drawing is an .html page or an .svg picture, not {form!r}", code="GC-DRAW")
    return FORMS[form](view(algorithm, collective, size=size, root=root, segments=segments, topology=topology,
                            nbytes=nbytes))


def view(algorithm: str, collective: str, *, size: int, root: int = 0, segments: int = 1,
         topology: str | None = None, nbytes: int = 1 << 20) -> View:
    """Return what is to be drawn."""
    _check("ranks", size, MOST_RANKS)
    network = None if topology is None else load(topology)
    nodes = network and network.nodes(size)
    schedules = [schedule(collective, algorithm, rank=rank, size=size, root=root, segments=segments, nodes=nodes)
                 for rank in range(max(1, size))]
    _check("chunks", schedules[0].chunks, MOST_CHUNKS)
    prove(collective, schedules, chunks=schedules[0].chunks, root=root)
    clock = network and TimelineClock(timeline(collective, algorithm, size, nbytes, network, root=root,
                                               segments=segments))
    recording = _readable(record(collective, schedules, chunks=schedules[0].chunks, root=root, clock=clock))
    pairs = [(message.sender, message.receiver) for message in recording.messages]
    places = layout(algorithm, size, pairs, root, nodes)
    return View(algorithm, recording, loads(recording), places, network and network.name, nbytes)


def _readable(recording: Recording) -> Recording:
    """Return the recording where it is not too much for a reader, or for a browser."""
    _check("chunks of scratch", recording.scratch, MOST_CHUNKS)
    _check("messages", len(recording.messages), MOST_MESSAGES)
    cells = len(recording.times) * recording.size * (recording.scratch + recording.outputs)
    _check("states of chunks", cells, MOST_CELLS)
    return recording


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise ArgumentError(f"{count:,} {what} cannot be read in one drawing, {most:,} can: take fewer ranks or "
                            "segments",
                            code="GC-DRAW")
