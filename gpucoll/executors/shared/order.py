"""What waits for what, where ranks read each other's memory instead of sending messages.

Every rank shows one number, its mark: 2 k once it has entered its round k, all that it wrote before being there to be
read; 2 k + 1 once it has, moreover, read all that it reads in round k. Since all ranks' schedules are known, a rank
knows the mark of the sender that it must see before it reads, and the marks of its readers before it overwrites what
they read. An `Order` is one rank's schedule as a list of such instructions.

A peer on another node gets and sends messages. Its number in a `Wait` is then that of the message, counted down from
-1.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Round, Send, Slice, Step


class Tell(NamedTuple):
    """Show `mark`."""

    mark: int


class Wait(NamedTuple):
    """Go on when `peer` shows `mark` or more; a negative peer is a message (see above)."""

    peer: int
    mark: int = 0


class Source(NamedTuple):
    """`part` of a peer's buffers."""

    peer: int
    part: Slice


class Message(NamedTuple):
    """What came as message `number`."""

    number: int


class Form(NamedTuple):
    """dst = op(...op(operands[0], operands[1])...); `aside`: in memory of its own, until `Land`.

    Every piece of it that is formed is written to the `copies` too.
    """

    dst: Slice
    operands: tuple[Slice | Source | Message, ...]
    aside: bool = False
    copies: tuple[Source, ...] = ()


class Land(NamedTuple):
    """Copy to `dst` what was formed aside for it."""

    dst: Slice


class Post(NamedTuple):
    """Begin message `number`: send `part` to `peer`, or receive aside what belongs there."""

    number: int
    peer: int
    part: Slice
    sends: bool


Instruction: TypeAlias = Tell | Wait | Form | Land | Post
Chunk: TypeAlias = tuple[str, int]


class Order(NamedTuple):
    """One rank's instructions; `sources` are the peers whose memory it reads.

    `readers` has, for every buffer that others read, the mark that each of them shows when it has done so.
    """

    instructions: tuple[Instruction, ...]
    sources: tuple[int, ...]
    readers: dict[str, dict[int, int]]


class _Result:
    """What the steps of one round make of one destination."""

    def __init__(self, dst: Slice) -> None:
        self.dst = dst
        self.operands: list[Slice | Source | Message] = []
        self.waits: list[Wait] = []

    def is_nothing(self) -> bool:
        """Whether it is a copy onto itself."""
        return self.operands == [self.dst]

    def reads(self) -> Iterator[Chunk]:
        """Yield the chunks of this rank that it needs as they were, but for the destination as the first operand."""
        for index, operand in enumerate(self.operands):
            if isinstance(operand, Slice) and (index or operand != self.dst):
                yield from _chunks(operand)


class Arranger:
    """Makes the order of rank `rank`; `near` are the ranks whose memory it can read, `alias`: input is output."""

    def __init__(self, rank: int, schedules: Callable[[int], Iterable[Round]], near: Collection[int],
                 alias: bool) -> None:
        self._near, self._alias = near, alias
        self._rounds = list(schedules(rank))
        self._arriving: dict[int, Iterator[tuple[int, Slice]]] = {}  # the sends of each peer to this rank
        self._leaving: dict[int, Iterator[int]] = {}  # the rounds in which each peer receives from it
        for peer in sorted({step.peer for steps in self._rounds for step in steps
                            if not isinstance(step, Copy | Reduce)} & {*near}):
            self._arriving[peer], self._leaving[peer] = _between(peer, rank, schedules(peer))
        self._reading: dict[Chunk, dict[int, int]] = collections.defaultdict(dict)
        self._readers: dict[str, dict[int, int]] = collections.defaultdict(dict)
        self._sources: dict[int, None] = {}
        self._passed: dict[int, int] = {}
        self._messages = 0
        self._out: list[Instruction] = []

    def fused(self) -> Order:
        """Return the order of a two_shot all-reduce in one pass: what is reduced goes to everybody while it is at hand.

        The rank that reduces a block is the only one that reads it, so that it may be overwritten in place.
        """
        first, second = self._rounds
        [result] = self._results(first)
        copies = tuple(Source(step.peer, step.src) for step in second if isinstance(step, Send))
        done = {peer: 2 for peer in self._sources}
        form = Form(result.dst, tuple(result.operands), copies=copies)
        return Order((form, Tell(2), *(Wait(*end) for end in done.items())), (*done,),
                     {"input": done, "output": done})

    def order(self) -> Order:
        """Return the order."""
        for number, steps in enumerate(self._rounds):
            self._round(number, steps)
        self._out.append(Tell(2 * len(self._rounds)))
        self._wait(Wait(-1 - number) for number in range(self._messages))
        return Order(tuple(self._out), tuple(self._sources), dict(self._readers))

    def _round(self, number: int, steps: Round) -> None:
        if number:
            self._out.append(Tell(2 * number))
        sent = {chunk for step in steps if isinstance(step, Send) for chunk in self._send(step)}
        results = self._results(steps)
        needed = sent.union(*(result.reads() for result in results))
        late = [result for result in results if not needed.isdisjoint(_chunks(result.dst))]
        for result in results:
            self._wait(result.waits)
            if result not in late:
                self._wait(self._readers_of(result.dst))
            if result.operands:
                self._out.append(Form(result.dst, tuple(result.operands), result in late))
        if late:
            self._out.append(Tell(2 * number + 1))
        for result in late:
            self._wait(self._readers_of(result.dst))
            self._out.append(Land(result.dst))

    def _send(self, step: Send) -> list[Chunk]:
        """Note who reads the source, until which mark; return its chunks."""
        part, peer, mark = self._named(step.src), step.peer, 0
        if peer in self._near:
            mark = 2 * next(self._leaving[peer]) + 1
            self._readers[step.src.buffer][peer] = mark
        else:
            peer = self._post(peer, part, sends=True)
        chunks = _chunks(part)
        for chunk in chunks:
            self._reading[chunk][peer] = mark
        return chunks

    def _post(self, peer: int, part: Slice, *, sends: bool) -> int:
        """Begin a message; return its number in a `Wait`."""
        self._out.append(Post(self._messages, peer, part, sends))
        self._messages += 1
        return -self._messages

    def _results(self, steps: Round) -> list[_Result]:
        results: dict[Slice, _Result] = {}
        for step in steps:
            if not isinstance(step, Send):
                dst = self._named(step.dst)
                result = results.setdefault(dst, _Result(dst))
                if isinstance(step, RecvReduce | Reduce) and not result.operands:
                    result.operands.append(dst)
                self._operand(result, step)
        return [result for result in results.values() if not result.is_nothing()]

    def _operand(self, result: _Result, step: Step) -> None:
        if isinstance(step, Copy | Reduce):
            result.operands.append(self._named(step.src))
        elif step.peer in self._near:
            round_there, part = next(self._arriving[step.peer])
            self._sources[step.peer] = None
            result.operands.append(Source(step.peer, part))
            result.waits.append(Wait(step.peer, 2 * round_there))
        else:
            number = self._post(step.peer, result.dst, sends=False)
            result.operands.append(Message(-1 - number))
            result.waits.append(Wait(number))

    def _wait(self, waits: Iterable[Wait]) -> None:
        """Wait for what has not been waited for yet; every peer has entered round 0 before."""
        for peer, mark in waits:
            if mark > self._passed.get(peer, 0 if peer >= 0 else -1):
                self._passed[peer] = mark
                self._out.append(Wait(peer, mark))

    def _readers_of(self, dst: Slice) -> Iterator[Wait]:
        for chunk in _chunks(dst):
            for peer, mark in self._reading.pop(chunk, {}).items():
                yield Wait(peer, mark)

    def _named(self, part: Slice) -> Slice:
        return part._replace(buffer="output") if self._alias and part.buffer == "input" else part


def _between(peer: int, rank: int, theirs: Iterable[Round]) -> tuple[Iterator[tuple[int, Slice]], Iterator[int]]:
    """Return what `peer` sends to `rank`, with its round, and in which rounds it receives from it."""
    sends, receives = [], []
    for number, steps in enumerate(theirs):
        for step in steps:
            if isinstance(step, Send) and step.peer == rank:
                sends.append((number, step.src))
            elif isinstance(step, Recv | RecvReduce) and step.peer == rank:
                receives.append(number)
    return iter(sends), iter(receives)


def _chunks(part: Slice) -> list[Chunk]:
    return [(part.buffer, part.first + index) for index in range(part.count)]
