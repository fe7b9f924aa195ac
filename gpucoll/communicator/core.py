"""What every call goes through: checked, resolved to a plan and an executor, run at once or behind a `Work`.

Whatever is wrong with this rank's arguments is raised here, before data moves, with every
array as it was.
"""

from __future__ import annotations

import contextlib
import functools
import os
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy

from gpucoll import bootstrap, tuner
from gpucoll.algorithms import find, schedule
from gpucoll.arrays import NOTHING, Cut, Prepared, Sizes, check_op, fill_identity, finish, premultiplied
from gpucoll.collectives import COLLECTIVES, Collective
from gpucoll.errors import ArgumentError, ClosedError, GpucollError, UsageError
from gpucoll.executors import Executor, Layouts, Plan, Task, resolve
from gpucoll.executors.mpi import farewell
from gpucoll.links import Link
from gpucoll.ops import NOT_IN, Op, op_of
from gpucoll.waits import Operation, Waits, Work

PLANS = 1024  # resolved schedules kept


class How(NamedTuple):
    """The options that every collective takes."""

    algorithm: str = "auto"
    async_op: bool = False


class Core:
    """Ranks, options, executors, and the one path of all calls."""

    def __init__(self, link: Link, options: bootstrap.Options) -> None:
        tuner.rules(options.prefer)  # refused here, not at the first call
        self._link = link
        self.mpi = link.mpi
        self.options = options
        self._waits = Waits(options.timeout, foreign=link.foreign, threads=link.threads,
                            crowded=self.local_size > (os.cpu_count() or 1))
        self._executors: dict[str, Executor] = {}
        self._group: list[Work] | None = None
        self.closed = False

    rank = property(lambda self: self._link.place.rank, doc="This rank, 0 .. size - 1.")
    size = property(lambda self: self._link.place.size, doc="How many ranks there are.")
    local_rank = property(lambda self: self._link.place.local_rank, doc="This rank's number on its node.")
    local_size = property(lambda self: self._link.place.local_size, doc="How many ranks this node has.")
    node = property(lambda self: self._link.place.nodes[self.rank], doc="This rank's node, 0 .. nodes - 1.")
    nodes = property(lambda self: max(self._link.place.nodes) + 1, doc="How many nodes there are.")
    timeout = property(lambda self: self.options.timeout, doc="Seconds: the deadline of every wait.")
    check = property(lambda self: self.options.check, doc="full, deferred, off, or None for the default.")
    executor = property(lambda self: self.options.executor, doc="The executor asked for, or None.")

    @functools.cached_property
    def device(self) -> int | None:
        """The CUDA ordinal of this rank, its local rank modulo the devices; None without one."""
        return bootstrap.device(self.local_rank)

    def _run(self, name: str, call: Prepared, how: How, op: Op | None = None, root: int = 0) -> Any:
        """Resolve and run a prepared call: every collective comes through here."""
        executor, task = self._resolve(COLLECTIVES[name], call, how, op, root)
        operation = self._operation(executor, task, call)
        if self._group is not None:
            self._group.append(Work(self._waits, operation, name, call.result))
            return self._group[-1] if how.async_op else call.result
        if how.async_op:
            return self._waits.submit(Work(self._waits, operation, name, call.result))
        self._waits.run(operation, name)
        return call.result

    def _resolve(self, row: Collective, call: Prepared, how: How, op: Op | None, root: int) -> tuple[Executor, Task]:
        limit = self._executor_limit() or ("mpi" if op is not None and op.expression else None)
        choice = tuner.choose(row.name, how.algorithm, call.nbytes, self.size, executor=limit,
                              prefer=self.options.prefer)
        source = call.input if op is None or call.input is None else premultiplied(op, call.input)
        plan = None
        if choice.algorithm != "native":
            find(row.name, choice.algorithm)
            plan = make_plan(row.name, choice, self._link.place, root, call.cut, call.in_place and source is call.input)
        output = None if call.target is None else call.target.row
        task = Task(row.name, choice.algorithm, plan, source, output, call.dtype, op, root, call.cut.lengths)
        return self._serving("native" if plan is None else "mpi", task), task

    def _executor_limit(self) -> str | None:
        """Return the executor that was asked for, or the only one there is: threads have no native one."""
        return self.options.executor or (None if self.mpi is not None else "mpi")

    def _serving(self, name: str, task: Task) -> Executor:
        """Return the executor for `task`; ArgumentError where another one was asked for or it cannot serve."""
        if self._executor_limit() not in (None, name):
            raise ArgumentError(f"{task.collective}: algorithm {task.algorithm!r} runs on executor {name}, but this "
                                f"communicator has executor={self._executor_limit()!r}", code="GC-EXECUTOR")
        executor = self._executor(name)
        reason = executor.serves(task)
        if reason is not None:
            raise ArgumentError(f"{task.collective}: executor {name} cannot serve: {reason}", code="GC-ALGO")
        return executor

    def _executor(self, name: str) -> Executor:
        if name not in self._executors:
            self._executors[name] = _make_executor(name, self._link.wire)
        return self._executors[name]

    def _operation(self, executor: Executor, task: Task, call: Prepared) -> Operation:
        yield from executor.run(task)
        if task.op is not None and task.output is not None:
            contributions = {"scan": self.rank + 1, "exscan": self.rank}.get(task.collective, self.size)
            if contributions:
                finish(task.op, task.output, contributions)
            else:
                fill_identity(task.op, task.output)
        if call.target is not None:
            call.target.deliver()

    def _sizes(self, name: str, root: Any = 0) -> Sizes:
        """Return who is asking, `root` checked; raise ArgumentError, ClosedError or RevokedError."""
        self._check_usable()
        return Sizes(self.rank, self.size, self._check_rank(name, "root", root))

    def _check_rank(self, name: str, what: str, rank: Any) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int | numpy.integer) or not 0 <= rank < self.size:
            raise ArgumentError(f"{name}: {what} {rank!r} is not in 0..{self.size - 1}", code="GC-ROOT")
        return int(rank)

    def _check_op(self, name: str, op: Any, call: Prepared) -> Op:
        row = op_of(op)
        if row.name in NOT_IN.get(name, ()):
            raise ArgumentError(f"{name}: op {row.name} is not defined for a prefix over ranks", code="GC-OP")
        check_op(name, row, call.dtype)
        return row

    def _check_usable(self) -> None:
        if self.closed:
            raise ClosedError("this communicator was closed; gpucoll.init() makes a new one")
        self._waits.check()

    def close(self) -> None:
        """Give back what the communicator holds; idempotent. A collective call unless it has failed.

        What is still under way is completed first. Where another rank has failed or does not come within the timeout,
        MPI's communicators stay: to free them on some ranks only would let late messages reach the next ones.
        """
        if self.closed:
            return
        self.closed = True
        together = self._say_farewell()
        self._waits.close()
        for executor in self._executors.values():
            executor.close()
        if together:
            self._link.free()

    def _say_farewell(self) -> bool:
        """Return whether every rank has come to close, none having failed; a failed one tells, and does not wait."""
        failed = self._waits.failure is not None
        leaving = farewell(self._link.wire, self.rank, self.size, failed=failed)
        if failed:
            with contextlib.suppress(*self._link.foreign):
                all(done() for done in leaving)  # tells, and hears nobody
            return False
        try:
            self._waits.run(leaving, "close")
        except GpucollError:
            return False
        return True

    def _meet(self, name: str) -> None:
        executor, task = self._resolve(COLLECTIVES["barrier"], NOTHING, How(), None, 0)
        self._waits.run(executor.run(task), name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None and self._waits.failure is None:  # the other ranks may be elsewhere: do not wait for them
            self._waits.failure = UsageError(f"the block that used it was left by {kind.__name__}")
        self.close()

    def __repr__(self) -> str:
        return f"<gpucoll.Communicator rank={self.rank} size={self.size}>"


@functools.lru_cache(PLANS)
def make_plan(collective: str, choice: tuner.Choice, place: bootstrap.Place, root: int, cut: Cut,
              in_place: bool) -> Plan:
    """Return the resolved schedule of a call; a call like it finds it made."""
    rounds = schedule(collective, choice.algorithm, rank=place.rank, size=place.size, root=root,
                      segments=choice.segments, nodes=place.nodes)
    per_block = rounds.chunks // place.size if COLLECTIVES[collective].blocks else rounds.chunks
    return resolve(rounds, Layouts(*cut.layouts(per_block)), in_place=in_place)


def _make_executor(name: str, wire: Any) -> Executor:
    if name == "native":
        from gpucoll.executors.native import NativeExecutor

        return NativeExecutor(wire)
    from gpucoll.executors.mpi import MpiExecutor

    return MpiExecutor(wire)
