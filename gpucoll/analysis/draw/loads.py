"""How busy links and ranks are: the figures beside a drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from gpucoll.analysis.draw.record import Message, Recording

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
    return Loads(tuple(_busiest(found) for found in flights),
                 tuple(sum(message.chunks for message in found) for found in flights),
                 tuple(_idle(busy, span) for span in spans),
                 tuple(_idle([busy[rank]], (0.0, times[-1])) for rank in range(size)),
                 tuple(map(_union, sends)), tuple(map(_union, receives)), max(sent))


def _by_rank(recording: Recording, end: str) -> list[list[Span]]:
    spans: list[list[Span]] = [[] for _ in range(recording.size)]
    for message in recording.messages:
        spans[getattr(message, end)].append((message.start, message.end))
    return spans


def _flights(recording: Recording) -> list[list[Message]]:
    """Return the messages that are under way in each span between two moments."""
    number = {time: place for place, time in enumerate(recording.times)}
    found: list[list[Message]] = [[] for _ in recording.times[1:]]
    for message in recording.messages:
        last = number[message.end]
        first = next(place for place in range(last, -1, -1) if recording.times[place] <= message.start)
        for place in range(first, last):
            found[place].append(message)
    return found


def _busiest(messages: Iterable[Message]) -> int:
    links: dict[tuple[int, int], int] = defaultdict(int)
    for message in messages:
        links[message.sender, message.receiver] += message.chunks
    return max(links.values(), default=0)


def _union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the spans in order, those that touch as one.

    >>> _union([(2, 3), (0, 1), (1, 2), (4, 5)])
    ((0, 3), (4, 5))
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)


def _idle(busy: list[tuple[Span, ...]], span: Span) -> float:
    """Return which share of `span` lies outside of the ranks' busy spans."""
    start, end = span
    if start == end:
        return 0.0
    used = sum(max(0.0, min(end, last) - max(start, first)) for spans in busy for first, last in spans)
    return 1 - used / ((end - start) * len(busy))
