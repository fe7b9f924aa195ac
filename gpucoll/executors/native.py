"""The `native` executor: MPI's own collectives, the baseline and the choice for small messages.

MPI's predefined ops serve where they mean what the contract says; elsewhere (float16, NaN in
min and max, logical ops on floats) MPI calls back into NumPy through an op of ours.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import numpy
from mpi4py import MPI

from gpucoll.arrays import combiner
from gpucoll.collectives import COLLECTIVES
from gpucoll.dtypes import DTYPES, Dtype, numpy_dtype
from gpucoll.executors import Task
from gpucoll.ops import LOGICAL, Op
from gpucoll.waits import keep_for_ever
from gpucoll.work import Operation

_MAKING = threading.Lock()
CALLS = {"all_reduce": "Iallreduce", "reduce": "Ireduce", "broadcast": "Ibcast", "all_gather": "Iallgather",
         "gather": "Igather", "scatter": "Iscatter", "reduce_scatter": "Ireduce_scatter_block",
         "all_to_all": "Ialltoall", "scan": "Iscan", "exscan": "Iexscan", "all_gather_v": "Iallgatherv",
         "gather_v": "Igatherv", "scatter_v": "Iscatterv", "reduce_scatter_v": "Ireduce_scatter",
         "all_to_all_v": "Ialltoallv", "barrier": "Ibarrier"}
ON_BOOL = {"sum": "LOR", "max": "LOR", "bor": "LOR", "lor": "LOR", "prod": "LAND", "min": "LAND", "band": "LAND",
           "land": "LAND", "bxor": "LXOR", "lxor": "LXOR"}


class NativeExecutor:
    """Runs MPI's non-blocking collectives, so that every wait has a deadline, over `comm`, which is nobody else's."""

    name = "native"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        with _MAKING:  # the threads of a process share the datatypes
            for dtype in DTYPES.values():
                _datatype(dtype)

    def serves(self, task: Task) -> str | None:
        """Every collective and op that MPI has."""
        if task.op is not None and task.op.expression:
            return "MPI has no op for an expression"
        return None

    def run(self, task: Task) -> Operation:
        """Start MPI's collective and wait for its end."""
        if task.in_place and task.collective != "broadcast":
            # MPI takes IN_PLACE from all ranks or from none; the copy lives as long as this generator
            task = dataclasses.replace(task, input=task.input.copy(), in_place=False)
        if task.collective == "broadcast" and task.input is not None and not task.in_place:
            numpy.copyto(task.output, task.input)
        request = getattr(self._comm, CALLS[task.collective])(*_arguments(task))
        try:
            while not request.Test():
                yield request.Test
        except BaseException:
            keep_for_ever((task, request))  # MPI goes on writing: its collectives cannot be called back
            raise

    def close(self) -> None:
        """Nothing to give back."""


def _arguments(task: Task) -> list[Any]:
    """Return mpi4py's arguments for a task."""
    row = COLLECTIVES[task.collective]
    if task.collective == "barrier":
        return []
    if row.reduces:
        lengths = [] if task.lengths is None else [task.lengths[0]]
        arguments = [*_both(task), *lengths, _op(task)]
    elif task.collective == "broadcast":
        arguments = [_moved(task, 1)]
    else:
        arguments = [_moved(task, 0), _moved(task, 1)]
    return [*arguments, task.root] if row.rooted else arguments


def _moved(task: Task, side: int) -> list[Any] | None:
    """Return mpi4py's spelling of a side whose values do not matter, as bytes; None where there is none."""
    row, promised = (task.input, task.output)[side], COLLECTIVES[task.collective]
    if row is None:
        return None
    if task.lengths is None or not (promised.input, promised.output)[side].blocks:
        return [row.view(numpy.uint8), MPI.BYTE]
    return [row.view(numpy.uint8), [length * row.dtype.itemsize for length in task.lengths[side]], MPI.BYTE]


def _both(task: Task) -> tuple[list[Any], list[Any] | None]:
    """Return mpi4py's spelling of input and output; what MPI does not know travels as unsigned of the same width."""
    kind = _datatype(task.dtype)
    source, target = (row if row is None or task.dtype.mpi else row.view(f"u{task.dtype.itemsize}")
                      for row in (task.input, task.output))
    return [source, kind], None if target is None else [target, kind]


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
    return getattr(MPI, op.mpi) if _means_the_same(op, dtype) else _numpy_op(op)


def _means_the_same(op: Op, dtype: Dtype) -> bool:
    """Return whether MPI's op is the contract's: NaN need not win there, and Open MPI's narrow sums saturate."""
    narrow = dtype.kind == "int" and dtype.itemsize < 4 and op.mpi in ("SUM", "PROD")
    unordered = dtype.kind == "float" and op.name in ("min", "max", *LOGICAL)
    return dtype.mpi is not None and not narrow and not unordered


@functools.cache
def _numpy_op(op: Op) -> MPI.Op:
    """Return an op that combines by NumPy; one for all dtypes, since MPI's bindings allow few."""

    def call(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        dtype = next(row for row in DTYPES.values() if _datatype(row) == datatype)
        kind = numpy_dtype(dtype.name)
        a, b = numpy.frombuffer(source, kind), numpy.frombuffer(target, kind)
        combiner(op, dtype)(b, a, [b])

    return MPI.Op.Create(call, commute=True)
