"""The executors of host arrays, and the way from a request to a compiled call: executor, algorithm, plan."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from gpucoll.algorithms import is_native, schedule
from gpucoll.arrays import Array, address
from gpucoll.arrays.segments import Heap, Slab, reserved
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Schedule
from gpucoll.core.signature import LastCall
from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.executors import Call, CallRequest, Executor, Refusal
from gpucoll.executors.engine.failures import culprit_of, show_failure
from gpucoll.health.flight import CALLS, LAST, PREAMBLE, Flight
from gpucoll.health.guard import Guard
from gpucoll.health.observed import CallObserver, ObservedCall
from gpucoll.health.preflight import Preflight
from gpucoll.launch.bootstrap import RankTopology
from gpucoll.plan import Layouts, Plan
from gpucoll.progress.operations import Operation
from gpucoll.progress.waits import Progress
from gpucoll.tuner import Choice, Tuner

if TYPE_CHECKING:
    from gpucoll.communicator.transports import Transport
    from gpucoll.executors.engine import NodeEngine
    from gpucoll.executors.native import NativeExecutor

NATIVE = "native"
HYBRID = "hybrid"


class Backend(Protocol):
    """The executors for one kind of memory, the host's or a GPU's."""

    @property
    def executors(self) -> Sequence[Executor]:
        """All executors, in the order of precedence."""

    def observed(self, call: Call) -> Call:
        """Return `call` with its comparison and its reports to observers, unless the engine does both."""


def able(backend: Backend, request: CallRequest, allowed: str | None) -> tuple[str, ...]:
    """Return the names of executors able to serve `request`, whose algorithm may be "auto".

    `allowed` is the user's choice. Raises ArgumentError if there is no executor. With "auto" the emulated device avoids
    NCCL's own collectives, as it exists to test those of gpucoll. `mpi` and `ucx` are left out if `hybrid` serves:
    `hybrid` sends the same messages between nodes and none inside a node.
    """
    name, algorithm = request.collective, request.algorithm
    there = [one for one in backend.executors if algorithm == "auto" or (one.name == NATIVE) == is_native(algorithm)]
    asked = [one for one in there if allowed in (None, one.name)]
    if not asked:
        raise _refused(request, there, allowed)
    reasons = [one.serves(request) for one in asked]
    served = tuple(dict.fromkeys(one.name for one, reason in zip(asked, reasons, strict=True) if reason is None))
    if not served:
        raise ArgumentError(f"{name}: executor {asked[-1].name} cannot run this call: {reasons[-1]}", code="GC-ALGO")
    # Only a choice by the library leaves executors out: the user may still name them.
    excluded = set[str]()
    if allowed is None and request.device == "emulated" and algorithm == "auto" and len(served) > 1:
        excluded.add(NATIVE)
    if allowed is None and HYBRID in served:
        excluded |= {"mpi", "ucx"}
    return tuple(name for name in served if name not in excluded)


def _refused(request: CallRequest, there: list[Executor], allowed: str | None) -> ArgumentError:
    name = request.collective
    if not there:
        return ArgumentError(f"{name}: there are no native collectives here; name an algorithm, or 'auto'",
                             code="GC-EXECUTOR")
    names = " or ".join(one.name for one in there)
    return ArgumentError(f"{name}: algorithm {request.algorithm!r} on {request.device} arrays runs on executor "
                         f"{names}, but this communicator has executor={allowed!r}", code="GC-EXECUTOR")


def compile_request(backend: Backend, request: CallRequest, tuner: Tuner, place: RankTopology,
                    allowed: str | None) -> Call:
    """Choose algorithm and executor for `request`, and return the compiled call.

    The algorithm of the request is the algorithm asked for, or "auto". Raises ArgumentError if no executor serves the
    request, or with the executor's reason for a refusal of the plan.
    """
    for one in backend.executors:
        if one.chooses:
            call = one.compile(request)
            assert isinstance(call, Call)
            return call
    choice = tuner.choose(request.collective, request.algorithm, request.nbytes, able(backend, request, allowed),
                          request.device, request.order)
    chosen = next(one for one in backend.executors if one.name == choice.executor)
    plan = None if is_native(choice.algorithm) else make_plan(request, choice, place)
    call = chosen.compile(replace(request, algorithm=choice.algorithm, plan=plan))
    if isinstance(call, Refusal):
        raise ArgumentError(f"{request.collective}: executor {choice.executor} cannot run this call: {call.reason}",
                            code="GC-ALGO")
    return backend.observed(call)


def make_plan(request: CallRequest, choice: Choice, place: RankTopology) -> Plan:
    """Return the resolved schedule of a request by the chosen algorithm."""
    collective = request.collective

    def of(rank: int) -> Schedule:
        return schedule(collective, choice.algorithm, rank=rank, size=place.size, root=request.root,
                        segments=choice.segments, nodes=place.nodes)

    rounds = of(place.rank)
    per_block = rounds.chunks // place.size if COLLECTIVES[collective].blocks else rounds.chunks
    layouts = Layouts.of(request.cut.elements, request.cut.lengths, per_block)
    return Plan(rounds, layouts, in_place=request.in_place, schedules=of)


class HostBackend:
    """The executors for host arrays: the node's shared memory, MPI's messages, MPI's collectives.

    Only ranks joined by MPI have MPI's collectives. On several nodes `hybrid` reads the memory of ranks of its own
    node, if the system allows this, and sends messages to the other nodes. The library chooses `hybrid`; users cannot
    name it. `heap` is the symmetric memory.
    """

    def __init__(self, link: Transport, timeout: float, asked: str | None, check: str | None) -> None:
        self._own = link.executor  # of a transport that carries out all calls itself
        self.heap: Heap = Heap(link.place.size, functools.partial(reserved, shared=self._own is None))
        shared, messages, native = (None, None, None) if self._own else _host_executors(link, timeout, asked, check)
        self._native = native
        there = (self._own, shared, messages, self._native)
        self.executors: tuple[Executor, ...] = tuple(one for one in there if one is not None)
        # The executor whose engine is the communicator's.
        self._shared: Any = shared or messages
        self._with_engine = [one for one in (shared, messages) if one]
        self._comparison: Preflight | None = None
        self._observers: list[CallObserver] = []
        self._reported: list[CallObserver] = []  # of calls that the engine does not record: the flight record, too

    def observe(self, flight: Flight | None, observers: Sequence[CallObserver], comparison: Preflight | None) -> None:
        """Compare, record and observe every call; with observers no call is left to the engine alone.

        `comparison` compares by messages. The engine of `shared` compares without messages: it reads the call
        descriptors of the other ranks.
        """
        self._observers, self._comparison = [*observers], comparison
        self._reported = [*([] if flight is None else [flight]), *observers]
        if self._shared is not None:
            if not self._shared.kind.compares:
                self._shared.comparison = comparison
            if flight is not None:
                self._shared.record(flight.memory, LAST, PREAMBLE, CALLS)

    def observed(self, call: Call) -> Call:
        """Return `call` with its comparison and its reports, as far as the engine does not compare and record it."""
        if call.executor.on_engine:
            return ObservedCall(call, self._observers, None) if self._observers else call
        return ObservedCall(call, self._reported, self)

    def counters(self) -> list[Any]:
        """Return what counts shares of calls: the engines made so far."""
        return [*filter(None, [one.engine for one in self._with_engine])]

    def meeting(self) -> Operation:
        """Return the operation that finds access to the memory of the node's other ranks; all these ranks join."""
        return iter(()) if self._shared is None else self._shared.meeting()

    def engine(self, waits: Progress, python: Callable[..., Any]) -> Any:
        """Return the engine for calls planned before, set to follow `waits`; None if Python makes all calls.

        `python` makes the calls unknown to the engine.
        """
        shared = self._shared
        if shared is None or shared.engine is None or self._observers:
            return None
        # Calls of the engine bypass `waits.run`: share its lock, queues and failure.
        shared.engine.bind_progress(*waits.gate(), waits, GpucollError, python)
        waits.is_busy = shared.engine.is_busy
        if self._native is not None:
            # A blocking call of MPI's has no deadline of its own: a thread raises this error.
            self._native.watch.late = waits.late
        return shared.engine

    def port(self, points: Any) -> Any:
        """Return the carrier of messages between two ranks; `points` is that between nodes."""
        return points if self._shared is None else self._shared.port(points)

    @property
    def shows_calls(self) -> Any:
        """The executor showing each rank's call to the others before data move, or None; the same on all ranks."""
        return self._shared if self.compares_calls else None

    def is_symmetric(self, *rows: Array | None) -> bool:
        """Return whether all these arrays are in symmetric memory."""
        return all(row is None or self.heap.find(address(row), row.nbytes) for row in rows)

    def reach(self, slab: Slab, keys: Sequence[int]) -> None:
        """Map a new slab of the heap for the engine; `keys` identify the slabs of all ranks."""
        if self._shared is not None:
            self._shared.reach(slab, keys)

    def awaited(self) -> set[int] | None:
        """Return the ranks awaited by the call under way, None if unknown."""
        known = (one.awaited() for one in self.executors)
        return next((ranks for ranks in known if ranks is not None), None)

    def progress(self, *, common: bool = False) -> dict[int, LastCall]:
        """Return the last call of each rank that shows its calls; `common` as of the engine's executor."""
        return {} if self._shared is None else self._shared.progress(common=common)

    @property
    def counts_calls(self) -> bool:
        """Whether the engines count the calls alike on all ranks; where messages compare the calls, messages do."""
        return self._comparison is None or self.compares_calls or (
            self._shared is not None and self._shared.is_compared_by_wire)

    @property
    def call_count(self) -> int:
        """The number of the last call on the host."""
        return 0 if self._shared is None or self._shared.engine is None else int(self._shared.engine.call_count)

    def thread(self) -> int:
        """Return the system's number of the thread of the engine's last call, or 0."""
        return 0 if self._shared is None or self._shared.engine is None else int(self._shared.engine.thread)

    @property
    def compares_calls(self) -> bool:
        """Whether the engine compares the calls of all ranks."""
        return self._shared is not None and self._shared.kind.compares and self._shared.engine is not None

    @property
    def compares_first(self) -> bool:
        """Whether the calls of all ranks are compared before data move, by the engine or by messages."""
        return self.compares_calls or (self._comparison is not None and not self._comparison.defers)

    def compare(self, description: str) -> Operation:
        """Compare a call with the other ranks' calls, before data move."""
        one: Executor = self._own or self._shared
        return one.compare(description)

    def explain_by(self, guard: Guard) -> None:
        """Let `guard` explain memory out of reach and shown failures, and end a meeting that a rank misses."""
        if self._shared is not None:
            self._shared.cause, self._shared.told = guard.cause, guard.told
            self._shared.hooks = [functools.partial(guard.check, meets=True)]

    def shown_culprit(self, rank: int) -> int | None:
        """Return the other rank to which a rank of this node has shown its failure to be due; None without one."""
        return None if self._shared is None else culprit_of(self._shared.node_ranks, rank)

    def fail(self, error: BaseException) -> None:
        """Tell the ranks of this node that this rank has failed."""
        if self._shared is not None:
            show_failure(self._shared.node_ranks, error)

    def close(self) -> None:
        """Release the executors and the heap."""
        for executor in self.executors:
            executor.close()
        self.heap.close()


def _host_executors(link: Transport, timeout: float, asked: str | None, check: str | None
          ) -> tuple[NodeEngine | None, NodeEngine, NativeExecutor | None]:
    """Return the executors for host arrays: of shared memory, of messages, of MPI. A collective call of processes."""
    from gpucoll.executors.engine import HOST_KINDS, NodeEngine
    from gpucoll.executors.engine.between_nodes import wire_of

    shared = native = None
    # Also beside executors of GPUs: the engine compares their calls.
    if link.shares_memory and (asked not in HOST_KINDS or HOST_KINDS[asked].carries):
        shared = NodeEngine(link, timeout, check, "shared" if max(link.place.nodes) == 0 else HYBRID)
        # Threads map their memory, and meet in `init_local`: one thread may make all communicators.
        if link.mpi is not None:
            # The communicator's guard does not exist yet: this one ends the meeting if a rank dies.
            others, began = frozenset(range(link.place.size)) - {link.place.rank}, time.monotonic()
            guard = Guard(link.place.rank, link.processes, lambda: others, dict, link.farewells, lambda: began)
            shared.meet(guard.check)
            if not all(link.mpi.allgather(shared.node_ranks.maps)):
                shared.close()
                shared = None
    # A communicator has one engine of its own: that of shared memory, if there is one.
    messages = NodeEngine(link, timeout, check, link.carrier, on_engine=shared is None)
    if messages.on_engine:
        messages.meet()  # without a wait: each rank is a node of its own
    if link.place.size > 1:
        wire = wire_of(link, timeout, check)
        for one in (shared, messages):
            if one is not None and one.kind.has_wire:
                one.use_wire(wire)
    if link.has_collectives:
        from gpucoll.executors.native import NativeExecutor

        native = NativeExecutor(link.wire, shared, timeout)
    return shared, messages, native
