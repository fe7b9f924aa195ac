"""One HTML page: all rounds as data, and a script that plays them. It asks for nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from gpucoll.analysis.document import asset, page_file, palettes, script_data
from gpucoll.analysis.draw.lanes import bars, every, lanes
from gpucoll.analysis.draw.layout import SIDE
from gpucoll.analysis.draw.record import RecordedMessage, Recording
from gpucoll.analysis.draw.shapes import DARK, LIGHT, ON_RANK, number, rank_colour, ranks
from gpucoll.analysis.draw.view import View, labels, states, time_text

LANES = 1000.0  # units across; the page stretches them


def page(view: View) -> str:
    """Return the page."""
    body = asset(__package__, "page.html")
    for name, text in {**_words(view), **_lanes(view), "data": script_data(_data(view))}.items():
        body = body.replace(f"{{{{{name}}}}}", text)
    style = palettes(LIGHT, DARK) + ranks(view.recording.size) + f".disc{{fill:{ON_RANK}}}\n"
    return page_file(view.title, style + asset(__package__, "page.css"), body, asset(__package__, "page.js"))


def _words(view: View) -> dict[str, str]:
    """Return the texts of the page by their names in it."""
    name, *details = view.title.split(" · ")
    return {"name": escape(name), "details": escape(" · ".join(details)), "tiles": _tiles(view),
            "key": _key(view.recording), "last": str(len(view.recording.times) - 1), "side": number(SIDE)}


def _tiles(view: View) -> str:
    recording, loads = view.recording, view.loads
    idle = sum(loads.rank_idle) / recording.size
    rounds = _counted(len(recording.times) - 1, "round")
    tiles = [rounds if view.topology is None else (time_text(view, view.last), "in all"),
             _counted(len(recording.messages), "message"),
             (f"{loads.most_sent / recording.chunks:.4g} n", "most bytes that a rank sends, n the data"),
             (f"{idle:.0%}", "of their time ranks idle")]
    return "".join(f"<li><strong>{escape(value)}</strong> <span>{escape(what)}</span></li>" for value, what in tiles)


def _counted(count: int, what: str) -> tuple[str, str]:
    return f"{count:,}", what if count == 1 else f"{what}s"


def _key(recording: Recording) -> str:
    if recording.row.reduces or recording.row.output.where == "nowhere":
        what = "arrivals it knows of" if recording.row.output.where == "nowhere" else "contributions"
        return (f"A cell fills with the {what}, a stripe in the colour of each rank, from below; "
                '<span class="swatch"></span> has those of all ranks.')
    return "A cell has the colour of the rank whose data it holds; grey is empty."


def _lanes(view: View) -> dict[str, str]:
    """Return the lanes, the bars above and below them, and what is written beside."""
    size, loads = view.recording.size, view.loads
    lane = 20.0 if size <= 16 else 11.0 if size <= 32 else 7.0
    shown = range(0, size, every(size, lane))
    beside = (f'<li style="height:{number(lane * shown.step)}px"><b>{rank}</b></li>' for rank in shown)
    idle = (f'<li style="height:{number(lane * shown.step)}px">{loads.rank_idle[rank]:.0%}</li>' for rank in shown)
    return {"ranks": "".join(beside), "idles": "".join(idle), "lane": number(lane),
            "lanes": _stretched(size * lane, lanes(view, LANES, lane)),
            "load": _stretched(24, bars(view, loads.busiest, LANES, 24, "axis")),
            "idle": _stretched(24, bars(view, loads.idle, LANES, 24, "idle"))}


def _stretched(height: float, shapes: Iterator[str]) -> str:
    return (f'<svg viewBox="0 0 {number(LANES)} {number(height)}" height="{number(height)}" '
            f'preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>')


def _data(view: View) -> dict[str, Any]:
    """Return all that the script needs: moments, messages, what changes at each moment, and places."""
    recording = view.recording
    return {
        "size": recording.size, "reduces": recording.row.reduces or recording.row.output.where == "nowhere",
        "barrier": recording.row.output.where == "nowhere", "rounds": view.topology is None, "times": recording.times,
        "names": [time_text(view, time) for time in recording.times],
        "scratch": recording.scratch, "outputs": recording.outputs, "inputs": list(map(int, recording.inputs)),
        "wanted": recording.wanted, "contents": [_runs(content.ranks) for content in recording.contents],
        "changes": [_changes(changed) for changed in states(recording)],
        "messages": [_message(recording, message) for message in recording.messages],
        "busiest": view.loads.busiest, "idle": [round(idle * recording.size, 3) for idle in view.loads.idle],
        "layout": view.layout.name, "places": view.layout.places, "radius": view.layout.radius,
        "groups": view.layout.groups,
        "colours": [rank_colour(rank, recording.size) for rank in range(recording.size)],
    }


def _runs(ranks: int) -> list[int]:
    """Return a set of ranks as first and last of each run.

    >>> _runs(0b11001)
    [0, 0, 3, 4]
    """
    ends: list[int] = []
    for rank in range(ranks.bit_length()):
        if ranks >> rank & 1:
            if ends and ends[-1] == rank - 1:
                ends[-1] = rank
            else:
                ends += [rank, rank]
    return ends


def _changes(changed: dict[tuple[int, str, int], int]) -> list[list[Any]]:
    """Return the cells that change as runs: rank, 1 for output and 0 for scratch, first chunk, contents."""
    runs: list[list[Any]] = []
    for (rank, buffer, chunk), content in sorted(changed.items()):
        where = [rank, int(buffer == "output")]
        if runs and runs[-1][:2] == where and runs[-1][2] + len(runs[-1][3]) == chunk:
            runs[-1][3].append(content)
        else:
            runs.append([*where, chunk, [content]])
    return runs


def _message(recording: Recording, message: RecordedMessage) -> list[Any]:
    """Return sender, receiver, start, end, number of chunks, the first content, and what the chunks are called."""
    first = message.contents[0] if message.contents else -1
    return [message.sender, message.receiver, message.start, message.end, message.chunks, first,
            labels(recording, message.contents)]
