"""What a drawing shows: every message with its round, what is written, who has contributed to it; how busy all is.

A message lasts one round, and is in the first in which both of its ends have begun theirs; a rank's round ends with its
last message. Copies and reductions take no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gpucoll.analysis.draw.placement import GraphLayout
from gpucoll.core.collectives import Collective
from gpucoll.core.collectives import collective as collective_row
from gpucoll.core.schedule import Round, Send, Slice
from gpucoll.verify.symbolic import SymbolicMemory, Turn, contributions

NOBODY = -1  # in place of a content: nothing is there, or nothing is promised

Change: TypeAlias = dict[tuple[int, str, int], int]  # of rank, buffer and chunk: what they hold now


class Content(NamedTuple):
    """Chunk `chunk` of the inputs, of all `ranks` that have contributed."""

    chunk: int
    ranks: tuple[int, ...]


class RecordedMessage(NamedTuple):
    """`chunks` chunks on their way in round `round`, the first being 1; `contents` counts through the recording's."""

    round: int
    sender: int
    receiver: int
    chunks: int
    contents: tuple[int, ...]


class View(NamedTuple):
    """All that happens in one collective, and how busy ranks and links are, in chunks.

    Idle time is a share: a rank is idle in a round in which it neither sends nor receives.
    """

    row: Collective
    size: int
    chunks: int
    messages: tuple[RecordedMessage, ...]
    changes: tuple[Change, ...]  # by round: what is written until its end, before the first round as well
    contents: tuple[Content, ...]
    wanted: tuple[tuple[int, ...], ...]  # by rank: the content of each chunk of its output that the collective promises
    rounds: int
    scratch: int  # chunks that some rank writes
    outputs: int  # chunks of the largest output
    moves_data: bool  # in a barrier none: one chunk stands for whom a rank knows to have come
    busiest: tuple[int, ...]  # by round: the most chunks on one link
    idle: tuple[float, ...]  # by round: of the ranks
    rank_idle: tuple[float, ...]  # by rank: of the rounds
    sends: tuple[frozenset[int], ...]  # by rank: the rounds in which it sends
    receives: tuple[frozenset[int], ...]
    most_sent: int  # chunks that one rank sends
    algorithm: str = ""
    layout: GraphLayout = GraphLayout("", (), 0.0)

    @property
    def title(self) -> str:
        """What is drawn, in one line."""
        return f"{self.algorithm} · {self.row.name} · {self.size} rank{'s' * (self.size > 1)}"


def record(collective: str, schedules: Sequence[Iterable[Round]], *, chunks: int, root: int = 0) -> View:
    """Return what the schedules of all ranks do; raise ScheduleError where they are wrong."""
    row, ranks = collective_row(collective), range(len(schedules))
    recorder = _Recorder(row, len(schedules), root, chunks)
    recorder.prove(schedules)
    wanted = tuple(map(recorder.wanted, ranks))
    last = max([*recorder.changes, *(message.round for message in recorder.messages)], default=0)
    joined: dict[tuple[int, int, int], RecordedMessage] = {}  # those that share a link in a round are one
    sent = Counter[int]()
    for message in recorder.messages:
        before = joined.get(message[:3], message._replace(chunks=0, contents=()))
        joined[message[:3]] = before._replace(chunks=before.chunks + message.chunks,
                                              contents=(*before.contents, *message.contents))
        sent[message.sender] += message.chunks
    messages, rounds = tuple(joined[key] for key in sorted(joined)), range(1, last + 1)
    sends = tuple(frozenset(message.round for message in messages if message.sender == rank) for rank in ranks)
    receives = tuple(frozenset(message.round for message in messages if message.receiver == rank) for rank in ranks)
    busy = [one | other for one, other in zip(sends, receives, strict=True)]
    return View(
        row, len(ranks), chunks, messages, tuple(recorder.changes[turn] for turn in range(last + 1)),
        tuple(recorder.numbers), wanted, rounds=last, outputs=max(map(len, wanted)),
        scratch=max((chunk + 1 for change in recorder.changes.values() for _, buffer, chunk in change
                     if buffer == "scratch"), default=0),
        moves_data=not recorder.ranks[0].is_barrier,
        busiest=tuple(max((message.chunks for message in messages if message.round == turn), default=0)
                      for turn in rounds),
        idle=tuple(sum(turn not in one for one in busy) / len(ranks) for turn in rounds),
        rank_idle=tuple(1 - len(one) / last if last else 0.0 for one in busy),
        sends=sends, receives=receives, most_sent=max(sent.values(), default=0))


class _Recorder(SymbolicMemory):
    """The observer of a replay: all ranks' buffers, and what has happened."""

    def __init__(self, row: Collective, size: int, root: int, chunks: int) -> None:
        super().__init__(row, size, root, chunks)
        self.messages: list[RecordedMessage] = []
        self.changes: dict[int, Change] = defaultdict(dict)
        self.numbers: dict[Content, int] = {}
        if self.ranks[0].is_barrier:  # whose chunk stands for whom a rank knows to have come: itself, before all rounds
            self.changes[0] = {(rank, "output", 0): self._number_at(rank, "output", 0) for rank in range(size)}

    def meet(self, turn: Turn, sender: int, sent: int, receiver: int, received: int) -> None:
        super().meet(turn, sender, sent, receiver, received)
        contents = tuple(map(self.number, self.ranks[receiver].came[received]))
        chunks = self.ranks[receiver].steps[received][0].count
        self.messages.append(RecordedMessage(turn.message, sender, receiver, chunks, contents))

    def finish(self, turn: Turn, rank: int) -> None:
        super().finish(turn, rank)
        written = [step.dst for step in self.ranks[rank].steps if not isinstance(step, Send)]
        for part in [Slice("output", 0)] if self.ranks[rank].is_barrier else written:
            for chunk in range(part.first, part.first + part.count):
                self.changes[turn.message][rank, part.buffer, chunk] = self._number_at(rank, part.buffer, chunk)

    def _number_at(self, rank: int, buffer: str, chunk: int) -> int:
        return self.number(self.ranks[rank].content[buffer][chunk])

    def number(self, content: tuple[int, int]) -> int:
        ranks = tuple(rank for rank, count in enumerate(contributions(content, len(self.ranks))) if count)
        return self.numbers.setdefault(Content(content[0], ranks), len(self.numbers))

    def wanted(self, rank: int) -> tuple[int, ...]:
        return tuple(self.number(content) if content[1] else NOBODY for content in self.ranks[rank].wanted())
