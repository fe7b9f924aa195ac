"""The `mpi` executor of a rank without the engine: messages and NumPy, on any number of hosts.

Messages and tags are the same as in the engine's `mpi`: ranks with and without the engine work together. The
communicator `comm` needs mpi4py's `Isend` and `Irecv` of a buffer, and requests with `Test`. If calls are not compared
before data move, a message may be longer than the posted receive; then nothing is written.

A round posts all receives and sends, and forms each result as soon as the operands have arrived: a segment is combined
while the next is on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.reductions import combiner
from gpucoll.executors import Call, CallRequest, Executor
from gpucoll.executors.messages import receiver
from gpucoll.plan import Message, Plan, PlanStep, Reduction, Span
from gpucoll.progress.operations import Operation
from gpucoll.transport.control import cancel
from gpucoll.transport.tags import BYTES, MAX_MESSAGE, tag_of_call


class MpiExecutor(Executor):
    """An executor of schedules by messages over `comm`, used by nothing else; `check` is the communicator's option.

    The number of a call gives the tag of the messages: no later message meets an earlier call's. Calls are counted when
    run if it `counts`, else at their comparison or refusal, like the engine's calls.
    """

    name = "mpi"
    engine: Any = None

    def __init__(self, comm: Any, check: str | None, *, counts: bool) -> None:
        receives = comm if check in (None, "full") else receiver(comm)
        self._comm = SimpleNamespace(Isend=comm.Isend, Irecv=receives.Irecv)
        self.call_count: int = 0
        self._counts = counts
        self._workspace: dict[str, Array] = {}
        self._run: _Walk | None = None

    def run(self, call: Call, source: Any, target: Any, stream: Any = None, *, repeated: bool = False) -> Operation:
        """Carry out the plan of a call round by round."""
        request = call.request
        self.call_count += self._counts
        assert request.plan is not None
        run = _Walk(self._comm, tag_of_call(self.call_count), request, request.plan, source, target, self._allocate)
        self._run = run
        try:
            for steps in request.plan.rounds:
                yield from run.round(steps)
        except BaseException:
            # Messages that cannot be cancelled may still write to the workspace: use new memory from here on.
            self._workspace = {}
            cancel(run.receives, run)
            raise
        finally:
            self._run = None

    def awaited(self) -> set[int] | None:
        """Return the partners of unfinished messages of the call under way; None if no call is under way."""
        return None if self._run is None else self._run.awaited()

    def _allocate(self, name: str, nbytes: int) -> Array:
        """Return `nbytes` of memory kept from call to call: new pages would cost as much as the copy.

        A communicator runs one operation at a time, so no two calls use the memory at once.
        """
        if name not in self._workspace or self._workspace[name].nbytes < nbytes:
            self._workspace[name] = numpy.empty(nbytes, numpy.uint8)
        return self._workspace[name][:nbytes]

    def close(self) -> None:
        """Release the memory kept for messages."""
        self._workspace.clear()


class _Walk:
    """One call under way: the buffers by name, and the messages of the round."""

    def __init__(self, comm: Any, tag: int, request: CallRequest, plan: Plan, source: Any, target: Any,
                 allocate: Callable[[str, int], Array]) -> None:
        self._comm, self._tag = comm, tag
        self._under_way: dict[int, list[Any]] = {}  # the round's requests, by message number
        self.receives: list[Any] = []
        self._peers: list[tuple[int, Any]] = []
        # MPI forbids two threads to test one request: the thread that finds the lock taken does not test.
        self._testing = threading.Lock()
        self._awaited = set[int]()
        some = target if target is not None else source
        dtype = numpy.dtype(numpy.uint8) if some is None else some.dtype
        self._rows = {name: allocate(name, count * dtype.itemsize).view(dtype)
                      for name, count in plan.workspace.items()}
        self._rows |= {"input": source.copy() if plan.copy_input else source, "output": target}
        self._combine = None if request.op is None else combiner(request.op, request.dtype)

    def round(self, steps: tuple[PlanStep, ...]) -> Operation:
        """Begin all messages of one round, form each result once all steps before have ended, and await the rest."""
        self._under_way, self.receives, self._peers = {}, [], []
        for step in steps:
            if isinstance(step, Message):
                self._begin(step)
            else:
                yield from self._end(step.after)
                self._reduce(step)
        yield from self._end(list(self._under_way))

    def _begin(self, message: Message) -> None:
        begin, row = self._comm.Isend if message.sends else self._comm.Irecv, self._row(message.span).view(numpy.uint8)
        # MPI counts bytes in 31 bits. An empty message is one empty piece.
        starts = range(0, len(row), MAX_MESSAGE) or (0,)
        requests = [begin([row[start:start + MAX_MESSAGE], BYTES], message.peer, self._tag) for start in starts]
        self._under_way[message.number] = requests
        self._peers += [(message.peer, request) for request in requests]
        if not message.sends:
            self.receives += requests

    def awaited(self) -> set[int]:
        """Return the partners of unfinished messages; the last known set while another thread tests."""
        if self._testing.acquire(blocking=False):
            try:
                self._awaited = {peer for peer, request in self._peers if not request.Test()}
            finally:
                self._testing.release()
        return self._awaited

    def _end(self, numbers: Iterable[int]) -> Operation:
        """Wait for the messages of this round among the given steps."""
        # Numbers of results, and of messages awaited before, are not among the round's requests.
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

    def _reduce(self, form: Reduction) -> None:
        dst, first, *others = map(self._row, (form.dst, *form.sources))
        if self._combine is not None and others:
            self._combine(dst, first, others)
        else:
            numpy.copyto(dst, first)

    def _row(self, span: Span) -> Array:
        return self._rows[span.buffer][span.start:span.stop]
