"""The table of compiled calls: a repeated call is neither checked nor resolved again.

The engine has a table of its own for calls run entirely in C++; these calls do not reach the table here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy

from gpucoll.arrays import HOST, NOTHING, Array, Prepared, same_memory
from gpucoll.communicator.backends import DeviceRow, Key, output_of
from gpucoll.communicator.gpu import DeviceSpace
from gpucoll.core.ops import LOGICAL
from gpucoll.device.streams import Output
from gpucoll.executors import Executor, Launcher, Task

if TYPE_CHECKING:
    from gpucoll.communicator.core import Core

MOST_CALLS = 256  # entries; a full table is cleared


@dataclass(slots=True)
class CompiledCall:
    """A resolved call, to be repeated on arrays of the same kind.

    `task` keeps no array alive. A bound call on a device has the addresses of the caller's arrays. Any other call gets
    its rows (flat arrays, or addresses) each time. `allocates` is the shape and dtype of a newly allocated result.
    """

    executor: Executor
    task: Task
    seconds: Array | None
    reads: bool  # whether this rank has an input
    writes: bool  # whether this rank has a result
    is_whole: bool  # whether the executor does the whole call
    allocates: tuple[tuple[int, ...], Any] | None = None
    is_bound: bool = True
    minds_blocking: bool = False  # whether the executor serves no blocking stream
    launch: Launcher | None = None  # enqueues the call on a GPU without a wait
    output: Output | None = None

    def on(self, x: Any, result: Any, stream: Any = None) -> Task:
        """Return a copy of the task for these arrays: the task of a failed call may outlive the call."""
        task = Task.__new__(Task)
        vars(task).update(vars(self.task))
        task.stream = stream
        task.output = _row(result, stream) if self.writes else None
        task.input = None if not self.reads else task.output if x is result else _row(x, stream)
        return task


def is_finished_by(executor: Executor, task: Task) -> bool:
    """Return whether the executor does the whole call; otherwise e.g. the division of an average remains."""
    if task.op is None or task.output is None:
        return True
    if task.op.name == "avg" and task.op.factor is not None:
        return False
    return executor.finishes(task) \
        or (task.collective != "exscan" and task.op.name not in ("avg", *LOGICAL))


def _row(x: Any, stream: Any) -> Any:
    """Return an array in the form for executors: one axis on the host, an address on a device's stream."""
    return x.reshape(-1) if stream is None else DeviceRow(x)


def compiled(x: Any, out: Any, executor: Executor, task: Task, seconds: Array | None, *,
                allocates: bool = False) -> CompiledCall | None:
    """Return the compiled form of a call on the memory of `x` and `out` themselves; None for any other call.

    With `allocates` each call makes a new result, unless the result is `x`.
    """
    on_device = task.device != "cpu"
    sides = ((x, task.input), (out, task.output))
    if (on_device and executor.name == "native" and task.device == "emulated") \
            or not all(row is None or _is_plain(array, row) for array, row in sides):
        return None
    is_new = allocates and out is not x
    # A device call with a given result is bound to addresses; any other call gets its rows each time.
    keeps = on_device and not is_new
    rows = [DeviceRow(row) if keeps and row is not None else None for row in (task.input, task.output)]
    again = replace(task, input=rows[0], output=rows[1], lengths=None, stream=None, repeated=keeps or not on_device)
    vars(again)["description"] = task.description
    made = (out.shape, out.dtype) if is_new and out is not None else None
    return CompiledCall(executor, again, seconds, task.input is not None, task.output is not None,
                        is_finished_by(executor, task), made, is_bound=not is_new,
                        minds_blocking=executor.minds_blocking,
                        output=output_of(task, out, task.output) if keeps else None)


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
    """The compiled calls of a communicator, by `key_of`."""

    def __init__(self, comm: Core) -> None:
        self._comm = comm
        self._known: dict[Key, CompiledCall] = {}

    def find(self, cache_key: Key, x: Any, out: Any, stream: Any) -> CompiledCall | None:
        """Return the compiled call for these arrays; None without one, or if it does not serve `stream`."""
        known = self._known.get(key_of(cache_key, x, out))
        return None if known is None or (known.minds_blocking and self._is_blocking(known, stream)) else known

    def bound(self) -> list[CompiledCall]:
        """Return the compiled calls bound to addresses of GPU arrays."""
        return [one for one in self._known.values() if one.is_bound and one.task.device != "cpu"]

    def keep(self, cache_key: Key, x: Any, out: Any, executor: Executor, task: Task, call: Prepared,
             seconds: Array | None) -> None:
        """Keep a call for repetition, here or in the engine, if it works on the memory of the arrays themselves.

        `cache_key` is the key without the arrays. The engine matches calls by shape and dtype, this table by address.
        """
        known = compiled(x, call.result, executor, task, seconds, allocates=out is None)
        try:
            plan = known and self._comm._engine_plan(executor, task)
        except OSError:  # no memory: the call itself meets the same error and tells the other ranks
            return
        if known is None:
            return
        key = key_of(cache_key, x, out) if cache_key[0] == task.collective else ()  # no key for a step of another call
        # Not repeatable: calls that may not be captured must ask the stream each time, and on a device the first rank
        # of an exscan fills its result through CuPy.
        is_asked = not known.is_bound and not executor.captures
        is_filled = task.collective == "exscan" and task.device != "cpu"
        if plan is None and key and not (task.header or task.collective == "scatter" or is_asked or is_filled):
            # Rare: a program with more kinds of calls pays for resolving them again.
            if len(self._known) == MOST_CALLS:
                self._known.clear()
            self._known[key] = known
        elif plan is not None and (call.result is not x or out is x or task.collective == "broadcast"):
            self._comm._engine.cache_call(*cache_key, x, call.result, out, plan, seconds, task.nbytes)

    def _is_blocking(self, call: CompiledCall, stream: Any) -> bool:
        device = self._comm._gpus[call.task.device].device
        return device.is_blocking(device.stream(stream))

    def repeat(self, call: CompiledCall, x: Any, out: Any, stream: Any) -> Any:
        """Repeat a call and return its result: `out`, an overwritten `x`, or a new array."""
        self._comm._check_usable()
        executor = call.executor
        if call.task.device != "cpu":
            return self._on_device(call, x, out, stream)
        if out is None:
            out = numpy.empty(*call.allocates) if call.allocates else x if call.writes else None
        task = call.on(x, out)
        is_plain = call.is_whole and self._comm.check != "data"
        operation = executor.run(task) if is_plain else self._comm._operation(executor, task, HOST)
        self._comm._timed(self._comm._counted(operation, task), task.collective, call.seconds)
        return out

    def _on_device(self, call: CompiledCall, x: Any, out: Any, stream: Any) -> Any:
        """Enqueue a repeated call in a stream of its GPU; return the result as `repeat` does."""
        executor, task, gpu = call.executor, call.task, self._comm._gpus[call.task.device]
        on = gpu.device.stream(stream)
        if not call.is_bound:
            result = gpu.device.empty(*call.allocates, on) if call.allocates else None
            task = call.on(x, result, on)
            space = DeviceSpace(gpu, on, output=output_of(task, result, task.output))
            kept = NOTHING._replace(given=x, result=result)  # as a user's CUDA graph may replay the call
            self._run(executor, task, space, kept)
            return result
        task.stream, result = on, x if out is None and call.writes else out
        if call.output is not None and call.output.owner() is None:  # another array now uses this memory
            call.output = output_of(task, result, task.output)
        # The short way: enqueue at once, if the stream needs no preparation and no other call is queued.
        if call.launch is not None and gpu.device.is_open(on):
            shares = self._comm._clock.begin(task.collective, task.nbytes)
            if self._comm._waits.at_once(gpu.order.enqueue, task.collective, call.launch, on, call.output):
                self._comm._clock.end(shares)
                return result
        space, kept = DeviceSpace(gpu, on, output=call.output), NOTHING._replace(given=x, result=result)
        self._run(executor, task, space, kept)
        if call.launch is None and call.is_whole:
            call.launch = executor.launcher(task)
        return result

    def _run(self, executor: Executor, task: Task, space: DeviceSpace, kept: Prepared) -> None:
        operation = self._comm._operation(executor, task, space, kept)
        self._comm._waits.run(self._comm._counted(operation, task), task.collective)
