"""Communicators of virtual ranks: gpucoll's own checks of arguments, and calls that are matched instead of carried out.

Transports, executors and waits are replaced, one by one; everything above them is the library itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

from gpucoll.algorithms import find, schedule
from gpucoll.arrays import Array, Prepared, Space, on_gpu
from gpucoll.arrays.segments import Heap, Segment
from gpucoll.communicator import Communicator
from gpucoll.communicator.backends import HostBackend
from gpucoll.communicator.calls import CallTable, Key
from gpucoll.communicator.core import Core
from gpucoll.communicator.leaving import Leaving
from gpucoll.communicator.lifecycle import Lifecycle
from gpucoll.communicator.links import Link
from gpucoll.communicator.metadata import Failure, Metadata, MetadataExchange, check_alike, checked
from gpucoll.communicator.points import PointToPoint
from gpucoll.communicator.ragged import VectorVariants
from gpucoll.communicator.symmetric import SymmetricHeaps
from gpucoll.communicator.wildcards import PointMessage
from gpucoll.core.signature import Signature
from gpucoll.errors import GpucollError, UsageError
from gpucoll.executors import Call, CallRequest, Executor, ReadyCall, Refusal, call_site
from gpucoll.health.processes import RankThreads
from gpucoll.launch.bootstrap import Options, RankTopology
from gpucoll.precheck import cupy_on_host
from gpucoll.precheck.matching import CLOSE, REFUSED, VirtualGroup
from gpucoll.precheck.values import compute
from gpucoll.progress.operations import Operation, Pending, ProbeResult, Work
from gpucoll.progress.partners import End
from gpucoll.progress.waits import Progress
from gpucoll.transport.mailbox import ThreadMessages
from gpucoll.tuner import built_in


class VirtualWaits(Progress):
    """Waits that give the turn to another rank; no deadline, no progress thread."""

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        super().__init__(math.inf, threads=False)
        self._turns, self._mine = group.turns, group.rank_of(rank)

    def until(self, done: Pending, name: str, deadline: float, ends: Sequence[End] = ()) -> None:
        """Give up the turn until ``done()`` is true."""
        self.name = name
        self._turns.wait(done, name)

    def until_work(self, work: Work) -> None:
        """Wait for messages; the precheck itself finds the cycles."""
        self.until(work.is_enqueued, work.name, math.inf)

    def soon(self, operation: Operation, name: str, result: Any) -> Work | None:
        """Start a message between two ranks."""
        return self.start(Work(self, operation, name, result))

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
        if not (self._queue or self._alone):
            self._mine.waits.discard(self)

    @property
    def is_idle(self) -> bool:
        """Whether no operation is under way."""
        return not (self._queue or self._alone)

    def _begin(self, work: Work, works: Any) -> Work:
        self.check()
        work.place = getattr(work, "place", "") or self._turns.site()  # type: ignore[attr-defined] # a mark of ours
        works.append(work)
        self._mine.waits.add(self)
        super().advance()
        return work

    def _step(self, work: Work) -> bool:
        before, self._turns.place = self._turns.place, work.place  # type: ignore[attr-defined]
        try:
            return super()._step(work)
        finally:
            self._turns.place = before


class VirtualExecutor(Executor):
    """Matches calls; the last rank to come computes the results of all."""

    name = "mpi"

    def __init__(self, group: VirtualGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def compile(self, request: CallRequest) -> Call | Refusal:
        return VirtualCall(self, request, "")

    def matched(self, ready: ReadyCall, description: str) -> Operation:
        call = self._group.arrive(self._rank, description, self._group.turns.site(), ready, compute)
        if not call.is_complete:
            yield lambda: call.is_complete


class VirtualCall(Call):
    """A request of a virtual rank; `description` is compared among the ranks."""

    executor: VirtualExecutor

    def __init__(self, executor: VirtualExecutor, request: CallRequest, where: str) -> None:
        super().__init__(executor, request)
        self.description = Signature.decode(request.description)._replace(where=where).encode() if where \
            else request.description

    def run(self, source: Any, target: Any, stream: Any = None, *, repeated: bool = False) -> Operation:
        return self.executor.matched(ReadyCall(self, source, target), self.description)


class VirtualBackend(HostBackend):
    """The single executor of virtual ranks."""

    def __init__(self, executor: Executor, size: int) -> None:
        self.heap = Heap(size, functools.partial(Segment, shared=False))
        self.executors = (executor,)
        self._shared = self._walker = self._native = None
        self._with_engine = []

    def observe(self, *_: Any) -> None:
        """Record and compare nothing: the calls are matched already."""


class VirtualLink(Link):
    """The place of rank `number` of the world in a group of virtual ranks."""

    threads = False

    def __init__(self, group: VirtualGroup, number: int) -> None:
        self.group, self.number = group, number
        rank = group.members.index(number)
        self.place = RankTopology(rank, group.size, rank, group.size, (0,) * group.size)
        self.points = ThreadMessages(rank, group.mail)
        self.processes, self.table = RankThreads({}), built_in()
        self.waits: VirtualWaits | None = None

    def split(self, color: int | None, key: int) -> VirtualLink | None:
        group, found = self.group, list[Any]()
        assert self.waits is not None
        self.waits.run(group.exchange(self.place.rank, Signature("split", header="split"), (color, key),
                                      lambda everyone: group.parts(*zip(*everyone, strict=True)), found), "split")
        return None if color is None else VirtualLink(found[0][color], self.number)

    def own_gpu(self, ordinal: int | None) -> int | None:
        return (self.number if ordinal is None else ordinal) if cupy_on_host.is_followed() else None


class VirtualLeaving(Leaving):
    """Tells other ranks nothing: the precheck sees which ranks leave, and where."""

    def tell(self, failure: GpucollError | None) -> None: ...

    def announce(self) -> None: ...

    def tell_parts(self, place: str) -> None: ...


class VirtualLifecycle(Lifecycle):
    """The waits, the executor and the end of a virtual rank's communicator."""

    link: VirtualLink

    def __init__(self, link: VirtualLink, options: Options) -> None:
        # No comparison by messages: the comparison belongs to real ranks.
        super().__init__(link, options._replace(check="off"))
        self.leaving = VirtualLeaving(self)
        link.group.rank_of(link.place.rank).communicators.append(self)

    def new_waits(self) -> Progress:
        self.link.waits = VirtualWaits(self.link.group, self.link.place.rank)
        return self.link.waits

    def new_host(self) -> HostBackend:
        self.executor = VirtualExecutor(self.link.group, self.link.place.rank)
        return VirtualBackend(self.executor, self.link.place.size)

    def check_usable(self) -> None:
        turns = self.link.group.turns
        turns.check("a call")
        try:
            super().check_usable()
        except GpucollError:
            turns.pause("a call after close or a failure")  # the program may repeat the call for ever
            raise

    def refuse(self, error: BaseException, call: Signature | None = None, *, on_device: bool = False) -> None:
        if not hasattr(error, "is_reported"):
            error.is_reported = True  # type: ignore[attr-defined] # a mark of ours
            refused = Signature("", refusal=REFUSED).encode()
            self.link.group.arrive(self.link.place.rank, refused, call_site(), str(error))

    def close(self) -> None:
        """Complete all operations under way; wait for the other ranks unless the communicator has failed."""
        if not self.closed:
            self.closed = True
            self.end(waits=self.waits.failure is None)

    def end(self, *, waits: bool, is_end: bool = False) -> None:
        """Leave: complete all operations, and with `waits` wait for the other ranks to leave."""
        self.closed = True
        self.stop_calls()
        turns, mine, group = self.link.group.turns, self.waits, self.link.group
        if turns.is_over:
            return
        assert isinstance(mine, VirtualWaits)
        if waits or is_end:
            turns.wait(lambda: mine.is_idle, "close")
        call = group.arrive(self.link.place.rank, CLOSE, "" if is_end else call_site(), is_end=is_end)
        if waits:
            turns.wait(lambda: call.is_complete, "close")
        self.host.close()


class VirtualMetadata(MetadataExchange):
    """Host messages of a virtual rank: objects, not rows of bytes."""

    _core: VirtualCore

    def broadcast(self, root: int, metadata: Metadata, name: str, mine: Failure = None) -> Metadata:
        everyone = self._exchanged(name, root, metadata, mine)
        return checked([everyone[root]], name, mine, first=root)[0]

    def all_gather(self, metadata: Metadata, name: str, mine: Failure = None) -> list[Metadata]:
        return checked(self._exchanged(name, 0, metadata, mine), name, mine)

    def _exchanged(self, name: str, root: int, metadata: Metadata, mine: Failure) -> list[Any]:
        core = self._core
        core.life.check_usable()
        found = list[Any]()
        call = Signature(name, root=root, header=name)
        given = metadata if mine is None else {"error": str(mine)}
        core.waits.run(core.link.group.exchange(core.rank, call, given, list, found), name)
        return found[0]


class VirtualCallTable(CallTable):
    """The compiled calls of a virtual rank. Calls on GPU arrays are prepared each time, because results are arrays too.

    Equal requests on both kinds of memory are different calls.
    """

    def compiled(self, request: CallRequest, allowed: str | None, space: Space) -> Call:
        return super().compiled(request, _where(space) or allowed, space)

    def keep(self, cache_key: Key, x: Any, out: Any, ready: ReadyCall, call: Prepared, seconds: Array | None) -> None:
        if not _where(call.space):
            super().keep(cache_key, x, out, ready, call, seconds)


def _where(space: Space) -> str:
    return "on devices" if isinstance(space, cupy_on_host.DeviceMemory) else ""


class VirtualHeaps(SymmetricHeaps):
    """The symmetric memory of a virtual rank: host memory for all devices."""

    def empty(self, name: str, shape: Any, dtype: Any, device: str | None) -> Any:
        array = super().empty(name, shape, dtype, device)
        return cupy_on_host.on_device(array) if device == "cuda" else array

    def _memory(self, where: str) -> tuple[Heap, Any]:
        return self._heaps.setdefault(where, self._core.host.heap), None


class VirtualCore(Core):
    """The path of a virtual rank's calls."""

    life_type = VirtualLifecycle
    metadata_type = VirtualMetadata
    life: VirtualLifecycle
    link: VirtualLink

    def __init__(self, link: VirtualLink, options: Options) -> None:
        super().__init__(link, options._replace(device=options.ordinal))  # never the emulated device
        self.calls = VirtualCallTable(self)

    def space(self, name: str, *arrays: Any, stream: Any = None) -> Space:
        if any(map(on_gpu, arrays)):
            return self.gpu("cuda").space(stream)
        return super().space(name, *arrays, stream=stream)

    def current(self, *_: Any) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def gpu(self, name: str) -> Any:
        if not cupy_on_host.is_followed():
            raise UsageError("precheck: a GPU array of another library than CuPy, or of a CuPy imported before; let "
                             "the function import CuPy itself, or use `gpucoll precheck`", code="GC-PRECHECK")
        return cupy_on_host.GPU

    def compile(self, request: CallRequest, allowed: str | None, space: Space) -> Call:
        if request.algorithm not in ("auto", "native"):
            _check_algorithm(request.collective, request.algorithm, self.size, request.root)
        return VirtualCall(self.life.executor, request, _where(space))

    def start(self, name: str, *arguments: Any) -> Any:
        return placed(super().start(name, *arguments), self.group)


class VirtualBlocks(VectorVariants):
    """The v-variants of a virtual rank: the lengths are exchanged as objects."""

    def _agree(self, name: str, check: Callable[[], Any], counts: Callable[[Any], tuple[int, ...]], rows: Any = None, *,
               alike: bool = False) -> tuple[Any, tuple[tuple[int, ...], ...], str]:
        given, facts, mine = None, Metadata(), None
        try:
            given = check()
            some = given[0] if isinstance(given, list) else given
            facts = {"dtype": some.dtype.name, "tail": some.shape[1:], "counts": counts(given)}
        except GpucollError as error:
            mine = error
        everyone = self._core.metadata.all_gather(facts, name, mine)
        for what, code in [("dtype", "GC-DTYPE"), ("tail", "GC-SHAPE"), *([("counts", "GC-COUNTS")] if alike else [])]:
            check_alike(name, everyone, what, code)
        return given, tuple(one["counts"] for one in everyone), ""


class VirtualPoints(PointToPoint):
    """The messages of a virtual rank."""

    _core: VirtualCore

    def in_group(self, message: PointMessage, group: list[Work]) -> Work:
        return placed(super().in_group(message, group), group)

    def found(self, source: int | None, tag: int | None, status: Any = None) -> Generator[Pending, None, ProbeResult]:
        probes = self._core.link.group.probes
        probes[self._core.rank] = source, tag
        found = yield from super().found(source, tag, status)
        probes.pop(self._core.rank, None)
        return found


def placed(result: Any, group: list[Work] | None) -> Any:
    """Note the line of the last call of an open group, and return `result`: a group starts its calls at its end."""
    if group:
        group[-1].place = call_site()  # type: ignore[attr-defined] # a mark of ours
    return result


VirtualLink.parts = VirtualCore, VirtualPoints, VirtualBlocks, VirtualHeaps


@functools.lru_cache(1024)
def _check_algorithm(collective: str, algorithm: str, size: int, root: int) -> None:
    """Raise ArgumentError, as a call does, for an algorithm that cannot serve."""
    find(collective, algorithm)
    schedule(collective, algorithm, rank=0, size=size, root=root)


def world_of(group: VirtualGroup, number: int, options: Options) -> Communicator:
    return Communicator(VirtualLink(group, number), options)


def end(communicators: list[Any], *, failed: bool) -> None:
    """Leave all communicators of a rank whose program has ended, or has `failed`."""
    for one in communicators:
        if not one.closed:
            one.end(waits=False, is_end=not failed)
