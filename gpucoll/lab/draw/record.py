"""The data of a drawing: messages with their rounds, written chunks with their contributors, and load.

A message lasts one round: the first round after both ranks have completed their earlier rounds. A rank's round ends
with the rank's last message. Copies and reductions take no time. A round is as long as its busiest rank needs for its
bytes, sent and received at the same time: the rank's link to a switch is the busiest link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

from gpucoll.internal import Collective, Round, Send, Slice, SymbolicMemory, Turn, contributions
from gpucoll.internal import collective as collective_row
from gpucoll.lab.draw.placement import GraphLayout

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NO_CONTENT = -1  # in place of a content: an empty chunk, or a chunk of output without a promised value

ChunkChanges: TypeAlias = dict[tuple[int, str, int], int]  # from rank, buffer and chunk to the new content's number


class ChunkContent(NamedTuple):
    """The value of a chunk: chunk `chunk` of the inputs, combined from `ranks`."""

    chunk: int
    ranks: tuple[int, ...]


class RecordedMessage(NamedTuple):
    """A message of `chunks` chunks in round `round`, counted from 1; `contents` are indices into `View.contents`."""

    round: int
    sender: int
    receiver: int
    chunks: int
    contents: tuple[int, ...]


class View(NamedTuple):
    """A recording of one collective: messages, contents, and the load of ranks in chunks.

    Idle time is a share of time between 0 and 1: a rank is idle while a busier rank of the round sends or receives.
    """

    row: Collective
    size: int
    chunks: int
    messages: tuple[RecordedMessage, ...]
    changes: tuple[ChunkChanges, ...]  # by round: the chunks written; entry 0 is before the first round
    contents: tuple[ChunkContent, ...]
    wanted: tuple[tuple[int, ...], ...]  # by rank: the promised content of each chunk of output
    rounds: int
    scratch: int  # chunks of scratch written, of the rank with the most
    outputs: int  # chunks of the largest output
    moves_data: bool  # False for a barrier: one chunk per rank then stands for the set of ranks known to have arrived
    inputs: tuple[tuple[int, ...], ...]  # by rank: the content of each chunk of input
    moved: tuple[tuple[tuple[int, int], ...], ...]  # by round and rank: the chunks sent and received
    busiest: tuple[int, ...]  # by round: the most chunks that a rank sends or receives
    idle: tuple[float, ...]  # by round: the mean of the ranks' idle shares
    rank_idle: tuple[float, ...]  # by rank: the idle share of the whole time
    sends: tuple[frozenset[int], ...]  # by rank: the rounds with sends
    receives: tuple[frozenset[int], ...]  # by rank: the rounds with receives
    most_sent: int  # chunks sent by the busiest rank
    algorithm: str = ""
    layout: GraphLayout = GraphLayout("", (), 0.0)

    @property
    def title(self) -> str:
        """The title of the drawing: algorithm, collective and number of ranks."""
        return f"{self.algorithm} · {self.row.name} · {self.size} rank{'s' * (self.size > 1)}"

    def input_names(self, rank: int) -> list[str]:
        """Return the names of a rank's chunks of input, a0 to a3 of rank 0; empty names beyond the alphabet."""
        return [f"{LETTERS[rank]}{self.contents[one].chunk}" if rank < len(LETTERS) else ""
                for one in self.inputs[rank] if self.moves_data]

    def told(self, turn: int) -> str:
        """Return who has the most to do in a round, counted from 0; the data of the collective are n."""
        load, ranks = self.busiest[turn], self.moved[turn]
        if not load or not self.moves_data:
            return ""
        much = share_of(load, self.chunks)
        sending, receiving = ([rank for rank, one in enumerate(ranks) if one[way] == load] for way in (0, 1))
        if len(sending) == len(receiving) == self.size:
            return f"each rank sends {much}"
        (ranks_of, verb), other = ((receiving, "receive"), sending) if len(receiving) == 1 and len(sending) != 1 else (
            (sending, "send"), receiving)
        if not ranks_of:
            ranks_of, verb = other, "receive"
        return f"rank {ranks_of[0]} {verb}s {much}" if len(ranks_of) == 1 else f"{len(ranks_of)} ranks {verb} {much}"


def share_of(chunks: int, whole: int) -> str:
    """Return a number of chunks of `whole` as a multiple of n.

    >>> share_of(12, 4), share_of(1, 4), share_of(6, 4), share_of(4, 4)
    ('3 n', 'n/4', '3n/2', 'n')
    """
    part = Fraction(chunks, whole)
    times = "" if part.numerator == 1 else f"{part.numerator} " if part.denominator == 1 else f"{part.numerator}"
    return f"{times}n" + (f"/{part.denominator}" if part.denominator > 1 else "")


def record(collective: str, schedules: Sequence[Iterable[Round]], *, chunks: int, root: int = 0) -> View:
    """Prove the schedules of all ranks and return the recording; raise ScheduleError for wrong schedules."""
    row, ranks = collective_row(collective), range(len(schedules))
    recorder = _Recorder(row, len(schedules), root, chunks)
    recorder.prove(schedules)
    wanted = tuple(map(recorder.wanted, ranks))
    inputs = tuple(tuple(map(recorder.number, recorder.ranks[rank].content["input"].values())) for rank in ranks)
    last = max([*recorder.changes, *(message.round for message in recorder.messages)], default=0)
    joined: dict[tuple[int, int, int], RecordedMessage] = {}  # messages on one link in one round are joined
    sent = Counter[int]()
    for message in recorder.messages:
        before = joined.get(message[:3], message._replace(chunks=0, contents=()))
        joined[message[:3]] = before._replace(chunks=before.chunks + message.chunks,
                                              contents=(*before.contents, *message.contents))
        sent[message.sender] += message.chunks
    messages, rounds = tuple(joined[key] for key in sorted(joined)), range(1, last + 1)
    sends = tuple(frozenset(message.round for message in messages if message.sender == rank) for rank in ranks)
    receives = tuple(frozenset(message.round for message in messages if message.receiver == rank) for rank in ranks)
    moved = [[[0, 0] for _ in ranks] for _ in rounds]
    for message in messages:
        moved[message.round - 1][message.sender][0] += message.chunks
        moved[message.round - 1][message.receiver][1] += message.chunks
    work = [[max(one) for one in turn] for turn in moved]  # by round and rank
    busiest = tuple(map(max, work))
    whole = sum(busiest)
    return View(
        row, len(ranks), chunks, messages, tuple(recorder.changes[turn] for turn in range(last + 1)),
        tuple(recorder.numbers), wanted, rounds=last, outputs=max(map(len, wanted)),
        scratch=max((chunk + 1 for change in recorder.changes.values() for _, buffer, chunk in change
                     if buffer == "scratch"), default=0),
        moves_data=not recorder.ranks[0].is_barrier,
        inputs=inputs, moved=tuple(tuple((one[0], one[1]) for one in turn) for turn in moved), busiest=busiest,
        idle=tuple(1 - sum(turn) / len(ranks) / max(turn) if any(turn) else 0.0 for turn in work),
        rank_idle=tuple(1 - sum(turn[rank] for turn in work) / whole if whole else 0.0 for rank in ranks),
        sends=sends, receives=receives, most_sent=max(sent.values(), default=0))


class _Recorder(SymbolicMemory):
    """The observer of a replay: all ranks' buffers, messages, and changes by round."""

    def __init__(self, row: Collective, size: int, root: int, chunks: int) -> None:
        super().__init__(row, size, root, chunks)
        self.messages: list[RecordedMessage] = []
        self.changes: dict[int, ChunkChanges] = defaultdict(dict)
        self.numbers: dict[ChunkContent, int] = {}
        if self.ranks[0].is_barrier:  # before the first round a rank knows only its own arrival
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
        return self.numbers.setdefault(ChunkContent(content[0], ranks), len(self.numbers))

    def wanted(self, rank: int) -> tuple[int, ...]:
        return tuple(self.number(content) if content[1] else NO_CONTENT for content in self.ranks[rank].wanted())
