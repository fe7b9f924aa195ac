"""The plans of an engine, and staging memory for buffers; `instructions` writes a single plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpucoll.algorithms import find
from gpucoll.arrays.segments import Segment
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import LOGICAL
from gpucoll.core.signature import is_refusal
from gpucoll.executors import Call, Called, CallRequest, call_site, fingerprint, shortened
from gpucoll.executors.engine.between_nodes import WireRoles
from gpucoll.executors.engine.instructions import Row, Writer, numbers_of
from gpucoll.executors.engine.neighbours import BUFFERS, SMALL, TINY, NodeRanks
from gpucoll.executors.engine.tables import AGREE, CALL, GIVEN, INPUT, PAGE, RESULT, TEXT, PlanFlag
from gpucoll.plan import Plan
from gpucoll.progress.operations import Operation

if TYPE_CHECKING:
    from gpucoll.executors.engine import NodeEngine

CACHED_PLANS = 256  # plans of calls without data
# Bytes of a staging buffer: the least, and the most for rounding up to a power of two: beyond, this wastes too much.
LEAST_STAGING, MOST_ROUNDED = 1 << 16, 1 << 28
NO_OP = -1  # the number of no op


def shown(description: str) -> tuple[str, int]:
    """Return a call's description as the ranks show it, cut to fit, and its fingerprint, which they compare.

    Behind the description stands the place in the program at which this rank plans the call: errors of other ranks name
    this place for all calls of the plan.
    """
    # A refusal, and a call compared by messages, has a place already.
    place = call_site() if "\n" not in description else ""
    return shortened(f"{description}\n{place}" if place else description, TEXT - 1), fingerprint(description)


class Plans:
    """The plans of one communicator's engine.

    `comparing(description)` returns a function to compare a call by messages with the other ranks' calls, by default
    the call under way as described by the engine. It returns None if the engine compares calls.
    `roles` are this rank's in messages between nodes, None without any.
    """

    def __init__(self, node_ranks: NodeRanks, engine: Any,
                 comparing: Callable[..., Callable[[], bool] | None] = lambda description="": None,
                 roles: WireRoles | None = None) -> None:
        self._node_ranks, self._engine, self._comparing = node_ranks, engine, comparing
        self.roles: WireRoles | None = roles
        self.without_data: functools._lru_cache_wrapper[Any] = functools.lru_cache(CACHED_PLANS)(self._without_data)
        self.deferred: functools._lru_cache_wrapper[Any] = functools.lru_cache(CACHED_PLANS)(self._deferred)
        self._staging: dict[int, Segment] = {}
        self._outgrown: list[Segment] = []  # a call under way may still use these

    def plan_for(self, request: CallRequest) -> Any:
        """Return the engine's plan for `request`."""
        plan, symmetric, node_ranks = request.plan, request.symmetric, self._node_ranks
        assert plan is not None
        assert plan.schedules is not None
        # A rank alone on its node, among several nodes, has no readers.
        is_read = len(node_ranks.all) > 1 or node_ranks.size == 1
        small = is_read and (request.nbytes <= TINY or (request.nbytes <= SMALL and not symmetric))
        # An input with several readers is copied once to mapped memory: process_vm_readv takes twice as long per read.
        copies = plan.copy_input or (is_read and plan.shares_input and not small and not symmetric)
        row = COLLECTIVES[request.collective]
        # In place, the input may be this rank's block of the output: peers may read a copy, this rank reads the block.
        is_block = row.output.blocks and not row.input.blocks
        alias = request.in_place and not small and (is_block or not copies) and (node_ranks.copies or symmetric)
        by_node = Plan(plan.schedules(node_ranks.rank), plan.layouts, in_place=alias, schedules=plan.schedules,
                       same_node=node_ranks.all)
        # The one-pass form of two_shot. The choice must be equal on all ranks, so it ignores the arrays' places.
        one_pass = request.op is not None and not request.op.expression and request.nbytes > SMALL \
            and find(request.collective, request.algorithm).traits.barriers == 2 \
            and len(node_ranks.all) == node_ranks.size > 1
        sizes = [*_bytes(request), by_node.workspace["scratch"] * request.dtype.itemsize]
        # Scratch always needs staging memory; input and output need it if peers cannot read the arrays in place.
        for buffer, wanted in enumerate((copies or not node_ranks.copies, not node_ranks.copies, True)):
            if small and sizes[buffer] > PAGE:  # the first page is reserved from the start
                node_ranks.reserve(buffer, min(sizes[buffer], SMALL))
            if wanted and sizes[buffer] > (SMALL if small else 0):
                self._stage(buffer, sizes[buffer])
        writer = Writer(request, node_ranks.rank, by_node, self.roles, self._comparing(), apart=small)
        instructions = (*(writer.fused() if one_pass else writer.rows()),)
        readers = [(BUFFERS.index(name), peer, counter) for (name, peer), counter in writer.readers.items()]
        readers += [(INPUT, peer, 0) for peer in self._readers_of_call(request)]
        starts = () if request.cut.lengths is None else tuple(
            start for layout in plan.layouts for start in _padded(layout, node_ranks.size + 1))
        # With buffers in control segments, peers compute the places of buffers without looking at descriptors: the
        # choice must be equal on all ranks. The size of scratch may differ, and the engine refuses a plan with too much
        # scratch for a workspace. Eager plans need this form. In an exchange of lengths all ranks meet: another rank
        # may have taken lengths from an earlier call.
        header = COLLECTIVES.get(request.header)
        in_control = small and request.nbytes <= TINY and request.cut.lengths is None \
            and len(node_ranks.all) == node_ranks.size and (header is None or header.ragged is None)
        flags = self._flags(request)
        flags |= in_control * PlanFlag.IN_CONTROL | small * PlanFlag.OWN_IN_CONTROL | copies * PlanFlag.COPIES_INPUT
        if request.collective == "broadcast" and request.in_place:
            flags |= PlanFlag.KEEPS_OUTPUT
        return self._plan_of(request, (*sizes, writer.private_bytes), flags, instructions, (*writer.calls,),
                             peers=(*writer.peers,), readers=tuple(readers), starts=starts)

    def by_calls(self, request: CallRequest, call: Called) -> Any:
        """Return the plan of a call compared by the engine and then done by the function `call`."""
        given, taken = _bytes(request)
        given = 0 if request.collective == "broadcast" else given
        instruction = CALL, 0, 0, (self._node_ranks.rank, RESULT, 0), 0, ((self._node_ranks.rank, GIVEN, 0),), ()
        readers = tuple((INPUT, peer, 0) for peer in self._readers_of_call(request))
        return self._plan_of(request, (given, taken, 0, 0), self._flags(request), (instruction,),
                             (call,), readers=readers)

    def _plan_of(self, request: CallRequest, sizes: tuple[int, ...], flags: int, instructions: tuple[Row, ...],
                 calls: tuple[Callable[..., Any], ...], *, peers: tuple[int, ...] = (),
                 readers: tuple[tuple[int, int, int], ...] = (), starts: tuple[int, ...] = ()) -> Any:
        return self._engine.plan(*shown(request.description), (*sizes, request.dtype.itemsize),
                                 self._reduction(request), flags, request.root, peers, readers, starts, instructions,
                                 calls)

    def _flags(self, request: CallRequest) -> int:
        """Return the flags that do not depend on the places of buffers."""
        return (request.collective == "broadcast") * PlanFlag.OVERWRITES \
            | self._is_announced(request) * PlanFlag.ANNOUNCED

    def _is_announced(self, request: CallRequest) -> bool:
        """Return whether the other ranks learn of this call, and its shapes, from the root's descriptor alone."""
        node_ranks = self._node_ranks
        return (request.header != "" or request.collective == "scatter") and COLLECTIVES[request.collective].rooted \
            and len(node_ranks.all) == node_ranks.size

    def _readers_of_call(self, request: CallRequest) -> frozenset[int]:
        """Return the ranks that read this rank's descriptor of a call for more than comparison."""
        node_ranks = self._node_ranks
        if not self._is_announced(request) or node_ranks.rank != request.root:
            return frozenset()
        return node_ranks.all - {node_ranks.rank}

    def _reduction(self, request: CallRequest) -> tuple[int, int, int]:
        """Return dtype and op by the engine's numbers, and the number of contributions for `_finish`."""
        if request.op is None:
            return list(DTYPES).index(request.dtype.name), NO_OP, 0
        return *numbers_of(request.op, request.dtype), self._finish(request)

    def _without_data(self, description: str) -> Any:
        """Return the plan of a call without data: only a comparison, or a refusal."""
        comparing = self._comparing(description)
        rows, calls = ((), ()) if comparing is None else (((CALL, 0, 0, None, 0, (), ()),), (lambda _: comparing(),))
        by_wire = self.roles is not None and self.roles.compares
        if by_wire:
            rows = ((AGREE, 0, 0, None, 0, (), ()),)
        refuses, by_engine = is_refusal(description), comparing is None and not by_wire
        flags = (by_engine and refuses) * PlanFlag.REFUSES | (not refuses) * PlanFlag.ONLY_COMPARES
        return self._bare(shown(description), flags, rows=rows, calls=calls)

    def _deferred(self, description: str, nbytes: int = 0) -> Any:
        """Return the plan of a call compared by the next call; all ranks get the `nbytes` of its input."""
        node_ranks = self._node_ranks
        readers = tuple((INPUT, rank, 0) for rank in sorted(node_ranks.all - {node_ranks.rank}) if nbytes)
        text, signature = shown(description)
        # Each rank raises its own refusal, if all refuse: refusals are alike.
        signature = fingerprint("refused") if is_refusal(description) else signature
        return self._bare((text, signature), PlanFlag.ONLY_COMPARES | PlanFlag.DEFERRED, nbytes, readers)

    def _bare(self, words: tuple[str, int], flags: int, nbytes: int = 0, readers: tuple[tuple[int, int, int], ...] = (),
              rows: tuple[Row, ...] = (), calls: tuple[Callable[..., Any], ...] = ()) -> Any:
        # Buffers without bytes count as buffers in the control segments: no rank waits for memory.
        flags |= PlanFlag.IN_CONTROL | PlanFlag.OWN_IN_CONTROL
        return self._engine.plan(*words, (nbytes, 0, 0, 0, 1), (0, NO_OP, 0), flags, 0, (), readers, (), rows, calls)

    def _finish(self, request: CallRequest) -> int:
        """Return the number of contributions for the engine's final step (mean or truth value); 0 for no step."""
        op = request.op
        if op is None or not request.has_output:
            return 0
        rank, size = self._node_ranks.rank, self._node_ranks.size
        contributions = {"scan": rank + 1, "exscan": rank}.get(request.collective, size)
        alone = op.name in LOGICAL and contributions == 1
        return contributions if alone or (op.name == "avg" and op.factor is None) else 0

    def _stage(self, buffer: int, nbytes: int) -> None:
        """Provide staging memory, kept from call to call, for a buffer not readable in place by peers."""
        staging = self._staging.get(buffer)
        if staging is None or staging.nbytes < nbytes:
            if staging is not None:
                self._outgrown.append(staging)
            rounded = 1 << (nbytes - 1).bit_length() if nbytes < MOST_ROUNDED else nbytes
            staging = self._staging[buffer] = Segment(max(LEAST_STAGING, rounded))
            self._engine.staging(buffer, staging.key, staging.start, staging.nbytes)
        staging.reserve(0, nbytes)

    def close(self) -> None:
        """Release the staging memory and all plans."""
        for staging in (*self._staging.values(), *self._outgrown):
            staging.close()
        self._staging.clear()
        self._outgrown.clear()
        self.without_data.cache_clear()
        self.deferred.cache_clear()


def _bytes(request: CallRequest) -> list[int]:
    """Return the bytes of input and output on this rank."""
    return [nbytes or 0 for nbytes in request.sizes]


def _padded(layout: Any, length: int) -> Sequence[int]:
    """Return the starts of `length` blocks; blocks missing from the layout are empty, at the end."""
    return (*layout.starts, *[layout.starts[-1]] * (length - len(layout.starts)))


class EngineCall(Call):
    """A request as a plan of the engine. The engine forms means, and fills an exscan: nothing is left to be done."""

    completes = True
    executor: NodeEngine

    def __init__(self, executor: NodeEngine, request: CallRequest, plans: Plans) -> None:
        super().__init__(executor, request)
        self._plans = plans

    @functools.cached_property
    def plan(self) -> Any:
        """The engine's plan, made in the first call: a lack of memory then ends the call on all ranks."""
        return self._plans.plan_for(self.request)

    @property
    def engine_plan(self) -> Any:
        return self.plan if self.executor.on_engine else None

    def run(self, source: Any, target: Any, stream: Any = None, *, repeated: bool = False) -> Operation:
        return self.executor.walk(lambda: self.plan, source, target)
