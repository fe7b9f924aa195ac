"""The transport of virtual ranks: calls are matched instead of carried out; everything above is the library itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy

from gpucoll import Transport, internal
from gpucoll.emulation import on_host
from gpucoll.precheck.gpu_arrays import GPU, is_followed
from gpucoll.precheck.matching import CLOSE, REFUSED, VirtualGroup
from gpucoll.precheck.turns import Turns, refusal


class VirtualWaits(internal.Progress):
    """Waits that give the turn to another rank; no deadline, no progress thread."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        super().__init__(math.inf, threads=False)
        self._turns, self._mine = group.turns, group.rank_of(rank)

    def new_group(self) -> list[internal.Work[Any]]:
        return PlacedWorks(self._turns)

    def until(self, done: internal.Pending, name: str, deadline: float, ends: Sequence[internal.End] = ()) -> None:
        """Give up the turn until ``done()`` is true."""
        self.name = name
        self._turns.wait(done, name)

    def soon(self, operation: internal.Operation, name: str, result: Any) -> internal.Work[Any] | None:
        """Start a message between two ranks."""
        return self.start(internal.Work(self, operation, name, result))

    def advance(self) -> None:
        """Advance all operations, and let the other ranks go on: the caller may be polling."""
        super().advance()
        self._turns.pause(self.name or "a poll")

    def poke(self) -> None:
        """Advance all operations of a waiting rank."""
        if self._stepping.locked():  # by a blocking call of the rank: only messages go on meanwhile
            self._advance_alone()
        else:
            super().advance()
        if self.is_idle:
            self._mine.waits.discard(self)

    @property
    def is_idle(self) -> bool:
        """Whether no operation is under way."""
        return not (self._queue or self._alone)

    def _begin(self, work: internal.Work[Any], works: Any) -> internal.Work[Any]:
        self.check()
        work.place = getattr(work, "place", "") or self._turns.site()  # type: ignore[attr-defined] # a mark of ours
        works.append(work)
        self._mine.waits.add(self)
        super().advance()
        return work

    def _step(self, work: internal.Work[Any]) -> bool:
        before, self._turns.place = self._turns.place, work.place  # type: ignore[attr-defined]
        try:
            return super()._step(work)
        finally:
            self._turns.place = before


class PlacedWorks(list[internal.Work[Any]]):
    """The works of an open group; each notes the line of its call, because the group starts the works at its end."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def append(self, work: internal.Work[Any]) -> None:
        work.place = self._turns.site()  # type: ignore[attr-defined] # a mark of ours
        super().append(work)


class MatchingExecutor(internal.Executor):
    """Matches calls; the last rank to come computes the results of all."""

    name = "mpi"
    chooses: bool = True
    binds: bool = False

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def compile(self, request: internal.CallRequest) -> internal.Call:
        if request.algorithm != "auto" and not internal.is_native(request.algorithm):
            _check_algorithm(request.collective, request.algorithm, self._group.size, request.root)
        return internal.Call(self, request)

    def run(self, call: internal.Call, source: Any, target: Any, stream: Any, *, repeated: bool) -> internal.Operation:
        ready = internal.ReadyCall(call, on_host(source), on_host(target))
        made = self._group.arrive(self._rank, call.request.description, self._group.turns.site(), ready, compute)
        if not made.is_complete:
            yield lambda: made.is_complete

    def compare(self, description: str) -> internal.Operation:
        """Note that this rank refuses a call; wait for nobody."""
        refused = internal.Signature("", refusal=REFUSED).encode()
        self._group.arrive(self._rank, refused, internal.call_site(), internal.Signature.decode(description).refusal)
        return iter(())


@functools.lru_cache(1024)
def _check_algorithm(collective: str, algorithm: str, size: int, root: int) -> None:
    """Raise ArgumentError, as a call does, for an algorithm that cannot serve."""
    internal.find(collective, algorithm)
    internal.schedule(collective, algorithm, rank=0, size=size, root=root)


class VirtualMessages(internal.ThreadMessages):
    """The messages of a rank; a waiting rank notes which message it looks for, for the findings."""

    def __init__(self, rank: int, group: VirtualGroup) -> None:
        super().__init__(rank, group.mail)
        self._group = group

    def Isend(self, buffer: list[Any], *given: Any) -> Any:
        return super().Isend([*map(on_host, buffer)], *given)

    def Irecv(self, buffer: list[Any], *given: Any) -> Any:
        return super().Irecv([*map(on_host, buffer)], *given)

    def seen(self, source: int | None, tag: int | None) -> internal.ProbeResult | None:
        found = super().seen(source, tag)
        if found is not None:
            self._group.probes.pop(self._rank, None)
        elif self._group.turns.is_looking:
            self._group.probes[self._rank] = source, tag
        return found


class VirtualTransport(Transport):
    """The place of rank `number` of the world in a group of virtual ranks."""

    meets_to_close = False
    waits: VirtualWaits

    def __init__(self, group: VirtualGroup, number: int) -> None:
        rank = group.members.index(number)
        super().__init__(rank, ("here",) * group.size, None, None, VirtualMessages(rank, group))
        self.group: VirtualGroup = group
        self.number: int = number
        self.closed: bool = False
        groups = group.turns.ranks[number].groups
        groups.setdefault(group, len(groups))
        self.executor: MatchingExecutor = MatchingExecutor(group, rank)
        self.enter: Callable[[], None] = self._begin_call

    def new_waits(self, timeout: float) -> internal.Progress:
        self.group.turns.ranks[self.number].transports.append(self)
        self.waits = VirtualWaits(self.group, self.rank)
        return self.waits

    def _begin_call(self) -> None:
        """Give up the turn in calls that are refused: the program may repeat such a call for ever."""
        self.group.turns.own("a call")
        if self.closed or self.waits.failure is not None:
            self.group.turns.pause("a call after close or a failure")

    def split(self, color: int | None, key: int) -> VirtualTransport | None:
        group, found = self.group, list[Any]()
        self.waits.run(group.exchange(self.rank, internal.Signature("split", header="split"), (color, key),
                                      lambda everyone: group.parts(*zip(*everyone, strict=True)), found), "split")
        return None if color is None else VirtualTransport(found[0][color], self.number)

    def exchange(self, name: str, root: int, value: Any, found: list[Any]) -> internal.Operation:
        return self.group.exchange(self.rank, internal.Signature(name, root=root, header=name), value, list, found)

    def own_gpu(self, ordinal: int | None) -> int | None:
        return (self.number if ordinal is None else ordinal) if is_followed() else None

    def gpu(self, name: str) -> Any:
        if not is_followed():
            raise refusal("precheck: a GPU array of another library than CuPy, or of a CuPy imported before; let the "
                          "function import CuPy itself, or use `gpucoll precheck`")
        return GPU

    def tell(self, others: Collection[int], farewell: internal.Farewell) -> None:
        """Tell nothing: the precheck sees which ranks leave, and where."""

    def has_ended(self) -> bool:
        return self.closed

    def farewells(self) -> Mapping[int, internal.Farewell]:
        return {}

    def close(self, release: Callable[[bool], None], farewell: internal.Farewell, *, failed: bool) -> None:
        self.end(waits=not failed)
        release(False)

    def end(self, *, waits: bool, is_end: bool = False) -> None:
        """Leave: complete all operations, unless failed, and with `waits` wait for the other ranks to leave.

        `is_end` says that the program of the rank ends here.
        """
        turns = self.group.turns
        self.closed = True
        if turns.is_over:
            return
        if waits or is_end:
            turns.wait(lambda: self.waits.is_idle, "close")
        call = self.group.arrive(self.rank, CLOSE, "" if is_end else internal.call_site(), is_end=is_end)
        if waits:
            turns.wait(lambda: call.is_complete, "close")


def end(transports: Sequence[VirtualTransport], *, failed: bool) -> None:
    """Leave all communicators of a rank whose program has ended, or has `failed`."""
    for one in transports:
        if not one.closed:
            one.end(waits=False, is_end=not failed)


# ---------------------------------------------------------------- the results, by NumPy and without a schedule

MOST_MATCHED = 128 << 20  # bytes of a call over all ranks: results of larger calls are not computed
# Bytes of a result that is not computed and set to zero: the memory of a longer one may never be touched, so that
# programs larger than this machine's memory can be checked.
MOST_ZEROS = 1 << 20


def compute(calls: Sequence[internal.ReadyCall]) -> None:
    """Write the results of a call, given the calls of all ranks in rank order.

    Above MOST_MATCHED no result is computed: a result apart from the input is zero up to MOST_ZEROS bytes, any other
    array keeps its values.
    """
    first, row = calls[0].call.request, internal.COLLECTIVES[calls[0].call.request.collective]
    if first.nbytes * len(calls) > MOST_MATCHED:
        for call in calls:
            if call.target is not None and not call.call.request.in_place and row.name != "broadcast" \
                    and call.target.nbytes <= MOST_ZEROS:
                call.target[...] = 0
    elif row.reduces:
        _reduce(row.name, calls, blocks=row.input.blocks)
    elif row.name != "barrier":
        _move(calls, blocks=row.input.blocks, source=first.root if row.input.where == "root" else None)


def _move(calls: Sequence[internal.ReadyCall], *, blocks: bool, source: int | None) -> None:
    """Carry out a call that moves data, from rank `source` or from all ranks."""
    givers = calls if source is None else [calls[source]]
    copies = [numpy.array(call.source) for call in givers]  # input and result may be the same memory
    rows = [_blocks(ready.call.request, row, len(calls)) for ready, row in zip(givers, copies, strict=True)] \
        if blocks else []
    everything = None if blocks else numpy.concatenate(copies)
    for rank, call in enumerate(calls):
        if call.target is not None:
            call.target[...] = numpy.concatenate([one[rank] for one in rows]) if everything is None else everything


def _blocks(request: internal.CallRequest, row: internal.Array, ranks: int) -> list[internal.Array]:
    """Return the blocks of a row for each rank, as views."""
    return numpy.split(row, ranks if request.cut.lengths is None else numpy.cumsum(request.cut.lengths[0])[:-1])


def _reduce(name: str, calls: Sequence[internal.ReadyCall], *, blocks: bool) -> None:
    """Carry out a reduction: in rank order, as `combine` rounds."""
    request, inputs, ranks = calls[0].call.request, [call.source for call in calls], len(calls)
    results: Sequence[internal.Array | None]
    if name in ("scan", "exscan"):
        results = [_total(request, inputs[:rank + (name == "scan")]) for rank in range(ranks)]
    else:
        total = _total(request, inputs)
        assert total is not None
        results = _blocks(request, total, ranks) if blocks else [total] * ranks
    for call, result in zip(calls, results, strict=True):
        if call.target is not None and result is not None:
            call.target[...] = result


def _total(request: internal.CallRequest, rows: Sequence[internal.Array]) -> internal.Array | None:
    assert request.op is not None
    if not rows:
        return None
    total = numpy.array(rows[0])
    if len(rows) > 1:
        internal.combine(request.op, request.dtype, total, rows)
    return total
