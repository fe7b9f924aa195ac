"""The path of every call: find the compiled call, or check the arguments, compile and keep it; run it.

A call that came before is neither resolved nor compiled again. Calls are found by their `CallRequest`. Where the
caller's arrays themselves are the rows of the call, a call is also found by these arrays, and then not even checked
again. The engine has a table of its own for calls run entirely in C++; these calls do not reach the tables here.

Errors in this rank's own arguments are raised here, before data moves: all arrays are unchanged then.
"""

from __future__ import annotations

import collections
import functools
import operator
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from gpucoll.algorithms import find, is_native
from gpucoll.arrays import (
    HOST,
    NOTHING,
    Array,
    Prepared,
    RankInfo,
    Space,
    check_op,
    is_on_device,
    prepare,
    promised,
    same_memory,
    scaled_mean,
)
from gpucoll.call.compile import compile_request
from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.core.dtypes import is_whole
from gpucoll.core.ops import NOT_IN, OPS, Op, Order, op_of
from gpucoll.device.launch import DeviceRow, Output, output_of
from gpucoll.errors import REFUSALS, ArgumentError, BackendError, CollectiveTimeout, UsageError
from gpucoll.executors import Call, CallLauncher, CallRequest, ReadyCall
from gpucoll.health.flight import TIMED, kind_of
from gpucoll.progress.operations import Operation, Work, keep_for_ever

if TYPE_CHECKING:
    from gpucoll.communicator.core import Core

Key = tuple[Any, ...]
_flat = operator.methodcaller("reshape", -1)


class CallOptions(NamedTuple):
    """The options common to all collectives."""

    algorithm: str = "auto"
    async_op: bool = False
    stream: Any = None


def not_known(*_: Any) -> Any:
    """Return NotImplemented, as the engine does for an unknown call. Stands in for a missing engine."""
    return NotImplemented


@dataclass(slots=True)
class KnownCall:
    """A compiled call, to be repeated on arrays of the same kind; no array is kept alive.

    With `is_new` each call makes a new result; `allocates` is its shape and dtype, None on a rank without a result. Of
    a call on a GPU, `launches` has by the addresses of the arrays what enqueues the call, and its result for the
    watchdog; `short` is the function of `short_way`.
    """

    call: Call
    seconds: Array | None
    is_new: bool = False
    allocates: tuple[tuple[int, ...], Any] | None = None
    options: Key = ()  # name, op, root and algorithm of a call in the table
    launches: dict[Key, tuple[CallLauncher, Output | None]] = field(default_factory=dict)
    short: Callable[..., Any] | None = None

    def on(self, x: Any, result: Any, *, on_device: bool = False) -> ReadyCall:
        """Return the call with the rows of these arrays."""
        request, row_of = self.call.request, DeviceRow if on_device else _flat
        target = row_of(result) if request.has_output else None
        source = None if not request.has_input else target if x is result else row_of(x)
        return ReadyCall(self.call, source, target)


def known_call(x: Any, out: Any, ready: ReadyCall, seconds: Array | None, *,
               allocates: bool = False) -> KnownCall | None:
    """Return the form for repeating a call on the memory of `x` and `out` themselves; None for any other call.

    With `allocates` each call makes a new result, unless the result is `x`.
    """
    if not (_is_plain(x, ready.source) and _is_plain(out, ready.target)) or not (
            ready.call.request.device == "cpu" or ready.call.executor.binds):
        return None
    is_new = allocates and out is not x
    return KnownCall(ready.call, seconds, is_new, (out.shape, out.dtype) if is_new and out is not None else None)


def _is_plain(x: Any, row: Any) -> bool:
    """Return whether executors use the memory and the dtype of `x` itself; False for another library's array."""
    flags = getattr(x, "flags", None)
    return row is None or (flags is not None and flags.c_contiguous and row.dtype == x.dtype and same_memory(x, row))


def key_of(cache_key: Key, x: Any, out: Any) -> Key:
    """Return the key of a call on these arrays, () for a call not to be kept; `cache_key` holds all other options.

    If the result is allocated, the key has the alignment of the input in place of its address.
    """
    is_apart = out is None and cache_key[0] != "broadcast"
    here = _place(x, is_apart)
    there = here if out is x or out is None else _place(out) if here else ()
    return (*cache_key, here, there, out is x, is_apart) if there else ()


def _place(x: Any, is_anywhere: bool = False) -> Key:
    """Return address, shape, strides and dtype of an array of NumPy or CuPy; () for any other array.

    With `is_anywhere` the alignment of the elements to their size replaces the address.
    """
    kind = type(x)
    if kind is numpy.ndarray:
        return x.flags.aligned if is_anywhere else x.__array_interface__["data"], x.shape, x.strides, x.dtype
    if kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        memory, dtype = x.data, x.dtype
        place = memory.ptr % dtype.itemsize == 0 if is_anywhere else memory.ptr
        return place, x.shape, x.strides, dtype, memory.device_id
    return ()


def reports_refusals(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of a `Core`, or of an object with a `_core`: refused arguments are reported to other ranks.

    Ranks waiting in the same call then raise PeerError.
    """
    @functools.wraps(call)
    def function(first: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(first, *arguments, **options)
        except REFUSALS as error:
            core = getattr(first, "_core", first)
            # Calls on devices and on the host are compared in different ways: use the way of this call.
            on_device = core.emulated or any(map(is_on_device, (*arguments, *options.values())))
            core.life.refuse(error, on_device=on_device)
            raise

    return function


class Calls:
    """The calls of a communicator: the single path of all calls, and the table of those compiled.

    `do` makes a collective with the same shapes on all ranks: it is `collective`, or the engine, once made, which
    repeats calls on host arrays and leaves all others to `collective`. `fast_path` is the engine too, or `not_known`.
    `group` has the works of an open group of calls, else None. A table with `most` entries is cleared.
    """

    most = 256

    def __init__(self, core: Core) -> None:
        self._core, self._waits = core, core.waits
        self._rank, self._size = core.rank, core.size
        self.engine: Any = None
        self.fast_path: Callable[..., Any] = not_known
        self.do: Callable[..., Any] = self.collective
        self.group: list[Work[Any]] | None = None
        # By name, calls that are made in another way than `_collective`, with its arguments.
        self.others: dict[str, Callable[..., Any]] = {"barrier": self._barrier}
        # By device: only a call on the same device can wait for the kernels that still read the memory of its calls.
        self._compiled: dict[str, dict[tuple[CallRequest, str | None], Call]] = {}
        self._known: dict[Key, KnownCall] = {}
        # Of the known calls, by options and the identity of their arrays.
        self.same: dict[Key, Callable[[Any, Any], Any]] = {}
        # By device: calls let go of since the last compilation. Only a compilation uses their memory again.
        self._dropped: collections.defaultdict[str, list[object]] = collections.defaultdict(list)

    def collective(self, name: str, op: Any, root: Any, algorithm: Any, x: Any, out: Any, dtype: Any, stream: Any,
                   async_op: bool) -> Any:
        """Run a collective with the same shapes on all ranks, by the call table if possible. No op is ""."""
        # A repeatable call needs options that compare by value: names and a root, no op object.
        cache_key: Key = (name, op, root, algorithm) if dtype is None and not async_op and \
            type(op) is type(algorithm) is str and type(root) is int else ()
        same = self.same.get((*cache_key, id(x), id(out))) if self.group is None and stream is None else None
        if same is not None and (result := same(x, out)) is not NotImplemented:
            return result
        way = self.others.get(name, self._collective)
        return way(cache_key, name, op, root, x, out, dtype, CallOptions(algorithm, async_op, stream))

    @reports_refusals
    def _collective(self, cache_key: Key, name: str, op: Any, root: Any, x: Any, out: Any, dtype: Any,
                    options: CallOptions) -> Any:
        known = self.find(cache_key, x, out, options.stream) if cache_key and self.group is None else None
        if known is not None:
            return self.repeat(known, x, out, options.stream)
        ready, call = self.prepared(COLLECTIVES[name], op, root, x, out, dtype, options)
        return self.begin(ready, call, options, cache_key, x, out)

    def prepared(self, row: Collective, op: Any, root: Any, x: Any, out: Any, dtype: Any, options: CallOptions
                 ) -> tuple[ReadyCall, Prepared]:
        """Return the compiled call of a collective with the same shapes on all ranks, after a check of its arguments.

        A v-variant, a scatter and a barrier call `resolve` themselves.
        """
        rank_info = self.sizes(row.name, root)
        call = prepare(row, x, out, rank_info, dtype, self.space(row.name, x, options.stream))
        checked = self.check_op(row.name, op, call) if row.reduces else None
        return self.resolve(row, call, options, self._core.options.executor, checked, rank_info.root)

    def space(self, name: str, x: Any, stream: Any) -> Space:
        """Return the space of a call on one array."""
        is_on_host = type(x) is numpy.ndarray and not self._core.emulated
        return HOST if is_on_host else self._core.space(name, x, stream=stream)

    def find(self, cache_key: Key, x: Any, out: Any, stream: Any) -> KnownCall | None:
        """Return the known call for these arrays; None without one, or if it does not serve `stream`."""
        known = self._known.get(key_of(cache_key, x, out))
        if known is not None and known.call.executor.minds_blocking and \
                (device := self._core.gpus[known.call.request.device].device).is_blocking(device.stream(stream)):
            return None
        return known

    def resolve(self, row: Collective, call: Prepared, options: CallOptions, allowed: str | None, op: Op | None = None,
                root: int = 0, header: str = "") -> tuple[ReadyCall, Prepared]:
        """Return the compiled call of these arrays, and `call` with the space where it runs.

        `allowed` is the executor asked for, or None.
        """
        if options.async_op:  # so that the caller's stream need not wait
            call = call._replace(space=call.space.on_side_stream())
        space, host = call.space, self._core.host
        order: Order = "any"
        if op is not None:
            op, order = promised(row.name, op, call.dtype, self._core.options.deterministic)
            op = scaled_mean(op, call.dtype, self._size)
        # premul_sum and the mean of narrow floats scale a copy of the input: the call is not in place then.
        source = call.input if op is None or call.input is None else space.premultiplied(op, call.input, call.dtype)
        target = None if call.target is None else call.target.row
        if options.algorithm != "auto" and not is_native(options.algorithm):
            find(row.name, options.algorithm)
        request = CallRequest(
            row.name, options.algorithm, call.dtype, op, root, call.nbytes,
            sizes=(None if source is None else source.nbytes, None if target is None else target.nbytes),
            in_place=call.in_place and source is call.input, cut=call.cut, shape=call.shape, header=header, order=order,
            device=space.device,
            symmetric=space is HOST and bool(host.heap.slabs) and host.is_symmetric(source, target),
            captured=space.has_unsupported_capture(), blocking=space.is_blocking())
        return ReadyCall(self.compiled(request, allowed, space), source, target), call

    def compiled(self, request: CallRequest, allowed: str | None, space: Space) -> Call:
        """Return the call for a request in `space`; `allowed` is the executor asked for, or None."""
        table = self._compiled.setdefault(request.device, {})
        call = table.get((request, allowed))
        if call is None:
            if len(table) == self.most:
                self.drop(request.device, table)
                table = self._compiled[request.device] = {}
            # Kernels under way, on any stream, may still read the memory of the calls.
            if (dropped := self._dropped.pop(request.device, None)) and space.gpu is not None:
                space.gpu.order.follow(space.stream)
                space.gpu.order.hold(space.stream, dropped)
            backend = self._core.host if space.gpu is None else space.gpu
            try:
                call = table[request, allowed] = compile_request(
                    backend, request, self._core.tuner, self._core.link.place, allowed)
            except (CollectiveTimeout, BackendError) as error:  # messages of a failed meeting stay under way
                self._waits.broken(error, request.collective)
                raise
        return call

    def begin(self, ready: ReadyCall, call: Prepared, options: CallOptions, cache_key: Key, x: Any, out: Any) -> Any:
        """Run a resolved call, or start the call if it is asynchronous or in a group.

        A call with a `cache_key` is kept for repetition, with the user's arrays `x` and `out`.
        """
        seconds = self.seconds_of(ready.call)
        if cache_key:
            self.keep(cache_key, x, out, ready, call, seconds)
        # Asynchronous calls end in another thread or line.
        place = "" if options.async_op or self.group is not None else None
        operation = self.measured(self.operation(ready, call.space, call), ready.call.request, place)
        return self.start(ready.call.request.collective, operation, call, options.async_op, seconds)

    def keep(self, cache_key: Key, x: Any, out: Any, ready: ReadyCall, call: Prepared, seconds: Array | None) -> None:
        """Keep a call for repetition, here or in the engine, if it works on the memory of the arrays themselves.

        `cache_key` is the key without the arrays. The engine matches calls by shape and dtype, this table by address.
        """
        request, captures = ready.call.request, ready.call.executor.captures
        known = known_call(x, call.result, ready, seconds, allocates=out is None)
        try:
            plan = known and self.engine_plan(ready.call)
        except OSError:  # no memory: the call itself meets the same error and tells the other ranks
            return
        if known is None:
            return
        key = key_of(cache_key, x, out) if cache_key[0] == request.collective else ()  # no key for a step of another
        # Not repeatable: calls that may not be captured must ask the stream each time, and on a device the first rank
        # of an exscan fills its result through CuPy.
        is_asked = out is None and call.result is not x and not captures and request.device == "cuda"
        is_filled = request.collective == "exscan" and request.device != "cpu"
        if plan is None and key and not (request.header or request.collective == "scatter" or is_asked or is_filled):
            # Rare: a program with more kinds of calls pays for resolving them again.
            if len(self._known) == self.most:
                for one in self._known.values():
                    self.drop(one.call.request.device, one.call)
                self._known.clear()
                self.same.clear()
            self._known[key], known.options = known, cache_key
        elif plan is not None and (call.result is not x or out is x or request.collective == "broadcast"):
            self.engine.cache_call(*cache_key, x, call.result, out, plan, seconds, request.nbytes)

    def seconds_of(self, call: Call) -> Array | None:
        """Return the timing row for calls of this kind; None on a device, as a call there only enqueues."""
        request = call.request
        if request.device != "cpu":
            return None
        name, bits = kind_of(request)
        return self._core.record.times[name, call.executor.name, request.algorithm, bits]

    def measured(self, operation: Operation, request: CallRequest, place: str | None = None) -> Operation:
        """Return the operation of a call, with its shares counted for `stats`; see `CallRecord.measured`."""
        return self._core.record.measured(operation, kind_of(request), request.nbytes, place,
                                          by_events=request.device == "cuda")

    def timed(self, operation: Operation, name: str, seconds: Array | None) -> None:
        started = time.perf_counter()
        self._waits.run(operation, name)
        if seconds is not None:
            seconds[1 + int(seconds[0]) % TIMED] = time.perf_counter() - started
            seconds[0] += 1

    def start(self, name: str, operation: Operation, call: Prepared, async_op: bool, seconds: Array | None) -> Any:
        if self.group is None and not async_op:
            self.timed(operation, name, seconds)
            return call.result
        # An open group starts its works itself, at its end.
        work = Work(self._waits, operation, name, call.result, call.space.completion())
        if self.group is None:
            self._waits.submit(work)
            # The order of enqueuing must be the same on all ranks, over all communicators with the resources.
            if self._core.shared_gpu() is not None:
                self._waits.until(work.is_enqueued, name, float("inf"))
            return work
        self.group.append(work)
        return work if async_op else call.result

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
        request, op = ready.call.request, ready.call.request.op
        assert op is not None
        contributions = {"scan": self._rank + 1, "exscan": self._rank}.get(request.collective, self._size)
        if contributions:
            space.finish(op, ready.target, request.dtype, contributions)
        else:
            space.fill_identity(op, ready.target, request.dtype)

    def repeat(self, known: KnownCall, x: Any, out: Any, stream: Any) -> Any:
        """Repeat a call and return its result: `out`, an overwritten `x`, or a new array."""
        self._waits.check_usable()
        call, request = known.call, known.call.request
        if request.device != "cpu":
            return self._on_device(known, x, out, stream)
        if out is None:
            out = numpy.empty(*known.allocates) if known.allocates else x if request.has_output else None
        ready = known.on(x, out)
        operation = call.run(ready.source, ready.target) if call.is_whole else self.operation(ready, HOST)
        self.timed(self.measured(operation, request), request.collective, known.seconds)
        return out

    def _on_device(self, known: KnownCall, x: Any, out: Any, stream: Any) -> Any:
        """Enqueue a repeated call in a stream of its GPU; return the result as `repeat` does."""
        request, gpu = known.call.request, self._core.gpus[known.call.request.device]
        on = gpu.device.stream(stream)
        borrows = stream is not None and not gpu.device.is_current(on)
        known.short = known.short or self.short_way(known, gpu)
        result = known.short(x, out, on, borrows)
        if result is not NotImplemented:
            if known.options and stream is None:
                if len(self.same) == self.most:
                    self.same.clear()
                self.same[*known.options, id(x), id(out)] = same_call(self._core, known, on, x, out)
            return result
        result = gpu.device.empty(*known.allocates, on) if known.allocates else \
            x if out is None and request.has_output else out
        ready = known.on(x, result, on_device=True)
        # A user's CUDA graph may replay the call: keep the arrays.
        space = gpu.space(stream, output_of(request, result, ready.target))
        kept = NOTHING._replace(given=x, result=result)
        operation = self.operation(ready, space, kept, repeated=not known.is_new)
        self._waits.run(self.measured(operation, request), request.collective)
        return result

    def short_way(self, known: KnownCall, gpu: Any) -> Callable[..., Any]:
        """Return a function that repeats a call on a GPU at once, if its stream needs no preparation.

        It returns the result; or NotImplemented, with nothing done, if the call needs `operation`. The arrays live
        until the end of the call if the function `borrows` them: see `DeviceSpace`.
        """
        call, record, nbytes, launches = known.call, self._core.record, known.call.request.nbytes, known.launches
        sums, is_x, allocates = record.python[kind_of(call.request)], call.request.has_output, known.allocates
        device, active, ordinal, place = gpu.device, gpu.device.active, gpu.device.ordinal, gpu.device.place
        enqueue = functools.partial(self._waits.at_once, self._enqueuer(gpu, call, sums), call.request.collective)

        def bind(x: Any, result: Any) -> tuple[CallLauncher | None, Output | None]:
            ready = known.on(x, result, on_device=True)
            launch = call.launcher(ready.source, ready.target) if call.is_whole else None
            output = output_of(call.request, result, ready.target) if gpu.order.is_watched else None
            if launch is not None:
                if len(launches) == self.most:
                    launches.clear()
                launches[place(x), result is not None and place(result)] = launch, output
            return launch, output

        def short(x: Any, out: Any, stream: Any, borrows: bool = False, found: Any = None) -> Any:
            if active() != ordinal or stream.is_capturing():
                return NotImplemented
            result = x if out is None and is_x else out
            if allocates:
                result = device.empty(*allocates, stream) if borrows else device.new_array(*allocates)
            found = found or launches.get((place(x), result is not None and place(result)))
            launch, output = found or bind(x, result)
            if output is not None and output.owner() is None:  # another array now uses this memory
                output = Output(weakref.ref(result if result.base is None else result.base), *output[1:])
            try:
                if not (launch and enqueue(launch, stream, output, (x, result) if borrows else None)):
                    return NotImplemented
            except BaseException:
                keep_for_ever((x, result))  # the kernel may have been enqueued
                raise
            record.left = time.monotonic_ns()  # as `CallRecord.enqueued`
            sums[0] += 1
            sums[1] += nbytes
            return result

        return short

    def _enqueuer(self, gpu: Any, call: Any, sums: list[float]) -> Callable[..., None]:
        """Return a function of `launch`, stream, output and memory to keep: it compares and enqueues a call.

        On the emulated device it carries out the call to its end, and the order of streams needs no note then. Nothing
        compares the call there: all its time moves data.
        """
        waits, order, settle, name = self._waits, gpu.order, gpu.device.settle, call.request.collective
        start, timed = call.steps() if gpu.device.asynchronous else (not_known, None)

        def enqueue(launch: CallLauncher, stream: Any, output: Output | None, keep: object) -> None:
            start()  # first: an error of the comparison keeps the call from being enqueued
            times = timed and timed.begin(sums, stream)
            order.enqueue(launch, stream, output, keep)
            if timed is not None:
                timed.end(times, stream)

        def complete(launch: CallLauncher, stream: Any, *_: object) -> None:
            began = time.monotonic()
            for done in launch(stream) or settle(stream):
                waits.until(done, name, began + waits.timeout)
            sums[4] += time.monotonic() - began

        return enqueue if gpu.device.asynchronous else complete

    @reports_refusals
    def _barrier(self, cache_key: Key, *given: Any) -> Any:
        options: CallOptions = given[-1]
        self._waits.check_usable()
        # On the host, the executor asked for makes the barrier only if it serves the host.
        call, allowed = NOTHING, self.host_executor()
        if options.stream is not None or self._core.emulated:
            space = self._core.gpu("emulated" if self._core.emulated else "cuda").space(options.stream)
            call, allowed, cache_key = NOTHING._replace(space=space), self._core.options.executor, ()
        ready, call = self.resolve(COLLECTIVES["barrier"], call, options, allowed)
        return self.begin(ready, call, options, cache_key, None, None)

    def host_engine(self) -> Any:
        """Return the engine for repeated calls on host arrays; None without one, always on the emulated device."""
        if self.engine is None and not self._core.emulated:
            self.engine = self._core.host.engine(self._waits, self.collective)
            self.fast_path = self.engine or not_known
            self.use_engine()
        return self.engine

    def use_engine(self) -> None:
        """Let the engine, if there is one, make known calls at once; not in a group, whose calls begin at its end."""
        self.do = self.engine if self.engine is not None and self.group is None else self.collective

    def engine_plan(self, call: Call) -> Any:
        """Return the plan by which the engine repeats `call` without Python; None if it does not."""
        plan = call.engine_plan
        return plan if plan is not None and self.host_engine() is not None else None

    def stop(self) -> None:
        """Close the engine: all later calls take the path through Python, with its checks."""
        self.fast_path, self.do = not_known, self.collective
        if self.engine is not None:
            self.engine.close()

    def drop(self, device: str, calls: object) -> None:
        """Let go of calls once no kernel reads their memory; also called by finalizers, in any thread."""
        self._dropped[device].append(calls)

    def close(self, failed: bool) -> None:
        """Forget all calls; if a rank has `failed`, keep the memory of calls on devices: kernels may still read it."""
        if failed:
            keep_for_ever([table for device, table in self._compiled.items() if device != "cpu"])
            keep_for_ever(self._dropped)
        self._compiled, self._known, self.same = {}, {}, {}

    def sizes(self, name: str, root: Any = 0) -> RankInfo:
        """Return rank, size and checked `root`; raise ArgumentError, ClosedError, UsageError or RevokedError."""
        self._waits.check_usable()
        return RankInfo(self._rank, self._size, self.check_rank(name, "root", root))

    def check_rank(self, name: str, what: str, rank: Any) -> int:
        if (type(rank) is not int and not is_whole(rank)) or not 0 <= rank < self._size:
            raise ArgumentError(f"{name}: {what} {rank!r} is not in 0..{self._size - 1}", code="GC-ROOT")
        return int(rank)

    def check_op(self, name: str, op: Any, call: Prepared) -> Op:
        row = OPS[op] if type(op) is str and op in OPS else op_of(op)
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
        asked = self._core.options.executor
        return asked if asked in ("mpi", "ucx", "shared", "hybrid", "native") else None


def same_call(core: Core, known: KnownCall, stream: Any, x: Any, out: Any) -> Callable[[Any, Any], Any]:
    """Return a function that repeats a call on a GPU on the same two arrays, in the same current stream.

    It looks nothing up, unless the result is new: arrays and stream are compared with those of the call before. It
    returns the result; or NotImplemented, with nothing done, if anything has changed.
    """
    same_x, same_out = weakref.ref(x), (lambda: None) if out is None else weakref.ref(out)
    waits, has_ended = core.waits, core.link.has_ended
    current: Any = core.gpus[known.call.request.device].device.current_stream
    short: Any = known.short
    found = None if known.is_new else next(iter(known.launches.values()))

    def repeat(x: Any, out: Any) -> Any:
        if same_x() is not x or same_out() is not out or current() is not stream or waits.ended is not None \
                or has_ended():
            return NotImplemented
        return short(x, out, stream, False, found)

    return repeat
