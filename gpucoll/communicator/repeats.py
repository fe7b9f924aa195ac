"""Calls that were made before with the same arrays: checked and resolved once, then only run.

What decides a call's task is in its key: what is called, and where its arrays are, in which shape and dtype. It keeps
no array alive: on a device a task has addresses, on the host rows are made anew.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy

from gpucoll.arrays import address, same_memory
from gpucoll.communicator.times import Seconds
from gpucoll.executors import Executor, Launcher, Task
from gpucoll.ops import LOGICAL

if TYPE_CHECKING:
    from gpucoll.executors.shared import SharedExecutor

KEPT = 256
WITH_ENGINE = ("shared", "hybrid")
Key = tuple[Any, ...]


class DeviceRow:
    """A row of device memory as executors see it: its address and how long it is."""

    __slots__ = ("data", "dtype", "nbytes", "ptr", "size")

    def __init__(self, row: Any) -> None:
        self.ptr, self.size, self.nbytes, self.dtype = address(row), row.size, row.nbytes, row.dtype
        self.data = self  # as CuPy's arrays have it


@dataclass(slots=True)
class Repeat:
    """A call to be made again; `task` holds no arrays of the user's."""

    executor: Executor
    task: Task
    seconds: Seconds | None
    plan: Any = None  # of the engine's
    launch: Launcher | None = None  # what enqueues it on a GPU and waits for nothing

    def rows(self, x: Any, out: Any) -> tuple[Any, Any]:
        """Return input and output of the task."""
        if self.task.device != "cpu":
            return self.task.input, self.task.output
        row = out.reshape(-1)
        return (row if out is x else x.reshape(-1)), row


class Repeats:
    """The calls of one communicator that may come again, found by where their arrays are."""

    def __init__(self) -> None:
        self._kept: dict[Key, Repeat] = {}

    def find(self, key: Key) -> Repeat | None:
        """Return the call that `key` stands for, if it was made before."""
        return self._kept.get(key)

    def keep(self, key: Key, found: Repeat) -> None:
        """Keep a call."""
        if len(self._kept) == KEPT:
            self._kept.clear()
        self._kept[key] = found


def repeat_of(x: Any, out: Any, executor: Executor, task: Task, seconds: Seconds | None, plan: Any) -> Repeat | None:
    """Return how to make a call again that works on the memory of `x` and `out` itself; None for any other."""
    on_device = task.device != "cpu"
    sides = ((x, task.input), (out, task.output))
    if (on_device and executor.name == "native" and task.device == "emulated") \
            or not all(row is None or _is_plain(array, row) for array, row in sides):
        return None
    rows = [None if row is None or not on_device else DeviceRow(row) for row in (task.input, task.output)]
    again = replace(task, input=rows[0], output=rows[1], lengths=None, stream=None, repeated=True)
    return Repeat(executor, again, seconds, plan)


def launcher_of(found: Repeat) -> Launcher | None:
    """Return what enqueues a call on a GPU that takes no step more, None where there is no such."""
    make, op = getattr(found.executor, "launcher", None), found.task.op
    if make is None or (op is not None and op.name in ("avg", *LOGICAL)):
        return None
    return cast("Launcher | None", make(found.task))


def plan_of(executor: Executor, task: Task) -> Any:
    """Return the engine's plan for calls like `task`, None where another executor does them, or takes a step more."""
    if executor.name not in WITH_ENGINE or task.collective == "exscan":
        return None
    return cast("SharedExecutor", executor).plan(task)


def has_finished(executor: Executor, task: Task) -> bool:
    """Return whether what an op does once, at the end, is done by the executor."""
    return executor.name in WITH_ENGINE and task.collective != "exscan"


def key_of(call: Key, x: Any, out: Any) -> Key:
    """Return what tells a call on arrays from another one, () where it will not be kept; `call` is all the rest."""
    here = place_of(x) if call and out is not None else ()
    there = here if out is x else place_of(out) if here else ()
    return (*call, here, there, out is x) if here and there else ()


def place_of(x: Any) -> Key:
    """Return where an array is and what it looks like; () for one that is not NumPy's or CuPy's own."""
    kind = type(x)
    if kind is numpy.ndarray:
        return x.__array_interface__["data"], x.shape, x.strides, x.dtype
    if kind is getattr(sys.modules.get("cupy"), "ndarray", None):
        memory = x.data
        return memory.ptr, x.shape, x.strides, x.dtype, memory.device_id
    return ()


def _is_plain(x: Any, row: Any) -> bool:
    """Return whether an executor works on the memory of `x` itself, in the dtype of `x`; not for another library's."""
    flags = getattr(x, "flags", None)
    return flags is not None and flags.c_contiguous and row.dtype == x.dtype and same_memory(x, row)
