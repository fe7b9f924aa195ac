"""The path of every call: check the arguments, choose plan and executor, run at once or behind a `Work`.

Errors in this rank's own arguments are raised here, before data moves: all arrays are unchanged then.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gpucoll.algorithms import find, registry
from gpucoll.arrays import (
    HOST,
    NOTHING,
    Array,
    Prepared,
    RankInfo,
    Space,
    check_op,
    is_borrowed,
    on_gpu,
    prepare,
    promised,
    scaled_mean,
    torch_stream,
)
from gpucoll.communicator.backends import Key, compile_request, not_known
from gpucoll.communicator.calls import CallOptions, CallTable
from gpucoll.communicator.gpu import DeviceSpace, Gpu, is_on_device, on_side_stream
from gpucoll.communicator.gpu_meeting import FIRST, make_gpu, offered
from gpucoll.communicator.lifecycle import REFUSALS, Lifecycle
from gpucoll.communicator.metadata import MetadataExchange
from gpucoll.communicator.transports import Transport
from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.core.dtypes import is_whole
from gpucoll.core.ops import NOT_IN, Op, Order, op_of
from gpucoll.core.signature import Signature
from gpucoll.device import gpus
from gpucoll.errors import ArgumentError, BackendError, CollectiveTimeout, RevokedError, UsageError
from gpucoll.executors import Call, CallRequest, ReadyCall
from gpucoll.health.shares import TIMED, kind_of
from gpucoll.launch.bootstrap import Options
from gpucoll.progress.operations import Operation, Work
from gpucoll.tuner import Tuner, rules

T = TypeVar("T")
NOWHERE = contextlib.nullcontext()


def reports_refusals(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of a `Core`, or of an object with a `_core`: refused arguments are reported to other ranks.

    Ranks waiting in the same call then raise PeerError.
    """
    @functools.wraps(call)
    def function(first: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(first, *arguments, **options)
        except REFUSALS as error:
            core = first if isinstance(first, Core) else first._core
            # Calls on devices and on the host are compared in different ways: use the way of this call.
            on_device = core.emulated or any(map(is_on_device, (*arguments, *options.values())))
            core.life.refuse(error, on_device=on_device)
            raise

    return function


class Core:
    """The single path of all calls of a communicator, with its compiled calls.

    `life` has connections, executors and guards; some of its parts stand here too, under the same names. `metadata`
    exchanges host messages. `group` has the works of an open group of calls, else None. `fast_path` is the engine, or
    `not_known` without one.
    """

    def __init__(self, link: Transport, options: Options) -> None:
        registry()  # import now: a call by a signal handler must not meet a half imported module
        if options.emulated:
            import gpucoll.executors.nccl  # noqa: F401

            offered("emulated")
        self.tuner = Tuner(link.place.nodes, link.table, options.prefer)
        rules(options.prefer)  # raise for a wrong GPUCOLL_ALGO here, not at the first call
        if link.executor is not None and options.emulated:  # the transport's executor takes host arrays as they are
            options = options._replace(device=None)
        self.link, self.options, self.emulated = link, options, options.emulated
        self.life = life = Lifecycle(link, options)
        self.waits, self.host, self.gpus, self.clock = life.waits, life.host, life.gpus, life.clock
        self.group: list[Work] | None = None
        self.calls = CallTable(self)
        self.engine: Any = None  # runs repeated calls on host arrays, once made
        self.fast_path: Callable[..., Any] = not_known
        self.metadata = MetadataExchange(self)
        life.stop_calls = self._stop
        life.releases.append(self.calls.close)

    rank = property(lambda self: self.link.place.rank)
    size = property(lambda self: self.link.place.size)

    @functools.cached_property
    def device(self) -> int | None:
        return self.link.own_gpu(self.options.ordinal)

    def _stop(self) -> None:
        """Close the engine: all later calls take the path through Python, with its checks."""
        self.fast_path = not_known
        if self.engine is not None:
            self.engine.close()

    def space(self, name: str, *arrays: Any, stream: Any = None, meets: bool = True) -> Space:
        """Return the space of a call: the GPU for GPU arrays, else the host or, if chosen, the emulated device.

        `meets` is False for a message between two ranks, in which the other ranks have no part.
        """
        if any(on_gpu(array) for array in arrays):
            own = self.link.gpu("cuda")
            if own is not None:
                return own.space(stream)
            if self.device is None:
                raise ArgumentError(f"{name}: x is a GPU array, but CuPy finds no GPU in this process "
                                    f"({gpus.no_gpu()}); pass a copy on the host", code="GC-ARRAY")
            of_torch = torch_stream(arrays)
            space = self.gpu("cuda", meets=meets).space(of_torch() if stream is None else stream)
            space.current_stream = of_torch
            space.borrows = space.borrows or any(map(is_borrowed, arrays))
            return space
        return self.gpu("emulated").space(stream) if self.emulated else HOST

    def current(self, stream: Any, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
        """Return the context for opening a call's arrays before its space exists: device and stream of GPU arrays."""
        # `device` searches for GPUs: ask last.
        if not any(map(on_gpu, arrays)) or self.link.gpu("cuda") is not None or self.device is None:
            return NOWHERE
        stream = torch_stream(arrays)() if stream is None else stream
        from gpucoll.device.cuda import CurrentDevice, CurrentStream, as_stream

        device = CurrentDevice(self.device)
        return device if stream is None else CurrentStream(device, as_stream(stream))

    def gpu(self, name: str, *, meets: bool = True) -> Gpu:
        """Return the device "cuda" or "emulated" of this rank, made when first used; with `meets` for collectives."""
        own = self.link.gpu(name)
        if own is not None:
            return own
        known = self.gpus.get(name)
        if known is None or (meets and known.meet is not None):
            self._together(functools.partial(self._make_gpu, name, meets=meets), FIRST, meets=meets)
        return self.gpus[name]

    def _make_gpu(self, name: str, *, meets: bool) -> None:
        if name not in self.gpus:
            self.use_gpu(name, make_gpu(name, self.link, self.waits, self.device, self.options.nccl or {}))
        gpu = self.gpus[name]
        if meets and gpu.meet is not None:
            gpu.meet(gpu)
            gpu.meet = None

    def _together(self, make: Callable[[], T], what: str, *, meets: bool = True) -> T:
        """Return what `make` makes together with the other ranks, once all ranks are known to come to this meeting.

        A rank in another call would never come, and the wait is inside NCCL. A failure of this rank alone, in `make`,
        revokes the communicator: the other ranks wait for this rank.
        """
        preflight = self.life.preflight
        if meets and preflight is not None:
            self.waits.run(preflight.meet(Signature(what).encode()), what)
        self.life.meets = meets  # a rank that has closed never comes
        try:
            return make()
        except (UsageError, RevokedError):  # raised by all ranks, or before the meeting
            raise
        except BaseException as error:
            self.waits.broken(error, what)
            raise
        finally:
            self.life.meets = False

    def use_gpu(self, name: str, gpu: Gpu) -> None:
        """Use `gpu` as the device "cuda" or "emulated" of this rank."""
        # The peer executor needs a handshake of all ranks, left to the first collective: only if asked for, or measured
        # for "auto".
        if self.options.executor == "peer" or self.tuner.has_measured("peer", name):
            from gpucoll.executors.peer import PeerExecutor

            gpu.make_peer = lambda: self._together(
                lambda: PeerExecutor(gpu.device, gpu.order, self.link, self.waits,
                                     required=self.options.executor == "peer"), "the first call by peer memory")
        self.gpus[name] = gpu
        # A failed transport must end every wait.
        self.waits.hooks.append(gpu.check)
        # The progress thread drives operations too: each thread must get its own current GPU back.
        self.waits.context = gpu.device.current
        self.life.watch(gpu)

    def shared_gpu(self) -> Gpu | None:
        """Return the GPU of this rank if the parts of this communicator are to share its resources, else None."""
        gpu = self.gpus.get("cuda")
        return None if gpu is None or gpu.split is None else gpu

    def collective(self, name: str, x: Any, out: Any, op: Any, dtype: Any, root: Any, algorithm: Any, async_op: bool,
                   stream: Any) -> Any:
        """Run a collective with the same shapes on all ranks, by the call table if possible. No op is ""."""
        # A repeatable call needs options that compare by value: names and a root, no op object.
        cache_key: Key = ()
        if dtype is None and not async_op and type(op) is type(algorithm) is str and type(root) is int:
            cache_key = name, op, root, algorithm
            if self.group is None and stream is None:
                same = self.calls.same.get((name, op, root, algorithm, id(x), id(out)))
                if same is not None and (result := same(x, out)) is not NotImplemented:
                    return result
        return self._collective(cache_key, name, x, out, op, dtype, root, algorithm, async_op, stream)

    @reports_refusals
    def _collective(self, cache_key: Key, name: str, x: Any, out: Any, op: Any, dtype: Any, root: Any, algorithm: Any,
                    async_op: bool, stream: Any) -> Any:
        known = self.calls.find(cache_key, x, out, stream) if cache_key and self.group is None else None
        if known is not None:
            return self.calls.repeat(known, x, out, stream)
        row, rank_info = COLLECTIVES[name], self.sizes(name, root)
        call = prepare(row, x, out, rank_info, dtype, self.space(name, x, stream=stream))
        checked = self.check_op(name, op, call) if row.reduces else None
        options = CallOptions(algorithm, async_op, stream)
        return self.run(name, call, options, checked, rank_info.root, cache_key, x, out)

    def host_engine(self) -> Any:
        """Return the engine for repeated calls on host arrays; None without one, always on the emulated device."""
        if self.engine is None and not self.emulated:
            self.engine = self.host.engine(self.waits)
            self.fast_path = self.engine or self.fast_path
        return self.engine

    def engine_plan(self, call: Call) -> Any:
        """Return the plan by which the engine repeats `call` without Python; None if it does not."""
        plan = call.engine_plan
        return plan if plan is not None and self.host_engine() is not None else None

    def run(self, name: str, call: Prepared, options: CallOptions, op: Op | None = None, root: int = 0,
             cache_key: Key = (), x: Any = None, out: Any = None) -> Any:
        """Resolve and run a prepared call. Scatter and the v-variants call `_resolve` and `_begin` themselves.

        A call with a `cache_key` is kept for repetition, with the user's arrays `x` and `out`. A call without arrays (a
        host barrier) uses the executor asked for only if that executor serves the host.
        """
        call = on_side_stream(call) if options.async_op else call
        allowed = self.host_executor() if call is NOTHING else self.options.executor
        ready = self.resolve(COLLECTIVES[name], call, options, allowed, op, root)
        return self.begin(ready, call, options, cache_key, x, out)

    @reports_refusals
    def barrier(self, options: CallOptions, cache_key: Key) -> Any:
        self.life.check_usable()
        if options.stream is None and not self.emulated:
            return self.run("barrier", NOTHING, options, cache_key=cache_key)
        space = self.gpu("emulated" if self.emulated else "cuda").space(options.stream)
        return self.run("barrier", NOTHING._replace(space=space), options)

    def begin(self, ready: ReadyCall, call: Prepared, options: CallOptions, cache_key: Key, x: Any, out: Any) -> Any:
        """Run a resolved call, or start the call if it is asynchronous or in a group."""
        seconds = self.seconds_of(ready.call)
        if cache_key:
            self.calls.keep(cache_key, x, out, ready, call, seconds)
        # Asynchronous calls end in another thread or line.
        place = "" if options.async_op or self.group is not None else None
        operation = self.measured(self.operation(ready, call.space, call), ready.request, place)
        return self.start(ready.request.collective, operation, call, options.async_op, seconds)

    def seconds_of(self, call: Call) -> Array | None:
        """Return the timing row for calls of this kind; None on a device, as a call there only enqueues."""
        request = call.request
        if request.device != "cpu":
            return None
        name, bits = kind_of(request)
        return self.clock.sums.times[name, call.executor.name, request.algorithm, bits]

    def measured(self, operation: Operation, request: CallRequest, place: str | None = None) -> Operation:
        """Return the operation of a call, with its shares counted for `stats`; see `CallClock.measured`."""
        return self.clock.measured(operation, kind_of(request), request.nbytes, place,
                                   by_events=request.device == "cuda")

    def timed(self, operation: Operation, name: str, seconds: Array | None) -> None:
        if seconds is None:
            self.waits.run(operation, name)
            return
        started = time.perf_counter()
        self.waits.run(operation, name)
        seconds[1 + int(seconds[0]) % TIMED] = time.perf_counter() - started
        seconds[0] += 1

    def start(self, name: str, operation: Operation, call: Prepared, async_op: bool, seconds: Array | None) -> Any:
        if self.group is None and not async_op:
            self.timed(operation, name, seconds)
            return call.result
        # An open group starts its works itself, at its end.
        work = Work(self.waits, operation, name, call.result, call.space.completion())
        if self.group is None:
            self.waits.submit(work)
            # The order of enqueuing must be the same on all ranks, over all communicators with the resources.
            if self.shared_gpu() is not None:
                self.waits.until(work.is_enqueued, name, float("inf"))
            return work
        self.group.append(work)
        return work if async_op else call.result

    def resolve(self, row: Collective, call: Prepared, options: CallOptions, allowed: str | None, op: Op | None = None,
                 root: int = 0, header: str = "") -> ReadyCall:
        """Return the compiled call of these arrays; `allowed` is the executor asked for, or None."""
        space = call.space
        order: Order = "any"
        if op is not None:
            op, order = promised(row.name, op, call.dtype, self.options.deterministic)
            op = scaled_mean(op, call.dtype, self.size)
        # premul_sum and the mean of narrow floats scale a copy of the input: the call is not in place then.
        source = call.input if op is None or call.input is None else space.premultiplied(op, call.input, call.dtype)
        target = None if call.target is None else call.target.row
        if options.algorithm not in ("auto", "native"):
            find(row.name, options.algorithm)
        request = CallRequest(
            row.name, options.algorithm, call.dtype, op, root, call.nbytes,
            sizes=(None if source is None else source.nbytes, None if target is None else target.nbytes),
            in_place=call.in_place and source is call.input, cut=call.cut, shape=call.shape, header=header, order=order,
            device=space.device, symmetric=space is HOST and self.host.is_symmetric(source, target),
            captured=space.has_unsupported_capture(), blocking=space.is_blocking())
        return ReadyCall(self.calls.compiled(request, allowed, space), source, target)

    def compile(self, request: CallRequest, allowed: str | None, space: Space) -> Call:
        """Choose algorithm and executor for a request, and return the compiled call."""
        backend = space.gpu if isinstance(space, DeviceSpace) else self.host
        try:
            return compile_request(backend, request, self.tuner, self.link.place, allowed)
        except (CollectiveTimeout, BackendError) as error:  # messages of a failed meeting stay under way
            self.waits.broken(error, request.collective)
            raise

    def operation(self, ready: ReadyCall, space: Space, call: Prepared = NOTHING, *,
                   repeated: bool = False) -> Operation:
        """Run a call in `space`, then deliver the result of `call`; both keep all memory alive until the end."""
        try:
            space.begin()
            yield from ready.call.run(ready.source, ready.target, space.stream, repeated=repeated)
            if not ready.call.is_whole:
                self._finish(ready, space)
            if call.target is not None:
                call.target.deliver(space)
            yield from space.end((ready, call))
        # MPI or a GPU may still write: the space keeps the memory for ever.
        except BaseException:
            space.cancel((ready, call))
            raise

    def _finish(self, ready: ReadyCall, space: Space) -> None:
        request, op = ready.request, ready.request.op
        assert op is not None
        contributions = {"scan": self.rank + 1, "exscan": self.rank}.get(request.collective, self.size)
        if contributions:
            space.finish(op, ready.target, request.dtype, contributions)
        else:
            space.fill_identity(op, ready.target, request.dtype)

    def sizes(self, name: str, root: Any = 0) -> RankInfo:
        """Return rank, size and checked `root`; raise ArgumentError, ClosedError, UsageError or RevokedError."""
        self.life.check_usable()
        return RankInfo(self.rank, self.size, self.check_rank(name, "root", root))

    def check_rank(self, name: str, what: str, rank: Any) -> int:
        if not is_whole(rank) or not 0 <= rank < self.size:
            raise ArgumentError(f"{name}: {what} {rank!r} is not in 0..{self.size - 1}", code="GC-ROOT")
        return int(rank)

    def check_op(self, name: str, op: Any, call: Prepared) -> Op:
        row = op_of(op)
        if row.name in NOT_IN.get(name, ()):
            raise ArgumentError(f"{name}: op {row.name} is not defined for a prefix over ranks", code="GC-OP")
        check_op(name, row, call.dtype)
        return row

    def check_apart(self, name: str) -> None:
        if self.group is not None:
            raise UsageError(f"{name}: the second step needs the result of the first step, but a group has results "
                             "only at its end; make this call outside the group", code="GC-GROUP")

    def host_executor(self) -> str | None:
        """Return the executor for calls without user arrays: the one asked for if it serves the host, else None."""
        asked = self.options.executor
        return asked if asked in ("mpi", "ucx", "shared", "hybrid", "native") else None
