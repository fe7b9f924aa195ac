"""What the page and the still picture have in common: how it is called, what a chunk is called, how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpucoll.analysis.draw.layout import Layout
from gpucoll.analysis.draw.loads import Loads
from gpucoll.analysis.draw.record import NOBODY, Content, Recording
from gpucoll.analysis.sizes import byte_text


class View(NamedTuple):
    """A recording with all that is known of it."""

    algorithm: str
    recording: Recording
    loads: Loads
    layout: Layout
    topology: str | None = None  # where times are seconds, of what
    nbytes: int | None = None  # and of how many bytes

    @property
    def title(self) -> str:
        """What is drawn, in one line."""
        found = f"{self.algorithm} · {self.recording.row.name} · {ranks_text(self.recording.size)}"
        return found if self.topology is None else f"{found} · {byte_text(self.nbytes or 0)} on {self.topology}"

    @property
    def last(self) -> float:
        """When all is done: the number of rounds, or seconds."""
        return self.recording.times[-1]


def ranks_text(size: int) -> str:
    """Return the number of ranks in words."""
    return "1 rank" if size == 1 else f"{size} ranks"


def time_text(view: View, time: float) -> str:
    """Return a moment in words: a number of rounds, or a time."""
    if view.topology is None:
        return f"{time:g}"
    power = 0 if time >= 1 or time == 0 else 1 if time >= 1e-3 else 2
    return f"{time * 1000 ** power:.3g} {('s', 'ms', 'µs')[power]}"


def people(ranks: int) -> list[int]:
    """Return the ranks whose bits are set.

    >>> people(0b1101)
    [0, 2, 3]
    """
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def label(recording: Recording, content: Content) -> int:
    """Return what a chunk is called: its number in the whole result, or where there is none in its rank's input."""
    row = recording.row
    if row.output.blocks and not row.input.blocks:
        return people(content.ranks)[0] * (recording.chunks // recording.size) + content.chunk
    return content.chunk


def labels(recording: Recording, contents: Sequence[int]) -> str:
    """Return what the chunks of a message are called, nothing where none moves (in a barrier)."""
    if recording.row.output.where == "nowhere" or not contents:
        return ""
    found = [label(recording, recording.contents[content]) for content in contents]
    if len(found) == 1:
        return str(found[0])
    in_a_row = found == list(range(found[0], found[0] + len(found)))
    return f"{found[0]}\N{EN DASH}{found[-1]}" if in_a_row else f"{found[0]}…"


def need(recording: Recording, rank: int, buffer: str, chunk: int) -> int:
    """Return how many contributions fill a chunk: those promised, or in scratch those of all ranks."""
    if buffer == "scratch":
        return recording.size if recording.row.reduces else 1
    wanted = recording.wanted[rank][chunk]
    return 1 if wanted == NOBODY else recording.contents[wanted].ranks.bit_count()


def states(recording: Recording) -> list[dict[tuple[int, str, int], int]]:
    """Return for every moment what has changed: (rank, buffer, chunk) to content."""
    number = {time: place for place, time in enumerate(recording.times)}
    found: list[dict[tuple[int, str, int], int]] = [{} for _ in recording.times]
    for write in recording.writes:
        for chunk, content in enumerate(write.contents, write.first):
            found[number[write.time]][write.rank, write.buffer, chunk] = content
    return found
