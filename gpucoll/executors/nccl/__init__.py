"""The `nccl` executor: schedules on GPU arrays, by NCCL's send and receive and the library's own kernels.

A round is one group of messages, then the kernels that combine the received data, all enqueued without waiting on the
host. If the messages of a round form pairs in order (a ring's segments), each pair is a group, and its data are
combined on a second stream, the side stream, during the next pair.

    replay            repeated small calls, captured as a CUDA graph
    nccl_collectives  NCCL's own collectives
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpucoll.arrays import address
from gpucoll.device import NO_CAPTURE, Device, Event, Part, Stream, Transport
from gpucoll.device.launch import MOST_SOURCES
from gpucoll.device.sources import UNITS, instance, reducing
from gpucoll.device.streams import StreamOrder, Workspace
from gpucoll.executors import Executor, Launcher, Task
from gpucoll.executors.nccl.replay import Graphs, Replay, place_of
from gpucoll.plan import HALVES, Message, Plan, Reduction, Span, Step
from gpucoll.progress.operations import Operation

TOKEN = 1  # bytes sent for a message of a barrier, which has no data
PROGRAMS = 1024  # the most plans whose nodes are kept
MAX_ELEMENTS = 1 << 26  # the most elements of a message, at most 16 bytes each: see `_cut`


@dataclass
class Node:
    """One thing to enqueue: messages in one group, or results.

    A node with `side` goes to the side stream. `after` is the node of the other stream to be awaited first; `awaited`
    says that a node of the other stream awaits this node.
    """

    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    forms: Sequence[Reduction] = ()
    side: bool = False
    after: int | None = None
    awaited: bool = False

    def follows(self, other: Node) -> bool:
        """Return whether this node needs results of the `other` node."""
        formed = [form.number for form in other.forms]
        steps: tuple[Step, ...] = (*self.sends, *self.receives, *self.forms)
        return any(not step.after.isdisjoint(formed) for step in steps)


class NcclExecutor(Executor):
    """An executor of schedules on `device` by `transport`; operations run in order, over all streams."""

    name = "nccl"

    def __init__(self, device: Device, transport: Transport, order: StreamOrder) -> None:
        self._device, self._transport, self._order = device, transport, order
        self._workspace = Workspace(device)
        self._captured = Workspace(device)  # for the user's graphs, launched at unknown times, in order
        self._graphs = Graphs()
        self._is_own_capture = False
        self._side: Stream | None = None
        self._events: list[Event] = []
        self._programs: dict[int, tuple[Plan, list[Node]]] = {}

    @property
    def captures(self) -> bool:
        """Whether calls can become part of a CUDA graph."""
        return self._transport.capturable

    def serves(self, task: Task) -> str | None:
        """Return None for every schedule, except in a capture by a transport that cannot be captured."""
        if not self._transport.capturable and self._device.asynchronous and task.stream.is_capturing():
            return NO_CAPTURE
        return None

    def prepare(self, task: Task) -> str | None:
        """Load the kernels, before data move.

        Loading a kernel may block until the GPU is idle, so kernels for a later replay are loaded here, too.
        """
        if self._transport.capturable:
            for width in UNITS:
                self._device.kernels.launcher(instance("copy", width))
        rounds = task.plan.rounds if task.plan is not None and task.order == "at once" else ()
        steps = (step for steps in rounds for step in steps)
        if any(isinstance(step, Reduction) and len(step.sources) > MOST_SOURCES for step in steps):
            return f"a kernel combines at most {MOST_SOURCES} contributions at once"
        if task.op is not None:
            kernel = reducing("reduce", task.op, task.dtype)
            self._device.kernels.load(kernel, task.collective, task.op, task.dtype)
        return None

    def run(self, task: Task) -> Operation:
        self._order.follow(task.stream)
        name = self._graphs.serve(task) if self._transport.capturable else None
        if name is None:
            yield from self._enqueue(task, task.stream, task.input, task.output)
            return
        place, graphs = place_of(task), self._graphs
        # A graph on the user's arrays saves two copies. Not if the transport registers memory: to the peers, another
        # array at this address later would be other memory.
        is_new = task.repeated and place not in graphs.direct
        if is_new and not self._transport.registers:
            graphs.keep_direct(place, (yield from self._capture(task, task.input, task.output)))
        if place in graphs.direct:
            graphs.direct[place].launch(task.stream)
            return
        key = name, task.in_place
        if key not in graphs.buffered:
            stream = self._device.new_stream()
            source, target = (None if row is None else self._device.empty(row.size, row.dtype, stream)
                              for row in (None if task.in_place else task.input, task.output))
            source = target if task.in_place else source
            graphs.buffered[key] = yield from self._capture(task, source, target, stream)
        self._replay(task, graphs.buffered[key])

    def launcher(self, task: Task) -> Launcher | None:
        """Return a function that launches the graph of calls like `task` on the same memory, or None."""
        direct = self._graphs.direct.get(place_of(task))
        return None if direct is None else direct.launch

    def scratch(self) -> list[Any]:
        """Return all memory from which results are formed, other than the user's."""
        return [*self._workspace.rows(), *self._captured.rows(), *self._graphs.rows()]

    def close(self) -> None:
        """Drop graphs and buffers; before the transport, since graphs refer to NCCL's communicator."""
        self._graphs.clear()
        self._workspace.clear()
        self._captured.clear()

    def _enqueue(self, task: Task, stream: Stream, source: Any, target: Any) -> Operation:
        assert task.plan is not None
        addresses = self._addresses(task, task.plan, source, target, stream)
        run = _GroupedRounds(self._device, task, addresses)
        if task.plan.copy_input:
            self._device.kernels.copy(address(source), addresses["input"], source.size, task.dtype.itemsize, stream)
        for number, node in enumerate(self._program(task.plan)):
            where = self._side_stream() if node.side else stream
            if node.after is not None:
                where.wait_event(self._event(node.after))
            if node.sends or node.receives:
                yield from self._transport.group(*run.parts(node), where)
            run.combine(node.forms, where)
            if node.awaited:
                self._event(number).record(where)

    def _addresses(self, task: Task, plan: Plan, source: Any, target: Any, stream: Stream) -> dict[str, int]:
        """Return the addresses of the buffers of `task` by name; "input" is a buffer if the plan needs a copy."""
        wanted = {name: count * task.dtype.itemsize for name, count in plan.workspace.items()}
        if task.collective == "barrier":  # a byte to send, and a byte for every receive
            wanted["token"] = 1 + max(map(len, plan.rounds), default=0)
        if plan.copy_input:
            wanted["input"] = source.nbytes
        # A graph captured by the user keeps using its workspace: give graphs memory of their own.
        workspace = self._captured if stream.is_capturing() and not self._is_own_capture else self._workspace
        return {"input": address(source), "output": address(target),
                **{name: address(workspace.row(name, nbytes, stream)) for name, nbytes in wanted.items()}}

    def _replay(self, task: Task, kept: Replay) -> None:
        kernels, width, source, target = self._device.kernels, task.dtype.itemsize, task.input, task.output
        if source is not None:
            kernels.copy(address(source), kept.source, source.size, width, task.stream)
        kept.launch(task.stream)
        # The root of a broadcast keeps its own data.
        if target is not None and not (task.collective == "broadcast" and source is not None):
            kernels.copy(kept.target, address(target), target.size, width, task.stream)

    def _capture(self, task: Task, source: Any, target: Any, stream: Stream | None = None) -> Any:
        """Return the call captured from `source` to `target`; all memory is allocated before the capture."""
        stream = stream or self._device.new_stream()
        assert task.plan is not None
        # Memory and streams cannot be allocated during a capture.
        self._addresses(task, task.plan, source, target, stream)
        self._side_stream()
        stream.begin_capture()
        self._is_own_capture = True
        try:
            yield from self._enqueue(task, stream, source, target)
        finally:
            self._is_own_capture = False
            graph = stream.end_capture()
        return Replay(graph, address(source), address(target), keep=(source, target, stream))

    def _program(self, plan: Plan) -> list[Node]:
        """Return the nodes of a plan; kept, since callers keep their plans and use them again."""
        # The plan is kept with the nodes, so that no other plan gets the same id.
        if id(plan) not in self._programs:
            if len(self._programs) == PROGRAMS:
                self._programs.clear()
            self._programs[id(plan)] = (plan, nodes_of(plan))
        return self._programs[id(plan)][1]

    def _side_stream(self) -> Stream:
        self._side = self._side or self._device.new_stream()
        return self._side

    def _event(self, number: int) -> Event:
        while len(self._events) <= number:
            self._events.append(self._device.new_event())
        return self._events[number]


class _GroupedRounds:
    """One task under way: the buffers by name, as addresses."""

    def __init__(self, device: Device, task: Task, addresses: dict[str, int]) -> None:
        self._kernels, self._task, self._addresses = device.kernels, task, addresses
        self._width = task.dtype.itemsize

    def parts(self, exchange: Node) -> tuple[list[Part], list[Part]]:
        """Return the messages of a node by addresses; messages without data only in a barrier."""
        if self._task.collective == "barrier":  # all sends share one byte, each receive has its own
            token = self._addresses["token"]
            return ([Part(token, TOKEN, message.peer) for message in exchange.sends],
                    [Part(token + place, TOKEN, one.peer) for place, one in enumerate(exchange.receives, 1)])
        return self._parts(exchange.sends), self._parts(exchange.receives)

    def _parts(self, messages: Sequence[Message]) -> list[Part]:
        parts = [Part(self._at(m.span), (m.span.stop - m.span.start) * self._width, m.peer) for m in messages]
        return [part for part in parts if part.nbytes]

    def combine(self, forms: Sequence[Reduction], stream: Stream) -> None:
        task = self._task
        for form in forms:
            count, sources = form.dst.stop - form.dst.start, [self._at(span) for span in form.sources]
            if len(sources) > 1 and task.op is not None:
                self._kernels.reduce(task.op, task.dtype, sources, self._at(form.dst), count, stream)
            else:
                self._kernels.copy(sources[0], self._at(form.dst), count, self._width, stream)

    def _at(self, span: Span) -> int:
        return self._addresses[span.buffer] + span.start * self._width


def nodes_of(plan: Plan) -> list[Node]:
    """Return the nodes of `plan` in order; the last node awaits the side stream.

    Results after a group of messages go to the side stream, if the next group does not need them. Messages stay on the
    first stream, in groups that are equal on both ranks of each message.
    """
    nodes = [node for steps in plan.rounds for node in _groups(steps)]
    # Backwards, so that the next group of messages is known at each result.
    following: Node | None = None  # the next group of messages
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if not node.forms:
            following = node
        elif number and not nodes[number - 1].forms:
            node.side = following is not None and not following.follows(node)
    # The empty last node makes the first stream wait for the side stream.
    if any(node.side for node in nodes):
        nodes.append(Node())
    # The last side node awaited by the first stream: all side nodes before have ended, too, and need no further wait.
    met = -1
    for number, node in enumerate(nodes):
        if node.side:
            node.after = number - 1
        else:
            last = number == len(nodes) - 1
            node.after = next((other for other in range(number - 1, met, -1)
                               if nodes[other].side and (last or node.follows(nodes[other]))), None)
            met = met if node.after is None else node.after
        if node.after is not None:
            nodes[node.after].awaited = True
    return nodes


def _groups(steps: Sequence[Step]) -> Iterator[Node]:
    """Yield the nodes of a round: results formed in staging before, then each group of messages, and the results after.

    If all sends go to one peer and all receives come from one peer, as in a ring, the groups are pairs of a send and a
    receive: every rank of a ring forms the same pairs.
    """
    sends, receives = ([piece for step in steps if isinstance(step, Message) and step.sends == sent
                        for piece in _cut(step)] for sent in (True, False))
    forms = [step for step in steps if isinstance(step, Reduction)]
    # In pairs, a result of an early pair would overwrite the source of a later send: then the round is one group.
    is_overwritten = any(send.number in form.after for send in sends for form in forms)
    paired = len(sends) == len(receives) > 1 and not is_overwritten \
        and len({send.peer for send in sends}) == 1 == len({receive.peer for receive in receives})
    turns = {message.number: turn if paired else 0 for side in (sends, receives) for turn, message in enumerate(side)}
    kept = [form for form in forms if form.dst.buffer in HALVES and form.after.isdisjoint(turns)]
    if kept:
        yield Node(forms=kept)
    forms = [form for form in forms if form not in kept]
    for form in forms:
        turns[form.number] = max((turns[number] for number in form.after if number in turns), default=0)
    for turn in range(len(sends) if paired else 1):
        there = slice(turn, turn + 1) if paired else slice(None)
        if sends[there] or receives[there]:
            yield Node(sends[there], receives[there])
        ready = [form for form in forms if turns[form.number] == turn]
        if ready:
            yield Node(forms=ready)


def _cut(message: Message) -> list[Message]:
    """Return `message` in pieces: on the emulated device MPI counts bytes in 31 bits."""
    span = message.span
    starts = range(span.start, span.stop, MAX_ELEMENTS) or [span.start]
    return [message._replace(span=span._replace(start=start, stop=min(start + MAX_ELEMENTS, span.stop)))
            for start in starts]
