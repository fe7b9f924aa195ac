"""Small all-reduces of a node in one exchange of slots: a few lines of C++, where the host has a compiler.

All ranks come, the last one wakes the others, and each combines all slots in rank order: as `one_shot` does.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.segments import at
from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.store import user_store
from gpucoll.errors import BackendError
from gpucoll.executors import Task
from gpucoll.waits import Operation

SLOT = 1 << 13  # bytes; larger arrays are read where they are
LINE = 64
ROOM = LINE + 2 * SLOT  # bytes of each rank's part of the shared memory
KINDS = ("float32", "float64", "int32", "int64", "uint32", "uint64")  # as kernels/slots.cc has them
OPS = ("sum", "prod", "min", "max")
PATIENCE = 1_000_000  # nanoseconds that a call waits before somebody looks at its deadline
SPINS, YIELDS = 2000, 8  # looks before a rank goes to sleep
CROWDED = (0, 60)  # the same where ranks outnumber cores: who yields lets another one come


@functools.cache
def library() -> Any:
    """Return the compiled code, None where there is no compiler, or one that cannot."""
    source = resources.files("gpucoll.kernels").joinpath("slots.cc").read_text()
    try:
        path = user_store().path(source, ".so", functools.partial(compile_shared, source), flags=recipe())
        found = ctypes.CDLL(str(path))
    except (BackendError, OSError):
        return None
    number, pointer = ctypes.c_uint64, ctypes.c_void_p
    found.arrive.argtypes = [pointer, number]
    found.exchange.argtypes = found.finish.argtypes = [pointer, number, number]
    return found


class Slots:
    """One rank's part in the exchanges of its communicator; `areas` are the addresses of all ranks' parts.

    The line at the beginning of rank 0's is everybody's.
    """

    def __init__(self, rank: int, areas: Sequence[int]) -> None:
        self.library = library()
        self.ranks, self.call = len(areas), 0
        looks = CROWDED if len(areas) > len(os.sched_getaffinity(0)) else (SPINS, YIELDS)
        self._view = numpy.array([areas[0], len(areas), *looks, SLOT, *(area + LINE for area in areas)], numpy.uint64)
        self.view = address(self._view)
        self.mine = [at(areas[rank] + LINE + half * SLOT, SLOT) for half in (0, 1)]
        self.result = numpy.empty(SLOT, numpy.uint8)

    def serves(self, task: Task) -> bool:
        """Return whether a task is an exchange of slots: the same on every rank."""
        return (task.algorithm == "one_shot" and task.collective == "all_reduce" and 0 < task.nbytes <= SLOT
                and task.dtype.name in KINDS and task.op is not None and task.op.factor is None
                and (task.op.name in OPS or task.op.name == "avg"))


class Exchange:
    """All calls of one length, dtype and op: each copies into a slot, and out of the result."""

    def __init__(self, slots: Slots, task: Task) -> None:
        assert task.op is not None
        dtype, nbytes = task.input.dtype, task.input.nbytes
        self._slots = slots
        self._arrive, self._exchange, self._finish = (
            getattr(slots.library, name) for name in ("arrive", "exchange", "finish"))
        self._sources = [slot[:nbytes].view(dtype) for slot in slots.mine]
        self._result = slots.result[:nbytes].view(dtype)
        op = "sum" if task.op.name == "avg" else task.op.name
        self._words = numpy.array([slots.view, address(self._result), task.input.size, KINDS.index(task.dtype.name),
                                   OPS.index(op)], numpy.uint64)
        self._step = address(self._words)

    def __call__(self, source: Array, target: Array) -> bool:
        """Do a call, waiting up to PATIENCE; return whether it is done. What is not is ended by `ends`."""
        slots = self._slots
        call = slots.call = slots.call + 1
        numpy.copyto(self._sources[call & 1], source)
        if not self._exchange(self._step, call, PATIENCE):
            return False
        numpy.copyto(target, self._result)
        return True

    def ends(self, target: Array, patience: int = PATIENCE) -> bool:
        """Wait a little longer; return whether the call is done."""
        if not self._finish(self._step, self._slots.call, patience):
            return False
        numpy.copyto(target, self._result)
        return True

    def run(self, task: Task) -> Operation:
        """Do a call as an operation, which never blocks."""
        slots = self._slots
        slots.call += 1
        numpy.copyto(self._sources[slots.call & 1], task.input)
        self._arrive(slots.view, slots.call)
        if not self.ends(task.output, 0):
            yield lambda: self.ends(task.output, 0)


class Alone:
    """All calls of a single rank: it has the result already."""

    def __call__(self, source: Array, target: Array) -> bool:
        """Copy."""
        if source is not target:
            numpy.copyto(target, source)
        return True

    def ends(self, target: Array) -> bool:
        """It has."""
        return True
