"""The `nccl` executor: schedules on GPU arrays, with NCCL's send and receive and the library's own kernels.

A round is one group of messages, then the kernels that combine the received data, all enqueued without waiting on the
host. If the messages of a round form pairs in order (a ring's segments), each pair is a group, and its data is combined
on a side stream during the next pair.

Repeated small calls are captured once as a CUDA graph and replayed. NCCL demands that a message is part of a graph on
both ranks or on neither. So the decision to replay depends only on facts known to all ranks: the call, and how many
times the call has come. Arrays are not known to all ranks, so a graph works on private buffers, with a copy in and a
copy out. A call repeated on the same arrays gets a graph on the arrays in place: this saves the copies, and makes no
difference to the other ranks.

    nccl_collectives  NCCL's own collectives
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpucoll.arrays import address
from gpucoll.device import NO_CAPTURE, Device, DeviceTransport, Event, Graph, GroupPart, Stream
from gpucoll.device.launch import MOST_SOURCES, Enqueue, StreamOrder, Workspace
from gpucoll.device.sources import UNIT_TYPES, instance, reducing
from gpucoll.executors import Call, CallLauncher, CallRequest, Executor, Refusal
from gpucoll.plan import HALVES, Message, Plan, PlanStep, Reduction, Span
from gpucoll.progress.operations import Operation

ONE_BYTE = 1  # bytes sent for a message of a barrier without data
MAX_ELEMENTS = 1 << 26  # the most elements of a message, at most 16 bytes each: see `_cut`
LIMIT = 1 << 18  # bytes up to which a schedule's launches cost more than two copies
FREQUENT = 1  # a call that has come this many times is likely to come again
GRAPHS = 64  # kept at most; any further call is enqueued piece by piece
DIRECT = 256  # the most graphs kept on the user's own memory
SEEN = 4096  # signatures counted


@dataclass
class GraphNode:
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

    def follows(self, other: GraphNode) -> bool:
        """Return whether this node needs results of the `other` node."""
        formed = [form.number for form in other.forms]
        steps: tuple[PlanStep, ...] = (*self.sends, *self.receives, *self.forms)
        return any(not step.after.isdisjoint(formed) for step in steps)


class BoundNodes(NamedTuple):
    """A node on given memory: the parts of its messages, and the functions that enqueue its results."""

    node: GraphNode
    sends: Sequence[GroupPart]
    receives: Sequence[GroupPart]
    forms: Sequence[Enqueue]


class NcclScheduleCall(Call):
    """A request as groups of messages and kernels."""

    @functools.cached_property
    def nodes(self) -> list[GraphNode]:
        """What to enqueue, in order."""
        assert self.request.plan is not None
        return nodes_of(self.request.plan)


class NcclExecutor(Executor):
    """An executor of schedules on `device` by `transport`; operations run in order, over all streams."""

    name = "nccl"

    def __init__(self, device: Device, transport: DeviceTransport, order: StreamOrder) -> None:
        self._device, self._transport, self._order = device, transport, order
        self.captures: bool = transport.capturable
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
            for width in UNIT_TYPES:
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
            yield from self._walk(self._nodes(call, source, target, stream), stream)
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
        in_order(self._replay(request, source, target, graphs.buffered[key]), stream)

    def launcher(self, call: Call, source: Any, target: Any) -> CallLauncher | None:
        """Return a function that launches the graph of a call on these arrays; without graphs see `_awaited`."""
        if not self.captures and not self._device.asynchronous:
            return self._awaited(call, source, target)
        request, graphs = call.request, self._graphs
        direct = graphs.direct.get(place_of(request, source, target))
        if direct is not None:
            return direct.launch
        kept = None if request.cut.lengths else graphs.buffered.get((_signature(request), request.in_place))
        return None if kept is None else functools.partial(in_order, self._replay(request, source, target, kept))

    def _awaited(self, call: Any, source: Any, target: Any) -> CallLauncher:
        """Return a function that carries out a call on the emulated device between threads, which the host awaits."""
        nodes = self._nodes(call, source, target, self._device.stream(None))

        def complete(stream: Stream) -> Operation:
            yield from self._walk(nodes, stream)
            yield from self._device.settle(stream)

        return complete

    def scratch(self) -> list[Any]:
        """Return all memory that results are formed from, without the user's arrays."""
        return [*self._workspace.rows(), *self._captured.rows(), *self._graphs.rows()]

    def close(self) -> None:
        """Drop graphs and buffers; before the transport, since graphs refer to NCCL's communicator."""
        self._graphs.clear()
        self._workspace.clear()
        self._captured.clear()

    def _nodes(self, call: NcclScheduleCall, source: Any, target: Any, stream: Stream) -> list[BoundNodes]:
        """Return the nodes of a call on given memory, after a first one without messages, for a copy of the input."""
        request, plan = call.request, call.request.plan
        assert plan is not None
        addresses, first = self._addresses(request, plan, source, target, stream), list[Enqueue]()
        if plan.copy_input:
            width = request.dtype.itemsize
            first = self._device.kernels.copiers(address(source), addresses["input"], source.size, width)
        return [BoundNodes(GraphNode(), (), (), first), *(self._bound(node, request, addresses) for node in call.nodes)]

    def _walk(self, nodes: Sequence[BoundNodes], stream: Stream) -> Operation:
        for number, (node, sends, receives, forms) in enumerate(nodes, -1):
            where = self._side_stream() if node.side else stream
            if node.after is not None:
                where.wait_event(self._event(node.after))
            if node.sends or node.receives:
                yield from self._transport.group(sends, receives, where)
            for form in forms:
                form(where)
            if node.awaited:
                self._event(number).record(where)

    def _bound(self, node: GraphNode, request: CallRequest, addresses: dict[str, int]) -> BoundNodes:
        width, kernels = request.dtype.itemsize, self._device.kernels

        def at(span: Span) -> int:
            return addresses[span.buffer] + span.start * width

        def parts(messages: Sequence[Message]) -> list[GroupPart]:
            return [GroupPart(at(one.span), (one.span.stop - one.span.start) * width, one.peer) for one in messages
                    if one.span.stop > one.span.start]

        if request.collective == "barrier":  # all sends share one byte, each receive has its own
            token = addresses["token"]
            receives = [GroupPart(token + place, ONE_BYTE, one.peer) for place, one in enumerate(node.receives, 1)]
            return BoundNodes(node, [GroupPart(token, ONE_BYTE, message.peer) for message in node.sends], receives, [])
        forms: list[Enqueue] = []
        for form in node.forms:
            count, sources = form.dst.stop - form.dst.start, [*map(at, form.sources)]
            forms += (kernels.reducers(request.op, request.dtype, sources, at(form.dst), count)
                      if len(sources) > 1 and request.op is not None else
                      kernels.copiers(sources[0], at(form.dst), count, width))
        return BoundNodes(node, parts(node.sends), parts(node.receives), forms)

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

    def _replay(self, request: CallRequest, source: Any, target: Any, kept: Replay) -> list[Enqueue]:
        """Return what enqueues a graph on private buffers: a copy of the input, the graph, a copy of the result."""
        copiers, width = self._device.kernels.copiers, request.dtype.itemsize
        given = [] if source is None else copiers(address(source), kept.source, source.size, width)
        # The root of a broadcast keeps its own data.
        stays = target is None or (request.collective == "broadcast" and source is not None)
        return [*given, kept.launch, *([] if stays else copiers(kept.target, address(target), target.size, width))]

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
            yield from self._walk(self._nodes(call, source, target, stream), stream)
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


def in_order(steps: Sequence[Enqueue], stream: Stream) -> None:
    """Enqueue all steps on a stream."""
    for enqueue in steps:
        enqueue(stream)


def nodes_of(plan: Plan) -> list[GraphNode]:
    """Return the nodes of `plan` in order; the last node awaits the side stream.

    Results after a group of messages go to the side stream, if the next group does not need them. Messages stay on the
    first stream, in groups that are equal on both ranks of each message.
    """
    nodes = [node for steps in plan.rounds for node in _groups(steps)]
    # Backwards, so that the next group of messages is known at each result.
    following: GraphNode | None = None  # the next group of messages
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if not node.forms:
            following = node
        elif number and not nodes[number - 1].forms:
            node.side = following is not None and not following.follows(node)
    # The empty last node makes the first stream wait for the side stream.
    if any(node.side for node in nodes):
        nodes.append(GraphNode())
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


def _groups(steps: Sequence[PlanStep]) -> Iterator[GraphNode]:
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
        yield GraphNode(forms=kept)
    forms = [form for form in forms if form not in kept]
    for form in forms:
        turns[form.number] = max((turns[number] for number in form.after if number in turns), default=0)
    for turn in range(len(sends) if paired else 1):
        there = slice(turn, turn + 1) if paired else slice(None)
        if sends[there] or receives[there]:
            yield GraphNode(sends[there], receives[there])
        ready = [form for form in forms if turns[form.number] == turn]
        if ready:
            yield GraphNode(forms=ready)


def _cut(message: Message) -> list[Message]:
    """Return `message` in pieces: on the emulated device MPI counts bytes in 31 bits."""
    span = message.span
    starts = range(span.start, span.stop, MAX_ELEMENTS) or [span.start]
    return [message._replace(span=span._replace(start=start, stop=min(start + MAX_ELEMENTS, span.stop)))
            for start in starts]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Replay:
    """A captured call, the addresses read and written by it, and the objects to be kept: buffers and stream.

    A graph keeps NCCL's communicator alive. `Graphs.clear` releases the graph even while others still hold the replay.
    """

    graph: Graph | None
    source: int
    target: int
    keep: tuple[Any, ...]

    def launch(self, stream: Stream) -> None:
        assert self.graph is not None
        self.graph.launch(stream)


class Graphs:
    """The captured calls of one communicator, and the counts of all calls.

    `direct` has the graphs on the user's memory, by `place_of`; `buffered` the graphs on private buffers, by the name
    from `serve` and whether the call is in place.
    """

    def __init__(self) -> None:
        self._seen: collections.Counter[Any] = collections.Counter()
        self._chosen: set[Any] = set()
        self.buffered: dict[Any, Replay] = {}
        self.direct: dict[Any, Replay] = {}
        self._all: weakref.WeakSet[Replay] = weakref.WeakSet()  # all of `direct`, and those held only by a launcher

    def serve(self, request: CallRequest, stream: Stream) -> Any:
        """Count the call; return its name for a replay, equal on every rank, or None."""
        if not 0 < request.nbytes <= LIMIT or request.cut.lengths is not None or stream.is_capturing():
            return None
        signature = _signature(request)
        if signature in self._chosen:
            return signature
        # All ranks count the same calls, and so clear the counts at the same call.
        if len(self._seen) == SEEN:
            self._seen.clear()
        self._seen[signature] += 1
        if self._seen[signature] <= FREQUENT or len(self._chosen) == GRAPHS:
            return None
        self._chosen.add(signature)
        return signature

    def keep_direct(self, place: Any, replay: Replay) -> None:
        """Keep a graph on the user's memory, and forget the oldest if there are too many."""
        if len(self.direct) == DIRECT:
            del self.direct[next(iter(self.direct))]
        self.direct[place] = replay
        self._all.add(replay)

    def rows(self) -> list[Any]:
        """Return the private buffers of all graphs."""
        return [row for replay in self.buffered.values() for row in replay.keep[:2] if row is not None]

    def clear(self) -> None:
        for replay in (*self.buffered.values(), *self._all):
            replay.graph, replay.keep = None, ()
        for kept in (self.buffered, self.direct, self._chosen, self._seen):
            kept.clear()


def _signature(request: CallRequest) -> tuple[Any, ...]:
    """Return the key of a call, equal on every rank."""
    op = request.op and request.op.cuda
    return request.collective, request.algorithm, request.nbytes, request.dtype.name, request.root, op


def place_of(request: CallRequest, source: Any, target: Any) -> tuple[Any, ...]:
    """Return the key of a call on given memory."""
    return _signature(request), address(source), address(target)
