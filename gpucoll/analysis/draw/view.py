"""What the page and the still picture have in common: names of moments and chunks; how full, and how busy, all is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from gpucoll.analysis.draw.layout import GraphLayout
from gpucoll.analysis.draw.record import NOBODY, Content, RecordedMessage, Recording
from gpucoll.analysis.sizes import byte_text

Span: TypeAlias = tuple[float, float]  # from, to


class Loads(NamedTuple):
    """Loads in chunks; idle time as a share: by span between two moments, and by rank."""

    busiest: tuple[int, ...]  # by span: the most chunks on one link
    moved: tuple[int, ...]  # by span: the chunks on all links
    idle: tuple[float, ...]  # by span: how much of it the mean rank neither sends nor receives
    rank_idle: tuple[float, ...]
    sends: tuple[tuple[Span, ...], ...]  # by rank: when it sends
    receives: tuple[tuple[Span, ...], ...]
    most_sent: int  # chunks that one rank sends


def loads(recording: Recording) -> Loads:
    """Return the loads of a recording."""
    size, times = recording.size, recording.times
    sends, receives = _by_rank(recording, "sender"), _by_rank(recording, "receiver")
    busy = [_union([*sends[rank], *receives[rank]]) for rank in range(size)]
    spans = list(pairwise(times))
    flights = _flights(recording)
    sent = [sum(message.chunks for message in recording.messages if message.sender == rank) for rank in range(size)]
    return Loads(tuple(_busiest(some) for some in flights),
                 tuple(sum(message.chunks for message in some) for some in flights),
                 tuple(_idle(busy, span) for span in spans),
                 tuple(_idle([busy[rank]], (0.0, times[-1])) for rank in range(size)),
                 tuple(map(_union, sends)), tuple(map(_union, receives)), max(sent))


def _by_rank(recording: Recording, end: str) -> list[list[Span]]:
    spans: list[list[Span]] = [[] for _ in range(recording.size)]
    for message in recording.messages:
        spans[getattr(message, end)].append((message.start, message.end))
    return spans


def _flights(recording: Recording) -> list[list[RecordedMessage]]:
    """Return the messages that are under way in each span between two moments."""
    number = {time: place for place, time in enumerate(recording.times)}
    flights: list[list[RecordedMessage]] = [[] for _ in recording.times[1:]]
    for message in recording.messages:
        last = number[message.end]
        first = next(place for place in range(last, -1, -1) if recording.times[place] <= message.start)
        for place in range(first, last):
            flights[place].append(message)
    return flights


def _busiest(messages: Iterable[RecordedMessage]) -> int:
    links: dict[tuple[int, int], int] = defaultdict(int)
    for message in messages:
        links[message.sender, message.receiver] += message.chunks
    return max(links.values(), default=0)


def _union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the spans in order, those that touch as one.

    >>> _union([(2, 3), (0, 1), (1, 2), (4, 5)])
    ((0, 3), (4, 5))
    """
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


def _idle(busy: list[tuple[Span, ...]], span: Span) -> float:
    """Return which share of `span` lies outside of the ranks' busy spans."""
    start, end = span
    if start == end:
        return 0.0
    used = sum(max(0.0, min(end, last) - max(start, first)) for spans in busy for first, last in spans)
    return 1 - used / ((end - start) * len(busy))


class View(NamedTuple):
    """A recording with all that is known of it."""

    algorithm: str
    recording: Recording
    loads: Loads
    layout: GraphLayout
    topology: str | None = None  # where times are seconds, of what
    nbytes: int | None = None  # and of how many bytes

    @property
    def title(self) -> str:
        """What is drawn, in one line."""
        title = f"{self.algorithm} · {self.recording.row.name} · {ranks_text(self.recording.size)}"
        return title if self.topology is None else f"{title} · {byte_text(self.nbytes or 0)} on {self.topology}"

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
    names = [label(recording, recording.contents[content]) for content in contents]
    if len(names) == 1:
        return str(names[0])
    in_a_row = names == list(range(names[0], names[0] + len(names)))
    return f"{names[0]}\N{EN DASH}{names[-1]}" if in_a_row else f"{names[0]}…"


def need(recording: Recording, rank: int, buffer: str, chunk: int) -> int:
    """Return how many contributions fill a chunk: those promised, or in scratch those of all ranks."""
    if buffer == "scratch":
        return recording.size if recording.row.reduces else 1
    wanted = recording.wanted[rank][chunk]
    return 1 if wanted == NOBODY else recording.contents[wanted].ranks.bit_count()


def states(recording: Recording) -> list[dict[tuple[int, str, int], int]]:
    """Return for every moment what has changed: (rank, buffer, chunk) to content."""
    number = {time: place for place, time in enumerate(recording.times)}
    changes: list[dict[tuple[int, str, int], int]] = [{} for _ in recording.times]
    for write in recording.writes:
        for chunk, content in enumerate(write.contents, write.first):
            changes[number[write.time]][write.rank, write.buffer, chunk] = content
    return changes
