"""The communicator: one method per collective, all of one shape.

A method names its collective and hands over. `_run` checks the arguments, resolves algorithm,
plan and executor, and runs them at once or behind a `Work`. Whatever is wrong with this
rank's arguments is raised here, before data moves, with every array as it was.
"""

from __future__ import annotations

import functools
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy

from gpucoll import bootstrap, tuner
from gpucoll.algorithms import find, schedule
from gpucoll.arrays import Prepared, check_op, finish, prepare
from gpucoll.chunks import Layout
from gpucoll.collectives import COLLECTIVES, Collective
from gpucoll.dtypes import DTYPES
from gpucoll.errors import ArgumentError, ClosedError, GpucollError, UsageError
from gpucoll.executors import Executor, Plan, Task, resolve
from gpucoll.ops import Op, op_of
from gpucoll.waits import Operation, Waits, Work

if TYPE_CHECKING:
    from mpi4py import MPI

PLANS = 256  # resolved schedules kept per communicator
NOTHING = Prepared(None, None, DTYPES["uint8"], 0, 0)


class Communicator:
    """A group of ranks and what they do together; made by `gpucoll.init` or `from_mpi`.

    ``rank size local_rank local_size node nodes`` are numbers, ``device`` is the CUDA ordinal or
    None, ``mpi`` the duplicated mpi4py communicator, ``timeout check executor`` the options.
    """

    def __init__(self, mpi: MPI.Intracomm, options: bootstrap.Options) -> None:
        from mpi4py.MPI import THREAD_MULTIPLE, Exception, Query_thread

        tuner.rules(options.prefer)  # refused here, not at the first call
        self.mpi = mpi.Dup()
        self._wire = mpi.Dup()  # the executors' own: no message of a user's can meet one of ours
        self._options = options
        self._place = bootstrap.place(self.mpi)
        self._waits = Waits(options.timeout, foreign=(Exception,), threads=Query_thread() == THREAD_MULTIPLE,
                            crowded=self.local_size > (os.cpu_count() or 1))
        self._executors: dict[str, Executor] = {}
        self._plan = functools.lru_cache(PLANS)(self._make_plan)
        self._closed = False

    @classmethod
    def from_mpi(cls, mpi: MPI.Intracomm, **options: Any) -> Communicator:
        """Return a communicator of the ranks of an mpi4py intracommunicator, which is duplicated.

        A collective call. Options as in `gpucoll.init`. Raises ArgumentError for anything else.
        """
        if not hasattr(mpi, "Is_inter") or not mpi or mpi.Is_inter():
            raise ArgumentError(f"from_mpi: {mpi!r} is no mpi4py intracommunicator", code="GC-COMM")
        return cls(mpi, bootstrap.options(options))

    rank = property(lambda self: self._place.rank, doc="This rank, 0 .. size - 1.")
    size = property(lambda self: self._place.size, doc="How many ranks there are.")
    local_rank = property(lambda self: self._place.local_rank, doc="This rank's number on its node.")
    local_size = property(lambda self: self._place.local_size, doc="How many ranks this node has.")
    node = property(lambda self: self._place.nodes[self.rank], doc="This rank's node, 0 .. nodes - 1.")
    nodes = property(lambda self: max(self._place.nodes) + 1, doc="How many nodes there are.")
    timeout = property(lambda self: self._options.timeout, doc="Seconds: the deadline of every wait.")
    check = property(lambda self: self._options.check, doc="full, deferred, off, or None for the default.")
    executor = property(lambda self: self._options.executor, doc="The executor asked for, or None.")

    @functools.cached_property
    def device(self) -> int | None:
        """The CUDA ordinal of this rank, its local rank modulo the devices; None without one."""
        return bootstrap.device(self.local_rank)

    def all_reduce(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                   stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all ranks' `x` (shape s) on every rank.

        `out` (shape s; ``out=x`` is in place) takes the result, else it is allocated. `op`: sum prod min max avg
        band bor bxor land lor lxor. `dtype` reads an unsigned carrier as another dtype. `algorithm`: a name of
        ``gpucoll.algorithms("all_reduce")``, "native" or "auto". `async_op` returns a `Work`.
        Raises ArgumentError and DtypeError before data moves. MPI-5.0, 6.9.6.
        """
        return self._run("all_reduce", x, out, op=op, dtype=dtype, algorithm=algorithm, async_op=async_op)

    def reduce(self, x: Any, out: Any = None, op: Any = "sum", root: int = 0, *, dtype: Any = None,
               algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all ranks' `x` (shape s) on `root`, None elsewhere; no `x` changes.

        Arguments and errors as in `all_reduce`. MPI-5.0, 6.9.1.
        """
        return self._run("reduce", x, out, op=op, dtype=dtype, root=root, algorithm=algorithm, async_op=async_op)

    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Overwrite every rank's `x` (shape s) with the root's and return it. MPI-5.0, 6.4."""
        return self._run("broadcast", x, root=root, algorithm=algorithm, async_op=async_op)

    def all_gather(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return all ranks' `x` (shape s) in rank order, shape (size, \\*s), on every rank. MPI-5.0, 6.7."""
        return self._run("all_gather", x, out, algorithm=algorithm, async_op=async_op)

    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                       stream: Any = None, async_op: bool = False) -> Any:
        """Return block `rank` (shape s) of the reduction of all ranks' `x` (shape (size, \\*s)).

        Arguments and errors as in `all_reduce`. MPI-5.0, 6.10.1.
        """
        return self._run("reduce_scatter", x, out, op=op, dtype=dtype, algorithm=algorithm, async_op=async_op)

    def barrier(self, *, algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return when every rank has called it. MPI-5.0, 6.3."""
        return self._run("barrier", algorithm=algorithm, async_op=async_op)

    def _run(self, name: str, x: Any = None, out: Any = None, *, op: Any = None, dtype: Any = None, root: int = 0,
             algorithm: str, async_op: bool) -> Any:
        """Check, resolve, run: every collective comes through here."""
        self._check_usable()
        row = COLLECTIVES[name]
        root = self._check_root(name, root)
        reduction = op_of(op) if row.reduces else None
        call = NOTHING if name == "barrier" else prepare(
            row, x, out, rank=self.rank, size=self.size, root=root, dtype=dtype)
        if reduction is not None:
            check_op(name, reduction, call.dtype)
        executor, task = self._resolve(row, call, reduction, root, algorithm)
        operation = self._operation(executor, task, call)
        result = None if call.target is None else x if name == "broadcast" else call.target.out
        if async_op:
            return self._waits.submit(Work(self._waits, operation, name, result))
        self._waits.run(operation, name)
        return result

    def _resolve(self, row: Collective, call: Prepared, op: Op | None, root: int,
                 algorithm: str) -> tuple[Executor, Task]:
        choice = tuner.choose(row.name, algorithm, call.nbytes, self.size, executor=self.executor,
                              prefer=self._options.prefer)
        plan = None
        if choice.algorithm != "native":
            find(row.name, choice.algorithm)
            plan = self._plan(row, choice, root, call.elements, call.in_place)
        output = None if call.target is None else call.target.row
        task = Task(row.name, choice.algorithm, plan, call.input, output, call.dtype, op, root)
        name = "native" if plan is None else "mpi"
        if self.executor not in (None, name):
            raise ArgumentError(f"{row.name}: algorithm {choice.algorithm!r} runs on executor {name}, but "
                                f"executor={self.executor!r} was asked for", code="GC-EXECUTOR")
        return self._executor(name), task

    def _make_plan(self, row: Collective, choice: tuner.Choice, root: int, elements: int, in_place: bool) -> Plan:
        rounds = schedule(row.name, choice.algorithm, rank=self.rank, size=self.size, root=root,
                          segments=choice.segments, nodes=self._place.nodes)
        per_block = rounds.chunks // self.size if row.blocks else rounds.chunks
        return resolve(rounds, Layout(elements, per_block), in_place=in_place)

    def _executor(self, name: str) -> Executor:
        if name not in self._executors:
            self._executors[name] = _make_executor(name, self._wire)
        return self._executors[name]

    def _operation(self, executor: Executor, task: Task, call: Prepared) -> Operation:
        yield from executor.run(task)
        if task.op is not None and task.output is not None:
            finish(task.op, task.output, self.size)
        if call.target is not None:
            call.target.deliver()

    def _check_root(self, name: str, root: Any) -> int:
        if isinstance(root, bool) or not isinstance(root, int | numpy.integer) or not 0 <= root < self.size:
            raise ArgumentError(f"{name}: root {root!r} is not in 0..{self.size - 1}", code="GC-ROOT")
        return int(root)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this communicator was closed; gpucoll.init() makes a new one")
        self._waits.check()

    def close(self) -> None:
        """Give back what the communicator holds; idempotent. A collective call unless it has failed.

        What is still under way is completed first. Where the other ranks do not come within the timeout, MPI's
        communicators stay: to free them on some ranks only would let late messages reach the next ones.
        """
        if self._closed:
            return
        self._closed = True
        together = self._all_close()
        self._waits.close()
        for executor in self._executors.values():
            executor.close()
        if together:
            self._wire.Free()
            self.mpi.Free()

    def _all_close(self) -> bool:
        """Return whether every rank has come to close, none having failed."""
        try:
            task = Task("barrier", "native", None, None, None, NOTHING.dtype)
            self._waits.run(self._executor("native").run(task), "close")
        except GpucollError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._waits.close()  # the other ranks may be elsewhere: no collective call now

    def __repr__(self) -> str:
        return f"<gpucoll.Communicator rank={self.rank} size={self.size}>"


def _make_executor(name: str, mpi: MPI.Intracomm) -> Executor:
    from gpucoll.executors.mpi import MpiExecutor
    from gpucoll.executors.native import NativeExecutor

    made: Executor = MpiExecutor(mpi) if name == "mpi" else NativeExecutor(mpi)
    return made


_world: Communicator | None = None


def init(**options: Any) -> Communicator:
    """Return the communicator of all ranks: MPI's COMM_WORLD, duplicated; again, the same object.

    Options: `timeout` in seconds, the deadline of every wait (default 300); `check` "full", "deferred" or "off";
    `executor` a name or None; `deterministic`. GPUCOLL_TIMEOUT, GPUCOLL_CHECK and GPUCOLL_EXECUTOR say what is left
    open. Raises UsageError for other options than before, and under a launcher of another MPI.
    """
    global _world
    wanted = bootstrap.options(options)
    if _world is None or _world._closed:
        _world = Communicator(bootstrap.world(), wanted)
    elif options and _world._options != wanted:
        raise UsageError(f"init was called before with {_world._options}, now with {wanted}; close it first, "
                         "or use Communicator.from_mpi for a second communicator", code="GC-INIT")
    return _world
