"""The `native` executor: MPI's own collectives, the baseline and the choice for small messages.

MPI's predefined ops serve where they mean what the contract says; elsewhere (float16, NaN in
min and max, logical ops on floats) MPI calls back into NumPy through an op of ours.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy
from mpi4py import MPI

from gpucoll.arrays import combiner
from gpucoll.dtypes import DTYPES, Dtype, numpy_dtype
from gpucoll.executors import Task
from gpucoll.ops import LOGICAL, Op
from gpucoll.waits import Operation

ON_BOOL = {"sum": "LOR", "max": "LOR", "bor": "LOR", "lor": "LOR", "prod": "LAND", "min": "LAND", "band": "LAND",
           "land": "LAND", "bxor": "LXOR", "lxor": "LXOR"}


class NativeExecutor:
    """Runs MPI's non-blocking collectives, so that every wait has a deadline, over `comm`, which is nobody else's."""

    name = "native"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def serves(self, task: Task) -> str | None:
        """Every collective and op that MPI has."""
        if task.op is not None and task.op.expression:
            return "MPI has no op for an expression"
        return None if hasattr(self, f"_{task.collective}") else f"MPI has no {task.collective}"

    def run(self, task: Task) -> Operation:
        """Start MPI's collective and wait for its end."""
        request = getattr(self, f"_{task.collective}")(task)
        if not request.Test():
            yield request.Test

    def close(self) -> None:
        """Nothing to give back."""

    def _all_reduce(self, task: Task) -> MPI.Request:
        return self._comm.Iallreduce(_source(task), _buffer(task.output, task.dtype), _op(task))

    def _reduce(self, task: Task) -> MPI.Request:
        target = None if task.output is None else _buffer(task.output, task.dtype)
        source = _source(task) if task.output is not None else _buffer(task.input, task.dtype)
        return self._comm.Ireduce(source, target, _op(task), task.root)

    def _reduce_scatter(self, task: Task) -> MPI.Request:
        return self._comm.Ireduce_scatter_block(_source(task), _buffer(task.output, task.dtype), _op(task))

    def _all_gather(self, task: Task) -> MPI.Request:
        # Of one rank, input and output may be the same memory.
        return self._comm.Iallgather(MPI.IN_PLACE if _in_place(task) else _moved(task.input), _moved(task.output))

    def _gather(self, task: Task) -> MPI.Request:
        return self._comm.Igather(_moved(task.input), _moved(task.output), task.root)

    def _scatter(self, task: Task) -> MPI.Request:
        return self._comm.Iscatter(_moved(task.input), _moved(task.output), task.root)

    def _all_to_all(self, task: Task) -> MPI.Request:
        return self._comm.Ialltoall(_moved(task.input.copy() if _in_place(task) else task.input), _moved(task.output))

    def _scan(self, task: Task) -> MPI.Request:
        return self._comm.Iscan(_source(task), _buffer(task.output, task.dtype), _op(task))

    def _exscan(self, task: Task) -> MPI.Request:
        return self._comm.Iexscan(_source(task), _buffer(task.output, task.dtype), _op(task))

    def _all_gather_v(self, task: Task) -> MPI.Request:
        return self._comm.Iallgatherv(_moved(task.input), _ragged(task, 1))

    def _gather_v(self, task: Task) -> MPI.Request:
        return self._comm.Igatherv(_moved(task.input), _ragged(task, 1) if task.output is not None else None, task.root)

    def _scatter_v(self, task: Task) -> MPI.Request:
        return self._comm.Iscatterv(None if task.input is None else _ragged(task, 0), _moved(task.output), task.root)

    def _all_to_all_v(self, task: Task) -> MPI.Request:
        return self._comm.Ialltoallv(_ragged(task, 0), _ragged(task, 1))

    def _reduce_scatter_v(self, task: Task) -> MPI.Request:
        assert task.lengths is not None
        source, target = _buffer(task.input, task.dtype), _buffer(task.output, task.dtype)
        return self._comm.Ireduce_scatter(source, target, task.lengths[0], _op(task))

    def _broadcast(self, task: Task) -> MPI.Request:
        if task.input is not None and not _in_place(task):
            numpy.copyto(task.output, task.input)
        return self._comm.Ibcast(_moved(task.output), task.root)

    def _barrier(self, task: Task) -> MPI.Request:
        return self._comm.Ibarrier()


def _moved(row: Any) -> Any:
    """Return mpi4py's spelling of a row whose values do not matter; None where there is none."""
    return None if row is None else [row.view(numpy.uint8), MPI.BYTE]


def _ragged(task: Task, side: int) -> list[Any]:
    """Return mpi4py's spelling of the blocks of one side: bytes and their counts."""
    assert task.lengths is not None
    row = task.output if side else task.input
    return [row.view(numpy.uint8), [length * row.dtype.itemsize for length in task.lengths[side]], MPI.BYTE]


def _in_place(task: Task) -> bool:
    return bool(task.input.ctypes.data == task.output.ctypes.data)


def _source(task: Task) -> Any:
    return MPI.IN_PLACE if _in_place(task) else _buffer(task.input, task.dtype)


def _buffer(row: Any, dtype: Dtype) -> list[Any]:
    """Return mpi4py's spelling of a row; what MPI does not know travels as unsigned of the same width."""
    carrier = row.view(f"u{dtype.itemsize}") if dtype.mpi is None else row
    return [carrier, _datatype(dtype)]


@functools.cache
def _datatype(dtype: Dtype) -> MPI.Datatype:
    """Return MPI's datatype; a duplicate of its own for one that MPI does not know, so that a callback can tell."""
    return getattr(MPI, dtype.mpi) if dtype.mpi else getattr(MPI, f"UINT{8 * dtype.itemsize}_T").Dup()


def _op(task: Task) -> MPI.Op:
    """Return MPI's op of that meaning, or one that calls NumPy."""
    assert task.op is not None
    op, dtype = task.op, task.dtype
    if dtype.kind == "bool":
        return getattr(MPI, ON_BOOL[op.name])
    exact = dtype.mpi is not None and (dtype.kind != "float" or op.name not in ("min", "max", *LOGICAL))
    return getattr(MPI, op.mpi) if exact else _numpy_op(op)


@functools.cache
def _numpy_op(op: Op) -> MPI.Op:
    """Return an op that combines by NumPy; one for all dtypes, since MPI's bindings allow few."""

    def call(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        dtype = next(row for row in DTYPES.values() if _datatype(row) == datatype)
        kind = numpy_dtype(dtype.name)
        a, b = numpy.frombuffer(source, kind), numpy.frombuffer(target, kind)
        combiner(op, dtype)(b, a, [b])

    return MPI.Op.Create(call, commute=True)
