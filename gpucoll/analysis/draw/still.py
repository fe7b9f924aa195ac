"""One still picture: what every rank holds after every round, and the messages between."""

from __future__ import annotations

from collections.abc import Iterator

from gpucoll.analysis.draw.record import NOBODY, RecordedMessage, Recording, View
from gpucoll.analysis.draw.shapes import document, heading, number, path, rect, words

LEFT, RIGHT, TOP, BOTTOM = 64.0, 24.0, 140.0, 12.0


def still(view: View) -> str:
    """Return an SVG file: every chunk after every round."""
    return _Chunks(view).document()


class _Chunks:
    """A column of ranks for every round; the arrows between two columns are the round's messages."""

    def __init__(self, view: View) -> None:
        self.view, self.recording = view, view.recording
        self.cells = max(1, self.recording.outputs, self.recording.scratch)
        self.cell = min(22.0, max(6.0, 64 / self.cells))
        self.height = 16.0  # of a chunk of the output; one of scratch has half of it
        self.lane = self.height * (1.5 if self.recording.scratch else 1) + 16
        self.gap = 54.0 if self.recording.size < 10 else 74.0
        self.used: dict[str, str] = {}

    def document(self) -> str:
        width = max(self._x(self.recording.rounds) + self.cells * self.cell + RIGHT, 560)
        height = TOP + self.recording.size * self.lane + BOTTOM
        body = [*heading(self.view.title, _key(self.recording)), *self._names(), *self._columns(),
                *map(self._arrow, self.recording.messages), *self._rounds()]
        defined = f"<defs>{''.join(self.used.values())}</defs>"
        return document(width, height, self.view.title, self.recording.size, [defined, *body])

    def _x(self, frame: int) -> float:
        return LEFT + frame * (self.cells * self.cell + self.gap)

    def _y(self, rank: int) -> float:
        return TOP + rank * self.lane

    def _names(self) -> Iterator[str]:
        for rank in range(self.recording.size):
            middle = self._y(rank) + self.height / 2
            yield f'<circle cx="{number(LEFT - 26)}" cy="{number(middle)}" r="11" class="r{rank}"/>'
            yield words(LEFT - 26, middle + 4.5, rank, "disc", anchor="middle")

    def _columns(self) -> Iterator[str]:
        held: dict[tuple[int, str, int], int] = {}
        for frame, changes in enumerate(self.recording.changes):
            held.update(changes)
            for rank in range(self.recording.size):
                yield from self._strip(frame, rank, held)

    def _strip(self, frame: int, rank: int, held: dict[tuple[int, str, int], int]) -> Iterator[str]:
        below = self._y(rank) + self.height + 2
        for buffer, count, y, height in (
                ("output", len(self.recording.wanted[rank]), self._y(rank), self.height),
                ("scratch", self.recording.scratch, below, self.height / 2)):
            for chunk in range(count):
                place = f'x="{number(self._x(frame) + chunk * self.cell)}" y="{number(y)}"'
                content = held.get((rank, buffer, chunk))
                if content is not None or buffer == "output":
                    yield f'<use href="#{self._symbol(rank, buffer, chunk, content, height)}" {place}/>'

    def _symbol(self, rank: int, buffer: str, chunk: int, content: int | None, height: float) -> str:
        """Return the name of the picture of a chunk: it fills from below, a stripe of each contributor's colour."""
        recording, wanted = self.recording, _need(self.recording, rank, buffer, chunk)
        ranks = () if content is None else recording.contents[content].ranks
        key = f"{buffer[0]}{'.'.join(map(str, ranks))}-{wanted}"
        if key not in self.used:
            width, stripe = self.cell - 1, height / wanted
            inside = [rect(0, 0, width, height, "cell", 1.5)]
            if len(ranks) == recording.size > 1:
                inside = [rect(0, 0, width, height, "done", 1.5)]
            else:
                inside += [rect(0, height - (turn + 1) * stripe, width, stripe, f"r{one}")
                           for turn, one in enumerate(ranks)]
            self.used[key] = f'<g id="{key}">{"".join(inside)}</g>'
        return key

    def _arrow(self, message: RecordedMessage) -> str:
        x, far = self._x(message.round - 1) + self.cells * self.cell + 4, self._x(message.round) - 6
        y, down = (self._y(rank) + self.height / 2 for rank in (message.sender, message.receiver))
        bend = (far - x) * 0.45
        curve = (f"M{number(x)} {number(y)}C{number(x + bend)} {number(y)} {number(far - bend)} {number(down)} "
                 f"{number(far)} {number(down)}")
        head = f"M{number(far - 5)} {number(down - 3.5)}l6 3.5l-6 3.5Z"
        return path(curve, f"a{message.sender}") + path(head, f"r{message.sender}")

    def _rounds(self) -> Iterator[str]:
        most = max(self.view.loads.busiest, default=0)
        for turn, load in enumerate(self.view.loads.busiest):
            middle = self._x(turn + 1) - self.gap / 2
            idle = round(self.view.loads.idle[turn] * self.recording.size)
            yield words(middle, TOP - 42, turn + 1, "muted", anchor="middle")
            yield rect(middle - 20, TOP - 34, 40, 4, "cell", 2)
            yield rect(middle - 20, TOP - 34, 40 * load / most if most else 0, 4, "ink", 2)
            yield words(middle, TOP - 16, f"{idle} idle", "idle" if idle else "axis", size=11, anchor="middle")


def _key(recording: Recording) -> str:
    if recording.row.reduces:
        return "A chunk fills with a stripe in the colour of every rank that has contributed; solid: all have."
    if not recording.moves_data:
        return "A cell fills with a stripe in the colour of every rank that is known to have come; solid: all have."
    return "A chunk has the colour of the rank that it comes from."


def _need(recording: Recording, rank: int, buffer: str, chunk: int) -> int:
    """Return how many contributions fill a chunk: those promised, or in scratch those of all ranks."""
    if buffer == "scratch":
        return recording.size if recording.row.reduces else 1
    wanted = recording.wanted[rank][chunk]
    return 1 if wanted == NOBODY else len(recording.contents[wanted].ranks)
