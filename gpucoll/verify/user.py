"""Check and prove a user's algorithm before anything runs it, and count its costs.

Each fault is an ArgumentError with code GC-PROOF. The message names rank, round and chunk, and shows the contents of
the buffers involved.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, NamedTuple

from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Round, Rounds, Send, Slice, Step
from gpucoll.errors import ArgumentError
from gpucoll.verify.symbolic import Content, ScheduleError, SymbolicMemory, Turn, contributions, replay

# Beyond these numbers the generator is assumed never to end.
ROUND_LIMIT, CHUNK_LIMIT = 1 << 17, 1 << 20
SHOWN_RANKS, SHOWN_CHUNKS = 4, 12  # the most shown in the picture of an error
BUFFERS = ("input", "output", "scratch")
STEP_TYPES = (Send, Recv, RecvReduce, Copy, Reduce)


class Claim(NamedTuple):
    """A user's algorithm for one collective, size and set of options: the object of a proof."""

    collective: str
    name: str
    make: Callable[..., Iterable[Any]]
    size: int
    chunks: int
    root: int
    options: tuple[tuple[str, Any], ...]
    is_for_some: bool = False  # whether the algorithm declares its sizes

    def rounds(self, rank: int) -> Rounds:
        """Yield the rounds of `rank` with plain integers; raise ArgumentError for invalid rounds."""
        where, number = f"{self.collective} by {self.name} for {self.size} ranks: rank {rank}", 0
        try:
            for number, steps in enumerate(self.make(rank, self.size, **dict(self.options)), 1):
                if not isinstance(steps, tuple | list) or isinstance(steps, STEP_TYPES) or number > ROUND_LIMIT:
                    more = f"is one of more than {ROUND_LIMIT}: does it ever end?"
                    what = more if number > ROUND_LIMIT else f"is {steps!r:.80}, and not a tuple of steps"
                    raise refused(f"{where}, round {number}, no chunk: it {what}")
                yield tuple(_step(f"{where}, round {number}", step, rank, self.size) for step in steps)
        except (ArgumentError, GeneratorExit):
            raise
        except Exception as error:
            raise refused(f"{where}, round {number + 1}, no chunk: the generator raised {type(error).__name__}: "
                          f"{error}") from error


def refused(why: str) -> ArgumentError:
    """Return the error of a proof that fails."""
    return ArgumentError(why, code="GC-PROOF")


def _step(where: str, step: Any, rank: int, size: int) -> Step:
    """Return the step with plain integers; raise ArgumentError for an object that is no valid step."""
    if not isinstance(step, STEP_TYPES):
        raise refused(f"{where}, no chunk: {step!r:.80} is no step: Send, Recv, RecvReduce, Copy or Reduce")
    parts = list[Any]()
    try:
        for value in step:
            if isinstance(value, Slice):
                value = Slice(value.buffer, operator.index(value.first), operator.index(value.count))
                if value.buffer not in BUFFERS or not 0 <= value.count <= CHUNK_LIMIT or abs(value.first) > CHUNK_LIMIT:
                    raise TypeError
            parts.append(value if isinstance(value, Slice) else operator.index(value))
        same = [isinstance(part, Slice) for part in parts] == [True, isinstance(step, Copy | Reduce)]
    except TypeError:
        same = False
    if not same:
        raise refused(f"{where}, no chunk: {step!r:.200} is no step: slices are Slice(buffer, first, count) of "
                      "input, output or scratch, and the peer is a rank")
    made: Step = type(step)(*parts)
    if not isinstance(made, Copy | Reduce) and (not 0 <= made.peer < size or made.peer == rank):
        place = made.src if isinstance(made, Send) else made.dst
        raise refused(f"{where}, {place.buffer} chunk {place.first}: {made}: the peer must be another rank of "
                      f"0..{size - 1}")
    return made


@functools.lru_cache(maxsize=1024)
def proved(claim: Claim) -> tuple[str, ...]:
    """Prove a claim and return a digest of each rank's rounds, and last a digest of all ranks' rounds."""
    what = f"{claim.collective} by {claim.name} for {claim.size} ranks is wrong"
    try:
        memory = SymbolicMemory(COLLECTIVES[claim.collective], claim.size, claim.root, claim.chunks)
    except ScheduleError as error:
        raise refused(f"{what}: {error.args[0]}") from None
    digests = [hashlib.blake2b(digest_size=4) for _ in range(claim.size)]

    def noted(rank: int) -> Rounds:
        for steps in claim.rounds(rank):
            digests[rank].update(repr(steps).encode())
            yield steps

    try:
        memory.prove([*map(noted, range(claim.size))])
    except ScheduleError as error:
        raise refused(f"{what}: {error.args[0]}\n{picture(memory, error)}{_advice(claim)}") from None
    except ArgumentError as error:
        raise refused(f"{error.args[0]}{_advice(claim)}") from error.__cause__
    each = [one.hexdigest() for one in digests]
    return (*each, hashlib.blake2b("".join(each).encode(), digest_size=4).hexdigest())


def _advice(claim: Claim) -> str:
    """Return the end of an error: how an algorithm declares its sizes; "" if the algorithm already does."""
    if claim.is_for_some:
        return ""
    return f"\nif the algorithm does not support {claim.size} ranks, pass unfit=lambda size, nodes: a reason, or None"


def as_proved(claim: Claim, rank: int) -> Rounds:
    """Return the rounds of `rank`; raise ArgumentError if the rounds differ from the proved rounds."""
    # The generator runs again for execution; code that depends on more than its arguments would escape the proof.
    rounds = [*claim.rounds(rank)]
    digest = hashlib.blake2b("".join(map(repr, rounds)).encode(), digest_size=4).hexdigest()
    if digest != proved(claim)[rank]:
        raise refused(f"{claim.collective} by {claim.name}: rank {rank} does not yield the proved rounds; a "
                      "generator must depend on its arguments only")
    return iter(rounds)


def picture(memory: SymbolicMemory, error: ScheduleError) -> str:
    """Return as text the buffers of the ranks in an error, and of the partners in the round."""
    ranks = dict.fromkeys(error.ranks)
    for rank in error.ranks:
        ranks |= {step.peer: None for step in memory.ranks[rank].steps if not isinstance(step, Copy | Reduce)}
    lines = ["who holds what then (chunk=which of the inputs, of the ranks):"]
    for rank in [*ranks][:SHOWN_RANKS]:
        content = memory.ranks[rank].content
        lines += [f"  rank {rank} {buffer:8}{_row(content[buffer], len(memory.ranks))}"
                  for buffer in BUFFERS[1:] if content[buffer]] or [f"  rank {rank} its input only"]
    return "\n".join(lines)


def _row(held: dict[int, Content], size: int) -> str:
    words = [f" {chunk}={content[0]} of " + "+".join(
        f"{rank}" if times == 1 else f"{times}x{rank}" for rank, times in enumerate(contributions(content, size))
        if times) for chunk, content in sorted(held.items())]
    return "".join(f" [{word[1:]}]" for word in words[:SHOWN_CHUNKS]) + " ..." * (len(words) > SHOWN_CHUNKS)


@functools.lru_cache(maxsize=1024)
def counted(claim: Claim) -> dict[str, Fraction]:
    """Return the fields of `Cost`, counted by a replay, as shares of the larger of input and output."""
    proved(claim)
    ledger = Ledger(claim.size)
    replay(map(claim.rounds, range(claim.size)), ledger)
    return ledger.costs(claim.chunks)


class Ledger:
    """An observer of `replay` that adds up, in chunks, the work of all ranks.

    A message begins when both ranks have begun their rounds, and takes as long as its number of chunks; a round ends
    with the last message. Messages of a round from one rank to another share a link, all others have a link each.
    """

    def __init__(self, size: int) -> None:
        self.rounds: int = 0
        self.gaps: int = 0
        self.length: list[int] = [0] * size
        self._ends = [0] * size  # of the longest chain: before, and in, the round
        self.moved: list[list[int]] = [[0, 0, 0] for _ in range(size)]  # chunks sent, received, reduced
        self._steps: list[Round] = [()] * size

    def costs(self, chunks: int) -> dict[str, Fraction]:
        """Return the fields of `Cost`; bytes are shares of the larger of input and output, of `chunks` chunks."""
        sent, received, reduced = (Fraction(max(column), chunks) for column in zip(*self.moved, strict=True))
        return {"rounds": Fraction(self.rounds), "path": Fraction(max(self.length), chunks), "sent": sent,
                "received": received, "reduced": reduced, "gaps": Fraction(self.gaps)}

    def begin(self, rank: int, steps: Round) -> None:
        self._steps[rank], self._ends[rank] = steps, self.length[rank]
        for step in steps:
            self.moved[rank][0] += step.src.count if isinstance(step, Send) else 0
            self.moved[rank][1] += step.dst.count if isinstance(step, Recv | RecvReduce) else 0
            self.moved[rank][2] += step.dst.count if isinstance(step, Reduce | RecvReduce) else 0
        if rank == 0:
            for kinds in (Send, Recv | RecvReduce):
                self.gaps += max(0, len({step[1] for step in steps if isinstance(step, kinds)}) - 1)

    def meet(self, turn: Turn, sender: int, sent: int, receiver: int, received: int) -> None:
        chunks = sum(step.src.count for step in self._steps[sender] if isinstance(step, Send) and step.peer == receiver)
        length = max(self.length[sender], self.length[receiver]) + chunks
        for rank in (sender, receiver):
            self._ends[rank] = max(self._ends[rank], length)

    def finish(self, turn: Turn, rank: int) -> None:
        self.length[rank], self.rounds = self._ends[rank], max(self.rounds, turn.message)
