"""MSCCL's steps as rounds: each message and each local step in the first round after all its predecessors.

A message is in the same round of sender and receiver. A write comes after earlier writes and reads of the same chunk. A
write may share a round with a read, because rounds read before writing. An MSCCL program may need other steps between
the departure and the arrival of a message. A round has no such delay, so these messages land in scratch first.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Reduce, Round, Send, Slice, Step, joined
from gpucoll.errors import ArgumentError
from gpucoll.msccl.documents import Place, XmlProgram, XmlStep
from gpucoll.msccl.order import Order, Touched, XmlEvent, ordered, refused
from gpucoll.verify.symbolic import ScheduleError, prove

# A node is ("move", event), a message or a local step, or ("land", event), the local step moving a message received
# into scratch to its destination. An edge to a successor is 1 for "in a later round", 0 for "in no earlier round".
Node: TypeAlias = tuple[str, int]
Edges: TypeAlias = dict[Node, dict[Node, int]]
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
            return _proved(program, _Rounds(program, ordered(program, local_source=local_source)).works())
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


class _Rounds:
    """The conversion of a program's events to rounds."""

    def __init__(self, program: XmlProgram, order: Order) -> None:
        self._program, self._events, self._sender = program, order.events, order.sender
        self._receipt = {sent: receipt for receipt, sent in order.sender.items()}
        self._where = _Where(program)

    def works(self) -> list[list[list[OriginStep]]]:
        """Return the steps of every round of every rank."""
        landing = set[int]()  # receives landing in scratch first
        levels, stuck = _levels(self._edges(landing))
        # Each pass adds at least one message to `landing`, because the XML's own order is acyclic: the loop ends.
        while stuck:
            landing |= {number for kind, number in stuck if kind == "move" and number in self._sender}
            levels, stuck = _levels(self._edges(landing))
        works = sorted(self._steps(levels, landing), key=lambda work: work[:3])
        made: list[list[list[OriginStep]]] = [[] for _ in range(self._program.size)]
        for (rank, _), some in itertools.groupby(works, key=lambda work: work[:2]):
            made[rank].append([work for *_, work in some])
        return made

    def _node(self, index: int, landing: set[int]) -> Node:
        """Return the node of an event; a send shares the node of its receive, unless the receive lands in scratch."""
        event = self._events[index]
        if event.kind == "send":
            return "move", self._receipt[index]
        return ("land" if index in landing else "move"), index

    def _edges(self, landing: set[int]) -> Edges:
        # A reader after a writer needs a later round, a writer after a reader only no earlier round. Both
        # events of a message share a node, so the node has the constraints of sender and receiver.
        edges: Edges = {}
        touched: list[Touched[Node]] = [Touched() for _ in range(self._program.size)]
        for index, event in enumerate(self._events):
            node, gpu = self._node(index, landing), event.step.gpu
            edges.setdefault(node, {})
            if node[0] == "land":
                edges.setdefault(("move", index), {})[node] = 1
            for other, _, wrote in touched[gpu].follows(node, dict.fromkeys(event.reads + event.operand), event.writes):
                edges[other][node] = max(edges[other].get(node, 0), int(wrote))
        return edges

    def _steps(self, levels: dict[Node, int], landing: set[int]) -> Iterator[tuple[int, int, int, OriginStep]]:
        """Yield (rank, round, class, step); the class orders a round: 0 sends, 1 copies, 2 receives, 3 reductions."""
        # Events come in a possible order: reading a place at its event gives the slice holding the place's data then.
        sent = dict[int, list[Slice]]()
        for index, event in enumerate(self._events):
            step, gpu, level = event.step, event.step.gpu, levels[self._node(index, landing)]
            if event.kind == "send":
                sent[index] = self._where.read(event, event.reads)
                continue
            came = sent.pop(self._sender[index]) if event.kind == "receive" else self._where.read(event, event.reads)
            operands = self._where.read(event, event.operand)
            classes = [self._where.kind(part) for part in came]
            targets = self._where.write(event, classes)
            # `landed` are the slices receiving the message: scratch for a landing message, else the targets.
            landed = [self._where.fresh(gpu, kind) for kind in classes] if index in landing else targets
            is_local = event.kind == "local" or index in landing
            for part, lands, operand, dst in joined(zip(came, landed, operands or came, targets, strict=True)):
                if event.kind == "receive":
                    source, moved = self._events[self._sender[index]].step, levels["move", index]
                    kind = RecvReduce if operands and not is_local else Recv
                    yield source.gpu, moved, 0, OriginStep(Send(part, gpu), source)
                    yield gpu, moved, 2, OriginStep(kind(lands, source.gpu), step)
                    part = lands
                # A reduction combines into `dst`, so the operand has to be in `dst` first.
                if operands and operand != dst:
                    yield gpu, level, 1, OriginStep(Copy(operand, dst), step)
                if is_local and (operands or part != dst):
                    yield gpu, level, 3 if operands else 1, OriginStep((Reduce if operands else Copy)(part, dst), step)
        for rank in range(self._program.size):
            for src, dst in joined(self._where.left(rank)):
                yield rank, 0, 1, OriginStep(Copy(src, dst), None)


class _Where:
    """The mapping from a program's places to slices of gpucoll's buffers, updated event by event.

    The input is never written. The length of a chunk depends on the position in its block, so a chunk is stored only at
    indices of scratch or output with the same position.
    """

    def __init__(self, program: XmlProgram) -> None:
        self._program, self._per_block = program, program.per_block
        row, size = program.row, program.size
        self._now: list[dict[Place, Slice]] = [{} for _ in range(size)]
        self._slots: list[dict[Any, Slice]] = [{} for _ in range(size)]
        self._count = [collections.Counter[int]() for _ in range(size)]
        # Fresh chunks of scratch start at a whole block after the program's own scratch.
        self._base = -(-program.scratch // self._per_block) * self._per_block
        for rank in range(size):
            if row.input.exists(rank, ROOT):
                for chunk in range(program.chunks if row.input.blocks else self._per_block):
                    self._now[rank][self._first(rank, chunk)] = Slice("input", chunk)

    def _first(self, rank: int, chunk: int) -> Place:
        if self._program.in_place and self._program.row.name in ("all_gather", "gather"):
            return "o", chunk + rank * self._per_block
        return "i", chunk

    def _result(self, rank: int, place: Place) -> int | None:
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

    def read(self, event: XmlEvent, places: tuple[Place, ...]) -> list[Slice]:
        """Return the current slices of the places; raise ArgumentError for a place never written."""
        now = self._now[event.step.gpu]
        for place in places:
            if place not in now:
                raise refused(event.step, f"reads {place[0]}[{place[1]}], written by no step")
        return [now[place] for place in places]

    def write(self, event: XmlEvent, kinds: list[int]) -> list[Slice]:
        """Choose a slice for each place written by `event`, note the slices as current, and return them."""
        gpu = event.step.gpu
        targets = [self._target(gpu, place, kind) for place, kind in zip(event.writes, kinds, strict=True)]
        self._now[gpu].update(zip(event.writes, targets, strict=True))
        return targets

    def _target(self, gpu: int, place: Place, kind: int) -> Slice:
        # Write results directly to the output, and scratch to the program's own index, if the position fits.
        result = self._result(gpu, place)
        if result is not None and result % self._per_block == kind:
            return Slice("output", result)
        buffer: Buffer = "scratch"
        if place[0] == "s" and place[1] % self._per_block == kind:
            return Slice(buffer, place[1])
        key = place, kind
        if key not in self._slots[gpu]:
            self._slots[gpu][key] = self.fresh(gpu, kind)
        return self._slots[gpu][key]

    def fresh(self, gpu: int, kind: int) -> Slice:
        """Return an unused chunk of scratch, of position `kind` in a block."""
        self._count[gpu][kind] += 1
        return Slice("scratch", self._base + (self._count[gpu][kind] - 1) * self._per_block + kind)

    def left(self, rank: int) -> list[tuple[Slice, Slice]]:
        """Return each chunk of input never moved but part of the result, with its chunk of output."""
        return [(part, Slice("output", result)) for place, part in sorted(self._now[rank].items())
                if part.buffer == "input" and (result := self._result(rank, place)) is not None]


def _levels(edges: Edges) -> tuple[dict[Node, int], list[Node]]:
    """Return the first possible round of every node and []; or {} and the nodes of a component without a solution.

    Nodes of a strongly connected component (Tarjan's algorithm, without recursion) must share a round. An edge 1 inside
    a component is a contradiction.
    """
    component = dict[Node, int]()
    members = list[list[Node]]()
    low, number = dict[Node, int](), dict[Node, int]()
    stack = list[Node]()
    for root in edges:
        if root in number:
            continue
        path = [(root, iter(edges[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        while path:
            node, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == number[node]:
                    members.append([])
                    while node not in component:
                        members[-1].append(stack.pop())
                        component[members[-1][-1]] = len(members) - 1
            elif following not in number:
                number[following] = low[following] = len(number)
                stack.append(following)
                path.append((following, iter(edges[following])))
            elif following not in component:
                low[node] = min(low[node], number[following])
    turns = [0] * len(members)
    for which in reversed(range(len(members))):  # Tarjan numbers successors first: go in reverse
        for node in members[which]:
            for following, apart in edges[node].items():
                other = component[following]
                if other == which and apart:
                    return {}, members[which]
                turns[other] = max(turns[other], turns[which] + apart)
    return {node: turns[which] for node, which in component.items()}, []
