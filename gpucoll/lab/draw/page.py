"""One HTML page: all rounds as data, and a script playing the rounds. The page loads no other files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from html import escape
from typing import Any

from gpucoll.lab.document import asset, page_file, palettes, script_data
from gpucoll.lab.draw.placement import SIDE
from gpucoll.lab.draw.record import ChunkChanges, View
from gpucoll.lab.draw.still import DRAWN_DARK, DRAWN_LIGHT, ON_RANK, key, number, path, rank_colour, ranks, rect

LANE_WIDTH = 1000.0  # width of a lane in SVG units; the page stretches lanes to the window


def page(view: View) -> str:
    body, (title, *details) = asset(__package__, "page.html"), view.title.split(" · ")
    texts = {"name": escape(title), "details": escape(" · ".join(details)), "tiles": _tiles(view),
             "key": key(view), "last": str(view.rounds), "box": f"0 0 {number(SIDE)} {number(SIDE)}", **_lanes(view),
             "data": script_data(_data(view))}
    for name, text in texts.items():
        body = body.replace(f"{{{{{name}}}}}", text)
    style = palettes(DRAWN_LIGHT, DRAWN_DARK) + ranks(view.size) + f".disc{{fill:{ON_RANK}}}\n"
    return page_file(view.title, style + asset(__package__, "page.css"), body, asset(__package__, "page.js"))


def _tiles(view: View) -> str:
    idle = sum(view.rank_idle) / view.size
    tiles = [_counted(view.rounds, "round"), _counted(len(view.messages), "message"),
             (f"{view.most_sent / view.chunks:.4g} n", "most bytes that a rank sends, n the data"),
             (f"{idle:.0%}", "of their time ranks idle")]
    return "".join(f"<li><strong>{escape(value)}</strong> <span>{escape(what)}</span></li>" for value, what in tiles)


def _counted(count: int, what: str) -> tuple[str, str]:
    return f"{count:,}", what if count == 1 else f"{what}s"


def _lanes(view: View) -> dict[str, str]:
    """Return the lanes of all ranks, the bars above and below the lanes, and the labels beside."""
    size, rounds = view.size, view.rounds
    lane = 20.0 if size <= 16 else 11.0 if size <= 32 else 7.0
    shown = range(0, size, 1 if size <= 16 else 2)
    labels = (f'<li style="height:{number(lane * shown.step)}px"><b>{rank}</b></li>' for rank in shown)
    idle = (f'<li style="height:{number(lane * shown.step)}px">{view.rank_idle[rank]:.0%}</li>' for rank in shown)
    return {"ranks": "".join(labels), "idles": "".join(idle), "lane": number(lane),
            "lanes": _stretched(size * lane, (shape for rank in range(size) for shape in _lane(view, rank, lane))),
            "load": _stretched(24, _bars(view.busiest, rounds, "axis")),
            "idle": _stretched(24, _bars(view.idle, rounds, "idle"))}


def _lane(view: View, rank: int, height: float) -> Iterator[str]:
    """Yield the lane of a rank: rounds with sends in the upper half, rounds with receives, lighter, in the lower."""
    top, rounds, space = rank * height, view.rounds, min(3.0, height / 5)
    half = (height - space) / 2
    yield rect(0, top, LANE_WIDTH, height - space, "cell")
    yield _spans(view.sends[rank], rounds, top, half, f"r{rank}")
    yield _spans(view.receives[rank], rounds, top + half, half, f"r{rank} light")


def _spans(turns: Collection[int], rounds: int, top: float, height: float, kind: str) -> str:
    across = LANE_WIDTH / (rounds or 1)
    return path("".join(f"M{number((turn - 1) * across)} {number(top)}h{number(_wide(across))}v{number(height)}"
                        f"h-{number(_wide(across))}Z" for turn in sorted(turns)), kind)


def _bars(values: Sequence[float], rounds: int, kind: str) -> Iterator[str]:
    across, most = LANE_WIDTH / (rounds or 1), max(values, default=0)
    for turn, value in enumerate(values):
        if value:
            yield rect(turn * across, 24 - 24 * value / most, _wide(across), 24 * value / most, kind)


def _wide(across: float) -> float:
    """Return the drawn width of a round: slightly less than `across`, so that gaps separate rounds."""
    return across - min(1.5, across / 5)


def _stretched(height: float, shapes: Iterator[str]) -> str:
    return (f'<svg viewBox="0 0 {number(LANE_WIDTH)} {number(height)}" height="{number(height)}" '
            f'preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>')


def _data(view: View) -> dict[str, Any]:
    """Return the script's data: messages, changed cells of each round, positions and colours."""
    return {
        "size": view.size, "reduces": view.row.reduces or not view.moves_data,
        "barrier": not view.moves_data, "last": view.rounds,
        "scratch": view.scratch, "outputs": view.outputs,
        "inputs": [view.input_names(rank) for rank in range(view.size)],
        "wanted": view.wanted, "contents": [content.ranks for content in view.contents],
        "changes": list(map(_runs, view.changes)),
        "messages": [[message.sender, message.receiver, message.round, message.chunks, (*message.contents, -1)[0],
                      _labels(view, message.contents)] for message in view.messages],
        "busiest": view.busiest, "idle": view.idle, "told": [view.told(turn) for turn in range(view.rounds)],
        "layout": view.layout.name, "places": view.layout.places, "radius": view.layout.radius,
        "groups": view.layout.groups,
        "colours": [rank_colour(rank, view.size) for rank in range(view.size)],
    }


def _runs(changed: ChunkChanges) -> list[list[Any]]:
    """Return the changed cells as runs: rank, 1 for output and 0 for scratch, first chunk, contents."""
    runs: list[list[Any]] = []
    for (rank, buffer, chunk), content in sorted(changed.items()):
        where = [rank, int(buffer == "output")]
        if runs and runs[-1][:2] == where and runs[-1][2] + len(runs[-1][3]) == chunk:
            runs[-1][3].append(content)
        else:
            runs.append([*where, chunk, [content]])
    return runs


def _labels(view: View, contents: Sequence[int]) -> str:
    """Return the label of a message's chunks; empty in a barrier.

    Chunks are numbered in the larger of input and output. A gathering's contents are numbered in one rank's input, so
    the offset of the rank's block is added.
    """
    if not view.moves_data or not contents:
        return ""
    by_rank = view.row.output.blocks and not view.row.input.blocks
    each = view.chunks // view.size if by_rank else 0
    names = [content.ranks[0] * each + content.chunk for content in map(view.contents.__getitem__, contents)]
    if len(names) == 1:
        return str(names[0])
    in_a_row = names == list(range(names[0], names[0] + len(names)))
    return f"{names[0]}\N{EN DASH}{names[-1]}" if in_a_row else f"{names[0]}…"
