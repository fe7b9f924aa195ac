"""MSCCL's steps as rounds: each message and each local step in the first round after the data that it reads.

A message is in the same round of sender and receiver, but an MSCCL program may need other steps between the departure
and the arrival. So a step does not wait for the readers of the chunk that it overwrites: data that is still to be read
stays in its place, and the new data goes to a chunk of scratch.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Round, Send, Slice, Step, joined
from gpucoll.errors import ArgumentError
from gpucoll.msccl.documents import ChunkPlace, XmlProgram, XmlStep
from gpucoll.msccl.order import EventOrder, XmlEvent, ordered, refused
from gpucoll.verify.symbolic import ScheduleError, prove

ROOT = 0


class OriginStep(NamedTuple):
    """A step of a round, with the XML step of its origin, for messages."""

    step: Step
    origin: XmlStep | None


def rounds_of(program: XmlProgram) -> tuple[tuple[Round, ...], ...]:
    """Return the proved rounds of every rank; raise ArgumentError naming the wrong XML step.

    MSCCL's runtime and the tools writing the files disagree on the operand of a reduction of received data (see
    `ordered`). Try both meanings, and accept the first with a proof; if both fail raise the error of the first.
    """
    faults = list[ArgumentError]()
    for local_source in (True, False):
        try:
            return _proved(program, _works(program, ordered(program, local_source=local_source)))
        except ArgumentError as error:
            faults.append(error)
    raise faults[0]


def _proved(program: XmlProgram, works: list[list[list[OriginStep]]]) -> tuple[tuple[Round, ...], ...]:
    rounds = tuple(tuple(tuple(work.step for work in some) for some in one) for one in works)
    try:
        if program.size > 1:
            prove(program.row.name, rounds, chunks=program.chunks, root=ROOT)
    except ScheduleError as error:
        origin = None
        if error.step is not None:
            rank, number, index = error.step
            origin = works[rank][number][index].origin
        where = "" if origin is None else f"{origin}: "
        raise ArgumentError(f"{where}{error.args[0]}", code="GC-PROOF", ranks=error.ranks) from None
    return rounds


def _works(program: XmlProgram, order: EventOrder) -> list[list[list[OriginStep]]]:
    """Return the steps of every round of every rank."""
    rounds = _rounds(program, order)
    works = sorted(_steps(program, order, rounds), key=lambda work: work[:3])
    made: list[list[list[OriginStep]]] = [[] for _ in range(program.size)]
    for (rank, _), some in itertools.groupby(works, key=lambda work: work[:2]):
        made[rank].append([work for *_, work in some])
    return made


def _rounds(program: XmlProgram, order: EventOrder) -> list[int]:
    """Return the round of each event; a send has the round of its receive."""
    written: list[dict[ChunkPlace, int]] = [{} for _ in range(program.size)]
    ready, rounds = dict[int, int](), [0] * len(order.events)  # by send: the round after the last of the data
    for index, event in enumerate(order.events):
        there = written[event.step.gpu]
        after = max((there[place] + 1 for place in event.reads + event.operand if place in there), default=0)
        if event.kind == "send":
            ready[index] = after
            continue
        rounds[index] = max(after, ready[order.sender[index]]) if event.kind == "receive" else after
        if event.kind == "receive":
            rounds[order.sender[index]] = rounds[index]
        there.update(dict.fromkeys(event.writes, rounds[index]))
    return rounds


def _steps(program: XmlProgram, order: EventOrder, rounds: list[int]) -> Iterator[tuple[int, int, int, OriginStep]]:
    """Yield (rank, round, class, step); the class orders a round: 0 sends, 1 copies, 2 receives, 3 reductions."""
    # Events come in a possible order: reading a place at its event gives the slice holding the place's data then.
    where, sent = _Where(program), dict[int, list[Slice]]()
    for index, event in enumerate(order.events):
        step, gpu, number = event.step, event.step.gpu, rounds[index]
        if event.kind == "send":
            sent[index] = where.read(event, event.reads, number)
            continue
        is_local = event.kind == "local"
        came = where.read(event, event.reads, number) if is_local else sent.pop(order.sender[index])
        operands = where.read(event, event.operand, number)
        targets = where.write(event, [where.kind(part) for part in came], number)
        for part, operand, dst in joined(zip(came, operands or came, targets, strict=True)):
            # A reduction combines into `dst`, so the operand has to be in `dst` first.
            if operands and operand != dst:
                yield gpu, number, 1, OriginStep(Copy(operand, dst), step)
            if not is_local:
                source = order.events[order.sender[index]].step
                yield source.gpu, number, 0, OriginStep(Send(part, gpu), source)
                yield gpu, number, 2, OriginStep((RecvReduce if operands else Recv)(dst, source.gpu), step)
            elif operands or part != dst:
                yield gpu, number, 3 if operands else 1, OriginStep((Reduce if operands else Copy)(part, dst), step)
    for rank in range(program.size):
        for number, moves in itertools.groupby(where.left(rank), key=lambda move: move[0]):
            for src, dst in joined(move[1:] for move in moves):
                yield rank, number, 1, OriginStep(Copy(src, dst), None)


class _Where:
    """The mapping from a program's places to slices of gpucoll's buffers, updated event by event.

    The input is never written. The length of a chunk depends on the position in its block, so a chunk is stored only at
    indices of scratch or output with the same position.
    """

    def __init__(self, program: XmlProgram) -> None:
        self._program, self._per_block = program, program.per_block
        row, size = program.row, program.size
        self._now: list[dict[ChunkPlace, Slice]] = [{} for _ in range(size)]
        self._spare: list[dict[Any, list[Slice]]] = [collections.defaultdict(list) for _ in range(size)]
        # By slice: the first round in which it may be overwritten, after its last write and not before its last read.
        self._free: list[dict[Slice, int]] = [collections.defaultdict(int) for _ in range(size)]
        self._count = [collections.Counter[int]() for _ in range(size)]
        # Fresh chunks of scratch start at a whole block after the program's own scratch.
        self._base = -(-program.scratch // self._per_block) * self._per_block
        for rank in range(size):
            if row.input.exists(rank, ROOT):
                for chunk in range(program.chunks if row.input.blocks else self._per_block):
                    self._now[rank][self._first(rank, chunk)] = Slice("input", chunk)

    def _first(self, rank: int, chunk: int) -> ChunkPlace:
        if self._program.in_place and self._program.row.name in ("all_gather", "gather"):
            return "o", chunk + rank * self._per_block
        return "i", chunk

    def _result(self, rank: int, place: ChunkPlace) -> int | None:
        """Return the number of the chunk of output at a place; None for places outside the output."""
        row, (buffer, chunk) = self._program.row, place
        if not row.output.exists(rank, ROOT):
            return None
        if self._program.in_place and row.name not in ("all_gather", "gather"):
            if buffer != "i":
                return None
            chunk -= rank * self._per_block if row.name in ("reduce_scatter", "scatter") else 0
        elif buffer != "o":
            return None
        return chunk if 0 <= chunk < (self._program.chunks if row.output.blocks else self._per_block) else None

    def kind(self, part: Slice) -> int:
        """Return the position of a chunk in its block; the position determines the chunk's length."""
        return part.first % self._per_block

    def read(self, event: XmlEvent, places: tuple[ChunkPlace, ...], number: int) -> list[Slice]:
        """Return the slices of the places, read in round `number`; raise ArgumentError for a place never written."""
        now, free = self._now[event.step.gpu], self._free[event.step.gpu]
        for place in places:
            if place not in now:
                raise refused(event.step, f"reads {place[0]}[{place[1]}], written by no step")
            free[now[place]] = max(free[now[place]], number)
        return [now[place] for place in places]

    def write(self, event: XmlEvent, kinds: list[int], number: int) -> list[Slice]:
        """Choose a slice for each place written by `event` in round `number`, note the slices, and return them."""
        gpu = event.step.gpu
        targets = [self._target(gpu, place, kind, number) for place, kind in zip(event.writes, kinds, strict=True)]
        self._now[gpu].update(zip(event.writes, targets, strict=True))
        self._free[gpu].update(dict.fromkeys(targets, number + 1))
        return targets

    def _target(self, gpu: int, place: ChunkPlace, kind: int, number: int) -> Slice:
        # Write results directly to the output, other data to the place's present slice or to the program's own index of
        # scratch: if the position in the block fits, and if no step still reads there.
        result, choices, spare = self._result(gpu, place), list[Slice](), self._spare[gpu][place, kind]
        if result is not None:
            choices.append(Slice("output", result))
        if place in self._now[gpu]:
            choices.append(self._now[gpu][place])
        if place[0] == "s":
            choices.append(Slice("scratch", place[1]))
        for part in (*choices, *spare):
            if part.buffer != "input" and self.kind(part) == kind and self._free[gpu][part] <= number:
                return part
        spare.append(self._fresh(gpu, kind))
        return spare[-1]

    def _fresh(self, gpu: int, kind: int) -> Slice:
        """Return an unused chunk of scratch, of position `kind` in a block."""
        self._count[gpu][kind] += 1
        return Slice("scratch", self._base + (self._count[gpu][kind] - 1) * self._per_block + kind)

    def left(self, rank: int) -> list[tuple[int, Slice, Slice]]:
        """Return the copies of results that are elsewhere: round, slice, and chunk of output; in order."""
        copies, free = list[tuple[int, Slice, Slice]](), self._free[rank]
        for place, part in sorted(self._now[rank].items()):
            result = self._result(rank, place)
            if result is not None and part != (home := Slice("output", result)):
                copies.append((max(free[home], 0 if part.buffer == "input" else free[part]), part, home))
        return sorted(copies, key=lambda copy: copy[0])
