"""The `mpi` executor: messages and NumPy; any number of hosts.

It needs of its communicator only what mpi4py's has: `Isend` and `Irecv` of a buffer, and requests with `Test`.

A round posts its receives and sends, and forms each result as soon as its operands have come,
so that one segment is combined while the next is on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.arrays import Array, combiner
from gpucoll.executors import Message, Plan, PlannedRound, Span, Task, Write
from gpucoll.waits import Operation

BYTES = "B"  # MPI's unsigned char
TAGS = 1 << 15  # MPI promises tags up to 32767; a late message of the call before cannot be mistaken


_NO_ROOM = numpy.empty(0, numpy.uint8)


class MpiExecutor:
    """Runs schedules by messages over `comm`, on which nobody else sends."""

    name = "mpi"

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._calls = 0
        self._rooms: dict[str, Array] = {}

    def serves(self, task: Task) -> str | None:
        """Every schedule on host arrays."""
        return None if task.plan is not None else f"{task.algorithm} has no schedule"

    def run(self, task: Task) -> Operation:
        """Carry out `task` round by round."""
        self._calls += 1
        assert task.plan is not None
        run = _Run(self._comm, self._calls % TAGS, task, task.plan, self._room)
        for planned in task.plan.rounds:
            yield from run.round(planned)

    def _room(self, name: str, nbytes: int) -> Array:
        """Return `nbytes` of memory that is kept from call to call: new pages would cost as much as the copy.

        One operation of a communicator runs at a time, so that it is never used twice at once.
        """
        if self._rooms.get(name, _NO_ROOM).nbytes < nbytes:
            self._rooms[name] = numpy.empty(nbytes, numpy.uint8)
        return self._rooms.get(name, _NO_ROOM)[:nbytes]

    def close(self) -> None:
        """Drop the memory kept for messages."""
        self._rooms.clear()


class _Run:
    """One task under way: its buffers by name, as elements and as bytes."""

    def __init__(self, comm: Any, tag: int, task: Task, plan: Plan,
                 room: Callable[[str, int], Array]) -> None:
        self._comm, self._tag = comm, tag
        some = task.output if task.output is not None else task.input
        dtype = numpy.dtype(numpy.uint8) if some is None else some.dtype
        source = task.input.copy() if plan.copy_input else task.input
        self._elements: dict[str, Any] = {
            "input": source, "output": task.output,
            "scratch": room("scratch", plan.scratch * dtype.itemsize).view(dtype),
            "staging": room("staging", plan.staging * dtype.itemsize).view(dtype)}
        self._bytes: dict[str, Any] = {
            name: None if row is None else row.view(numpy.uint8) for name, row in self._elements.items()}
        self._width = dtype.itemsize
        self._combine = None if task.op is None else combiner(task.op, task.dtype)

    def round(self, planned: PlannedRound) -> Operation:
        """Move and combine what one round says."""
        receives = [self._comm.Irecv(self._buffer(m), m.peer, self._tag) for m in planned.receives]
        sends = [self._comm.Isend(self._buffer(m), m.peer, self._tag) for m in planned.sends]
        for source, kept in planned.snapshots:
            self._row(kept)[:] = self._row(source)
        if planned.hold:
            yield from _all(sends)
        come = 0
        for write in planned.writes:
            yield from _all(receives[come:write.needs])
            come = max(come, write.needs)
            self._write(write)
        yield from _all(receives[come:])
        if not planned.hold:
            yield from _all(sends)

    def _write(self, write: Write) -> None:
        dst, base = self._row(write.dst), self._row(write.base)
        if self._combine is not None and write.operands:
            self._combine(dst, base, [self._row(operand) for operand in write.operands])
        else:
            numpy.copyto(dst, base)

    def _row(self, span: Span) -> Array:
        return self._elements[span.buffer][span.start:span.stop]

    def _buffer(self, message: Message) -> list[Any]:
        span, width = message.span, self._width
        return [self._bytes[span.buffer][span.start * width:span.stop * width], BYTES]


def _all(requests: list[Any]) -> Operation:
    """Wait for `requests`, unless they have ended already."""
    left = [request for request in requests if not request.Test()]

    def done() -> bool:
        left[:] = [request for request in left if not request.Test()]
        return not left

    if left:
        yield done
