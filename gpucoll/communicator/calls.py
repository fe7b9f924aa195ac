"""The compiled calls of a communicator: a call that came before is neither resolved nor compiled again.

Calls are found by their `CallRequest`. Where the caller's arrays themselves are the rows of the call, a call is also
found by these arrays, and then not even checked again. The engine has a table of its own for calls run entirely in C++;
these calls do not reach the tables here.
"""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from gpucoll.arrays import HOST, NOTHING, Array, Prepared, Space, same_memory
from gpucoll.communicator.backends import DeviceRow, Key, output_of
from gpucoll.communicator.gpu import DeviceSpace
from gpucoll.device.streams import Output
from gpucoll.executors import Call, CallRequest, Launcher, ReadyCall
from gpucoll.progress.operations import keep_for_ever

if TYPE_CHECKING:
    from gpucoll.communicator.core import Core


class CallOptions(NamedTuple):
    """The options common to all collectives."""

    algorithm: str = "auto"
    async_op: bool = False
    stream: Any = None


@dataclass(slots=True)
class KnownCall:
    """A compiled call, to be repeated on arrays of the same kind; no array is kept alive.

    A call on a device with a given result is bound to addresses: `rows` are the rows of input and result. Any other
    call gets its rows each time. `allocates` is the shape and dtype of a newly allocated result.
    """

    call: Call
    seconds: Array | None
    rows: tuple[Any, Any] | None = None
    allocates: tuple[tuple[int, ...], Any] | None = None
    is_new: bool = False  # whether each call makes a new result, where this rank has a result
    launch: Launcher | None = None  # enqueues the call on a GPU without a wait
    output: Output | None = None
    options: Key = ()  # name, op, root and algorithm of a call in the table

    def on(self, x: Any, result: Any, stream: Any = None) -> ReadyCall:
        """Return the call with the rows of these arrays."""
        request = self.call.request
        target = _row(result, stream) if request.has_output else None
        source = None if not request.has_input else target if x is result else _row(x, stream)
        return ReadyCall(self.call, source, target)


def _row(x: Any, stream: Any) -> Any:
    """Return an array in the form for executors: one axis on the host, an address on a device's stream."""
    return x.reshape(-1) if stream is None else DeviceRow(x)


def known_call(x: Any, out: Any, ready: ReadyCall, seconds: Array | None, *,
               allocates: bool = False) -> KnownCall | None:
    """Return the form for repeating a call on the memory of `x` and `out` themselves; None for any other call.

    With `allocates` each call makes a new result, unless the result is `x`.
    """
    request, executor = ready.request, ready.call.executor
    on_device = request.device != "cpu"
    sides = ((x, ready.source), (out, ready.target))
    if (on_device and not executor.binds) or not all(row is None or _is_plain(array, row) for array, row in sides):
        return None
    is_new = allocates and out is not x
    made = (out.shape, out.dtype) if is_new and out is not None else None
    if is_new or not on_device:
        return KnownCall(ready.call, seconds, None, made, is_new)
    source, target = (None if row is None else DeviceRow(row) for row in (ready.source, ready.target))
    return KnownCall(ready.call, seconds, (source, target), made, is_new, output=output_of(request, out, ready.target))


def _is_plain(x: Any, row: Any) -> bool:
    """Return whether executors use the memory and the dtype of `x` itself; False for another library's array."""
    flags = getattr(x, "flags", None)
    return flags is not None and flags.c_contiguous and row.dtype == x.dtype and same_memory(x, row)


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


class CallTable:
    """The compiled calls of a communicator, by request, and for repetition by `key_of`.

    A table with `most` entries is cleared.
    """

    most = 256

    def __init__(self, core: Core) -> None:
        self._core = core
        # By device: only a call on the same device can wait for the kernels that still read the memory of its calls.
        self._compiled: dict[str, dict[tuple[CallRequest, str | None], Call]] = {}
        self._known: dict[Key, KnownCall] = {}
        # Of the known calls, by options and the identity of their arrays.
        self.same: dict[Key, Callable[[Any, Any], Any]] = {}
        # By device: calls let go of since the last compilation. Only a compilation uses their memory again.
        self._dropped: collections.defaultdict[str, list[object]] = collections.defaultdict(list)

    def compiled(self, request: CallRequest, allowed: str | None, space: Space) -> Call:
        """Return the call for a request in `space`; `allowed` is the executor asked for, or None."""
        table = self._compiled.setdefault(request.device, {})
        call = table.get((request, allowed))
        if call is None:
            if len(table) == self.most:
                self.drop(request.device, table)
                table = self._compiled[request.device] = {}
            # Kernels under way, on any stream, may still read the memory of the calls.
            if (dropped := self._dropped.pop(request.device, None)) and isinstance(space, DeviceSpace):
                space.gpu.order.follow(space.stream)
                space.gpu.order.hold(space.stream, dropped)
            call = table[request, allowed] = self._core.compile(request, allowed, space)
        return call

    def drop(self, device: str, calls: object) -> None:
        """Let go of calls once no kernel reads their memory; also called by finalizers, in any thread."""
        self._dropped[device].append(calls)

    def close(self, failed: bool) -> None:
        """Forget all calls; if a rank has `failed`, keep the memory of calls on devices: kernels may still read it."""
        if failed:
            keep_for_ever([table for device, table in self._compiled.items() if device != "cpu"])
            keep_for_ever(self._dropped)
        self._compiled, self._known, self.same = {}, {}, {}

    def find(self, cache_key: Key, x: Any, out: Any, stream: Any) -> KnownCall | None:
        """Return the known call for these arrays; None without one, or if it does not serve `stream`."""
        known = self._known.get(key_of(cache_key, x, out))
        if known is not None and known.call.executor.minds_blocking and \
                (device := self._core.gpus[known.call.request.device].device).is_blocking(device.stream(stream)):
            return None
        return known

    def bound(self) -> list[KnownCall]:
        """Return the known calls bound to addresses of GPU arrays."""
        return [one for one in self._known.values() if one.rows is not None]

    def keep(self, cache_key: Key, x: Any, out: Any, ready: ReadyCall, call: Prepared, seconds: Array | None) -> None:
        """Keep a call for repetition, here or in the engine, if it works on the memory of the arrays themselves.

        `cache_key` is the key without the arrays. The engine matches calls by shape and dtype, this table by address.
        """
        request, executor = ready.request, ready.call.executor
        known = known_call(x, call.result, ready, seconds, allocates=out is None)
        try:
            plan = known and self._core.engine_plan(ready.call)
        except OSError:  # no memory: the call itself meets the same error and tells the other ranks
            return
        if known is None:
            return
        key = key_of(cache_key, x, out) if cache_key[0] == request.collective else ()  # no key for a step of another
        # Not repeatable: calls that may not be captured must ask the stream each time, and on a device the first rank
        # of an exscan fills its result through CuPy.
        is_asked = known.is_new and not executor.captures
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
            self._core.engine.cache_call(*cache_key, x, call.result, out, plan, seconds, request.nbytes)

    def repeat(self, known: KnownCall, x: Any, out: Any, stream: Any) -> Any:
        """Repeat a call and return its result: `out`, an overwritten `x`, or a new array."""
        self._core.life.check_usable()
        call, request = known.call, known.call.request
        if request.device != "cpu":
            return self._on_device(known, x, out, stream)
        if out is None:
            out = numpy.empty(*known.allocates) if known.allocates else x if request.has_output else None
        ready = known.on(x, out)
        operation = call.run(ready.source, ready.target) if call.is_whole else self._core.operation(ready, HOST)
        self._core.timed(self._core.measured(operation, request), request.collective, known.seconds)
        return out

    def _on_device(self, known: KnownCall, x: Any, out: Any, stream: Any) -> Any:
        """Enqueue a repeated call in a stream of its GPU; return the result as `repeat` does."""
        call, request, gpu = known.call, known.call.request, self._core.gpus[known.call.request.device]
        on = gpu.device.stream(stream)
        if known.rows is None:
            result = gpu.device.empty(*known.allocates, on) if known.allocates else None
            ready = known.on(x, result, on)
            output = output_of(request, result, ready.target)
            launch = call.launcher(ready.source, ready.target) if call.is_whole else None
        else:
            result, ready = x if out is None and request.has_output else out, ReadyCall(call, *known.rows)
            if known.output is not None and known.output.owner() is None:  # another array now uses this memory
                known.output = output_of(request, result, ready.target)
            output, launch = known.output, known.launch
        keep = None if stream is None or gpu.device.is_current(on) else (x, result)
        # The short way: enqueue at once, if the stream needs no preparation and no other call is queued.
        if launch is not None and gpu.device.is_open(on):
            try:
                is_made = self._core.waits.at_once(gpu.order.enqueue, request.collective, launch, on, output, keep)
            except BaseException:
                keep_for_ever((x, result))  # the kernel may have been enqueued
                raise
            if is_made:
                if known.launch is not None and known.options and stream is None:
                    if len(self.same) == self.most:
                        self.same.clear()
                    self.same[*known.options, id(x), id(out)] = same_call(self._core, known, on, x, out)
                return result
        # A user's CUDA graph may replay the call: keep the arrays.
        space = DeviceSpace(gpu, on, output=output, borrows=keep is not None)
        kept = NOTHING._replace(given=x, result=result)
        operation = self._core.operation(ready, space, kept, repeated=known.rows is not None)
        self._core.waits.run(self._core.measured(operation, request), request.collective)
        if known.rows is not None and known.launch is None and call.is_whole:
            known.launch = call.launcher(ready.source, ready.target)
        return result


def same_call(core: Core, known: KnownCall, stream: Any, x: Any, out: Any) -> Callable[[Any, Any], Any]:
    """Return a function that repeats a call on a GPU on the same two arrays, in the same current stream.

    It looks nothing up: arrays, stream and device are compared with those of the call before. It returns the result;
    or NotImplemented, with nothing done, if anything has changed.
    """
    gpu = core.gpus[known.call.request.device]
    owners = weakref.ref(x), (lambda: None) if out is None else weakref.ref(out)
    (same_x, same_out), life, has_ended = owners, core.life, core.link.has_ended
    current, is_open, at_once = gpu.device.current_stream, gpu.device.is_open, core.waits.at_once
    enqueue, name = gpu.order.enqueue, known.call.request.collective

    def repeat(x: Any, out: Any) -> Any:
        if same_x() is not x or same_out() is not out or current() is not stream or life.is_forked \
                or has_ended() or not is_open(stream):
            return NotImplemented
        try:
            is_made = at_once(enqueue, name, known.launch, stream, known.output)
        except BaseException:
            keep_for_ever((x, out))  # the kernel may have been enqueued
            raise
        return NotImplemented if not is_made else x if out is None and known.call.request.has_output else out

    return repeat
