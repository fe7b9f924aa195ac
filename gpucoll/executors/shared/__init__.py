"""The `shared` executor: the ranks of one node read, and reduce, each other's memory in place.

It runs every schedule: a receive reads the sender's part where it is, once that rank shows that it has come so far;
no rank waits for others than those that it reads from, or that read from it. Inside a node nothing is sent. Across
nodes the same executor, then named `hybrid`, sends messages.

    order        what waits for what
    program      an order bound to memory
    engine       the same for C++, which walks calls like one that was made before
    calls        where the buffers of a call are, and the programs that were made
    neighbours   the ranks of the node, and ways into their memory
    slots        calls of one or two exchanges, done by C++

Symmetric memory is mapped by all ranks. Small arrays are copied to memory that is mapped, and so is scratch; other
arrays are copied, block by block, by the system (process_vm_readv), or where it forbids that, to mapped memory as a
whole.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from gpucoll.arrays import address
from gpucoll.arrays.symmetric import Heap, Slab
from gpucoll.errors import BackendError, CollectiveTimeout, MismatchError, RankFailedError
from gpucoll.executors import Task
from gpucoll.executors.shared import slots
from gpucoll.executors.shared.calls import Calls
from gpucoll.executors.shared.neighbours import CALLS, FAILURE, SIGNATURE, SLEEPERS, Neighbours, make_fence
from gpucoll.executors.shared.program import CALL, END, SEND, TELL, WAIT, Program, copy_blocks
from gpucoll.executors.shared.slots import ROOM, Step, exchange, library, make_slots
from gpucoll.waits import Waits, is_settled, keep_for_ever
from gpucoll.work import Operation

ROUNDS = 20  # bits of a mark below the number of the call
COMPILING = 120.0  # seconds beyond the deadline for a rank that compiles
POLLS = 64  # in a wait, before each look at what the others do
YIELDS = 64  # polls in place that yield the processor, before the wait is handed to whoever runs the operation
# Why a rank goes no further: its call has ended by its deadline, or as others are in another one, or, FAILED less a
# rank, by that one's error. What it had shown before stays.
LATE, ASTRAY, FAILED = -1, -2, -3
DIFFERS = ("ranks of this node make different calls, by collective, algorithm, length, dtype, op or root, or one has "
           "refused a call that others have made")
TAGS, FIRST_TAG = 1 << 15, 3  # of messages to other nodes, as the `mpi` executor has them
PIECE = 1 << 30  # bytes of a message: MPI counts them in 31 bits


class SharedExecutor:
    """Runs schedules by way of the node's shared memory; `heap` is the ranks' symmetric memory.

    The ranks `meet` before their first call, or in it, all of them in the same one, for at most `timeout` seconds.
    Under the name "hybrid" it serves several nodes: messages go between them.
    """

    def __init__(self, link: Any, heap: Heap, timeout: float, name: str = "shared") -> None:
        self.name = name
        self._link, self._timeout = link, timeout
        self._size, self._wire = link.place.size, link.wire
        may_have_slots = name == "shared" and link.mpi is not None
        self._near = Neighbours(link.place, ROOM, may_have_slots and library() is not None)
        self._calls = Calls(self._near, heap)
        self._fence: Callable[[], None] | None = None
        self._has_met = False
        self.slots: Any = None
        self._mark = self._near.mine.words
        # How many walks there were, and calls, slots' too; for either half of the walks and each rank, the mark that it
        # shows when it has read all that it reads of this rank. The engine has them too.
        self._progress = numpy.zeros(2 + 2 * self._size, numpy.int64)
        self._numbers = memoryview(self._progress)  # type: ignore[arg-type] # an array is a buffer
        self._messages: list[list[Any]] = []  # of the call under way: requests for the pieces of each

    def serves(self, task: Task) -> str | None:
        """Every schedule on host arrays, where the ranks of a node can map each other's memory."""
        if self.name == "shared" and len(self._near.all) < self._size:
            return "the ranks are on several nodes"
        if not self._has_met:
            self.meet()
        if not self._near.maps:
            return "the system does not let these ranks map each other's memory"
        return None if task.plan is None or task.plan.schedules is not None else f"{task.algorithm} has no schedule"

    def meet(self) -> None:
        """Find ways into each other's memory. A collective call; raises CollectiveTimeout."""
        # Another process may still compile what this one has found in its cache: all have come to `init` by now.
        waits = Waits(self._timeout + (COMPILING if self._link.mpi is not None else 0), foreign=self._link.foreign)
        waits.run(self._near.meet(self._wire), "the first call over shared memory")
        self._fence = make_fence(self._link.mpi is None)
        self._has_met = True
        if self._near.maps and self._near.all_able and len(self._near.all) == self._size:
            self.slots = make_slots(self._near, self._progress)

    def watch(self, error: BaseException | None = None, awaited: int | None = None) -> None:
        """Raise if another rank has failed in a call, or the awaited one, or one is in another call; tell the others of
        an error of this rank's.
        """
        if error is not None and not is_settled(error):
            culprit = error.ranks[0] if isinstance(error, RankFailedError) and error.ranks else self._near.rank
            self._mark[FAILURE] = (LATE if isinstance(error, CollectiveTimeout) else
                             ASTRAY if isinstance(error, MismatchError) else FAILED - culprit)
        looked_at = () if error is not None else self._near.all if awaited is None else (awaited,)
        for failure in [self._near.mark(rank)[FAILURE] for rank in looked_at]:
            if failure == LATE:
                raise CollectiveTimeout("another rank of this node has waited until its deadline in this call; is "
                                        "every rank in the same call, with the same shape, dtype and algorithm?")
            if failure == ASTRAY:
                raise MismatchError(DIFFERS, code="GC-CALL")
            if failure <= FAILED:
                raise RankFailedError(f"rank {FAILED - failure} has failed, or has left the communicator",
                                      ranks=(FAILED - failure,))
        if error is None:
            self._compare_calls()

    def _compare_calls(self) -> None:
        """Raise MismatchError where a rank is in another call, by slots while this one walks or the other way round."""
        number, mine = self._numbers[1], self._mark
        which = CALLS + number % 2
        for other in [self._near.controls[rank].words[which] for rank in self._near.all]:
            if other >> 1 == number and other != mine[which]:
                raise MismatchError(DIFFERS, code="GC-CALL")

    def refuse(self) -> None:
        """Note that this rank has refused a call: it must not meet the others in its next one."""
        self._calls.refusals += 1
        if self.slots is not None:
            self.slots.refuse()

    def reach(self, slab: Slab, keys: Sequence[int]) -> None:
        """Let slots read symmetric memory where it is: this rank's new slab, and those of all ranks by their keys."""
        if self.slots is not None:
            self.slots.reach(slab.nbytes, tuple(
                slab.start if rank == self._near.rank else address(self._near.attached(rank, keys[rank]))
                for rank in sorted(self._near.all)))

    def takes(self, task: Task) -> bool:
        """Return whether slots do such calls by some algorithm."""
        return self.slots is not None and self._size > 1 and slots.takes(task)

    def step(self, task: Task) -> Step | None:
        """Return what slots do for calls like `task`, None where they are not for them; a rank alone copies."""
        if self.slots is None:
            return None
        if self._size == 1:
            return slots.alone(task)
        return slots.step_of(task)

    def walk(self, task: Task) -> Any:
        """Return what the engine walks for calls like `task`, None where Python does."""
        if self.slots is None or self._size == 1 or task.plan is None or task.plan.schedules is None:
            return None
        return self._calls.walk(task)

    def run(self, task: Task) -> Operation:
        """Carry out `task`; when that fails, no other rank begins to read or write its arrays any more."""
        if self._size == 1:
            if task.output is not None and not task.in_place:
                copy_blocks(task.output, task.input)
            return
        step = self.step(task)
        try:
            yield from self._run(task) if step is None else exchange(self.slots, task, step, self.watch)
        except BaseException as error:
            if is_settled(error):
                raise
            self.watch(error)
            keep_for_ever((task, self._messages, self._calls))  # one that has begun may still do so, and so may MPI
            if isinstance(error, OSError):
                raise BackendError(f"{task.collective}: another rank's memory is out of reach: {error}") from error
            raise

    def _run(self, task: Task) -> Operation:
        numbers = self._numbers
        numbers[0] += 1
        numbers[1] += 1
        self._mark[CALLS + numbers[1] % 2] = 2 * numbers[1] + 1
        base, half = numbers[0] << ROUNDS, numbers[0] & 1
        unread = 2 + half * self._size
        for rank in self._near.all:  # of the call before the last one, whose workspace this call takes
            mark = self._near.mark(rank)
            if mark[0] < numbers[unread + rank]:
                yield from self._reached(mark, numbers[unread + rank])
        call = self._calls.of(task)
        laid = self._calls.lay(task, call, half)
        self._calls.show(task, call, laid, half)
        if self._fence:
            self._fence()
        self._show(base)
        for mark in call.sources:
            if mark[0] < base:
                yield from self._reached(mark, base)
        if self._fence:
            self._fence()
        for board in call.boards[half]:
            if board[SIGNATURE] != call.signature + self._calls.refusals:
                raise MismatchError(DIFFERS, code="GC-CALL")
        yield from self._execute(self._calls.program(task, call, laid, half), base)
        for rank, number in call.readers.items():
            numbers[unread + rank] = base + number
        if laid.result is not None:
            copy_blocks(task.output, laid.result)

    def _execute(self, program: Program, base: int) -> Operation:
        """Do the steps of a program."""
        fence = self._fence
        messages = self._messages = []
        for do, what, number in program:
            if do == CALL:
                what()
            elif do == WAIT:
                if what[0] < base + number:
                    yield from self._reached(what, base + number, messages)
                if fence:
                    fence()
            elif do == TELL:
                if fence:
                    fence()
                self._show(base + number)
            else:
                yield from self._message(messages, do, what, number)

    def _show(self, mark: int) -> None:
        self._mark[0] = mark
        if self._mark[SLEEPERS]:
            self.slots.wake()

    def _message(self, messages: list[list[Any]], do: int, what: Any, number: int) -> Operation:
        """Begin a message, in pieces that MPI can count, or see one to its end."""
        if do == END:
            for request in messages[number]:
                while not request.Test():
                    yield request.Test
        else:
            tag = FIRST_TAG + self._numbers[0] % (TAGS - FIRST_TAG)
            begin = self._wire.Isend if do == SEND else self._wire.Irecv
            messages.append([begin([what[start:start + PIECE], "B"], number, tag)
                             for start in range(0, len(what), PIECE) or [0]])

    def _reached(self, mark: Any, number: int, messages: Sequence[Sequence[Any]] = ()) -> Operation:
        """Wait until `mark` shows `number`: first by yielding the processor to the rank that it is waited for.

        Messages go on meanwhile: MPI moves them only when it is asked for them.
        """
        for _ in range(YIELDS):
            os.sched_yield()
            if mark[0] >= number:
                return

        polls = itertools.count(1)

        def shows_it() -> bool:
            if mark[FAILURE] and mark[0] < number:
                self.watch()
            if next(polls) % POLLS == 0:
                self._compare_calls()
            for requests in messages:
                for request in requests:
                    request.Test()
            return mark[0] >= number

        yield shows_it

    def close(self) -> None:
        """Let go of all memory."""
        if self.slots is not None:
            self.slots.close()
        self._calls.close()
        self._near.close()
