"""One still picture: every rank's input, its chunks after every round, and the messages between rounds.

The HTML page uses the same shapes and colours. Shapes carry classes, and a style sheet sets light and dark colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape

from gpucoll.internal import find
from gpucoll.lab.document import DARK, FONT, LIGHT
from gpucoll.lab.draw.record import NO_CONTENT, RecordedMessage, View, share_of

DRAWN_LIGHT = {**LIGHT, "cell": "#e9edf1", "done": "#27323e", "idle": "#c02f1d"}
DRAWN_DARK = {**DARK, "cell": "#262e37", "done": "#e3e9ef", "idle": "#ff8b7a"}

CHROMA = 0.13
LIGHTNESS = (0.77, 0.68)  # alternating, so that neighbours differ for readers with colour blindness, too
ON_RANK = "#12161b"  # text on a rank's colour, in light and in dark
LEFT_MARGIN, RIGHT_MARGIN, TOP_MARGIN, BOTTOM_MARGIN = 64.0, 24.0, 162.0, 12.0
ROUND_WIDTH = 40.0  # of a round in which a rank sends or receives n, beyond the room of an empty round
LABEL_ROOM, LONGEST_FORMULA = 122.0, 40  # of the words above a round; characters


def rank_colour(rank: int, size: int) -> str:
    """Return the colour of a rank as sRGB: the hues of all ranks are evenly spaced on the OKLCH circle.

    Ottosson, "A perceptual color space for image processing" (2020).

    >>> rank_colour(0, 8), rank_colour(4, 8)
    ('#fc9191', '#0accd5')
    """
    lightness, hue = LIGHTNESS[rank % 2], 2 * math.pi * rank / size + 0.35
    a, b = CHROMA * math.cos(hue), CHROMA * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
              -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
              -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short)
    bounded = (min(1.0, max(0.0, part)) for part in linear)
    shown = (12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055 for part in bounded)
    return "#" + "".join(f"{round(255 * part):02x}" for part in shown)


def number(value: float) -> str:
    """Return a coordinate as text, rounded to hundredths, in as few characters as possible.

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
    """Return a line of text; `anchor` names the part of the text at x: "start", "middle" or "end"."""
    return (f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}" class="{kind}">'
            f"{escape(str(text))}</text>")


def ranks(size: int) -> str:
    """Return the style sheet of the ranks' colours: .r0 is an area, .a0 a line, and so on.

    >>> ranks(1)
    '.r0{fill:#fc9191}.a0{fill:none;stroke:#fc9191}'
    """
    return "".join(f".r{rank}{{fill:{colour}}}.a{rank}{{fill:none;stroke:{colour}}}"
                   for rank, colour in enumerate(rank_colour(rank, size) for rank in range(size)))


def picture(title: str, width: float, height: float, style: str, shapes: Iterable[str]) -> str:
    """Return an SVG file of `shapes`, with a class for each colour, and `style` for further classes."""
    # Light colours come first, for programs without media queries; readers preferring dark get dark.
    light, dark = ("".join(f".{role}{{fill:{colour}}}.s-{role}{{fill:none;stroke:{colour}}}"
                           for role, colour in palette.items())
                   for palette in (DRAWN_LIGHT, DRAWN_DARK))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
            f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="{FONT}"><title>{escape(title)}</title>'
            f"<style>{light}.disc{{fill:{ON_RANK}}}{style}\n@media (prefers-color-scheme:dark){{{dark}}}</style>"
            + "\n".join([rect(0, 0, width, height, "paper"), *shapes, "</svg>\n"]))


def key(view: View) -> str:
    """Return the sentence explaining the cells of a drawing."""
    if view.row.reduces:
        return "A chunk fills with a stripe in the colour of every rank that has contributed; solid: all have."
    if not view.moves_data:
        return "A cell fills with a stripe in the colour of every rank that is known to have come; solid: all have."
    return "A chunk has the colour of the rank that it comes from."


class Still:
    """One still picture, an SVG file, of every rank's chunks after every round.

    The first column has the inputs, and each round a further column. The arrows between two columns are the messages of
    the round; the room between them grows with the bytes of the busiest rank.
    """

    def __init__(self, view: View) -> None:
        self.view: View = view
        self.cells: int = max(1, self.view.outputs, self.view.scratch)
        inputs = max(1, *map(len, self.view.inputs))
        self.cell: float = min(22.0, max(6.0, 88 / max(self.cells, inputs)))
        self.height: float = 16.0  # of a chunk of output; chunks of scratch have half the height
        self.lane: float = self.height * (1.5 if self.view.scratch else 1) + 16
        room = max(54.0 if self.view.size < 10 else 74.0, LABEL_ROOM - self.cells * self.cell)
        self.gaps: list[float] = [room + ROUND_WIDTH * load / view.chunks * view.moves_data for load in view.busiest]
        self.lefts: list[float] = [LEFT_MARGIN]  # of each column
        self.ends: list[float] = [LEFT_MARGIN + max(40.0, inputs * self.cell)]
        for gap in self.gaps:
            self.lefts.append(self.ends[-1] + gap)
            self.ends.append(self.lefts[-1] + self.cells * self.cell)
        self.used: dict[str, str] = {}

    def document(self) -> str:
        names = list[str]()
        for rank in range(self.view.size):
            middle = self._y(rank) + self.height / 2
            names += [f'<circle cx="{number(LEFT_MARGIN - 26)}" cy="{number(middle)}" r="11" class="r{rank}"/>',
                      words(LEFT_MARGIN - 26, middle + 4.5, rank, "disc", anchor="middle")]
        width = max(self.ends[-1] + RIGHT_MARGIN, 620, 40 + 6.4 * len(self._costs()))
        height = TOP_MARGIN + self.view.size * self.lane + BOTTOM_MARGIN
        body = [*names, *self._inputs(), *self._columns(), *map(self._arrow, self.view.messages), *self._rounds()]
        style = f"{ranks(self.view.size)}path{{stroke-width:1.6}}"
        title, *details = self.view.title.split(" · ")
        note = f'<tspan font-size="14" font-weight="400" class="muted" dx="12">{escape(" · ".join(details))}</tspan>'
        shapes = [
            f"<defs>{''.join(self.used.values())}</defs>",
            f'<text x="24" y="38" font-size="22" font-weight="650" class="ink">{escape(title)}{note}</text>',
            words(24, 60, key(self.view), "muted", size=12), words(24, 79, self._costs(), "muted", size=12), *body]
        return picture(self.view.title, width, height, style, shapes)

    def _costs(self) -> str:
        """Return rounds and bytes in words, with the formulas of the registry where these are short."""
        view, cost = self.view, find(self.view.row.name, self.view.algorithm).cost
        sums = [[sum(turn[rank][way] for turn in view.moved) for rank in range(view.size)] for way in (0, 1)]
        sent, received = map(max, sums)
        formulas = [f" = {one}".replace("N", "n") if 1 < len(one) <= LONGEST_FORMULA else "" for one in (
            cost.rounds, cost.sent if sent >= received else cost.received)]
        rounds = f"Rounds: {view.rounds}{formulas[0]}"
        if not view.moves_data or not sent:
            return rounds
        verb, most = ("sends", sent) if sent >= received else ("receives", received)
        return (f"{rounds}. The busiest rank {verb} {share_of(most, view.chunks)}{formulas[1]}; all ranks together "
                f"send {share_of(sum(sums[0]), view.chunks)}, n the data.")

    def _inputs(self) -> Iterator[str]:
        """Yield the inputs: a letter for each rank, and the number of the chunk."""
        view = self.view
        for rank in range(view.size):
            for place, name in enumerate(view.input_names(rank)):
                x, y = LEFT_MARGIN + place * self.cell, self._y(rank)
                yield rect(x, y, self.cell - 1, self.height, f"r{rank}", 1.5)
                if self.cell > 16 and name:
                    yield words(x + self.cell / 2 - 0.5, y + 11.5, name, "disc", size=10, anchor="middle")

    def _y(self, rank: int) -> float:
        return TOP_MARGIN + rank * self.lane

    def _columns(self) -> Iterator[str]:
        held: dict[tuple[int, str, int], int] = {}
        for frame, changes in enumerate(self.view.changes):
            held.update(changes)
            if not frame and self.view.moves_data:
                continue  # the column of the inputs
            for rank in range(self.view.size):
                y = self._y(rank)
                cells = [("output", chunk, y, self.height) for chunk in range(len(self.view.wanted[rank]))]
                cells += [("scratch", chunk, y + self.height + 2, self.height / 2) for chunk in range(self.view.scratch)
                          if (rank, "scratch", chunk) in held]
                for buffer, chunk, y, height in cells:
                    name = self._symbol(rank, buffer, chunk, held.get((rank, buffer, chunk)), height)
                    yield f'<use href="#{name}" x="{number(self.lefts[frame] + chunk * self.cell)}" y="{number(y)}"/>'

    def _symbol(self, rank: int, buffer: str, chunk: int, content: int | None, height: float) -> str:
        """Return the name of a chunk's symbol: stripes in the contributors' colours fill the cell from below."""
        # `wanted` is the number of contributions filling the cell: the promised number, in scratch the number of ranks.
        view, wanted = self.view, 1
        if buffer == "scratch":
            wanted = view.size if view.row.reduces else 1
        elif view.wanted[rank][chunk] != NO_CONTENT:
            wanted = len(view.contents[view.wanted[rank][chunk]].ranks)
        ranks = () if content is None else view.contents[content].ranks
        name = f"{buffer[0]}{'.'.join(map(str, ranks))}-{wanted}"
        if name not in self.used:
            width, stripe = self.cell - 1, height / wanted
            inside = [rect(0, 0, width, height, "cell", 1.5)]
            if len(ranks) == view.size > 1:
                inside = [rect(0, 0, width, height, "done", 1.5)]
            else:
                inside += [rect(0, height - (turn + 1) * stripe, width, stripe, f"r{one}")
                           for turn, one in enumerate(ranks)]
            self.used[name] = f'<g id="{name}">{"".join(inside)}</g>'
        return name

    def _arrow(self, message: RecordedMessage) -> str:
        x, far = self.ends[message.round - 1] + 4, self.lefts[message.round] - 6
        y, down = (self._y(rank) + self.height / 2 for rank in (message.sender, message.receiver))
        bend = (far - x) * 0.45
        curve = (f"M{number(x)} {number(y)}C{number(x + bend)} {number(y)} {number(far - bend)} {number(down)} "
                 f"{number(far)} {number(down)}")
        head = f"M{number(far - 5)} {number(down - 3.5)}l6 3.5l-6 3.5Z"
        return path(curve, f"a{message.sender}") + path(head, f"r{message.sender}")

    def _rounds(self) -> Iterator[str]:
        yield words(LEFT_MARGIN, TOP_MARGIN - 14, "input" if self.view.moves_data else "arrived", "muted", size=11)
        for turn, load in enumerate(self.view.busiest):
            x, y = self.ends[turn], TOP_MARGIN
            middle, idle = x + self.gaps[turn] / 2, f"{self.view.idle[turn]:.0%}".replace("%", " % idle")
            yield words(middle, y - 54, f"round {turn + 1}", "muted", anchor="middle")
            yield words(middle, y - 39, self.view.told(turn), "ink", size=11, anchor="middle")
            yield rect(x + 4, y - 31, self.gaps[turn] - 8, 4, "ink" if load else "cell", 2)
            yield words(middle, y - 14, idle, "idle" if self.view.idle[turn] else "axis", size=11, anchor="middle")
