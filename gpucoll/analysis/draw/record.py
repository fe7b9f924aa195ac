"""What a drawing shows: every message with its time, every write, and who has contributed to what is written.

By the clock `RoundClock` a message lasts one round and begins when both of its
ends have begun their rounds; a rank's round ends with its last message. Copies and reductions take no time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from gpucoll.analysis.replay import replay
from gpucoll.analysis.simulate import Timeline
from gpucoll.collectives import Collective
from gpucoll.collectives import collective as collective_row
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Round, Send, Slice, Step

NOBODY = -1  # in place of a content: nothing is there, or nothing is promised

Key: TypeAlias = tuple[str, int]  # buffer, chunk


class Content(NamedTuple):
    """Chunk `chunk` of the inputs, of all `ranks` (one bit each) that have contributed."""

    chunk: int
    ranks: int


class RecordedMessage(NamedTuple):
    """`chunks` chunks on their way from `start` to `end`; `contents` counts through the recording's."""

    sender: int
    receiver: int
    start: float
    end: float
    chunks: int
    contents: tuple[int, ...]


class RecordedWrite(NamedTuple):
    """At `time` the chunks of `buffer` from `first` on hold `contents`."""

    time: float
    rank: int
    buffer: str
    first: int
    contents: tuple[int, ...]


class Recording(NamedTuple):
    """All that happens in one collective; `times` are the moments at which something has changed, 0 first."""

    row: Collective
    size: int
    chunks: int
    times: tuple[float, ...]
    messages: tuple[RecordedMessage, ...]
    writes: tuple[RecordedWrite, ...]
    contents: tuple[Content, ...]
    wanted: tuple[tuple[int, ...], ...]  # by rank: the content of each chunk of its output that the collective promises
    inputs: tuple[bool, ...]  # by rank: whether it has an input

    @property
    def scratch(self) -> int:
        """How many chunks of scratch some rank writes."""
        return max((write.first + len(write.contents) for write in self.writes if write.buffer == "scratch"), default=0)

    @property
    def outputs(self) -> int:
        """The chunks of the largest output."""
        return max(map(len, self.wanted))


class RoundClock:
    """The clock that counts rounds."""

    def __init__(self, size: int) -> None:
        self._now, self._end = [0.0] * size, [0.0] * size

    def begin(self, rank: int) -> None:
        """A round without messages ends when it begins."""
        self._end[rank] = self._now[rank]

    def meet(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return when a message between rounds of these ranks starts and ends."""
        start = max(self._now[sender], self._now[receiver])
        for rank in (sender, receiver):
            self._end[rank] = max(self._end[rank], start + 1)
        return start, start + 1

    def finish(self, rank: int) -> float:
        """Return when the round of `rank` ends."""
        self._now[rank] = self._end[rank]
        return self._now[rank]


class TimelineClock:
    """The clock of `analysis/simulate`: when its timeline has messages and rounds begin and end."""

    def __init__(self, predicted: Timeline) -> None:
        self._messages: dict[tuple[int, int], deque[tuple[float, float]]] = defaultdict(deque)
        for sender, receiver, _, start, end in predicted.transfers:
            self._messages[sender, receiver].append((_rounded(start), _rounded(end)))
        self._rounds = [deque(_rounded(end) for _, end in rounds) for rounds in predicted.rounds]

    def begin(self, rank: int) -> None:
        """The timeline knows."""

    def meet(self, sender: int, receiver: int) -> tuple[float, float]:
        """Return when the next message between these ranks starts and ends."""
        return self._messages[sender, receiver].popleft()

    def finish(self, rank: int) -> float:
        """Return when the round of `rank` ends."""
        return self._rounds[rank].popleft()


def _rounded(time: float) -> float:
    """Return the same number for times that differ only by how they were added up."""
    return float(f"{time:.9g}")


def record(collective: str, schedules: Sequence[Iterable[Round]], *, chunks: int, root: int = 0,
           clock: RoundClock | TimelineClock | None = None) -> Recording:
    """Return what the schedules of all ranks do, which must have been proved, by `clock` or else in rounds."""
    row = collective_row(collective)
    recorder = (_Recorder if row.output.where != "nowhere" else _Arrivals)(row, len(schedules), root, chunks)
    recorder.clock = clock or RoundClock(len(schedules))
    replay(schedules, recorder)
    return recorder.recording()


class _Recorder:
    """The observer of a replay: all ranks' buffers, and what has happened."""

    clock: RoundClock | TimelineClock

    def __init__(self, row: Collective, size: int, root: int, chunks: int) -> None:
        self.row, self.size, self.root, self.chunks = row, size, root, chunks
        self.per_block = chunks // size if row.blocks else chunks
        self.inputs = tuple(row.input.exists(rank, root) for rank in range(size))
        self.held: list[dict[Key, int]] = [{} for _ in range(size)]
        self.messages: list[RecordedMessage] = []
        self.writes: list[RecordedWrite] = []
        self._contents: list[Content] = []
        self._numbers: dict[Content, int] = {}
        self._steps: list[Round] = [()] * size
        self._came: list[dict[int, tuple[int, ...]]] = [{} for _ in range(size)]

    def begin(self, rank: int, steps: Round) -> None:
        self.clock.begin(rank)
        self._steps[rank] = steps
        self._came[rank] = {index: self._read(rank, step.src) for index, step in enumerate(steps)
                            if isinstance(step, Send | Copy | Reduce)}

    def meet(self, sender: int, sent: int, receiver: int, received: int) -> None:
        contents, step = self._came[sender][sent], self._steps[sender][sent]
        chunks = step.src.count if isinstance(step, Send) else 0
        self._came[receiver][received] = contents
        self.messages.append(RecordedMessage(sender, receiver, *self.clock.meet(sender, receiver), chunks, contents))

    def finish(self, rank: int) -> None:
        time = self.clock.finish(rank)
        for index, step in enumerate(self._steps[rank]):
            if not isinstance(step, Send):
                self._write(rank, time, step, self._came[rank][index])

    def number(self, content: Content) -> int:
        """Return the number of a content, the same for the same one."""
        known = self._numbers.setdefault(content, len(self._numbers))
        if known == len(self._contents):
            self._contents.append(content)
        return known

    def _read(self, rank: int, part: Slice) -> tuple[int, ...]:
        chunks = range(part.first, part.first + part.count)
        if part.buffer == "input":
            return tuple(self.number(Content(chunk, 1 << rank)) for chunk in chunks)
        return tuple(self.held[rank][part.buffer, chunk] for chunk in chunks)

    def _write(self, rank: int, time: float, step: Recv | RecvReduce | Copy | Reduce, came: tuple[int, ...]) -> None:
        if isinstance(step, RecvReduce | Reduce):
            came = tuple(map(self._combined, self._read(rank, step.dst), came))
        self._keep(rank, time, step.dst, came)

    def _combined(self, old: int, new: int) -> int:
        chunk, ranks = self._contents[old]
        return self.number(Content(chunk, ranks | self._contents[new].ranks))

    def _keep(self, rank: int, time: float, part: Slice, contents: tuple[int, ...]) -> None:
        for place, content in enumerate(contents, part.first):
            self.held[rank][part.buffer, place] = content
        self.writes.append(RecordedWrite(time, rank, part.buffer, part.first, contents))

    def wanted(self, rank: int) -> tuple[int, ...]:
        """Return what the output of `rank` has to hold."""
        if not self.row.output.exists(rank, self.root):
            return ()
        pieces = (self.row.result(rank, self.size, self.root, self.per_block, index)
                  for index in range(self.chunks if self.row.output.blocks else self.per_block))
        return tuple(self.number(Content(piece.chunk, sum(1 << one for one in piece.ranks))) if piece.ranks else NOBODY
                     for piece in pieces)

    def recording(self) -> Recording:
        """Return all that was seen, in the order of time."""
        wanted = tuple(map(self.wanted, range(self.size)))
        moments = {0.0, *(message.end for message in self.messages), *(write.time for write in self.writes)}
        return Recording(self.row, self.size, self.chunks, tuple(sorted(moments)), _together(self.messages),
                         tuple(sorted(self.writes, key=lambda write: write.time)), tuple(self._contents), wanted,
                         self.inputs)


class _Arrivals(_Recorder):
    """A barrier's recorder: no data moves, so that one chunk stands for whom a rank knows to have arrived."""

    def __init__(self, row: Collective, size: int, root: int, chunks: int) -> None:
        super().__init__(row, size, root, chunks)
        for rank in range(size):
            self._keep(rank, 0.0, Slice("output", 0), (self.number(Content(0, 1 << rank)),))

    def _read(self, rank: int, part: Slice) -> tuple[int, ...]:
        return (self.held[rank]["output", 0],)

    def _write(self, rank: int, time: float, step: Step, came: tuple[int, ...]) -> None:
        known = self.held[rank]["output", 0]
        self._keep(rank, time, Slice("output", 0), tuple(self._combined(known, content) for content in came))

    def wanted(self, rank: int) -> tuple[int, ...]:
        return (self.number(Content(0, (1 << self.size) - 1)),)


def _together(messages: Iterable[RecordedMessage]) -> tuple[RecordedMessage, ...]:
    """Return the messages in the order of time, those that share a link from the same moment on as one."""
    joined: dict[tuple[float, int, int, float], RecordedMessage] = {}
    for message in messages:
        key = (message.start, message.sender, message.receiver, message.end)
        before = joined.get(key, message._replace(chunks=0, contents=()))
        joined[key] = before._replace(chunks=before.chunks + message.chunks,
                                      contents=(*before.contents, *message.contents))
    return tuple(joined[key] for key in sorted(joined))
