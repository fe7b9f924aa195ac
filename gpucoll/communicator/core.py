"""What every call goes through: checked, resolved to a plan and an executor, run at once or behind a `Work`.

Whatever is wrong with this rank's arguments is raised here, before data moves, with every
array as it was.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import numpy

from gpucoll import bootstrap
from gpucoll.algorithms import find, registry
from gpucoll.arrays import HOST, NOTHING, Prepared, Sizes, Space, check_op, is_borrowed, on_gpu, stream_of
from gpucoll.collectives import COLLECTIVES, Collective
from gpucoll.communicator.backends import Backend, HostBackend, able, chosen, make_plan
from gpucoll.communicator.gpu import DeviceSpace, Gpu, make_gpu
from gpucoll.communicator.repeats import Key, Repeat, Repeats, has_finished, key_of, launcher_of, plan_of, repeat_of
from gpucoll.communicator.times import Seconds, Times
from gpucoll.errors import ArgumentError, BackendError, ClosedError, CollectiveTimeout, GpucollError, UsageError
from gpucoll.executors import Executor, Task
from gpucoll.executors.mpi import farewell
from gpucoll.launchers import local_rank
from gpucoll.links import Link, LocalLink
from gpucoll.ops import NOT_IN, Op, op_of
from gpucoll.tuner import Tuner, rules
from gpucoll.waits import Waits
from gpucoll.work import Operation, Work

NOWHERE = contextlib.nullcontext()


class How(NamedTuple):
    """The options that every collective takes."""

    algorithm: str = "auto"
    async_op: bool = False
    stream: Any = None


class Core:
    """Ranks, options, executors, and the one path of all calls."""

    def __init__(self, link: Link, options: bootstrap.Options) -> None:
        rules(options.prefer)  # refused here, not at the first call
        registry()  # imported here: a signal handler may make a call, and must not meet a module half imported
        self._link = link
        self.mpi = link.mpi
        self.options = options
        self._waits = Waits(options.timeout, foreign=link.foreign, threads=link.threads,
                            crowded=self.local_size > (os.cpu_count() or 1))
        self._host = HostBackend(link, options.timeout, options.executor)
        self._gpus: dict[str, Gpu] = {}
        self._group: list[Work] | None = None
        self._tuner = Tuner(link.place.nodes, link.table, options.prefer)
        self._times = Times()
        self._repeats = Repeats()
        self._engine: Any = None  # which does calls that came before, once there is one
        self._express: Callable[..., Any] = nothing
        self._batch: Any = None  # of the messages between GPU arrays in the group
        self.closed = False
        self._is_forked = False  # whether this process is a fork's child: what joins the ranks is its parent's
        _alive.add(self)

    rank = property(lambda self: self._link.place.rank, doc="This rank, 0 .. size - 1.")
    size = property(lambda self: self._link.place.size, doc="How many ranks there are.")
    local_rank = property(lambda self: self._link.place.local_rank, doc="This rank's number on its node.")
    local_size = property(lambda self: self._link.place.local_size, doc="How many ranks this node has.")
    node = property(lambda self: self._link.place.nodes[self.rank], doc="This rank's node, 0 .. nodes - 1.")
    nodes = property(lambda self: max(self._link.place.nodes) + 1, doc="How many nodes there are.")
    timeout = property(lambda self: self.options.timeout, doc="Seconds: the deadline of every wait.")
    check = property(lambda self: self.options.check, doc="full, deferred, off, or None for the default.")
    executor = property(lambda self: self.options.executor, doc="The executor asked for, or None.")

    @property
    def seconds_under_way(self) -> float:
        """Seconds so far in which the host's part of at least one operation of this rank was under way behind a `Work`.

        That is every asynchronous one, and of the blocking ones messages between two ranks that take long and calls
        that wait their turn. Who computes between two readings has hidden as much communication as this has grown.
        """
        return self._waits.under_way.seconds

    @functools.cached_property
    def device(self) -> int | None:
        """The CUDA ordinal of this rank: its number on the host modulo the devices, threads' current one; or None."""
        if self.mpi is None:
            return bootstrap.device(None)
        given = local_rank()  # the launcher's: that of a part of the ranks counts anew, and would deal out devices anew
        return bootstrap.device(self.local_rank if given is None else given)

    def _space(self, name: str, *arrays: Any, stream: Any = None) -> Space:
        """Return where a call on `arrays` runs: they decide, and GPUCOLL_DEVICE=emulated for those on the host."""
        if any(on_gpu(array) for array in arrays):
            if self.device is None:
                raise ArgumentError(f"{name}: x is a GPU array, but CuPy finds no GPU in this process; pass a copy on "
                                    "the host", code="GC-ARRAY")
            space = self._gpu("cuda").space(stream_of(arrays) if stream is None else stream)
            space.borrows = any(map(is_borrowed, arrays))
            return space
        return self._gpu("emulated").space(stream) if self.options.emulated else HOST

    def _current(self, stream: Any, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
        """Return the context in which arrays are opened before a call has its space."""
        if not any(map(on_gpu, arrays)) or self.device is None:  # which looks for GPUs
            return NOWHERE
        stream = stream_of(arrays) if stream is None else stream
        from gpucoll.device.cuda import CurrentDevice, CurrentStream, as_stream

        device = CurrentDevice(self.device)
        return device if stream is None else CurrentStream(device, as_stream(stream))

    def _gpu(self, name: str) -> Gpu:
        if name not in self._gpus:
            peer = self.executor == "peer" or self._tuner.has_measured("peer", name)
            self._gpus[name] = make_gpu(name, self._link, self.timeout, self.device, peer=peer)
            self._waits.hooks.append(self._gpus[name].check)
            if name == "cuda":
                self._waits.context = self._gpus[name].device.current
        return self._gpus[name]

    def _again(self, same: Key, x: Any, out: Any, stream: Any) -> Any:
        """Run a call that was made before with the same arrays; return its result, None where there was none.

        `same` is all but the arrays. For the engine, which is asked before, one like it is enough.
        """
        if self._group is not None or out is None:
            return None
        found = self._repeats.find(key_of(same, x, out))
        if found is None:
            return None
        self._learn(same, x, out, found, out)
        self._repeat(found, *found.rows(x, out), stream)
        return out

    def _learn(self, same: Key, x: Any, result: Any, found: Repeat, out: Any) -> None:
        """Let the engine know a call that it can do."""
        if found.plan is not None and self._host_engine() is not None:
            self._engine.learn(*same, x, result, out, found.plan, cast("Seconds", found.seconds).ring)

    def _host_engine(self) -> Any:
        """Return what does calls that came before, once there is one; None for ever on the emulated device."""
        if self._engine is None and not self.options.emulated:
            self._engine = self._host.engine(self._waits)
            self._express = self._engine or self._express
        return self._engine

    def _remember(self, same: Key, x: Any, out: Any, executor: Executor, task: Task, call: Prepared,
                  seconds: Seconds | None) -> None:
        """Keep a call for the next time, if it works on the memory of its arrays itself."""
        overwrites = task.collective == "broadcast"
        is_whole = same[0] == task.collective and not task.announced  # not a part of another call
        key = key_of(same, x, out) if is_whole else ()
        try:
            plan = plan_of(executor, task)
        except OSError:  # which the call itself will meet, and tell the others of
            return
        found = repeat_of(x, call.result, executor, task, seconds, plan)
        if found is not None and key and task.output is not None and (task.input is not None or overwrites):
            self._repeats.keep(key, found)
        if found is not None and (call.result is not x or out is x or overwrites):
            self._learn(same, x, call.result, found, out)

    def _repeat(self, found: Repeat, source: Any, target: Any, stream: Any) -> None:
        """Run a call once more, from the row `source` to the row `target`."""
        self._check_usable()
        if found.task.device == "cpu":
            task = found.task.again(source, target)  # it may outlive the call, where that fails
            self._timed(self._operation(found.executor, task, HOST), task.collective, found.seconds)
            return
        task, gpu = found.task, self._gpus[found.task.device]
        task.stream = on = gpu.device.stream(stream)
        if gpu.launch(found.launch, on, task.collective, self._waits):
            return
        self._waits.run(self._operation(found.executor, task, DeviceSpace(gpu, on)), task.collective)
        found.launch = found.launch or launcher_of(found)

    def _run(self, name: str, call: Prepared, how: How, op: Op | None = None, root: int = 0, same: Key = (),
             x: Any = None, out: Any = None) -> Any:
        """Resolve and run a prepared call: every collective comes through here, at least the first time.

        With `same` it is kept for the next time, with the user's arrays `x` and `out`. What has none, as a barrier of
        the host's, takes the executor asked for if it serves the host.
        """
        call = beside(call, how)
        allowed = self._host_executor() if call is NOTHING else self.executor
        executor, task = self._resolve(COLLECTIVES[name], call, how, allowed, op, root)
        return self._begin(executor, task, call, how, same, x, out)

    def _begin(self, executor: Executor, task: Task, call: Prepared, how: How, same: Key, x: Any, out: Any) -> Any:
        """Run a resolved call, or begin it."""
        seconds = self._seconds(executor, task)
        if same:
            self._remember(same, x, out, executor, task, call, seconds)
        operation = self._operation(executor, task, call.space, call)
        return self._start(task.collective, operation, call, how.async_op, seconds)

    def _seconds(self, executor: Executor, task: Task) -> Seconds | None:
        """Return where calls like this one are noted; those on a device do not wait, and are not."""
        if task.device != "cpu":
            return None
        return self._times.of(task.collective, executor.name, task.algorithm, task.nbytes)

    def _timed(self, operation: Operation, name: str, seconds: Seconds | None) -> None:
        if seconds is None:
            self._waits.run(operation, name)
            return
        started = time.perf_counter()
        self._waits.run(operation, name)
        seconds.append(time.perf_counter() - started)

    def _start(self, name: str, operation: Operation, call: Prepared, async_op: bool, seconds: Seconds | None) -> Any:
        if self._group is None and not async_op:
            self._timed(operation, name, seconds)
            return call.result
        work = Work(self._waits, operation, name, call.result, call.space.completion())
        if self._group is None:
            return self._waits.submit(work)
        self._group.append(work)
        return work if async_op else call.result

    def _resolve(self, row: Collective, call: Prepared, how: How, allowed: str | None, op: Op | None = None,
                 root: int = 0) -> tuple[Executor, Task]:
        """Return the executor and the task of a call; `allowed` is the executor asked for, or None."""
        space, backend = call.space, call.space.gpu if isinstance(call.space, DeviceSpace) else self._host
        source = call.input if op is None or call.input is None else space.premultiplied(op, call.input, call.dtype)
        task = Task(row.name, "native", None, source, None if call.target is None else call.target.row, call.dtype,
                    op, root, call.nbytes, call.in_place and source is call.input, call.cut.lengths, space.device,
                    space.stream)
        executor = self._choose(task, how.algorithm, call, backend, allowed)
        return executor, task

    def _choose(self, task: Task, algorithm: str, call: Prepared, backend: Backend, allowed: str | None) -> Executor:
        """Complete `task` by algorithm and plan; return who runs it."""
        if algorithm not in ("auto", "native"):
            find(task.collective, algorithm)
        task.algorithm = algorithm
        try:
            executors = able(backend, task, allowed)
        except (CollectiveTimeout, BackendError) as error:  # ranks that did not meet have left messages behind
            self._waits.failure = error
            raise
        choice = self._tuner.choose(task.collective, algorithm, call.nbytes, executors, task.device)
        task.algorithm = choice.algorithm
        if choice.algorithm != "native":
            task.plan = make_plan(task.collective, choice, self._link.place, task.root, call.cut, task.in_place)
        return chosen(backend, task, choice.executor)

    def _operation(self, executor: Executor, task: Task, space: Space, call: Prepared = NOTHING) -> Operation:
        """Run `task` in `space`; `call` has what is still to be delivered, and what must live as long."""
        try:
            space.begin()
            yield from executor.run(task)
            if task.op is not None and task.output is not None and not has_finished(executor, task):
                self._finish(task, space, task.op)
            if call.target is not None:
                call.target.deliver(space)
            yield from space.end((task, call))
        except BaseException:
            space.abandon((task, call))
            raise

    def _finish(self, task: Task, space: Space, op: Op) -> None:
        contributions = {"scan": self.rank + 1, "exscan": self.rank}.get(task.collective, self.size)
        if contributions:
            space.finish(op, task.output, task.dtype, contributions)
        else:
            space.fill_identity(op, task.output, task.dtype)

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
        if self._is_forked:
            raise UsageError("this communicator is the parent process'; a forked child cannot take part in its calls: "
                             "start ranks by mpiexec, or children by spawn, before there is a communicator",
                             code="GC-FORK")
        if self.closed:
            raise ClosedError("this communicator was closed; gpucoll.init() makes a new one")
        if self._link.has_ended():
            raise ClosedError("MPI has been finalized, and no call is possible any more; let it end with the process, "
                              "or close communicators before")
        self._waits.check()

    def close(self) -> None:
        """Give back what the communicator holds; idempotent. A collective call unless it has failed.

        What is still under way is completed first. Where another rank has failed or does not come within the timeout,
        MPI's communicators stay: to free them on some ranks only would let late messages reach the next ones.
        Of ranks that are threads none waits for another: the last one to close frees the memory of all.
        """
        if self.closed or self._is_forked:
            return
        self.closed = True
        self._forget_calls()
        if isinstance(self._link, LocalLink):
            ended = self._has_ended()
            self._waits.close()
            self._link.leave(self._release, failed=not ended)
        else:
            together = self._say_farewell()
            self._waits.close()
            self._release(not together)

    def _forget_calls(self) -> None:
        """Let every call come through here from now on."""
        self._express = nothing
        if self._engine is not None:
            self._engine.close()

    def _has_ended(self) -> bool:
        """Return whether all that this rank has under way has come to a good end, on its devices too."""
        try:
            self._waits.run(iter(()), "close")
        except GpucollError:
            return False
        return all([gpu.has_ended(self.timeout) for gpu in self._gpus.values()])

    def _release(self, failed: bool) -> None:
        """Give all memory back, or of devices' what no other rank can still be using where one has `failed`."""
        self._host.close()
        for gpu in self._gpus.values():
            gpu.close(self.timeout, failed=failed)
        if not failed:
            self._link.free()

    def _say_farewell(self) -> bool:
        """Return whether every rank has come to close, none having failed; a failed one tells, and does not wait."""
        if self._link.has_ended():
            return False
        failure = self._waits.failure
        leaving = farewell(self._link.wire, self.rank, self.size, failed=failure is not None)
        if failure is not None:
            self._host.fail(failure)
            with contextlib.suppress(*self._link.foreign):
                all(done() for done in leaving)  # tells, and hears nobody
            return False
        try:
            self._waits.run(leaving, "close")
        except GpucollError:
            return False
        return True

    def _host_executor(self) -> str | None:
        """Return the executor for what has no arrays of the user's: the one asked for, if it serves the host."""
        return self.executor if self.executor in ("mpi", "shared", "hybrid", "native") else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None and self._waits.failure is None:  # the other ranks may be elsewhere: do not wait for them
            self._waits.failure = UsageError(f"the block that used it was left by {kind.__name__}")
        self.close()

    def __repr__(self) -> str:
        return f"<gpucoll.Communicator rank={self.rank} size={self.size}>"


def beside(call: Prepared, how: How) -> Prepared:
    """Return the call, on a stream of its own where nobody waits for it on a GPU."""
    if how.async_op and isinstance(call.space, DeviceSpace):
        return call._replace(space=call.space.beside())
    return call


def nothing(*_: Any) -> None:
    """Do nothing: what stands for the engine where there is none."""


_alive: weakref.WeakSet[Core] = weakref.WeakSet()


def _after_fork() -> None:
    """In a fork's child: no call, no wait at exit, no farewell of the parent's communicators."""
    for comm in _alive:
        comm._is_forked = True
        comm._forget_calls()
        comm._waits.forget()
        comm._waits.hooks.append(comm._check_usable)  # who waits for a `Work` of the parent's waits for ever


os.register_at_fork(after_in_child=_after_fork)
