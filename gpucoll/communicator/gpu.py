"""A communicator's GPU, or the emulated device in its place; made when the first array on the device comes.

All ranks meet for collectives, at the first of them or at a split.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy

from gpucoll.arrays import HOST, Array, Prepared, Space, Target, address, divisor
from gpucoll.arrays.segments import Heap
from gpucoll.communicator.transports import Transport
from gpucoll.core.dtypes import Dtype, numpy_dtype, row_of
from gpucoll.core.ops import LOGICAL, Op
from gpucoll.device import Device, DeviceTransport, Event, Stream, gpus
from gpucoll.device.launch import Output, StreamOrder, output_of
from gpucoll.device.nccl_settings import WINDOWS
from gpucoll.device.sources import Scale
from gpucoll.errors import ArgumentError, BackendError, CollectiveTimeout, GpucollError, UsageError
from gpucoll.executors import Call, Executor, ReadyCall
from gpucoll.health.device_shares import DeviceShares
from gpucoll.health.devices import DeviceWatch
from gpucoll.health.observed import CallObserver, ObservedCall
from gpucoll.health.preflight import DeferredOnNode, Deferring
from gpucoll.launch import bootstrap
from gpucoll.progress.operations import Operation, keep_for_ever
from gpucoll.progress.waits import SHORTEST_SLEEP, Progress
from gpucoll.transport.control import exchange
from gpucoll.transport.tags import Tag

if TYPE_CHECKING:
    from gpucoll.communicator.lifecycle import Lifecycle
    from gpucoll.device.nccl import Nccl
    from gpucoll.device.pairs import Pairs
    from gpucoll.executors.peer import PeerExecutor

FIRST_GPU_CALL = "the first call on a GPU"  # in which all ranks meet, unless it is a message


class Gpu:
    """A device, its transports to the other ranks, and its executors.

    `points` carries messages between two ranks. `meet` adds the executors: a collective call, so the first collective
    does it, and messages do without. `make_peer` makes the executor working in the ranks' own memory, collectively too.
    """

    def __init__(self, device: Device, points: DeviceTransport, meet: Callable[[Gpu], None] | None = None) -> None:
        self.device: Device = device
        self.points: DeviceTransport = points
        self.claimed: Sequence[gpus.ClaimedGpu] = ()  # of all ranks, once processes have met
        self.meet: Callable[[Gpu], None] | None = meet
        self.order: StreamOrder = StreamOrder(device)
        self.made_executors: list[Executor] = []
        self._transport: DeviceTransport | None = None
        self.windows: Any = None  # symmetric memory for NCCL, if the program asks for it
        # Makes the GPU of a part of the ranks with the resources of this one, if the program asks for it: see `_split`.
        self.split: Callable[[int | None, int, Transport | None, Progress | None], Gpu | None] | None = None
        self.make_peer: Callable[[], PeerExecutor] | None = None
        self._peer: PeerExecutor | None = None
        self._observers: Sequence[CallObserver] = ()
        self._comparison: Any = None
        self._shares: DeviceShares | None = None

    def add(self, transport: DeviceTransport, *others: Executor) -> None:
        """Run collectives by `transport`, and by `others`."""
        from gpucoll.executors.nccl import NcclExecutor

        self._transport, self._scheduled = transport, NcclExecutor(self.device, transport, self.order)
        self.made_executors += [self._scheduled, *others]

    @property
    def _transports(self) -> list[DeviceTransport]:
        return [one for one in (self._transport, self.points) if one is not None]

    @property
    def call_count(self) -> int:
        """The number of calls on this GPU; 0 on an emulated device, whose calls are not counted here."""
        return 0 if self._shares is None else self._shares.call_count

    @property
    def peer(self) -> PeerExecutor | None:
        """The peer executor, if any. The first access is a collective call if `make_peer` is set."""
        self._make_peer()
        return self._peer

    def _make_peer(self) -> None:
        if self.make_peer is not None:
            # Cleared first: the other ranks would not join a second attempt.
            make, self.make_peer = self.make_peer, None
            try:
                self._peer = make()
            except UsageError:  # of all ranks: another communicator uses the GPU until it closes
                self.make_peer = make
                raise
            self.made_executors.insert(0, self._peer)

    @property
    def executors(self) -> tuple[Executor, ...]:
        """All executors: the peer executor first, if any, the native one last. The first access makes `peer`."""
        self._make_peer()
        return tuple(self.made_executors)

    def watch(self, life: Lifecycle) -> None:
        """Record, observe and compare the calls to come, and on a GPU time them and set a watchdog on them."""
        recorded, place = [] if life.record.file is None else [life.record.file], life.link.place
        self._observers, self._comparison = [*recorded, *life.observers], life.device_comparison
        if self.device.asynchronous:
            compared = place.size if isinstance(self._comparison, Deferring) else 1
            self._shares = DeviceShares(self.device, life.record, place.rank, compared)
            if place.size > 1:
                life.watches.append(DeviceWatch(self, life.waits, may_call=life.link.threads))
        if isinstance(life.preflight, DeferredOnNode):
            life.waits.hooks.append(life.preflight.check)

    def observed(self, call: Call) -> Call:
        """Return `call` with its comparison and its reports to the observers."""
        is_seen = self._observers or self._comparison or self._shares
        return ObservedCall(call, self._observers, self._comparison, self._shares) if is_seen else call

    def space(self, stream: Any, output: Output | None = None) -> DeviceSpace:
        """Return the space of a call on a stream, or on the current one; a repeated call knows its `output`."""
        on = self.device.stream(stream)
        return DeviceSpace(self, on, output=output, borrows=stream is not None and not self.device.is_current(on))

    def new_heap(self, ranks: int) -> Heap:
        """Return symmetric memory out of reach of other ranks' kernels."""
        return self.device.new_heap(ranks, self.order)

    @functools.cached_property
    def side_stream(self) -> Stream:
        """The stream of asynchronous calls (``async_op=True``), which overlap with the caller's own work."""
        return self.device.new_stream()

    def check(self) -> None:
        """Raise BackendError if a transport has failed; called between the polls of every wait."""
        for transport in self._transports:
            transport.check()
        if self._peer is not None:
            self._peer.check()

    def has_ended(self, timeout: float) -> bool:
        """Return whether all enqueued work ends within `timeout` seconds."""
        awaited = self.order.awaited() if self.device.asynchronous else []
        deadline = time.monotonic() + timeout
        while not all(event.done for event in awaited):
            if time.monotonic() > deadline:
                return False
            time.sleep(SHORTEST_SLEEP)
        return True

    def collectives_end(self, refused: list[GpucollError]) -> Operation:
        """Wait for the end of all collectives enqueued so far; an event of a user's graph is added as `refused`."""
        def done() -> bool:
            try:
                return all(event.done for event in awaited)
            except UsageError as error:
                refused.append(error)
                return True

        awaited = self.order.last() if self.device.asynchronous else []
        while not done():
            yield done

    def end(self, outputs: Sequence[Output] = ()) -> None:
        """Abort the work under way without the other ranks; fill the incomplete `outputs` with NaN first."""
        try:
            places = {one.address: one.nbytes for one in outputs if one.owner() is not None}
            if places:  # kernels still to run read the scratch rows: fill these too
                places |= {address(row): row.nbytes for row in self._scheduled.scratch()}
                self.device.fill_with_nan(places.items())
        # Abort in any case: only the abort ends the kernels.
        finally:
            if self._peer is not None:
                self._peer.abort()
            for transport in self._transports:
                transport.abort()

    def unfinished(self, timeout: float) -> GpucollError | None:
        """Return the error of a call that is aborted or does not end within `timeout` seconds; None without one."""
        try:
            has_ended = self.has_ended(timeout)
            self.check()
        except GpucollError as error:
            return error
        return None if has_ended else CollectiveTimeout(
            "a call on the GPU has not ended, and the result is incomplete; do all ranks make the same calls? "
            "timeout= sets the deadline")

    def close(self, *, failed: bool) -> None:
        """Close executors and transports in the same order on every rank; if `failed`, abort without the other ranks.

        After a failure the memory is never freed: NCCL may write into it until the abort ends, at an unknown time.
        """
        if failed:
            self.end()
            keep_for_ever(self)
        else:
            for executor in self.made_executors:
                executor.close()
            for transport in self._transports:
                transport.close(captured=self.order.has_captured)


class DeviceSpace(Space):
    """A device's memory, seen from one stream; see `gpucoll.arrays.Space`.

    `begin` enqueues the preparations of a call (packing, scaling) together with the call. A kernel enqueued earlier,
    for a call refused in between or only planned, would run later on memory that already belongs to another array.
    """

    def __init__(self, gpu: Gpu, stream: Stream, preparations: list[Callable[[Stream], None]] | None = None,
                 output: Output | None = None, *, borrows: bool = False) -> None:
        self.gpu: Any = gpu
        self.stream: Any = stream
        self.device: str = gpu.device.name
        # Whether the arrays' memory may be reused in the order of another stream, if the program drops an array.
        self.borrows = borrows
        # Returns the stream to wait for an asynchronous call: the current one of the arrays' library (torch, CuPy).
        self.current_stream: Callable[[], Any] = lambda: None
        self._output = output  # result of a repeated call, known from the first one
        self._completion: Completion | None = None
        self._preparations = [] if preparations is None else preparations

    @property
    def current(self) -> AbstractContextManager[object]:
        return self.gpu.device.within(self.stream)

    def on_side_stream(self, stream: Stream | None = None) -> DeviceSpace:
        """Return the space on `stream` (default: the side stream), ordered after the work of this space so far."""
        stream = stream or self.gpu.side_stream
        self.lead(stream)
        space = DeviceSpace(self.gpu, stream, self._preparations)
        space.borrows, space.current_stream = self.borrows, self.current_stream
        return space

    def is_captured(self) -> bool:
        """Return whether enqueued work becomes part of a user's CUDA graph."""
        return self.gpu.device.asynchronous and self.stream.is_capturing()

    def has_unsupported_capture(self) -> bool:
        return not all(one.captures for one in self.gpu.made_executors) and self.is_captured()

    def is_blocking(self) -> bool:
        # The question costs calls of CUDA. Before the first collective it is unknown whether the peer executor minds.
        minds = self.gpu.make_peer is not None or any(one.minds_blocking for one in self.gpu.made_executors)
        return minds and self.gpu.device.is_blocking(self.stream)

    def lead(self, stream: Stream) -> None:
        """Let `stream` wait for all work enqueued on this space's stream so far."""
        with self.gpu.device.current:
            stream.wait_event(self.gpu.device.mark(self.stream))

    def completion(self) -> Completion:
        """Return the future end of an operation on this space's stream."""
        self._completion = Completion(self.gpu.device, self.current_stream)
        return self._completion

    def begin(self) -> None:
        preparations, self._preparations = self._preparations, []
        for prepare in preparations:
            prepare(self.stream)

    def end(self, keep: Any) -> Operation:
        """End an operation: the next operation of the communicator follows it on the device.

        `keep`, the compiled and the prepared call, lives until the end of an operation on another stream than the
        current one, or on memory not from CuPy. In a capture `keep` lives as long as the communicator, for the launches
        of the user's graph. Any other operation needs no `keep`: CuPy's pool reuses freed memory later in the same
        stream only.
        """
        # An event costs time: make one only if a `Work` or freed memory must wait for the end.
        event = None
        if self._completion is None and not self.borrows:
            self.gpu.order.passed(self.stream, keep)
        else:
            event = self.gpu.order.mark(self.stream, keep)
            if self._completion is not None:
                self._completion.event = event
        # A captured call runs only when the user launches the graph: the watchdog cannot follow it.
        if self.gpu.order.is_watched and not self.stream.is_capturing():
            self.gpu.order.noted(self.stream, _output(*keep) or self._output, event)
        return self._settle()

    def end_message(self, keep: object) -> Operation:
        """End messages between two ranks, with no collective ordered after them; `keep` lives until the end."""
        event = self.gpu.order.hold(self.stream, keep)
        if self._completion is not None:
            self._completion.event = event
        if not self.is_captured():
            self.gpu.order.noted_message(event)
        return self._settle()

    def _settle(self) -> Operation:
        """Wait on the host for the emulated device, as it works only during such waits; never wait for a GPU."""
        return iter(()) if self.gpu.device.asynchronous else self._settled()

    def _settled(self) -> Operation:
        yield from self.gpu.device.settle(self.stream)
        self.gpu.order.let_go()

    def cancel(self, keep: object) -> None:
        # Work on a GPU cannot be called back: its memory must never be used again.
        keep_for_ever((self.gpu, keep))

    def check(self, name: str, what: str, array: Array) -> None:
        elsewhere = self.gpu.device.owns(array)
        if elsewhere is not None:
            raise ArgumentError(f"{name}: {what} is {elsewhere}, not on the device of this call; all arrays of a "
                                "call must be on comm.device, or all on the host", code="GC-DEVICE")

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype) -> Array:
        return self.gpu.device.empty(shape, dtype, self.stream)

    def works_on(self, x: Array) -> bool:
        return bool(x.flags.c_contiguous) and address(x) % x.itemsize == 0  # kernels need aligned elements

    def pack(self, x: Array, row: Array) -> None:
        self._preparations.append(functools.partial(
            self.gpu.device.kernels.pack, address(x), *_strided(x), address(row)))

    def unpack(self, row: Array, out: Array) -> None:
        self.gpu.device.kernels.unpack(address(row), address(out), *_strided(out), self.stream)

    def read_as(self, row: Array, dtype: Dtype) -> Array:
        """Return a NumPy row in `dtype`, for MPI's own collectives; return a CuPy row as is: CuPy lacks some dtypes."""
        return HOST.read_as(row, dtype) if isinstance(row, numpy.ndarray) else row

    def premultiplied(self, op: Op, row: Array, dtype: Dtype) -> Array:
        if op.factor is None:
            return row
        product = self.empty(row.size, row.dtype)
        # Left to `begin`, as in `pack`: the call may still be refused.
        self._preparations.append(functools.partial(self._scale, "multiply", dtype, row, product, op.factor))
        return product

    def finish(self, op: Op, row: Array, dtype: Dtype, contributions: int) -> None:
        if op.name == "avg":
            self._scale("divide", dtype, row, row, divisor(op, contributions), self.stream)
        elif op.name in LOGICAL and contributions == 1:
            self._scale("truth", dtype, row, row, 1, self.stream)

    def fill_identity(self, op: Op, row: Array, dtype: Dtype) -> None:
        value = numpy.empty(1, numpy_dtype(dtype.name))
        HOST.fill_identity(op, value, dtype)
        self.gpu.device.fill(row, value, self.stream)

    def _scale(self, what: Scale, dtype: Dtype, source: Array, target: Array, factor: Any, stream: Stream) -> None:
        wide = row_of(dtype.wide or dtype.name)
        # Kernels compute narrow floats in a wider dtype: pass the factor in that dtype.
        value = numpy.array([factor], numpy_dtype(wide.name))
        self.gpu.device.kernels.scale(what, dtype, address(source), address(target), source.size, value, stream)


def _strided(x: Array) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides and bytes of the units for packing `x`: elements, or bytes if elements are unaligned."""
    if any(place % x.itemsize for place in (address(x), *x.strides)):
        return (*x.shape, x.itemsize), (*x.strides, 1), 1
    return x.shape, x.strides, x.itemsize


def _output(ready: ReadyCall, call: Prepared) -> Output | None:
    """Return the result of a call for the watchdog, if it is formed in the memory of the user's array."""
    target = call.target
    own = isinstance(target, Target) and address(target.row) == address(target.out)
    return output_of(ready.call.request, call.result, target.row) if own and target is not None else None


class Completion:
    """The end, on its stream, of an operation enqueued by the host; `event` is set once the host has done so."""

    def __init__(self, device: Device, current_stream: Callable[[], Any]) -> None:
        self._device, self._current_stream = device, current_stream
        self.event: Event | None = None

    def done(self) -> bool:
        return self.event is None or self.event.done

    def order(self) -> None:
        """Let the current stream wait for the end of the operation."""
        if self.event is not None:
            with self._device.current:
                self._device.stream(self._current_stream()).wait_event(self.event)


def make_gpu(name: str, link: Transport, waits: Progress, ordinal: int | None, settings: Mapping[str, Any]) -> Gpu:
    """Return the device of a communicator, "cuda" with its ordinal or another device by name; `link` joins the ranks.

    `waits` are those of the communicator; `settings` are those of NCCL. Raises BackendError if the rank has no GPU. All
    ranks meet in `Gpu.meet`. It raises BackendError if a rank has no GPU, and UsageError if processes share a GPU
    (without GPUCOLL_SHARE_GPU=1), or if threads use different GPUs.
    """
    device = _cuda(ordinal) if name == "cuda" else offered(name)(ordinal)
    if link.mpi is None:
        from gpucoll.device.local import LocalTransport

        points = LocalTransport(link.place.rank, link.offers[1], device, are_users=True)
        return Gpu(device, points, functools.partial(_threads_meet, link, waits))
    return Gpu(device, _pairs(device, link, waits, settings), functools.partial(_processes_meet, link, waits, settings))


def _cuda(ordinal: int | None) -> Any:
    if ordinal is None:
        raise BackendError(f"CuPy finds no GPU in this process: {gpus.no_gpu()}", code="GC-NO-GPU")
    gpus.check_installed()
    from gpucoll.device.cuda import CudaDevice

    return CudaDevice(ordinal)


@functools.cache
def offered(name: str) -> Callable[[int | None], Any]:
    """Return the function that makes the device `name` for NumPy arrays, given a CUDA ordinal or None.

    A package offers the device under its name in the group "gpucoll.devices" of entry points.
    """
    from importlib.metadata import entry_points

    for found in entry_points(group="gpucoll.devices", name=name):
        make: Callable[[int | None], Any] = found.load()
        return make
    raise BackendError(f"no installed package offers the device {name!r}; install gpucoll anew", code="GC-DEVICE")


def _same_ordinal(link: Transport, ordinal: int) -> Operation:
    """Exchange the GPU ordinals of the threads; raise UsageError on all threads if they differ."""
    place = link.place
    ordinals = [row[0] for row in (yield from exchange(link.wire, place.rank, range(place.size), [ordinal]))]
    if len(set(ordinals)) > 1:
        raise UsageError(f"threads are on GPUs {', '.join(map(str, ordinals))}, but can access each other's memory "
                         "only on a single GPU; in each thread call cupy.cuda.Device(n).use(), or use mpiexec",
                         code="GC-DEVICE", settled=True)  # on all ranks in the same exchange


def _threads_meet(link: Transport, waits: Progress, gpu: Gpu) -> None:
    from gpucoll.device.local import LocalTransport

    waits.run(_same_ordinal(link, gpu.device.ordinal), FIRST_GPU_CALL)
    gpu.add(LocalTransport(link.place.rank, link.offers[0], gpu.device))


def _processes_meet(link: Transport, waits: Progress, settings: Mapping[str, Any], gpu: Gpu) -> None:
    # Before the meeting: a GPU that fails here fails on this rank alone.
    mine = gpus.describe_gpu(gpu.device.ordinal)
    claimed, one = bootstrap.meet(link.mpi, waits.timeout, lambda: (
        gpus.claim_gpu(link.mpi, mine), gpus.nccl_id(link.mpi)), waits)
    from gpucoll.device.nccl import joined

    transport = joined(link.place.rank, link.place.size, one, gpu.device, waits, settings)
    gpu.claimed = claimed
    # All ranks must choose alike: the oldest GPU decides on NCCL's float8.
    _on_nccl(gpu, transport, min(one.capability for one in claimed), settings)


def _pairs(device: Any, link: Transport, waits: Progress, settings: Mapping[str, Any]) -> Pairs:
    """Return the carrier of messages: on the communicator of collectives, a message would wait for collectives."""
    from gpucoll.device.pairs import Pairs

    rank = link.place.rank

    def join(peer: int) -> Nccl:
        gpus.check_nccl()
        from gpucoll.device.nccl import joined

        both = sorted({rank, peer})
        return joined(both.index(rank), len(both), lambda: gpus.pair_id(rank, peer, lambda words: exchange(
            link.wire, rank, both, words, Tag.PAIR)), device, waits, settings)

    return Pairs(rank, device, join)


def _on_nccl(gpu: Gpu, transport: Nccl, capability: int, settings: Mapping[str, Any]) -> Gpu:
    """Let a GPU run collectives by NCCL; `capability` is the lowest compute capability of all ranks."""
    from gpucoll.communicator.windows import Windows
    from gpucoll.executors.nccl.nccl_collectives import NcclNative

    gpu.add(transport, NcclNative(gpu.device, transport, gpu.order, capability=capability))
    gpu.windows = Windows(gpu.device, transport, gpu.order) if settings.get(WINDOWS) else None
    if settings.get("split_share"):
        gpu.split = functools.partial(_split, gpu.device, transport, capability, settings)
    return gpu


def _split(device: Device, transport: Nccl, capability: int, settings: Mapping[str, Any], color: int | None, key: int,
           link: Transport | None, waits: Progress | None) -> Gpu | None:
    """Return the GPU of a part: the ranks of the same `color`, ordered by `key`, joined by `link`; None for both.

    `waits` are those of the part's communicator. A collective call of all ranks. The part's collectives share the
    resources of `transport`. Messages do not: a message that waits for its receiver would hold up the collectives of
    the parent.
    """
    part = transport.split(color, key, 0 if link is None else link.place.size, waits)
    if part is None or link is None or waits is None:
        return None
    return _on_nccl(Gpu(device, _pairs(device, link, waits, settings)), part, capability, settings)
