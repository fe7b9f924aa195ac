"""NCCL's own collectives: the `native` choice for GPU arrays.

NCCL reduces dtypes known to NCCL, and moves all data as bytes. A complex number is a pair of reals, correct for sum and
avg. A bool is a byte; max of bytes is `or`, min is `and`.
"""

from __future__ import annotations

from typing import Any

from gpucoll.arrays import address
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import Device, Waiting, nccl
from gpucoll.device.nccl import Nccl
from gpucoll.device.streams import StreamOrder
from gpucoll.executors import Executor, Launcher, Task
from gpucoll.progress.operations import Operation

ON_BOOL = {"sum": "max", "max": "max", "bor": "max", "lor": "max", "prod": "min", "min": "min", "band": "min",
           "land": "min"}
REDUCES = ("all_reduce", "reduce", "reduce_scatter")


class NcclNative(Executor):
    """An executor of NCCL's collectives on `device`."""

    name = "native"

    def __init__(self, device: Device, transport: Nccl, order: StreamOrder, *, capability: int) -> None:
        self._device, self._transport, self._order = device, transport, order
        self._lacks_float8 = nccl.lacks_float8(capability)  # capability: the lowest of all ranks

    def serves(self, task: Task) -> str | None:
        """Return None for the collectives, ops and dtypes of NCCL with the library's meaning."""
        if task.collective in REDUCES:
            return _cannot_reduce(task) or (self._lacks_float8 if task.dtype.itemsize == 1 and
                                            task.dtype.kind == "float" else None)
        return nccl.lacks(task.collective)

    def run(self, task: Task) -> Operation:
        self._order.follow(task.stream)
        if _reads_what_it_writes(task):
            return self._from_copy(task)
        return self._transport.call(self._call(task, address(task.input), address(task.output)), task.stream)

    def launcher(self, task: Task) -> Launcher | None:
        if _reads_what_it_writes(task):
            return None
        return self._transport.launcher(self._call(task, address(task.input), address(task.output)))

    def close(self) -> None:
        """Do nothing: the transport belongs to the communicator."""

    def _call(self, task: Task, source: int, target: int) -> nccl.NcclCall:
        """Return NCCL's call; sizes are elements in reductions, elsewhere bytes of one rank's block."""
        name, call = task.collective, self._transport.collective
        if name in REDUCES:
            dtype, op, per_element = _spelled(task)
            count = (task.output if name == "reduce_scatter" else task.input).size * per_element
            root = [task.root] if name == "reduce" else []  # ranks other than the root have no output
            return call(name, source, target or source if root else target, count, dtype, nccl.OPS[op], *root)
        rows = [row for row in (task.input, task.output) if row is not None]
        if name == "broadcast":
            return call(name, source or target, target, rows[-1].nbytes, "ncclUint8", task.root)
        if name == "all_gather":
            return call(name, source, target, task.input.nbytes, "ncclUint8")
        if name == "all_to_all":
            return call(name, source, target, task.input.nbytes // self._transport.size, "ncclUint8")
        block = (task.input if name == "gather" else task.output).nbytes
        return call(name, source, target, block, "ncclUint8", task.root)

    def _from_copy(self, task: Task) -> Waiting:
        """Let NCCL read a copy, kept until all is enqueued, or for good in a capture."""
        staging = self._device.empty(task.input.size, task.input.dtype, task.stream)
        self._order.keep_captured(task.stream, staging)
        self._device.kernels.copy(address(task.input), address(staging), task.input.size, task.dtype.itemsize,
                                  task.stream)
        yield from self._transport.call(self._call(task, address(staging), address(task.output)), task.stream)


def _reads_what_it_writes(task: Task) -> bool:
    """Return whether the call is an all_to_all in place, for which NCCL needs a copy of the input."""
    return task.collective == "all_to_all" and address(task.input) == address(task.output)


def _cannot_reduce(task: Task) -> str | None:
    assert task.op is not None
    op, dtype = task.op, task.dtype
    if op.expression:
        return "NCCL has no op for an expression"
    if dtype.kind == "bool":
        return None if op.name in ON_BOOL else f"NCCL has no {op.name} for bool"
    if dtype.kind == "complex":
        return None if op.name in ("sum", "avg", "premul_sum") else f"NCCL has no {op.name} for complex numbers"
    if dtype.nccl is None or op.nccl is None:
        return f"NCCL has no {op.name} for {dtype.name}"
    if dtype.kind == "float" and op.name in ("min", "max"):
        return f"NCCL's {op.name} need not let NaN win"
    return None


def _spelled(task: Task) -> tuple[Any, Any, int]:
    """Return NCCL's dtype and op, and the number of NCCL's elements in one element."""
    assert task.op is not None
    # As for every executor, a factor has been applied before, and the division of avg comes after.
    name = "sum" if task.op.factor is not None or task.op.name == "avg" else task.op.name
    if task.dtype.kind == "bool":
        return "ncclUint8", OPS[ON_BOOL[name]].nccl, 1
    if task.dtype.kind == "complex":
        return DTYPES[f"float{4 * task.dtype.itemsize}"].nccl, OPS[name].nccl, 2
    return task.dtype.nccl, OPS[name].nccl, 1
