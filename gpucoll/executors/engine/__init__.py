"""The `shared` executor: same-node ranks read each other's memory, and reduce from there, in place.

The executor runs every schedule. Inside a node nothing is sent: a receiving rank reads the sender's memory when the
sender's progress counter (see `instructions`) has reached the round. A rank waits only for ranks whose data it reads,
and for the readers of memory that it overwrites. On several nodes the executor is named `hybrid`, and sends messages
between nodes. Under the name `mpi` every rank counts as a separate node.

    plans         the engine's plans, found by call, and staging buffers
    instructions  a plan on bytes of the ranks' buffers: counters to await, operands to combine, counters to publish
    between_nodes messages between nodes: wires, the ranks to be greeted, and data that travel with a greeting
    extension     loads the C++ engine; digest: a hash of the engine's sources
    neighbours    the same-node ranks, and access to their memory
    failures      what these ranks show of their failures and of their last calls
    tables        numbers shared by Python and C++

Peers read a rank's buffers in one of four places. Small arrays are copied to workspaces in memory mapped by all ranks.
Symmetric arrays are mapped in place. Any other array is read in place with `process_vm_readv`, block by block. If the
system forbids this call, or several ranks read the same block, the owner copies the whole array to a mapped staging
buffer. Scratch is always in mapped memory.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpucoll.arrays import address
from gpucoll.arrays.segments import Slab
from gpucoll.core.signature import LastCall, is_refusal
from gpucoll.errors import BackendError, CollectiveTimeout, GpucollError, MismatchError, RankFailedError, is_settled
from gpucoll.executors import INSIDE, Call, CallRequest, Executor, Refusal, call_site, disagreement, shortened
from gpucoll.executors.engine.between_nodes import Comparing, WireRoles
from gpucoll.executors.engine.extension import library
from gpucoll.executors.engine.failures import ASTRAY, DOWN, EXPIRED, EXPIRED_FOR, last_call, show_failure
from gpucoll.executors.engine.neighbours import SMALL, NodeRanks
from gpucoll.executors.engine.plans import EngineCall, Plans
from gpucoll.executors.engine.tables import ALL, COUNTER, FAILURE, OFF, PEERS, ROUNDS, TEXT
from gpucoll.progress.operations import Operation, ProbeResult, keep_for_ever
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import WireError
from gpucoll.transport.tags import ENGINE_CALLS, ENGINE_TAGS

# Seconds for which ranks with different calls wait for the others' descriptions: MISMATCH_TIMEOUT if all ranks come to
# `differ`, SHORT_TIMEOUT if some may not. MISMATCH_INTERVAL is the pause between two looks.
MISMATCH_TIMEOUT, SHORT_TIMEOUT, MISMATCH_INTERVAL = 5.0, 0.25, 1e-4
# The counter of a rank that has shown the place of its call. One less than the engine's SETTLED, and above all rounds.
SITE_SHOWN = (1 << ROUNDS) - 2
CHECK_LEVELS: dict[str | None, int] = {"off": OFF, "deferred": PEERS, "full": ALL, None: ALL}


class HostKind(NamedTuple):
    """What the name of a `NodeEngine` decides."""

    compares: bool  # whether the engine compares calls in the node's memory; all ranks are on one node
    carries: bool  # whether the engine carries messages between two ranks of a node; else each rank is a node
    has_wire: bool  # whether messages between nodes go by a wire, and compare the calls


HOST_KINDS = {"shared": HostKind(compares=True, carries=True, has_wire=False),
              "hybrid": HostKind(compares=False, carries=True, has_wire=True),
              "mpi": HostKind(compares=False, carries=False, has_wire=True),
              "ucx": HostKind(compares=False, carries=False, has_wire=True)}


class NodeEngine(Executor):
    """An executor of schedules in the node's shared memory.

    Ranks `meet` before or in their first call, all ranks in the same call, for at most `timeout` seconds. `check` is
    the extent of comparing calls inside the node: "full" with all ranks before data is sent, "deferred" with the ranks
    to be read from, "off" with none. The `name` is a key of `HOST_KINDS`: "shared" on one node, "hybrid" on several;
    "mpi" and "ucx", named after the link, work on any number. `use_wire` gives the wire.
    `on_engine` says whether this engine is the communicator's own, with its flight records and its table of calls.

    Every call has a number, `engine.call_count`, equal on all ranks. A rank's progress counter is the call number and
    the position in the call.
    """

    def __init__(self, link: Any, timeout: float, check: str | None, name: str, *, on_engine: bool = True) -> None:
        self.name: str = name
        self.kind: HostKind = HOST_KINDS[name]
        self.on_engine: bool = on_engine
        self._check = CHECK_LEVELS[check] if self.kind.compares else OFF
        self._capsule: Any = None  # the wire
        # Whether the engine compares calls by messages that also carry the first data.
        self.is_compared_by_wire: bool = False
        self._may_compare = on_engine and CHECK_LEVELS[check] == ALL and self.kind.has_wire
        self._link, self._timeout, self._size = link, timeout, link.place.size
        place = link.place
        if not self.kind.carries:
            place = place._replace(nodes=tuple(range(self._size)))
        self.node_ranks: NodeRanks = NodeRanks(place, library().BOX)
        self._has_met, self._nodes = False, place.nodes
        self.engine: Any = None
        self.plans: Any = None
        self._flight: Any = None
        self.cause: Callable[[], GpucollError | None] = lambda: None  # the error that explains memory out of reach
        self.hooks: list[Callable[[], None]] = []  # for the meeting, if it comes with the first call
        # Returns the error for a failure shown by a rank, once the rank has told its cause; None if it tells nothing.
        self.told: Callable[[int], GpucollError | None] = lambda rank: None
        self.comparison: Any = None  # compares calls by messages, if the engine does not
        self.described: str = ""  # the whole description of a call without data
        self._explaining = Comparing(self, "")  # finds the difference after unlike greetings
        self._asked: int | None = None  # the rank whose next call is awaited: see `next_call`

    def serves(self, request: CallRequest) -> str | None:
        """Return None, once the ranks have met."""
        self.meet()
        return None

    def compile(self, request: CallRequest) -> Call | Refusal:
        """Return the call of a plan with the schedules of all ranks."""
        assert request.plan is not None
        if request.plan.schedules is None:
            return Refusal(f"{request.algorithm} has no schedule")
        return EngineCall(self, request, self.plans)

    def meet(self, *hooks: Callable[[], None]) -> None:
        """Gain access to the other ranks' memory. Collective; raises CollectiveTimeout and errors of `hooks`."""
        if not self._has_met:
            waits = Progress(self._timeout, foreign=self._link.foreign)
            waits.hooks.extend(hooks or self.hooks)
            waits.run(self.meeting(), "the first call over shared memory")

    def meeting(self) -> Operation:
        """Do the work of `meet`, as an operation."""
        node_ranks = self.node_ranks
        yield from node_ranks.meet(self._link.wire)
        self._has_met = True
        if node_ranks.maps:
            # A waiting rank may spin only if no other rank needs its core.
            cores, threads = len(os.sched_getaffinity(0)), [*node_ranks.processes.values()].count(os.getpid())
            heads, keys, processes = (
                tuple(of(rank) if rank in node_ranks.all else 0 for rank in range(self._size))
                for of in (lambda rank: address(node_ranks.controls[rank]), node_ranks.keys.get,
                           node_ranks.processes.get))
            self.engine = library().Engine(
                executor=self, errors=GpucollError, rank=node_ranks.rank, check=self._check, process=os.getpid(),
                spins=node_ranks.has_core, crowd=-(-threads // cores), copies=node_ranks.copies, first=node_ranks.first,
                workspace_bytes=SMALL, boxes=node_ranks.boxes, heads=heads, keys=keys, processes=processes)
            self._record()
            # Whether the call under way has ended; `patient` waits a short time, for a thread that waits alone.
            self.has_ended: Callable[[], Any] = functools.partial(self.engine.go_on)
            self.has_ended.patient = self.engine.ends  # type: ignore[attr-defined] # partial objects take attributes
            self.plans = Plans(node_ranks, self.engine, self._comparing)
            if self._capsule is not None:
                self._bind_wire()

    def use_wire(self, capsule: Any) -> None:
        """Send the messages between nodes by the wire in a capsule; called on all ranks, before the first call."""
        self._capsule = capsule
        self.is_compared_by_wire = self._may_compare
        if self.engine is not None:
            self._bind_wire()

    def _bind_wire(self) -> None:
        roles = self.plans.roles = WireRoles.of(self.node_ranks.rank, self._nodes, compares=self._may_compare)
        # Calls of two engines may have the same number, so each engine has its own tags.
        tag = ENGINE_TAGS + (0 if self.on_engine else ENGINE_CALLS)
        self.engine.bind_wire(self._capsule, tag, roles.partners, roles.leader, roles.compares)

    def record(self, memory: Any, last: int, records: int, capacity: int) -> None:
        """Write a flight record of every call to `memory`, at the given places of the last number and the records."""
        self._flight = memory, last, records, capacity
        self._record()

    def _record(self) -> None:
        if self.engine is not None and self._flight is not None:
            self.engine.record(INSIDE, address(self._flight[0]), *self._flight[1:])

    def check_failures(self, awaited: int | None = None) -> None:
        """Raise the failure shown by another rank of this node, or by `awaited` alone."""
        for rank in self.node_ranks.all if awaited is None else (awaited,):
            failure = self.node_ranks.words[rank][FAILURE]
            if failure == ASTRAY:
                self.differ(meet=False)
            elif failure:
                raise self.told(rank) or self._shown(failure)

    def _shown(self, failure: int) -> GpucollError:
        """Return the error for a failure shown by a rank that tells no cause."""
        if failure != EXPIRED and failure > EXPIRED_FOR:
            return RankFailedError(f"rank {DOWN - failure} has failed, or has left the communicator",
                                   ranks=(DOWN - failure,))
        # Without a name in the failure, blame the ranks that have not reached this call.
        behind = (EXPIRED_FOR - failure,) if failure != EXPIRED else tuple(
            rank for rank, last in self.progress().items() if last.number < self.engine.call_count)
        return CollectiveTimeout("another rank of this node has waited until its deadline in this call; is every rank "
                                 "in the same call, with the same shape, dtype and algorithm?", ranks=behind)

    def differ(self, meet: bool = True) -> None:
        """Raise MismatchError or PeerError with the call, and its place in the code, of each rank of this node.

        If all ranks compare calls before data is sent, all ranks come here. Each rank shows its place in the code and
        reads the others': the error is settled, and the communicator goes on as if the call had not been made. In all
        other cases the communicator has failed: with `check="deferred"`, if a rank is ahead in eager calls, or if
        another rank has failed (`meet` false). If all visible calls are equal, the error names no rank: the difference
        lies between nodes, and the comparison by messages explains it.
        """
        if meet and self.is_compared_by_wire:
            return self._explaining.explain()
        self.judge()
        number, node_ranks, words = self.engine.call_count, sorted(self.node_ranks.all), self.node_ranks.words
        settles = meet and self._check == ALL and not any(self.engine.is_eager(rank, number) for rank in node_ranks)
        # After `settle` the next use of the same descriptor waits for all counters, so that no rank can miss it.
        if settles:
            self.node_ranks.check_lengths(self.engine, number)
        # Wait until all ranks have shown their descriptions with their places in the code.
        if settles:
            self.engine.add_call_site(call_site())
        else:
            words[self.node_ranks.rank][FAILURE] = ASTRAY
        counter = number << ROUNDS | (SITE_SHOWN if settles else 0)
        deadline = time.monotonic() + min(self._timeout, MISMATCH_TIMEOUT if settles else SHORT_TIMEOUT)
        while any(words[rank][COUNTER] < counter for rank in node_ranks) and time.monotonic() < deadline:
            time.sleep(MISMATCH_INTERVAL)
        if settles and all(words[rank][COUNTER] >= counter for rank in node_ranks):
            calls = [self.engine.description(rank, number) for rank in node_ranks]
            self.engine.settle()
            raise disagreement(node_ranks, calls)
        if (error := self.difference()) is not None:
            raise error
        # Ranks may be several calls apart, as behind a root that was ahead: then compare the last calls.
        shown = {rank: last.text.partition("\n")[0] for rank, last in self.progress().items()}
        if len(set(shown.values())) < 2 or self._check == OFF:
            raise MismatchError("another rank of this node found that the ranks make different calls")
        raise disagreement([*shown], [*shown.values()], moved=True)

    def difference(self) -> GpucollError | None:
        """Return the error of unlike calls, of this rank's last number or shortly before; None without any."""
        shown = {} if self.engine is None else self.node_ranks.unlike_calls(self.engine, self.engine.call_count)
        return disagreement([*shown], [*shown.values()], moved=True) if len({*shown.values()}) > 1 else None

    def compare(self, description: str) -> Operation:
        """Compare a call made by another executor, or refused, with the other ranks; a refusal waits for no rank."""
        if not self._has_met:
            yield from self.meeting()
        if self._check == OFF and self.comparison is None and not is_refusal(description):
            return
        if is_refusal(description) and self.comparison is None:
            description = shortened(f"{description}\n{call_site()}", TEXT - 1)
        self.described = description if self.is_compared_by_wire else ""
        try:
            yield from self.walk(lambda: self.plans.without_data(description), None, None)
        finally:
            self.described = ""

    def deferrer(self, description: str, waits: Progress) -> Callable[[], None]:
        """Return a function that begins to compare a call, and judges the call deferred before; see `Deferring`."""
        plan, defer = self.plans.deferred(description), self.engine.defer

        def start() -> None:
            try:
                if not defer(plan, None):
                    waits.slow_wait(self.engine, "comparing calls")
            except BaseException as error:
                self.cancel(error, plan)
                raise

        return start

    def judge(self) -> set[int]:
        """Return the ranks that have not come to the deferred call; raise the error if ranks differ in it."""
        if self.engine is None or not (number := self.engine.open()):
            return set()
        ranks = sorted(self.node_ranks.all)
        if self.engine.unlike():
            raise disagreement(ranks, [self.engine.description(rank, number) for rank in ranks], moved=True)
        return {rank for rank in ranks if self.node_ranks.words[rank][COUNTER] >> ROUNDS < number}

    def _comparing(self, description: str = "") -> Callable[[], bool] | None:
        """Return an instruction that compares a call by messages; None if the engine compares calls."""
        return None if self.comparison is None or self.is_compared_by_wire else Comparing(self, description).go_on

    def awaited(self) -> set[int] | None:
        """Return the ranks awaited by the call under way; None if no call is under way."""
        is_walking = self.engine is not None and self.engine.is_walking()
        rank = self.engine.awaited() if is_walking else self._asked
        if rank not in (None, self.node_ranks.rank):
            return {rank}
        return {*self.engine.partners()} or None if is_walking else None

    def under_way(self) -> str:
        """Return the description of the call under way, or ""."""
        if self.engine is None or not self.engine.is_walking():
            return ""
        text: str = self.engine.description(self.node_ranks.rank, self.engine.call_count)
        return text.partition("\n")[0]

    def progress(self, *, common: bool = False) -> dict[int, LastCall]:
        """Return the last call of each rank of this node; with `common`, the last one compared of all other ranks."""
        engine, node_ranks = self.engine, self.node_ranks
        if engine is None:
            return {}
        found = {rank: last_call(node_ranks, engine, rank) for rank in node_ranks.all}
        if common and self.is_compared_by_wire:
            # Calls are compared before they end: another node has made at least the call before this one.
            number = engine.call_count - engine.is_walking()
            call = LastCall(number, engine.description(node_ranks.rank, number) if number > 0 else "", None)
            found = dict.fromkeys(range(self._size), call) | found
        return found

    def next_call(self, rank: int) -> str | None:
        """Return the description of the call of `rank` numbered as this rank's next; None if `rank` has not come there.

        "" means that `rank`, too, waits for the root of the call. Raises as `check_failures` does.
        """
        description: str | None = self.engine.next_call(rank)
        self._asked = None if description is not None else rank
        if description is None:
            self.check_failures(rank)
        return description

    def out_of_reach(self, number: int) -> None:
        """Raise the cause of the system's error `number`: BackendError unless some rank is known to have ended."""
        raise self._unreachable(os.strerror(number))

    def disconnected(self, reason: str, rank: int) -> None:
        """Raise the error of a message between nodes that has failed for this `reason`."""
        raise WireError(f"message with rank {rank}: {reason}", ranks=(rank,))

    def spent(self) -> None:
        """Raise the error of a call after the last number that the progress counters hold."""
        raise BackendError(f"this communicator has made all of its {self.engine.call_count} calls; close it and make "
                           "another one")

    def _unreachable(self, why: object) -> GpucollError:
        return self.cause() or BackendError(f"no memory, or no access to another rank's: {why}", code="GC-MEMORY")

    def reach(self, slab: Slab, keys: Sequence[int]) -> None:
        """Register a new slab of symmetric memory; `keys` identify the slabs of all ranks."""
        if self.engine is not None:
            for rank in self.node_ranks.all - {self.node_ranks.rank}:
                self.attach(rank, keys[rank])
            self.engine.symmetric(slab.key, slab.start, slab.nbytes)

    def attach(self, rank: int, key: int) -> None:
        """Map another rank's segment for the engine; raise BackendError if the system forbids it."""
        try:
            row = self.node_ranks.attached(rank, key)
        except OSError as error:
            raise self._unreachable(error) from error
        self.engine.attach(rank, key, address(row), row.nbytes)

    @property
    def compares_calls(self) -> bool:
        """Whether the engine compares the calls of all ranks."""
        return self.kind.compares and self.engine is not None

    def port(self, points: Any) -> Any:
        """Return the carrier of messages between two ranks, if `points` carries those between nodes.

        The carrier is of the same kind on all ranks after `meet`.
        """
        carries = self.engine is not None and self.node_ranks.copies and self.kind.carries
        return MessagePort(self, points) if carries else points

    def walk(self, plan: Callable[[], Any], x: Any, out: Any) -> Operation:
        """Carry out a plan on these arrays; after a failure no other rank begins to read or write the arrays."""
        made = None
        try:
            made = plan()
            self.engine.begin(made, x, out)
            if not self.engine.go_on():
                yield self.has_ended
        except BaseException as error:
            if is_settled(error):
                raise
            # CollectiveTimeout is an OSError too, and needs no explanation.
            is_system = isinstance(error, OSError) and not isinstance(error, GpucollError)
            raised = self._unreachable(error) if is_system else error
            # A broken connection is the reporter's view of a death elsewhere: other ranks must not take it for its own.
            if isinstance(error, (BackendError, *self._link.foreign)):
                raised = self.cause() or error
            self.cancel(raised, x, out, made)
            if raised is not error:
                raise raised from error
            raise

    def cancel(self, error: BaseException, *memory: Any) -> None:
        """Show an error to the other ranks, and keep alive all memory still accessible to the ranks or MPI."""
        if not is_settled(error):
            show_failure(self.node_ranks, error)
            # Peers and MPI cannot be stopped, and would still use freed memory.
            keep_for_ever((memory, self.plans, self.engine))
            if self.engine is not None:
                self.engine.cancel_messages()

    def close(self) -> None:
        """Release all memory."""
        # A signal's handler may close the communicator inside a call, and the call goes on using everything.
        if self.engine is not None and self.engine.is_walking():
            self.engine.close()
            keep_for_ever(self)
            return
        if self.engine is not None:
            # A greeting may still be on its way, after unlike calls.
            if not self.engine.cancel_messages():
                keep_for_ever(self.engine)
            self.engine.close()
            self.plans.close()
        self.engine = self.plans = None  # a cycle of references: end it here
        self.node_ranks.close()


class MessagePort:
    """The carrier of messages between two ranks: the engine of a node, and `points` for ranks of other nodes."""

    def __init__(self, node: NodeEngine, points: Any) -> None:
        self._node, self._points = node, points

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin to send ``[bytes, "B"]`` with a dtype code, like mpi4py's method."""
        if dest in self._node.node_ranks.all:
            return self._node.engine.message(True, buffer[0], dest, tag, dtype)
        return self._points.Isend(buffer, dest, tag, dtype)

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin to receive ``[bytes, "B"]`` with a dtype code, like mpi4py's method."""
        if source in self._node.node_ranks.all:
            return self._node.engine.message(False, buffer[0], source, tag, dtype)
        return self._points.Irecv(buffer, source, tag, dtype)

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a message that could be received now, or None; `source` and `tag` None match any."""
        ranks = self._node.node_ranks
        if source is None or source in ranks.all:
            found = self._node.engine.probe(-1 if source is None else source, -1 if tag is None else tag)
            if found is not None or source is not None or len(ranks.all) == ranks.size:
                return None if found is None else ProbeResult(*found)
        return self._points.seen(source, tag)
