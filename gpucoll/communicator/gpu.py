"""A communicator's GPU, or what stands for it: made when the first array comes that lives there."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy

from gpucoll.arrays import HOST, Array, Prepared, Space, Target, address, on_gpu
from gpucoll.arrays.space import divisor
from gpucoll.communicator.backends import output_of
from gpucoll.communicator.links import Link
from gpucoll.core.dtypes import Dtype, numpy_dtype, row_of
from gpucoll.core.ops import LOGICAL, Op
from gpucoll.device import Device, Event, Stream, Transport, gpus
from gpucoll.device.emulated import EmulatedDevice
from gpucoll.device.messages import MessageTransport
from gpucoll.device.sources import Scale
from gpucoll.device.streams import Output, StreamOrder
from gpucoll.errors import ArgumentError, BackendError, CollectiveTimeout, GpucollError, UsageError
from gpucoll.executors import Executor, Task
from gpucoll.executors.nccl import NcclExecutor
from gpucoll.executors.peer import PeerExecutor
from gpucoll.executors.peer.handshake import exchange
from gpucoll.health.observed import CallObserver, Comparison, observed
from gpucoll.launch import bootstrap
from gpucoll.progress.operations import Operation, keep_for_ever
from gpucoll.progress.pauses import NAP
from gpucoll.progress.waits import Waits
from gpucoll.transport.tags import TAGS, Tag


class Gpu:
    """A device with what moves data to the other ranks' and what runs tasks on it.

    `points` carries messages between two ranks. `make_peer` makes the executor that works in the ranks' own memory,
    when the first collective comes: it takes all of them.
    """

    def __init__(self, device: Device, transport: Transport, points: Transport) -> None:
        self.device, self.points = device, points
        self.order = StreamOrder(device)
        self._scheduled = NcclExecutor(device, transport, self.order)
        self.made: list[Executor] = [self._scheduled]
        self._transport = transport
        self.windows: Any = None  # symmetric memory for NCCL, where the program has asked for it
        self.make_peer: Callable[[], PeerExecutor] | None = None
        self._peer: PeerExecutor | None = None
        self.observers: Sequence[CallObserver] = ()
        self.comparison: Comparison | None = None

    @property
    def executors(self) -> tuple[Executor, ...]:
        """All executors, the native one last; the first time, a collective call where there is `make_peer`."""
        if self.make_peer is not None:
            make, self.make_peer = self.make_peer, None
            self._peer = make()
            self.made.insert(0, self._peer)
        return tuple(observed(one, self.observers, self.comparison) for one in self.made)

    def space(self, stream: Any) -> DeviceSpace:
        """Return the space of a call on `stream`; None is the current one."""
        return DeviceSpace(self, self.device.stream(stream))

    @functools.cached_property
    def beside(self) -> Stream:
        """The stream of calls that run beside the caller's own: ``async_op=True``."""
        return self.device.new_stream()

    def check(self) -> None:
        """Raise BackendError where a transport has failed; called between the polls of every wait."""
        for transport in (self._transport, self.points):
            transport.check()
        if self._peer is not None:
            self._peer.check()

    def has_ended(self, timeout: float) -> bool:
        """Return whether all that was enqueued comes to an end within `timeout` seconds."""
        awaited = self.order.awaited() if self.device.asynchronous else []
        deadline = time.monotonic() + timeout
        while not all(event.done for event in awaited):
            if time.monotonic() > deadline:
                return False
            time.sleep(NAP)
        return True

    def end(self, outputs: Sequence[Output] = ()) -> None:
        """End what is under way without the other ranks; `outputs`, which are not complete, become NaN before."""
        try:
            places = {one.address: one.nbytes for one in outputs if one.owner() is not None}
            if places:  # kernels that come next form results from what was received
                places |= {address(row): row.nbytes for row in self._scheduled.scratch()}
                self.device.fill_with_nan(places.items())
        finally:
            if self._peer is not None:
                self._peer.abort()
            self._transport.abort()
            self.points.abort()

    def unfinished(self, timeout: float) -> GpucollError | None:
        """Return the error of a call that does not end within `timeout` seconds, or has ended without the other ranks.
        """
        try:
            has_ended = self.has_ended(timeout)
            self.check()
        except GpucollError as error:
            return error
        return None if has_ended else CollectiveTimeout(
            "a call on the GPU has not ended, and its result is not complete; does every rank make the same calls? "
            "timeout= sets the deadline")

    def close(self, *, failed: bool) -> None:
        """Give back what it holds, in order; where the communicator has failed, without the other ranks.

        Then its memory stays: NCCL may go on writing until it has been aborted, and nobody knows when that is.
        """
        if failed:
            self.end()
            keep_for_ever(self)
        else:
            for executor in self.made:
                executor.close()
            for transport in (self._transport, self.points):
                transport.close(captured=self.order.has_captured)


class DeviceSpace(Space):
    """A device's memory, seen from one stream; see `gpucoll.arrays.Space`.

    What prepares a call is enqueued by `begin`, with the call itself: a kernel on the stream of a call that is refused
    in between, or only planned, would run later, on memory that is somebody else's by then.
    """

    def __init__(self, gpu: Gpu, stream: Stream, preparations: list[Callable[[Stream], None]] | None = None,
                 output: Output | None = None) -> None:
        self.gpu, self.stream = gpu, stream
        self.device = gpu.device.name
        self.borrows = False  # whether it works on memory that another library gives out again
        # The stream that waits for an asynchronous call: the current one of the library that its arrays are of
        self.current_stream: Callable[[], Any] = nothing_given
        self._output = output  # of a call on the memory of arrays that are not given again
        self._completion: Completion | None = None
        self._preparations = [] if preparations is None else preparations

    @property
    def current(self) -> AbstractContextManager[object]:
        return self.gpu.device.within(self.stream)

    def beside(self, stream: Stream | None = None) -> DeviceSpace:
        """Return the space on `stream`, by default that of asynchronous calls, going on from where this one is."""
        stream = stream or self.gpu.beside
        self.lead(stream)
        space = DeviceSpace(self.gpu, stream, self._preparations)
        space.borrows, space.current_stream = self.borrows, self.current_stream
        return space

    def is_captured(self) -> bool:
        """Return whether what is enqueued becomes part of a CUDA graph of the user's."""
        return self.gpu.device.asynchronous and self.stream.is_capturing()

    def lead(self, stream: Stream) -> None:
        """Let `stream` wait for what this space's stream has been given so far."""
        with self.gpu.device.current:
            stream.wait_event(self.gpu.device.mark(self.stream))

    def completion(self) -> Completion:
        """Return the end, still to come, of an operation on this space's stream."""
        self._completion = Completion(self.gpu.device, self.current_stream)
        return self._completion

    def begin(self) -> None:
        preparations, self._preparations = self._preparations, []
        for prepare in preparations:
            prepare(self.stream)

    def end(self, keep: Any) -> Operation:
        """End an operation: the next one follows it.

        `keep`, its task and its call, lives until it has ended, if it runs beside the caller's own work or on memory
        that is not CuPy's: else what is let go of earlier is used again later in the same stream only.
        """
        event = None
        if self._completion is None and not self.borrows:
            self.gpu.order.passed(self.stream, keep)
        else:
            event = self.gpu.order.mark(self.stream, keep)
            if self._completion is not None:
                self._completion.event = event
        if self.gpu.order.is_watched and not self.stream.is_capturing():
            self.gpu.order.noted(self.stream, _output(*keep) or self._output, event)
        return self._settle()

    def end_message(self, keep: object) -> Operation:
        """End messages between two ranks, which no collective follows; `keep` lives until they have ended."""
        event = self.gpu.order.hold(self.stream, keep)
        if self._completion is not None:
            self._completion.event = event
        if not self.is_captured():
            self.gpu.order.noted_message(event)
        return self._settle()

    def _settle(self) -> Operation:
        """Wait on the host for a device that works only then."""
        return iter(()) if self.gpu.device.asynchronous else self._settled()

    def _settled(self) -> Operation:
        yield from self.gpu.device.settle(self.stream)
        self.gpu.order.let_go()

    def cancel(self, keep: object) -> None:
        self.gpu.device.cancel()
        keep_for_ever((self.gpu, keep))

    def check(self, name: str, what: str, array: Array) -> None:
        elsewhere = self.gpu.device.owns(array)
        if elsewhere is not None:
            raise ArgumentError(f"{name}: {what} is {elsewhere}, which is not the device of this call; all arrays of a "
                                "call live on comm.device, or all on the host", code="GC-DEVICE")

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype) -> Array:
        return self.gpu.device.empty(shape, dtype, self.stream)

    def works_on(self, x: Array) -> bool:
        return bool(x.flags.c_contiguous) and address(x) % x.itemsize == 0  # kernels read whole elements

    def pack(self, x: Array, row: Array) -> None:
        self._preparations.append(functools.partial(
            self.gpu.device.kernels.pack, address(x), *_strided(x), address(row)))

    def unpack(self, row: Array, out: Array) -> None:
        self.gpu.device.kernels.unpack(address(row), address(out), *_strided(out), self.stream)

    def read_as(self, row: Array, dtype: Dtype) -> Array:
        """NumPy's rows in their dtype, for MPI's own collectives; CuPy has not every dtype, and needs none."""
        return HOST.read_as(row, dtype) if isinstance(row, numpy.ndarray) else row

    def premultiplied(self, op: Op, row: Array, dtype: Dtype) -> Array:
        if op.factor is None:
            return row
        product = self.empty(row.size, row.dtype)
        self._preparations.append(functools.partial(self._scale, "multiply", dtype, row, product, op.factor))
        return product

    def finish(self, op: Op, row: Array, dtype: Dtype, contributions: int) -> None:
        if op.name == "avg" and dtype.kind == "complex":  # as NumPy divides them by a real
            one = numpy_dtype(f"float{4 * dtype.itemsize}").type(1)
            self._scale("multiply", dtype, row, row, one / contributions, self.stream)
        elif op.name == "avg":
            self._scale("divide", dtype, row, row, divisor(op, contributions), self.stream)
        elif op.name in LOGICAL and contributions == 1:
            self._scale("truth", dtype, row, row, 1, self.stream)

    def fill_identity(self, op: Op, row: Array, dtype: Dtype) -> None:
        value = numpy.empty(1, numpy_dtype(dtype.name))
        HOST.fill_identity(op, value, dtype)
        self.gpu.device.fill(row, value, self.stream)

    def _scale(self, what: Scale, dtype: Dtype, source: Array, target: Array, factor: Any, stream: Stream) -> None:
        wide = row_of(dtype.wide or dtype.name)
        value = numpy.array([factor], numpy_dtype(wide.name))
        self.gpu.device.kernels.scale(what, dtype, address(source), address(target), source.size, value, stream)


def _strided(x: Array) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides and bytes of the units in which `x` is packed: elements, or bytes where those lie askew."""
    if any(place % x.itemsize for place in (address(x), *x.strides)):
        return (*x.shape, x.itemsize), (*x.strides, 1), 1
    return x.shape, x.strides, x.itemsize


def _output(task: Task, call: Prepared) -> Output | None:
    """Return the result of a call, where it is formed in the memory of the user's array."""
    target = call.target
    own = isinstance(target, Target) and address(target.row) == address(target.out)
    return output_of(task, call.result, target.row) if own and target is not None else None


class Completion:
    """The end, on its stream, of an operation that the host enqueues; `event` is there once it has."""

    def __init__(self, device: Device, current_stream: Callable[[], Any]) -> None:
        self._device, self._current_stream = device, current_stream
        self.event: Event | None = None

    def done(self) -> bool:
        return self.event is None or self.event.done

    def order(self) -> None:
        """Let the current stream wait for it."""
        if self.event is not None:
            with self._device.current:
                self._device.stream(self._current_stream()).wait_event(self.event)


def nothing_given() -> None:
    """Return None, by which a device takes its own current stream."""


def beside(call: Prepared) -> Prepared:
    """Return a call that nobody waits for: on a GPU it runs on a stream of its own."""
    return call._replace(space=call.space.beside()) if isinstance(call.space, DeviceSpace) else call


def make_gpu(name: str, link: Link, timeout: float, ordinal: int | None, *, peer: bool) -> Gpu:
    """Return the GPU of a communicator whose ranks `link` joins: "emulated", or "cuda" with its ordinal.

    With `peer` there is that executor too. A collective call on "cuda". Raises, on every rank, BackendError where one
    has no GPU, UsageError where ranks share one.
    """
    if name == "emulated":
        gpu = _emulated(link)
    elif ordinal is None:
        raise BackendError(f"CuPy finds no GPU in this process: {gpus.no_gpu()}", code="GC-NO-GPU")
    else:
        gpu = (_between_threads if link.mpi is None else _between_processes)(link, timeout, ordinal)
    if peer:
        gpu.make_peer = functools.partial(PeerExecutor, gpu.device, gpu.order, link, timeout)
    return gpu


def _emulated(link: Link) -> Gpu:
    transport, points = MessageTransport(link.wire, Tag.DEVICE), MessageTransport(link.points, 0, buffered=True)
    gpu = Gpu(EmulatedDevice(), transport, points)
    if link.has_collectives:
        from gpucoll.executors.native import NativeExecutor

        gpu.made.append(_AfterKernels(NativeExecutor(link.wire), gpu.device))
    return gpu


class _AfterKernels:
    """MPI's own collectives on the emulated device: what was enqueued before must have been done."""

    name = "native"

    def __init__(self, executor: Executor, device: Device) -> None:
        self._executor, self._device = executor, device
        self.serves, self.close = executor.serves, executor.close

    def run(self, task: Task) -> Operation:
        yield from self._device.settle(task.stream)
        yield from self._executor.run(task)


def _same_ordinal(link: Link, ordinal: int) -> Operation:
    """Tell the other threads which GPU this one is on; raise UsageError, on all of them, where they differ."""
    ordinals = [words[0] for words in (yield from exchange(link.place, link.wire, [ordinal]))]
    if len(set(ordinals)) > 1:
        raise UsageError(f"threads are on GPUs {', '.join(map(str, ordinals))}, and reach each other's memory on one "
                         "only; cupy.cuda.Device(n).use() in each of them, or start processes by mpiexec",
                         code="GC-DEVICE")


def _between_threads(link: Link, timeout: float, ordinal: int) -> Gpu:
    from gpucoll.device.cuda import CudaDevice
    from gpucoll.device.local import LocalTransport

    Waits(timeout, foreign=link.foreign).run(_same_ordinal(link, ordinal), "device")
    device = CudaDevice(ordinal)
    # Threads' tags have no limit: beyond MPI's, no message of the host can be mistaken for one of these.
    return Gpu(device, LocalTransport(link.wire, TAGS, device), LocalTransport(link.points, TAGS, device))


def _between_processes(link: Link, timeout: float, ordinal: int) -> Gpu:
    # Messages have a communicator of their own: NCCL runs all that is enqueued on one in order.
    claimed, *ids = bootstrap.meet(link.mpi, timeout, lambda: (
        gpus.claim_gpu(link.mpi, ordinal), *(gpus.nccl_id(link.mpi) for _ in range(2))))
    lowest = min(gpu.capability for gpu in claimed)
    from gpucoll.communicator.windows import Windows
    from gpucoll.device.cuda import CudaDevice
    from gpucoll.device.nccl import Nccl
    from gpucoll.executors.nccl.nccl_collectives import NcclNative

    device = CudaDevice(ordinal)
    transport, points = (Nccl(link.place.rank, link.place.size, one, device, timeout) for one in ids)
    gpu = Gpu(device, transport, points)
    gpu.made.append(NcclNative(device, transport, gpu.order, capability=lowest))
    gpu.windows = Windows.promised(device, transport)
    return gpu


def is_on_device(argument: Any) -> bool:
    """Return whether an argument of a call, arrays or what a root has told of them, says that they are on a device."""
    if isinstance(argument, dict):
        return bool(argument.get("gpu"))
    if isinstance(argument, Space):
        return argument.device != "cpu"
    return any(map(on_gpu, argument)) if isinstance(argument, list) else on_gpu(argument)
