"""Prove schedules: run all ranks symbolically and compare each rank's output with the collective's promise.

The content of a chunk is a pair: the chunk of the inputs that it is made of, and a count of contributions for each
rank. The counts are 16-bit digits of one integer, so that combining is an addition, and "each rank once" is a
constant.

Each fault able to break an executor is an error here: a slice out of range, a read of an unwritten chunk, a write to
input, two writers of one destination in a round, unequal lengths, a message without a partner, ranks waiting for each
other, a contribution lost or counted twice. In a barrier no data move: the content is the set of ranks known to have
entered, and each message carries the sender's set.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from gpucoll.core.collectives import Collective, Side, collective
from gpucoll.core.schedule import Copy, Recv, Reduce, Round, Send, Slice, Step
from gpucoll.errors import GpucollError

DIGIT = 16  # bits of a count
READING, STORING, LOCAL = (Send, Copy, Reduce), (Copy, Recv), (Copy, Reduce)

Content: TypeAlias = tuple[int, int]  # chunk of the inputs, contributions


class ScheduleError(GpucollError):
    """An error in a schedule; the message has rank, round and reason."""

    default_code = "GC-PROOF"
    step: tuple[int, int, int] | None = None  # rank, round and index (from 0) of the wrong step


class Proof(NamedTuple):
    """The result of a proof: the largest number of rounds of a rank, and the number of messages of all ranks."""

    rounds: int
    messages: int


def prove(name: str, schedules: Sequence[Iterable[Round]], *, chunks: int, root: int = 0) -> Proof:
    """Prove the rounds in `schedules`, one iterable per rank, for collective `name`; raise ScheduleError."""
    return SymbolicMemory(collective(name), len(schedules), root, chunks).prove(schedules)


class Turn(NamedTuple):
    """A time: the number of messages on the longest chain so far, and the rounds without messages since then."""

    message: int
    idle: int


def replay(schedules: Iterable[Iterable[Round]], observer: Any) -> int:
    """Run all ranks to their end and return the number of messages; raise ScheduleError if some ranks wait for ever.

    The k-th Send from a to b meets the k-th receive of b from a. A round ends when all its messages have met. This is
    as strict as an executor without any buffering: a schedule that ends here ends on every transport.

    The replay calls the observer: ``begin(rank, steps)`` when a round begins, ``meet(turn, sender, sent, receiver,
    received)`` when the two ends of a message meet (`sent` and `received` are indices in the rounds), and
    ``finish(turn, rank)`` when all messages of a round have met. The turn of a message is one after the turns of both
    ranks' rounds before. The turn of a round is the turn of its last message.
    """
    rounds = [iter(one) for one in schedules]
    steps: list[Round] = [()] * len(rounds)
    now, ends = ([Turn(0, 0)] * len(rounds) for _ in range(2))
    # For each rank: the number of its round, and the number of messages of the round still without their partner.
    number, left = [0] * len(rounds), [0] * len(rounds)
    # Ends of messages posted before their partner, by (sender, receiver, whether the end is a send), in order.
    waiting: dict[tuple[int, int, bool], deque[tuple[int, int]]] = defaultdict(deque)
    messages, ready = 0, deque(range(len(rounds)))
    while ready:
        rank = ready.popleft()
        begun = next(rounds[rank], None)
        if begun is None:
            continue
        observer.begin(rank, begun)
        ends[rank] = now[rank]._replace(idle=now[rank].idle + 1)
        steps[rank], number[rank] = begun, number[rank] + 1
        posts = [index for index, step in enumerate(begun) if not isinstance(step, LOCAL)]
        left[rank], ended = len(posts), [] if posts else [rank]
        for index in posts:
            peer, sends, post = begun[index][1], isinstance(begun[index], Send), (rank, index)
            pair = (rank, peer) if sends else (peer, rank)
            # The other end may have been posted before: meet the oldest such end, else wait.
            if not waiting[*pair, not sends]:
                waiting[*pair, sends].append(post)
                continue
            other, messages = waiting[*pair, not sends].popleft(), messages + 1
            turn = Turn(max(now[rank], now[other[0]]).message + 1, 0)
            observer.meet(turn, *(post + other if sends else other + post))
            for end in (rank, other[0]):
                ends[end] = max(ends[end], turn)
                left[end] -= 1
                ended += [end] * (not left[end])
        for done in ended:
            now[done] = ends[done]
            observer.finish(now[done], done)
        ready += ended
    # No rank is ready, so an end left over never meets its partner.
    for rank, index in (post for posts in waiting.values() for post in posts):
        step = steps[rank][index]
        error = ScheduleError(f"rank {rank}, round {number[rank]}, {place_of(step)}: {step} waits for ever: the "
                              "partner has no matching step, or waits too", ranks=(rank,))
        error.step = rank, number[rank] - 1, index
        raise error
    return messages


def place_of(step: Step) -> str:
    """Return in words the chunks sent or written by a step.

    >>> place_of(Copy(Slice("input", 0, 2), Slice("output", 4, 2)))
    'output chunks 4 to 5'
    """
    part = step.src if isinstance(step, Send) else step.dst
    return f"{part.buffer} chunk {part.first}" if part.count == 1 else \
        f"{part.buffer} chunks {part.first} to {part.first + part.count - 1}"


class SymbolicMemory:
    """The buffers of all ranks; an observer of `replay`."""

    def __init__(self, row: Collective, size: int, root: int, chunks: int) -> None:
        if (row.blocks and chunks % size) or (row.ragged and chunks != size):
            many = "not one for each" if row.ragged else "no multiple"
            raise ScheduleError(f"{row.name}: {chunks} chunks are {many} of {size} blocks")
        self.ranks: list[_Rank] = [_Rank(row, rank, size, root, chunks) for rank in range(size)]

    def prove(self, schedules: Sequence[Iterable[Round]]) -> Proof:
        """Run the schedules and check every rank's output; raise ScheduleError for a wrong schedule."""
        messages = replay(schedules, self)
        for rank in self.ranks:
            rank.check_result()
        return Proof(max(rank.round for rank in self.ranks), messages)

    def begin(self, rank: int, steps: Round) -> None:
        self.ranks[rank].begin(steps)

    def meet(self, turn: Turn, sender: int, sent: int, receiver: int, received: int) -> None:
        source, target = self.ranks[sender], self.ranks[receiver]
        src, dst = source.steps[sent].src, target.steps[received].dst  # type: ignore[union-attr]
        if source.lengths(src) != target.lengths(dst):
            raise target.error(target.steps[received], f"the length differs from the length of {src} of rank {sender}")
        target.came[received] = source.came[sent]

    def finish(self, turn: Turn, rank: int) -> None:
        self.ranks[rank].finish()


class _Rank:
    """The symbolic buffers of one rank, and the round under way."""

    def __init__(self, row: Collective, rank: int, size: int, root: int, chunks: int) -> None:
        self.row, self.rank, self.size, self.root, self.chunks = row, rank, size, root, chunks
        self.per_block = chunks // size if row.blocks else chunks
        self.limits = {"input": self._extent(row.input), "output": self._extent(row.output)}
        own = {chunk: (chunk, 1 << DIGIT * rank) for chunk in range(self.limits["input"])}
        self.content: dict[str, dict[int, Content]] = {"input": own, "output": {}, "scratch": {}}  # by chunk
        self.is_barrier = row.output.where == "nowhere"
        if self.is_barrier:
            self.content["output"][0] = (0, 1 << DIGIT * rank)
        self.round = 0
        self.steps: Round = ()
        self.came: dict[int, list[Content]] = {}  # by step: contents read at the beginning, or received

    def _extent(self, side: Side) -> int:
        if not side.exists(self.rank, self.root):
            return 0
        return self.chunks if side.blocks else self.per_block

    def error(self, step: Step | None, why: str) -> ScheduleError:
        """Return the error that names rank, round, chunks and step."""
        where = f"{self.row.name}: rank {self.rank}, round {self.round}"
        if step is None:
            return ScheduleError(f"{where}, {why}", ranks=(self.rank,))
        error = ScheduleError(f"{where}, {place_of(step)}: {step}: {why}", ranks=(self.rank,))
        error.step = self.rank, self.round - 1, self.steps.index(step)
        return error

    def begin(self, steps: Round) -> None:
        """Begin a round: check the steps, and read all sources before anything is written."""
        self.steps, self.round = steps, self.round + 1
        written: dict[tuple[str, int], Slice] = {}
        for step in steps:
            self._check_slices(step)
            self._check_target(step, written)
        # A round reads everything before writing anything; received contents follow in `SymbolicMemory.meet`.
        self.came = {index: self._read(step, step[0]) for index, step in enumerate(steps) if isinstance(step, READING)}

    def _check_slices(self, step: Step) -> None:
        for part in step:
            if isinstance(part, Slice):
                limit = self.limits.get(part.buffer, part.first + part.count)
                if part.first < 0 or part.count < 0 or part.first + part.count > limit:
                    raise self.error(step, f"{part} is not in the {limit} chunks of this rank's {part.buffer}")
                if part.buffer == "scratch" and self.row.ragged:
                    raise self.error(step, "schedules for blocks of unequal length have no scratch")
        if isinstance(step, Copy | Reduce) and self.lengths(step.src) != self.lengths(step.dst):
            raise self.error(step, "the lengths of source and destination differ")

    def _check_target(self, step: Step, written: dict[tuple[str, int], Slice]) -> None:
        """Check a destination: not input; one Copy or Recv, listed first; equal to or disjoint from the others."""
        if isinstance(step, Send):
            return
        target = step.dst
        if target.buffer == "input":
            raise self.error(step, "writes to input")
        for chunk in _chunks(target):
            key = target.buffer, chunk
            if key in written and (isinstance(step, STORING) or written[key] != target):
                raise self.error(step, "an earlier step of the round writes there")
            written[key] = target

    def lengths(self, part: Slice) -> list[object]:
        """Return the length classes of the chunks of `part`; only chunks of one class are known to be equally long.

        The i-th chunks of all blocks are one class, unless blocks differ in length.
        """
        if self.row.ragged is None:
            return [chunk % self.chunks % self.per_block for chunk in _chunks(part)]
        return [self._ragged(part.buffer, chunk) for chunk in _chunks(part)]

    def _ragged(self, buffer: str, chunk: int) -> object:
        """Return the ranks that determine the length of a chunk, in a collective of unlike blocks.

        A side without blocks, one array, depends on its own rank only.
        """
        side = self.row.input if buffer == "input" else self.row.output
        other = chunk if side.blocks else None
        source, target = (self.rank, other) if buffer == "input" else (other, self.rank)
        return {"source": source, "target": target, "pair": (source, target)}[self.row.ragged or "pair"]

    def _read(self, step: Step, part: Slice) -> list[Content]:
        if self.is_barrier and not part.count:
            return [self.content["output"][0]]
        try:
            return list(map(self.content[part.buffer].__getitem__, _chunks(part)))
        except KeyError as missing:
            raise self.error(step, f"reads {(part.buffer, missing.args[0])}, written by no step") from None

    def finish(self) -> None:
        """Apply the writes of the round, in listed order."""
        for index, step in enumerate(self.steps):
            if self.is_barrier and index in self.came and not step[0].count:
                self.content["output"][0] = (0, self.content["output"][0][1] | self.came[index][0][1])
            elif not isinstance(step, Send):
                contents = zip(_chunks(step.dst), self.came[index], strict=True)
                held = self.content[step.dst.buffer]
                if isinstance(step, STORING):
                    held.update(contents)
                    continue
                # Only contents of one chunk combine. A contribution counted twice is found by `check_result`.
                for place, (chunk, counts) in contents:
                    old = held.get(place)
                    if old is None or old[0] != chunk:
                        raise self.error(step, f"combines chunk {chunk} into {_words(old, self.size)}")
                    held[place] = (chunk, old[1] + counts)

    def check_result(self) -> None:
        """Raise ScheduleError if the output differs from the promise of the collective."""
        for index, wanted in enumerate(self.wanted()):
            held = self.content["output"].get(index)
            if wanted[1] and held != wanted:
                cut = f"; the data is cut into {self.chunks} chunks; chunks= sets their number" if held is None else ""
                raise self.error(None, f"output chunk {index}: at the end it holds {_words(held, self.size)}, "
                                       f"not {_words(wanted, self.size)}{cut}")

    def wanted(self) -> list[Content]:
        """Return the promised content of each output chunk; no contributions where nothing is promised."""
        pieces = (self.row.result(self.rank, self.size, self.root, self.per_block, index)
                  for index in range(1 if self.is_barrier else self.limits["output"]))
        return [(piece.chunk, _once(piece.ranks)) for piece in pieces]


@functools.lru_cache(maxsize=256)
def _once(ranks: frozenset[int]) -> int:
    return sum(1 << DIGIT * rank for rank in ranks)


def _chunks(part: Slice) -> range:
    return range(part.first, part.first + part.count)


def _words(content: Content | None, size: int) -> str:
    if content is None:
        return "nothing"
    return f"chunk {content[0]} with contributions {contributions(content, size)}"


def contributions(content: Content, size: int) -> list[int]:
    """Return how many times each rank has contributed to a content."""
    return [content[1] >> DIGIT * rank & (1 << DIGIT) - 1 for rank in range(size)]
