"""The `nccl` executor: schedules on GPU arrays, with NCCL's send and receive and the library's own kernels.

A round is one group of messages, then the kernels that combine the received data, all enqueued without waiting on the
host. If the messages of a round form pairs in order (a ring's segments), each pair is a group, and its data is combined
on a side stream during the next pair.

    replay            repeated small calls, captured as a CUDA graph
    nccl_collectives  NCCL's own collectives
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpucoll.arrays import address
from gpucoll.device import NO_CAPTURE, Device, DeviceTransport, Event, Part, Stream
from gpucoll.device.launch import MOST_SOURCES
from gpucoll.device.sources import UNITS, instance, reducing
from gpucoll.device.streams import StreamOrder, Workspace
from gpucoll.executors import Call, CallRequest, Executor, Launcher, Refusal
from gpucoll.executors.nccl.replay import Graphs, Replay, place_of
from gpucoll.plan import HALVES, Message, Plan, Reduction, Span, Step
from gpucoll.progress.operations import Operation

TOKEN = 1  # bytes sent for a message of a barrier without data
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


class NcclScheduleCall(Call):
    """A request as groups of messages and kernels."""

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """What to enqueue, in order."""
        assert self.request.plan is not None
        return nodes_of(self.request.plan)


class NcclExecutor(Executor):
    """An executor of schedules on `device` by `transport`; operations run in order, over all streams."""

    name = "nccl"

    def __init__(self, device: Device, transport: DeviceTransport, order: StreamOrder) -> None:
        self._device, self._transport, self._order = device, transport, order
        self.captures = transport.capturable
        self._workspace = Workspace(device)
        self._captured = Workspace(device)  # for the user's graphs, launched at unknown times, in order
        self._graphs = Graphs()
        self._is_own_capture = False
        self._side: Stream | None = None
        self._events: list[Event] = []

    def serves(self, request: CallRequest) -> str | None:
        """Return None for every schedule, except in a capture by a transport that cannot be captured."""
        return NO_CAPTURE if request.captured and not self.captures else None

    def compile(self, request: CallRequest) -> Call | Refusal:
        """Load the kernels of the call.

        Loading a kernel may block until the GPU is idle, so kernels for a later replay are loaded here, too.
        """
        if self.captures:
            for width in UNITS:
                self._device.kernels.launcher(instance("copy", width))
        rounds = request.plan.rounds if request.plan is not None and request.order == "at once" else ()
        steps = (step for steps in rounds for step in steps)
        if any(isinstance(step, Reduction) and len(step.sources) > MOST_SOURCES for step in steps):
            return Refusal(f"a kernel combines at most {MOST_SOURCES} contributions at once")
        if request.op is not None:
            kernel = reducing("reduce", request.op, request.dtype)
            self._device.kernels.load(kernel, request.collective, request.op, request.dtype)
        return NcclScheduleCall(self, request)

    def run(self, call: NcclScheduleCall, source: Any, target: Any, stream: Stream, *, repeated: bool) -> Operation:
        """Enqueue a call, by a graph if the call has come often enough."""
        request, graphs = call.request, self._graphs
        self._order.follow(stream)
        name = graphs.serve(request, stream) if self.captures else None
        if name is None:
            yield from self._enqueue(call, stream, source, target)
            return
        place = place_of(request, source, target)
        # A graph on the user's arrays saves two copies. Not if the transport registers memory: to the peers, another
        # array at this address later would be other memory.
        is_new = repeated and place not in graphs.direct
        if is_new and not self._transport.registers:
            graphs.keep_direct(place, (yield from self._capture(call, source, target)))
        if place in graphs.direct:
            graphs.direct[place].launch(stream)
            return
        key = name, request.in_place
        if key not in graphs.buffered:
            own = self._device.new_stream()
            given, taken = (None if row is None else self._device.empty(row.size, row.dtype, own)
                            for row in (None if request.in_place else source, target))
            given = taken if request.in_place else given
            graphs.buffered[key] = yield from self._capture(call, given, taken, own)
        self._replay(request, source, target, stream, graphs.buffered[key])

    def launcher(self, call: Call, source: Any, target: Any) -> Launcher | None:
        """Return a function that launches the graph of a call on these arrays, or None."""
        direct = self._graphs.direct.get(place_of(call.request, source, target))
        return None if direct is None else direct.launch

    def scratch(self) -> list[Any]:
        """Return all memory that results are formed from, without the user's arrays."""
        return [*self._workspace.rows(), *self._captured.rows(), *self._graphs.rows()]

    def close(self) -> None:
        """Drop graphs and buffers; before the transport, since graphs refer to NCCL's communicator."""
        self._graphs.clear()
        self._workspace.clear()
        self._captured.clear()

    def _enqueue(self, call: NcclScheduleCall, stream: Stream, source: Any, target: Any) -> Operation:
        request, plan = call.request, call.request.plan
        assert plan is not None
        addresses = self._addresses(request, plan, source, target, stream)
        run = _GroupedRounds(self._device, request, addresses)
        if plan.copy_input:
            self._device.kernels.copy(address(source), addresses["input"], source.size, request.dtype.itemsize, stream)
        for number, node in enumerate(call.nodes):
            where = self._side_stream() if node.side else stream
            if node.after is not None:
                where.wait_event(self._event(node.after))
            if node.sends or node.receives:
                yield from self._transport.group(*run.parts(node), where)
            run.combine(node.forms, where)
            if node.awaited:
                self._event(number).record(where)

    def _addresses(self, request: CallRequest, plan: Plan, source: Any, target: Any, stream: Stream) -> dict[str, int]:
        """Return the addresses of the buffers of a call by name; "input" is a buffer if the plan needs a copy."""
        wanted = {name: count * request.dtype.itemsize for name, count in plan.workspace.items()}
        if request.collective == "barrier":  # a byte to send, and a byte for every receive
            wanted["token"] = 1 + max(map(len, plan.rounds), default=0)
        if plan.copy_input:
            wanted["input"] = source.nbytes
        # A graph captured by the user keeps using its workspace: give graphs memory of their own.
        workspace = self._captured if stream.is_capturing() and not self._is_own_capture else self._workspace
        return {"input": address(source), "output": address(target),
                **{name: address(workspace.row(name, nbytes, stream)) for name, nbytes in wanted.items()}}

    def _replay(self, request: CallRequest, source: Any, target: Any, stream: Stream, kept: Replay) -> None:
        kernels, width = self._device.kernels, request.dtype.itemsize
        if source is not None:
            kernels.copy(address(source), kept.source, source.size, width, stream)
        kept.launch(stream)
        # The root of a broadcast keeps its own data.
        if target is not None and not (request.collective == "broadcast" and source is not None):
            kernels.copy(kept.target, address(target), target.size, width, stream)

    def _capture(self, call: NcclScheduleCall, source: Any, target: Any, stream: Stream | None = None) -> Any:
        """Return the call captured from `source` to `target`; all memory is allocated before the capture."""
        stream = stream or self._device.new_stream()
        assert call.request.plan is not None
        # Memory and streams cannot be allocated during a capture.
        self._addresses(call.request, call.request.plan, source, target, stream)
        self._side_stream()
        stream.begin_capture()
        self._is_own_capture = True
        try:
            yield from self._enqueue(call, stream, source, target)
        finally:
            self._is_own_capture = False
            graph = stream.end_capture()
        return Replay(graph, address(source), address(target), keep=(source, target, stream))

    def _side_stream(self) -> Stream:
        self._side = self._side or self._device.new_stream()
        return self._side

    def _event(self, number: int) -> Event:
        while len(self._events) <= number:
            self._events.append(self._device.new_event())
        return self._events[number]


class _GroupedRounds:
    """One call under way: the buffers by name, as addresses."""

    def __init__(self, device: Device, request: CallRequest, addresses: dict[str, int]) -> None:
        self._kernels, self._request, self._addresses = device.kernels, request, addresses
        self._width = request.dtype.itemsize

    def parts(self, exchange: Node) -> tuple[list[Part], list[Part]]:
        """Return the messages of a node by addresses; messages without data only in a barrier."""
        if self._request.collective == "barrier":  # all sends share one byte, each receive has its own
            token = self._addresses["token"]
            return ([Part(token, TOKEN, message.peer) for message in exchange.sends],
                    [Part(token + place, TOKEN, one.peer) for place, one in enumerate(exchange.receives, 1)])
        return self._parts(exchange.sends), self._parts(exchange.receives)

    def _parts(self, messages: Sequence[Message]) -> list[Part]:
        parts = [Part(self._at(m.span), (m.span.stop - m.span.start) * self._width, m.peer) for m in messages]
        return [part for part in parts if part.nbytes]

    def combine(self, forms: Sequence[Reduction], stream: Stream) -> None:
        request = self._request
        for form in forms:
            count, sources = form.dst.stop - form.dst.start, [self._at(span) for span in form.sources]
            if len(sources) > 1 and request.op is not None:
                self._kernels.reduce(request.op, request.dtype, sources, self._at(form.dst), count, stream)
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
