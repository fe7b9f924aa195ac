"""The `mpi` executor of a rank without the engine: messages and NumPy; any number of hosts.

Its messages, and their tags, are those of the engine's `mpi`, so that ranks with and without the engine work together.
The communicator below needs mpi4py's `Isend` and `Irecv` of a buffer, and requests with `Test`. Where calls are not
compared before data move, a message may be longer than the room for it, and none of it is written.

A round posts its receives and sends, and forms each result as soon as its operands have come, so that one segment is
combined while the next is on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy

from gpucoll.arrays import Array, combiner
from gpucoll.device.messages import receiver
from gpucoll.executors import Task
from gpucoll.plan import Form, Message, Plan, Span, Step
from gpucoll.progress.operations import Operation
from gpucoll.transport.control import cancel
from gpucoll.transport.tags import BYTES, PIECE, tag_of_call


class MpiExecutor:
    """Runs schedules by messages over `comm`, on which nobody else sends; `check` is the communicator's.

    Calls are numbered by their comparisons, as those of the engine are, or where there are none as they run.
    """

    name = "mpi"

    def __init__(self, comm: Any, check: str | None = None) -> None:
        receives = comm if check in (None, "full") else receiver(comm)
        self._comm = SimpleNamespace(Isend=comm.Isend, Irecv=receives.Irecv)
        self._calls, self._is_compared = 0, check != "off"
        self._workspace: dict[str, Array] = {}
        self._run: _Run | None = None

    def serves(self, task: Task) -> str | None:
        """Every schedule on host arrays."""
        return None

    def run(self, task: Task) -> Operation:
        """Carry out `task` round by round."""
        if not self._is_compared:
            self._calls += 1
        assert task.plan is not None
        run = _Run(self._comm, tag_of_call(self._calls), task, task.plan, self._allocate)
        self._run = run
        try:
            for steps in task.plan.rounds:
                yield from run.round(steps)
        except BaseException:
            self._workspace = {}
            cancel(run.receives, run)
            raise
        finally:
            self._run = None

    def awaited(self) -> set[int] | None:
        """Return the ranks to or from which messages of the call under way have not ended; None where there is none."""
        return None if self._run is None else self._run.awaited()

    def count_call(self) -> None:
        """Note that calls are compared, or that this rank refuses one: its next messages meet no others'."""
        self._calls += 1

    def _allocate(self, name: str, nbytes: int) -> Array:
        """Return `nbytes` of memory that is kept from call to call: new pages would cost as much as the copy.

        One operation of a communicator runs at a time, so that it is never used twice at once.
        """
        if name not in self._workspace or self._workspace[name].nbytes < nbytes:
            self._workspace[name] = numpy.empty(nbytes, numpy.uint8)
        return self._workspace[name][:nbytes]

    def close(self) -> None:
        """Drop the memory kept for messages."""
        self._workspace.clear()


class _Run:
    """One task under way: its buffers by name."""

    def __init__(self, comm: Any, tag: int, task: Task, plan: Plan,
                 allocate: Callable[[str, int], Array]) -> None:
        self._comm, self._tag = comm, tag
        self._under_way: dict[int, list[Any]] = {}  # requests of the round, by the numbers of its messages
        self.receives: list[Any] = []
        self._peers: list[tuple[int, Any]] = []
        self._testing = threading.Lock()  # MPI forbids that two threads test one request
        self._awaited = set[int]()
        some = task.output if task.output is not None else task.input
        dtype = numpy.dtype(numpy.uint8) if some is None else some.dtype
        self._rows = {name: allocate(name, count * dtype.itemsize).view(dtype)
                      for name, count in plan.workspace.items()}
        self._rows |= {"input": task.input.copy() if plan.copy_input else task.input, "output": task.output}
        self._combine = None if task.op is None else combiner(task.op, task.dtype)

    def round(self, steps: tuple[Step, ...]) -> Operation:
        """Begin all messages of one round, form each result when what it follows has ended, and wait for the rest."""
        self._under_way, self.receives, self._peers = {}, [], []
        for step in steps:
            if isinstance(step, Message):
                self._begin(step)
            else:
                yield from self._end(step.after)
                self._form(step)
        yield from self._end(list(self._under_way))

    def _begin(self, message: Message) -> None:
        begin, row = self._comm.Isend if message.sends else self._comm.Irecv, self._row(message.span).view(numpy.uint8)
        starts = range(0, len(row), PIECE) or (0,)
        requests = [begin([row[start:start + PIECE], BYTES], message.peer, self._tag) for start in starts]
        self._under_way[message.number] = requests
        self._peers += [(message.peer, request) for request in requests]
        if not message.sends:
            self.receives += requests

    def awaited(self) -> set[int]:
        """Return the ranks to or from which messages of this round have not ended, as far as another thread looks."""
        if self._testing.acquire(blocking=False):
            try:
                self._awaited = {peer for peer, request in self._peers if not request.Test()}
            finally:
                self._testing.release()
        return self._awaited

    def _end(self, numbers: Iterable[int]) -> Operation:
        """Wait for those of the steps that are messages of this round."""
        left = [request for number in numbers for request in self._under_way.pop(number, ())]

        def done() -> bool:
            if left and self._testing.acquire(blocking=False):
                try:
                    left[:] = [request for request in left if not request.Test()]
                finally:
                    self._testing.release()
            return not left

        if not done():
            yield done

    def _form(self, form: Form) -> None:
        dst, first, *others = map(self._row, (form.dst, *form.sources))
        if self._combine is not None and others:
            self._combine(dst, first, others)
        else:
            numpy.copyto(dst, first)

    def _row(self, span: Span) -> Array:
        return self._rows[span.buffer][span.start:span.stop]
