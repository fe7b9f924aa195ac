"""Prove a schedule: run all ranks symbolically and hold the result against the collective's promise.

A chunk's content is a pair: which chunk of the inputs it is made of, and how often each
rank has contributed (one 16-bit digit per rank in one integer, so that combining is
addition and "exactly once" is a constant). Everything that could go wrong in an executor
is an error here: a slice out of range, a read of what nobody wrote, a write to input, two
writers of one destination in a round, lengths that differ, a message without a partner,
ranks that wait for each other, a contribution lost or counted twice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from gpucoll import algorithms
from gpucoll.collectives import Collective, Side, collective
from gpucoll.errors import GpucollError
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Round, Schedule, Send, Slice, Step, reads, writes

DIGIT = 16


class ScheduleError(GpucollError):
    """A schedule is wrong; the message says on which rank, in which round, and why."""

    default_code = "GC-SCHEDULE"


class Content(NamedTuple):
    """What a chunk holds: chunk `chunk` of the inputs, with the contributions counted per rank."""

    chunk: int
    counts: int


Message: TypeAlias = list[Content]
Rounds: TypeAlias = Iterable[Round]


class Proof(NamedTuple):
    """A proved schedule: the most rounds of a rank, the messages of all ranks."""

    rounds: int
    messages: int


def verify(name: str, algorithm: str, size: int, *, root: int = 0, segments: int = 1) -> Proof:
    """Prove the schedule of every rank, or raise ScheduleError.

    >>> verify("all_reduce", "ring", 4)
    Proof(rounds=6, messages=24)
    """
    schedules = [algorithms.schedule(name, algorithm, rank=rank, size=size, root=root, segments=segments)
                 for rank in range(size)]
    return prove(name, schedules, chunks=schedules[0].chunks, root=root)


def prove(name: str, schedules: Iterable[Schedule | Rounds], *, chunks: int, root: int = 0) -> Proof:
    """Prove given rounds, one iterable a rank, for collective `name`; raise ScheduleError."""
    row = collective(name)
    rounds = list(schedules)
    ranks = [_Rank(row, rank, len(rounds), root, chunks, iter(schedule)) for rank, schedule in enumerate(rounds)]
    messages = _run(ranks)
    for rank in ranks:
        rank.check_result()
    return Proof(max(rank.round for rank in ranks), messages)


def _run(ranks: list[_Rank]) -> int:
    """Let every rank run its rounds; messages of a round meet as soon as both ends are there."""
    wire = _Wire()
    ready = deque(ranks)
    while ready:
        rank = ready.popleft()
        steps = rank.begin()
        if steps is not None:
            wire.post(rank, steps)
            ready.extend(wire.completed())
    wire.check_idle(ranks)
    return wire.messages


class _Wire:
    """The messages between ranks: the k-th send from a to b meets the k-th receive of b from a."""

    def __init__(self) -> None:
        self.sends: dict[tuple[int, int], deque] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque] = defaultdict(deque)
        self.messages = 0
        self._done: list[_Rank] = []

    def post(self, rank: _Rank, steps: Round) -> None:
        """Begin a round of `rank`; it is complete when all its messages have met."""
        touched = set()
        for index, step in enumerate(steps):
            if isinstance(step, Send):
                touched.add((rank.rank, step.peer))
                self.sends[rank.rank, step.peer].append((rank, index, step, rank.read(step.src)))
            elif isinstance(step, Recv | RecvReduce):
                touched.add((step.peer, rank.rank))
                self.receives[step.peer, rank.rank].append((rank, index, step))
        self._done = [] if rank.open else [rank]
        for pair in touched:
            self._meet(pair)

    def _meet(self, pair: tuple[int, int]) -> None:
        sends, receives = self.sends[pair], self.receives[pair]
        while sends and receives:
            (sender, sent, send, message), (receiver, received, step) = sends.popleft(), receives.popleft()
            if sender.lengths(send.src) != receiver.lengths(step.dst):
                raise receiver.error(step, f"its length differs from that of {send} of rank {sender.rank}")
            self.messages += 1
            receiver.arrived[received] = message
            for rank, index in ((sender, sent), (receiver, received)):
                rank.open.discard(index)
                if not rank.open:
                    self._done.append(rank)

    def completed(self) -> Iterator[_Rank]:
        """Yield the ranks whose round has become complete, its writes applied."""
        for rank in self._done:
            rank.finish()
            yield rank

    def check_idle(self, ranks: list[_Rank]) -> None:
        """Raise where a rank waits for ever."""
        for rank in ranks:
            if rank.open:
                step = rank.steps[min(rank.open)]
                raise rank.error(step, "it waits for ever: its partner has no such step, or waits as well")


class _Rank:
    """One rank's buffers and its place in its schedule."""

    def __init__(self, row: Collective, rank: int, size: int, root: int, chunks: int, rounds: Iterator[Round]) -> None:
        self.row, self.rank, self.size, self.root = row, rank, size, root
        self.chunks = chunks
        self.per_block = chunks // size if row.blocks else chunks
        if row.blocks and chunks % size:
            raise ScheduleError(f"{row.name}: {chunks} chunks are no multiple of {size} blocks")
        self.rounds, self.round = rounds, 0
        self.steps: Round = ()
        self.open: set[int] = set()
        self.arrived: dict[int, Message] = {}
        self.local: dict[int, Message] = {}
        self.content: dict[tuple[str, int], Content] = {}
        self.limits = {"input": self._chunks(row.input), "output": self._chunks(row.output)}
        for chunk in range(self.limits["input"]):
            self.content["input", chunk] = Content(chunk, 1 << DIGIT * rank)

    def _chunks(self, side: Side) -> int:
        if not side.exists(self.rank, self.root):
            return 0
        return self.chunks if side.blocks else self.per_block

    def error(self, step: Step | None, why: str) -> ScheduleError:
        """Return the error that names rank, round and step."""
        return ScheduleError(f"{self.row.name}: rank {self.rank}, round {self.round}: {step}: {why}", ranks=(self.rank,))

    def begin(self) -> Round | None:
        """Take the next round: check it, read what it reads; None at the end."""
        steps = next(self.rounds, None)
        if steps is None:
            return None
        self.steps, self.round = steps, self.round + 1
        self._check(steps)
        self.open = {i for i, step in enumerate(steps) if isinstance(step, Send | Recv | RecvReduce)}
        self.local = {i: self.read(step.src) for i, step in enumerate(steps) if isinstance(step, Copy | Reduce)}
        self.arrived = {}
        return steps

    def _check(self, steps: Round) -> None:
        written: dict[tuple[str, int], Slice] = {}
        for step in steps:
            for part in (*reads(step), writes(step)):
                self._check_range(step, part)
            if isinstance(step, Copy | Reduce) and self.lengths(step.src) != self.lengths(step.dst):
                raise self.error(step, "the lengths of source and destination differ")
            self._check_writes(step, written)

    def _check_range(self, step: Step, part: Slice | None) -> None:
        if part is None:
            return
        limit = self.limits.get(part.buffer, part.first + part.count)
        if part.first < 0 or part.count < 0 or part.first + part.count > limit:
            raise self.error(step, f"{part} is not in the {limit} chunks of this rank's {part.buffer}")

    def _check_writes(self, step: Step, written: dict[tuple[str, int], Slice]) -> None:
        """A destination: never input; one Copy or Recv, first; and equal or disjoint to the others of the round."""
        target = writes(step)
        if target is None:
            return
        if target.buffer == "input":
            raise self.error(step, "it writes to input")
        for key in _keys(target):
            if key in written and (isinstance(step, Copy | Recv) or written[key] != target):
                raise self.error(step, "an earlier step of the round writes there")
            written[key] = target

    def lengths(self, part: Slice) -> tuple[int, ...]:
        """Return the length classes of the chunks: chunk i is as long as chunk i of the first block."""
        return tuple((part.first + i) % self.chunks % self.per_block for i in range(part.count))

    def read(self, part: Slice) -> Message:
        """Return the content of `part`, which must have been written."""
        try:
            return [self.content[key] for key in _keys(part)]
        except KeyError as missing:
            raise self.error(None, f"reads {missing.args[0]}, which nobody has written") from None

    def finish(self) -> None:
        """Apply the writes of a complete round, in listed order."""
        for index, step in enumerate(self.steps):
            if not isinstance(step, Send):
                message = self.arrived[index] if index in self.arrived else self.local[index]
                self._write(step, message, combine=isinstance(step, RecvReduce | Reduce))

    def _write(self, step: Step, message: Message, combine: bool) -> None:
        target = writes(step)
        for key, new in zip(_keys(target), message, strict=True):  # type: ignore[arg-type]
            old = self.content.get(key) if combine else None
            if combine and (old is None or old.chunk != new.chunk):
                raise self.error(step, f"combines {new} into {old}")
            self.content[key] = Content(new.chunk, new.counts + (old.counts if old else 0))

    def check_result(self) -> None:
        """Raise where the output is not what the collective promises."""
        for index in range(self.limits["output"]):
            piece = self.row.result(self.rank, self.size, self.root, self.per_block, index)
            wanted = Content(piece.chunk, sum(1 << DIGIT * rank for rank in piece.ranks))
            found = self.content.get(("output", index))
            if found != wanted:
                raise self.error(None, f"output chunk {index} holds {_words(found, self.size)}, "
                                       f"not {_words(wanted, self.size)}")


def _keys(part: Slice) -> list[tuple[str, int]]:
    return [(part.buffer, chunk) for chunk in range(part.first, part.first + part.count)]


def _words(content: Content | None, size: int) -> str:
    if content is None:
        return "nothing"
    counts = [content.counts >> DIGIT * rank & (1 << DIGIT) - 1 for rank in range(size)]
    return f"chunk {content.chunk} with contributions {counts}"
