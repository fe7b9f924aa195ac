"""The results of collectives among virtual ranks, computed by NumPy and without a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from gpucoll.arrays import Array, combiner
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.executors import Task

MOST_BYTES = 128 << 20  # bytes of a call over all ranks: larger calls are matched, and their results are not computed
# Bytes of a result that is not computed and set to zero: the memory of a longer one may never be touched, so that
# programs larger than this machine's memory can be checked.
MOST_ZEROS = 1 << 20


def compute(tasks: Sequence[Task]) -> None:
    """Write the results of a call, given the tasks of all ranks in rank order.

    Above MOST_BYTES no result is computed: a result apart from the input is zero up to MOST_ZEROS bytes, any other
    array keeps its values.
    """
    first, row = tasks[0], COLLECTIVES[tasks[0].collective]
    if first.nbytes * len(tasks) > MOST_BYTES:
        for task in tasks:
            if task.output is not None and not task.in_place and row.name != "broadcast" \
                    and task.output.nbytes <= MOST_ZEROS:
                task.output[...] = 0
    elif row.reduces:
        _reduce(row.name, tasks, blocks=row.input.blocks)
    elif row.name != "barrier":
        _move(tasks, blocks=row.input.blocks, source=first.root if row.input.where == "root" else None)


def _move(tasks: Sequence[Task], *, blocks: bool, source: int | None) -> None:
    """Carry out a call that moves data, from rank `source` or from all ranks."""
    givers = tasks if source is None else [tasks[source]]
    # A copy of the inputs, because input and result may be the same memory.
    parts = [_blocks(task, len(tasks)) if blocks else [task.input] for task in givers]
    everything = None if blocks else numpy.concatenate([one for (one,) in parts])
    copies = [[numpy.array(block) for block in one] for one in parts] if blocks else []
    for rank, task in enumerate(tasks):
        if task.output is not None:
            task.output[...] = numpy.concatenate([one[rank] for one in copies]) if everything is None else everything


def _blocks(task: Task, ranks: int) -> list[Array]:
    """Return the blocks of the input of `task`, one for each rank."""
    row = task.input
    if task.lengths is None:
        return list(row.reshape(ranks, -1)) if len(row) else [row] * ranks
    stops = numpy.cumsum(task.lengths[0])
    return [row[stop - length:stop] for stop, length in zip(stops, task.lengths[0], strict=True)]


def _reduce(name: str, tasks: Sequence[Task], *, blocks: bool) -> None:
    """Carry out a reduction: in rank order, as `combiner` rounds."""
    inputs = [task.input for task in tasks]
    if name in ("scan", "exscan"):
        totals = [_total(tasks[0], inputs[:rank + (name == "scan")]) for rank in range(len(tasks))]
        for task, total in zip(tasks, totals, strict=True):
            if total is not None:
                task.output[...] = total
        return
    total = _total(tasks[0], inputs)
    assert total is not None
    for rank, task in enumerate(tasks):
        if task.output is not None:
            task.output[...] = _block(task, total, rank, len(tasks)) if blocks else total


def _total(task: Task, rows: Sequence[Array]) -> Array | None:
    assert task.op is not None
    if not rows:
        return None
    total = numpy.array(rows[0])
    combiner(task.op, task.dtype)(total, rows[0], rows[1:])
    return total


def _block(task: Task, total: Array, rank: int, ranks: int) -> Array:
    if task.lengths is None:
        each = len(total) // ranks
        return total[rank * each:(rank + 1) * each]
    start = sum(task.lengths[0][:rank])
    return total[start:start + task.lengths[0][rank]]
