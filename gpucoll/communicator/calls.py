"""The table of compiled calls: a call that comes again is neither checked nor resolved again.

The engine has a table of its own, of the calls that it does from beginning to end: they take no step in Python.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy

from gpucoll.arrays import HOST, NOTHING, Array, Prepared, same_memory
from gpucoll.communicator.backends import DeviceRow, Key, output_of, plan_of
from gpucoll.communicator.gpu import DeviceSpace
from gpucoll.core.ops import LOGICAL
from gpucoll.device.streams import Output
from gpucoll.executors import Executor, Launcher, Task

if TYPE_CHECKING:
    from gpucoll.communicator.core import Core

MOST_CALLS = 256  # calls


@dataclass(slots=True)
class CompiledCall:
    """A call that is resolved, to be made again on arrays like its own.

    `task` keeps no array alive. A bound call on a device has the addresses of the caller's arrays; any other call gets
    its rows each time. `allocates` is the shape and dtype of a result that is made anew.
    """

    executor: Executor
    task: Task
    seconds: Array | None
    reads: bool  # whether this rank has an input
    writes: bool  # whether it has a result
    is_whole: bool  # whether the executor does all of it
    allocates: tuple[tuple[int, ...], Any] | None = None
    is_bound: bool = True
    minds_blocking: bool = False  # whether the executor was chosen for a stream that does not block
    launch: Launcher | None = None  # what enqueues it on a GPU and waits for nothing
    output: Output | None = None

    def on(self, x: Any, result: Any, stream: Any = None) -> Task:
        """Return the task on these arrays; another one, as it may outlive the call where that fails."""
        task = Task.__new__(Task)
        vars(task).update(vars(self.task))
        task.stream = stream
        task.output = _row(result, stream) if self.writes else None
        task.input = None if not self.reads else task.output if x is result else _row(x, stream)
        return task


def is_finished_by(executor: Executor, task: Task) -> bool:
    """Return whether nothing is left to be done after the executor's part, as the division of an average is."""
    if task.op is None or task.output is None:
        return True
    if task.op.name == "avg" and task.op.factor is not None:
        return False
    finishes = getattr(executor, "finishes", None)
    return (finishes is not None and finishes(task)) \
        or (task.collective != "exscan" and task.op.name not in ("avg", *LOGICAL))


def _row(x: Any, stream: Any) -> Any:
    """Return an array as executors see it: of one axis on the host, an address on the device of a stream."""
    return x.reshape(-1) if stream is None else DeviceRow(x)


def compiled(x: Any, out: Any, executor: Executor, task: Task, seconds: Array | None, *,
                allocates: bool = False) -> CompiledCall | None:
    """Return how to make a call again that works on the memory of `x` and `out` itself; None for any other.

    With `allocates` the result is made anew in each call, unless it is `x`.
    """
    on_device = task.device != "cpu"
    sides = ((x, task.input), (out, task.output))
    if (on_device and executor.name == "native" and task.device == "emulated") \
            or not all(row is None or _is_plain(array, row) for array, row in sides):
        return None
    is_new = allocates and out is not x
    keeps = on_device and not is_new
    rows = [DeviceRow(row) if keeps and row is not None else None for row in (task.input, task.output)]
    again = replace(task, input=rows[0], output=rows[1], lengths=None, stream=None, repeated=keeps or not on_device)
    vars(again)["words"] = task.words
    made = (out.shape, out.dtype) if is_new and out is not None else None
    return CompiledCall(executor, again, seconds, task.input is not None, task.output is not None,
                        is_finished_by(executor, task), made, is_bound=not is_new,
                        minds_blocking=getattr(executor, "minds_blocking", False),
                        output=output_of(task, out, task.output) if keeps else None)


def _is_plain(x: Any, row: Any) -> bool:
    """Return whether an executor works on the memory of `x` itself, in the dtype of `x`; not for another library's."""
    flags = getattr(x, "flags", None)
    return flags is not None and flags.c_contiguous and row.dtype == x.dtype and same_memory(x, row)


def key_of(same: Key, x: Any, out: Any) -> Key:
    """Return the key of a call on these arrays, () for a call that is not kept; `same` is all the rest.

    Where a result is allocated, the key has what the input looks like, and not its address.
    """
    is_apart = out is None and same[0] != "broadcast"
    here = _place(x, is_apart)
    there = here if out is x or out is None else _place(out) if here else ()
    return (*same, here, there, out is x, is_apart) if there else ()


def _place(x: Any, is_anywhere: bool = False) -> Key:
    """Return where an array is and what it looks like; () for one that is not NumPy's or CuPy's own.

    For one that may be anywhere, only whether its elements begin at multiples of their size.
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

    def find(self, same: Key, x: Any, out: Any, stream: Any) -> CompiledCall | None:
        """Return the call on arrays like these, None where there is none that this stream allows."""
        known = self._known.get(key_of(same, x, out))
        return None if known is None or (known.minds_blocking and self._is_blocking(known, stream)) else known

    def bound(self) -> list[CompiledCall]:
        """Return those on GPU arrays at known addresses."""
        return [one for one in self._known.values() if one.is_bound and one.task.device != "cpu"]

    def keep(self, same: Key, x: Any, out: Any, executor: Executor, task: Task, call: Prepared,
             seconds: Array | None) -> None:
        """Keep a call for the next time, here or in the engine, if it works on the memory of its arrays itself.

        `same` is all but the arrays. For the engine one that is like it is the same.
        """
        known = compiled(x, call.result, executor, task, seconds, allocates=out is None)
        try:
            plan = known and plan_of(executor, task)
        except OSError:  # which the call itself will meet, and tell the others of
            return
        if known is None:
            return
        key = key_of(same, x, out) if same[0] == task.collective else ()  # not of a part of another call
        # Where no call may be captured each one asks its stream; the first rank of an exscan fills an array of CuPy's
        is_asked = not known.is_bound and not getattr(executor, "captures", True)
        is_filled = task.collective == "exscan" and task.device != "cpu"
        if plan is None and key and not (task.header or task.collective == "scatter" or is_asked or is_filled):
            if len(self._known) == MOST_CALLS:
                self._known.clear()
            self._known[key] = known
        elif plan is not None and (call.result is not x or out is x or task.collective == "broadcast") \
                and self._comm._host_engine() is not None:
            self._comm._engine.learn(*same, x, call.result, out, plan, seconds)

    def _is_blocking(self, call: CompiledCall, stream: Any) -> bool:
        device = self._comm._gpus[call.task.device].device
        return device.is_blocking(device.stream(stream))

    def repeat(self, call: CompiledCall, x: Any, out: Any, stream: Any) -> Any:
        """Make a call once more, and return its result: `out`, `x` where that is overwritten, or a new array."""
        self._comm._check_usable()
        executor = call.executor
        if call.task.device != "cpu":
            return self._on_device(call, x, out, stream)
        if out is None:
            out = numpy.empty(*call.allocates) if call.allocates else x if call.writes else None
        task = call.on(x, out)
        operation = executor.run(task) if call.is_whole else self._comm._operation(executor, task, HOST)
        self._comm._timed(operation, task.collective, call.seconds)
        return out

    def _on_device(self, call: CompiledCall, x: Any, out: Any, stream: Any) -> Any:
        """The same on a GPU: enqueue the call in a stream."""
        executor, task, gpu = call.executor, call.task, self._comm._gpus[call.task.device]
        on = gpu.device.stream(stream)
        if not call.is_bound:
            result = gpu.device.empty(*call.allocates, on) if call.allocates else None
            task = call.on(x, result, on)
            space = DeviceSpace(gpu, on, output=output_of(task, result, task.output))
            kept = NOTHING._replace(given=x, result=result)  # as long as a graph of the user's that has the call
            self._comm._waits.run(self._comm._operation(executor, task, space, kept), task.collective)
            return result
        task.stream, result = on, x if out is None and call.writes else out
        if call.output is not None and call.output.owner() is None:  # of another array on the same memory
            call.output = output_of(task, result, task.output)
        if call.launch is not None and gpu.device.is_open(on) \
                and self._comm._waits.at_once(gpu.order.enqueue, task.collective, call.launch, on, call.output):
            return result
        space, kept = DeviceSpace(gpu, on, output=call.output), NOTHING._replace(given=x, result=result)
        self._comm._waits.run(self._comm._operation(executor, task, space, kept), task.collective)
        if call.launch is None and call.is_whole and hasattr(executor, "launcher"):
            call.launch = executor.launcher(task)
        return result
