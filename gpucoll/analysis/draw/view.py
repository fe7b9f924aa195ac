"""What the page and the still picture have in common: the names of chunks; how full, and how busy, all is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gpucoll.analysis.draw.layout import GraphLayout
from gpucoll.analysis.draw.record import NOBODY, Content, Recording


class Loads(NamedTuple):
    """Loads in chunks; idle time as a share, a rank being idle in a round in which it neither sends nor receives."""

    busiest: tuple[int, ...]  # by round: the most chunks on one link
    idle: tuple[float, ...]  # by round: of the ranks
    rank_idle: tuple[float, ...]  # by rank: of the rounds
    sends: tuple[frozenset[int], ...]  # by rank: the rounds in which it sends
    receives: tuple[frozenset[int], ...]
    most_sent: int  # chunks that one rank sends


def loads(recording: Recording) -> Loads:
    """Return the loads of a recording."""
    ranks, rounds, messages = range(recording.size), range(1, recording.rounds + 1), recording.messages
    sends = [frozenset(message.round for message in messages if message.sender == rank) for rank in ranks]
    receives = [frozenset(message.round for message in messages if message.receiver == rank) for rank in ranks]
    busy = [one | other for one, other in zip(sends, receives, strict=True)]
    sent = Counter[int]()
    for message in messages:
        sent[message.sender] += message.chunks
    return Loads(tuple(max((message.chunks for message in messages if message.round == turn), default=0)
                       for turn in rounds),
                 tuple(sum(turn not in one for one in busy) / recording.size for turn in rounds),
                 tuple(1 - len(one) / len(rounds) if rounds else 0.0 for one in busy),
                 tuple(sends), tuple(receives), max(sent.values(), default=0))


class View(NamedTuple):
    """A recording with all that is known of it."""

    algorithm: str
    recording: Recording
    loads: Loads
    layout: GraphLayout

    @property
    def title(self) -> str:
        """What is drawn, in one line."""
        size = self.recording.size
        return f"{self.algorithm} · {self.recording.row.name} · {size} rank{'s' * (size > 1)}"


def label(recording: Recording, content: Content) -> int:
    """Return what a chunk is called: its number in the whole result, or where there is none in its rank's input."""
    row = recording.row
    if row.output.blocks and not row.input.blocks:
        return content.ranks[0] * (recording.chunks // recording.size) + content.chunk
    return content.chunk


def labels(recording: Recording, contents: Sequence[int]) -> str:
    """Return what the chunks of a message are called, nothing where none moves (in a barrier)."""
    if not recording.moves_data or not contents:
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
    return 1 if wanted == NOBODY else len(recording.contents[wanted].ranks)
