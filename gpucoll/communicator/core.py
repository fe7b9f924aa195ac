"""The path of every call: check the arguments, choose plan and executor, run at once or behind a `Work`.

Errors in this rank's own arguments are raised here, before data moves: all arrays are unchanged then.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy

from gpucoll.algorithms import find, registry
from gpucoll.arrays import (
    HOST,
    NOTHING,
    Array,
    Prepared,
    RankInfo,
    Space,
    check_op,
    is_borrowed,
    on_gpu,
    prepare,
    torch_stream,
)
from gpucoll.arrays.space import promised, scaled_mean
from gpucoll.communicator.backends import (
    HostBackend,
    Key,
    compile_request,
    not_known,
)
from gpucoll.communicator.calls import CallTable
from gpucoll.communicator.gpu import DeviceSpace, Gpu, is_on_device, make_gpu, nothing_given, on_side_stream
from gpucoll.communicator.links import Link
from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.core.dtypes import is_whole
from gpucoll.core.ops import NOT_IN, Op, Order, op_of
from gpucoll.device import gpus
from gpucoll.errors import ArgumentError, BackendError, ClosedError, CollectiveTimeout, DtypeError, UsageError
from gpucoll.executors import Call, CallRequest, ReadyCall
from gpucoll.health.integrity import DataCheck
from gpucoll.health.shares import HEADER, SUMS, CallClock, CallSums, Stats
from gpucoll.launch import bootstrap
from gpucoll.progress.operations import Operation, Work
from gpucoll.progress.waits import Progress
from gpucoll.tuner import Tuner, rules

NOWHERE = contextlib.nullcontext()
LAST = 32  # timings kept for each kind of call
REFUSALS = (ArgumentError, DtypeError, MemoryError)  # errors in a rank's own arguments


class CallOptions(NamedTuple):
    """The options common to all collectives."""

    algorithm: str = "auto"
    async_op: bool = False
    stream: Any = None


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a call: an error in its arguments is also reported to other ranks waiting in the same call."""
    @functools.wraps(call)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(self, *arguments, **options)
        except REFUSALS as error:
            # Calls on devices and on the host are compared in different ways: use the way of this call.
            on_device = self.options.emulated or any(map(is_on_device, (*arguments, *options.values())))
            self._refuse(error, on_device=on_device)
            raise

    return method


class Core:
    """Ranks, options and executors of a communicator, and the single path of all calls."""

    def __init__(self, link: Link, options: bootstrap.Options) -> None:
        rules(options.prefer)  # raise for a wrong GPUCOLL_ALGO here, not at the first call
        registry()  # import now: a call by a signal handler must not meet a half imported module
        self._link = link
        self.mpi: Any = link.mpi if link.has_collectives else None  # None for threads and a store
        self.options = options
        self._waits = self._new_waits()
        self._host = self._new_host()
        self._gpus: dict[str, Gpu] = {}
        self._group: list[Work] | None = None
        self._tuner = Tuner(link.place.nodes, link.table, options.prefer)
        # Timings of blocking calls on host arrays, by collective, executor, algorithm and bit length of the size:
        # element 0 is the number of calls, then comes a ring of the seconds of the last `LAST` calls. Behind the ring
        # stand the sums of the engine's repeated calls, for `stats`.
        self._times: dict[tuple[str, str, str, int], Array] = collections.defaultdict(
            lambda: numpy.zeros(1 + LAST + SUMS))
        self._checked_calls = itertools.count(1)
        self._clock = CallClock(self._host.engines, CallSums(self._times))
        self._calls = CallTable(self)
        self._engine: Any = None  # runs repeated calls on host arrays, once made
        self._fast_path: Callable[..., Any] = not_known
        self._batch: Any = None  # messages between GPU arrays in the open group
        self.closed = False
        self._is_forked = False  # whether this is a fork's child: the links then belong to the parent

    def _new_waits(self) -> Progress:
        """Return the waits of this communicator."""
        return Progress(self.timeout, foreign=self._link.foreign, threads=self._link.threads,
                        crowded=self.local_size > (os.cpu_count() or 1))

    def _new_host(self) -> HostBackend:
        """Return the executors for host arrays."""
        return HostBackend(self._link, self.timeout, self.executor, self.options.compares)

    rank = property(lambda self: self._link.place.rank, doc="This rank, 0 .. size - 1.")
    size = property(lambda self: self._link.place.size, doc="The number of ranks.")
    local_rank = property(lambda self: self._link.place.local_rank, doc="This rank's number on its node.")
    local_size = property(lambda self: self._link.place.local_size, doc="How many ranks this node has.")
    node = property(lambda self: self._link.place.nodes[self.rank], doc="This rank's node, 0 .. nodes - 1.")
    nodes = property(lambda self: max(self._link.place.nodes) + 1, doc="How many nodes there are.")
    timeout = property(lambda self: self.options.timeout, doc="Seconds: the deadline of every wait.")
    check = property(lambda self: self.options.check, doc="full, data, deferred, off, or None for the default.")
    executor = property(lambda self: self.options.executor, doc="The executor asked for, or None.")

    @property
    def seconds_under_way(self) -> float:
        """Seconds so far with at least one operation of this rank under way on the host behind a `Work`.

        All asynchronous operations count. Blocking calls count if queued behind other calls, blocking messages between
        two ranks if longer than about 1 ms. The growth between two readings is the communication hidden behind the
        computation in between.
        """
        return self._waits.under_way.seconds

    @functools.cached_property
    def device(self) -> int | None:
        """The CUDA ordinal of this rank; None without a GPU.

        The ordinal is given by `device=` or GPUCOLL_DEVICE; otherwise it is the number of the rank on its host, modulo
        the number of GPUs. A communicator made by `split` has the device of its parent. Ranks that are threads use the
        current device of their thread.
        """
        return self._link.own_gpu(self.options.ordinal)

    def _space(self, name: str, *arrays: Any, stream: Any = None) -> Space:
        """Return the space of a call: the GPU for GPU arrays, else the host or, if chosen, the emulated device."""
        if any(on_gpu(array) for array in arrays):
            if self.device is None:
                raise ArgumentError(f"{name}: x is a GPU array, but CuPy finds no GPU in this process "
                                    f"({gpus.no_gpu()}); pass a copy on the host", code="GC-ARRAY")
            of_torch = torch_stream(arrays) or nothing_given
            space = self._gpu("cuda").space(of_torch() if stream is None else stream)
            space.current_stream = of_torch
            space.borrows = any(map(is_borrowed, arrays))
            return space
        return self._gpu("emulated").space(stream) if self.options.emulated else HOST

    def _current(self, stream: Any, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
        """Return the context for opening a call's arrays before its space exists: device and stream of GPU arrays."""
        if not any(map(on_gpu, arrays)) or self.device is None:  # `device` searches for GPUs: ask last
            return NOWHERE
        stream = (torch_stream(arrays) or nothing_given)() if stream is None else stream
        from gpucoll.device.cuda import CurrentDevice, CurrentStream, as_stream

        device = CurrentDevice(self.device)
        return device if stream is None else CurrentStream(device, as_stream(stream))

    def _gpu(self, name: str) -> Gpu:
        if name not in self._gpus:
            # The peer executor needs a handshake of all ranks: only if asked for, or measured for "auto".
            peer = self.executor == "peer" or self._tuner.has_measured("peer", name)
            self._gpus[name] = make_gpu(name, self._link, self.timeout, self.device, peer=peer)
            # A failed transport must end every wait.
            self._waits.hooks.append(self._gpus[name].check)
            # The progress thread drives operations too: each thread must get its own current GPU back.
            if name == "cuda":
                self._waits.context = self._gpus[name].device.current
        return self._gpus[name]

    @counted
    def _collective(self, name: str, x: Any, out: Any, op: Any, dtype: Any, root: Any, algorithm: Any, async_op: bool,
                    stream: Any) -> Any:
        """Run a collective with the same shapes on all ranks, by the call table if possible. No op is ""."""
        # A repeatable call needs options that compare by value: names and a root, no op object.
        cache_key: Key = ()
        if dtype is None and not async_op and type(op) is type(algorithm) is str and type(root) is int:
            cache_key = name, op, root, algorithm
            known = None if self._group is not None else self._calls.find(cache_key, x, out, stream)
            if known is not None:
                return self._calls.repeat(known, x, out, stream)
        row, rank_info = COLLECTIVES[name], self._sizes(name, root)
        call = prepare(row, x, out, rank_info, dtype, self._space(name, x, stream=stream))
        checked = self._check_op(name, op, call) if row.reduces else None
        options = CallOptions(algorithm, async_op, stream)
        return self._run(name, call, options, checked, rank_info.root, cache_key, x, out)

    def _host_engine(self) -> Any:
        """Return the engine for repeated calls on host arrays; None without one, always on the emulated device."""
        if self._engine is None and not self.options.emulated:
            self._engine = self._host.engine(self._waits)
            self._fast_path = self._engine or self._fast_path
        return self._engine

    def _engine_plan(self, call: Call) -> Any:
        """Return the plan by which the engine repeats `call` without Python; None if it does not.

        With check="data" it does not: each call shows its data.
        """
        plan = None if self.check == "data" else call.engine_plan
        return plan if plan is not None and self._host_engine() is not None else None

    def _run(self, name: str, call: Prepared, options: CallOptions, op: Op | None = None, root: int = 0,
             cache_key: Key = (), x: Any = None, out: Any = None) -> Any:
        """Resolve and run a prepared call. Scatter and the v-variants call `_resolve` and `_begin` themselves.

        A call with a `cache_key` is kept for repetition, with the user's arrays `x` and `out`. A call without arrays (a
        host barrier) uses the executor asked for only if that executor serves the host.
        """
        call = on_side_stream(call) if options.async_op else call
        allowed = self._host_executor() if call is NOTHING else self.executor
        ready = self._resolve(COLLECTIVES[name], call, options, allowed, op, root)
        return self._begin(ready, call, options, cache_key, x, out)

    def _begin(self, ready: ReadyCall, call: Prepared, options: CallOptions, cache_key: Key, x: Any, out: Any) -> Any:
        """Run a resolved call, or start the call if it is asynchronous or in a group."""
        seconds = self._seconds(ready.call)
        if cache_key:
            self._calls.keep(cache_key, x, out, ready, call, seconds)
        operation = self._counted(self._operation(ready, call.space, call), ready.request)
        return self._start(ready.request.collective, operation, call, options.async_op, seconds)

    def _seconds(self, call: Call) -> Array | None:
        """Return the timing row for calls of this kind; None on a device, as a call there only enqueues."""
        request = call.request
        if request.device != "cpu":
            return None
        name = HEADER + request.header if request.header else request.collective
        return self._times[name, call.executor.name, request.algorithm, request.nbytes.bit_length()]

    def _counted(self, operation: Operation, request: CallRequest) -> Operation:
        """Return the operation of a call, with its shares counted for `stats`."""
        name = HEADER + request.header if request.header else request.collective
        return self._clock.measured(operation, name, request.nbytes)

    def stats(self) -> Stats:
        """Return figures of all completed collective calls of this rank, by collective and size class.

        The keys are pairs such as ``("all_reduce", 4096)``. The size class is the largest power of two not above the
        bytes of the call (the larger of input and output over all ranks), 0 for a call without data. The values have
        the keys ``calls``, ``bytes``, ``own_seconds``, ``waiting_seconds`` and ``moving_seconds``. Own seconds: how
        much later than the first rank this rank came to the calls, at most the time since its last call. Waiting
        seconds: in calls, until the other ranks had come. Moving seconds: the rest of the calls. No rank waits for
        another, and the figures outlive `close`. The guide to performance says what each executor can tell.

        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: (comm.barrier(), comm.stats()["barrier", 0]["calls"])[1], 2)
        [1, 1]
        """
        return self._clock.sums.stats()

    def _timed(self, operation: Operation, name: str, seconds: Array | None) -> None:
        if seconds is None:
            self._waits.run(operation, name)
            return
        started = time.perf_counter()
        self._waits.run(operation, name)
        seconds[1 + int(seconds[0]) % LAST] = time.perf_counter() - started
        seconds[0] += 1

    def _start(self, name: str, operation: Operation, call: Prepared, async_op: bool, seconds: Array | None) -> Any:
        if self._group is None and not async_op:
            self._timed(operation, name, seconds)
            return call.result
        # An open group starts its works itself, at its end.
        work = Work(self._waits, operation, name, call.result, call.space.completion())
        if self._group is None:
            return self._waits.submit(work)
        self._group.append(work)
        return work if async_op else call.result

    def _resolve(self, row: Collective, call: Prepared, options: CallOptions, allowed: str | None, op: Op | None = None,
                 root: int = 0, header: str = "") -> ReadyCall:
        """Return the compiled call of these arrays; `allowed` is the executor asked for, or None."""
        space = call.space
        order: Order = "any"
        if op is not None:
            op, order = promised(row.name, op, call.dtype, self.options.deterministic)
            op = scaled_mean(op, call.dtype, self.size)
        # premul_sum and the mean of narrow floats scale a copy of the input: the call is not in place then.
        source = call.input if op is None or call.input is None else space.premultiplied(op, call.input, call.dtype)
        target = None if call.target is None else call.target.row
        if options.algorithm not in ("auto", "native"):
            find(row.name, options.algorithm)
        request = CallRequest(row.name, options.algorithm, call.dtype, op, root, call.nbytes,
                          (None if source is None else source.nbytes, None if target is None else target.nbytes),
                          call.in_place and source is call.input, call.cut, call.shape, header, order, space.device,
                          space is HOST and self._host.is_symmetric(source, target), space.has_unsupported_capture(),
                          space.is_blocking())
        return ReadyCall(self._calls.compiled(request, allowed, space), source, target)

    def _compile(self, request: CallRequest, allowed: str | None, space: Space) -> Call:
        """Choose algorithm and executor for a request, and return the compiled call."""
        backend = space.gpu if isinstance(space, DeviceSpace) else self._host
        try:
            return compile_request(backend, request, self._tuner, self._link.place, allowed)
        except (CollectiveTimeout, BackendError) as error:  # messages of a failed meeting stay under way
            self._waits.failure = error
            raise

    def _operation(self, ready: ReadyCall, space: Space, call: Prepared = NOTHING, *,
                   repeated: bool = False) -> Operation:
        """Run a call in `space`, then deliver the result of `call`; both keep all memory alive until the end."""
        try:
            space.begin()
            check = self._data_check(ready)
            yield from ready.call.run(ready.source, ready.target, space.stream, repeated=repeated)
            if not ready.call.is_whole:
                self._finish(ready, space)
            if check is not None:
                yield from self._compared(check, ready.request.collective)
            if call.target is not None:
                call.target.deliver(space)
            yield from space.end((ready, call))
        # MPI or a GPU may still write: the space keeps the memory for ever.
        except BaseException:
            space.cancel((ready, call))
            raise

    def _data_check(self, ready: ReadyCall) -> DataCheck | None:
        """Return what this rank shows of its data in a call, with check="data"; None for calls without such a check."""
        request = ready.request
        if self.check != "data" or request.device != "cpu" or request.header or request.collective == "barrier":
            return None
        return DataCheck(ready, self.size, next(self._checked_calls))

    def _compared(self, check: DataCheck, name: str) -> Operation:
        """Compare the data of all ranks in an ended call; raise BackendError, on every rank, if data have changed."""
        row = COLLECTIVES["all_gather"]
        call = prepare(row, check.completed(), None, RankInfo(self.rank, self.size, 0))
        ready = self._resolve(row, call, CallOptions(), self._host_executor(), header=f"data of {name}")
        yield from ready.call.run(ready.source, ready.target)
        check.compare(call.result)

    def _finish(self, ready: ReadyCall, space: Space) -> None:
        request, op = ready.request, ready.request.op
        assert op is not None
        contributions = {"scan": self.rank + 1, "exscan": self.rank}.get(request.collective, self.size)
        if contributions:
            space.finish(op, ready.target, request.dtype, contributions)
        else:
            space.fill_identity(op, ready.target, request.dtype)

    def _sizes(self, name: str, root: Any = 0) -> RankInfo:
        """Return rank, size and checked `root`; raise ArgumentError, ClosedError, UsageError or RevokedError."""
        self._check_usable()
        return RankInfo(self.rank, self.size, self._check_rank(name, "root", root))

    def _check_rank(self, name: str, what: str, rank: Any) -> int:
        if not is_whole(rank) or not 0 <= rank < self.size:
            raise ArgumentError(f"{name}: {what} {rank!r} is not in 0..{self.size - 1}", code="GC-ROOT")
        return int(rank)

    def _check_op(self, name: str, op: Any, call: Prepared) -> Op:
        row = op_of(op)
        if row.name in NOT_IN.get(name, ()):
            raise ArgumentError(f"{name}: op {row.name} is not defined for a prefix over ranks", code="GC-OP")
        check_op(name, row, call.dtype)
        return row

    def _check_apart(self, name: str) -> None:
        if self._group is not None:
            raise UsageError(f"{name}: the second step needs the result of the first step, and a group has results "
                             "at its end only; make this call outside of the group", code="GC-GROUP")

    def _check_usable(self) -> None:
        if self._is_forked:
            raise UsageError("this communicator belongs to the parent process; a forked child cannot use it: "
                             "start ranks by mpiexec, or children by spawn, before making a communicator",
                             code="GC-FORK")
        if self.closed:
            raise ClosedError("this communicator was closed; gpucoll.init() makes a new communicator")
        if self._link.has_ended():
            raise ClosedError("MPI has been finalized, and no call is possible any more; let MPI end with the process, "
                              "or close communicators before")
        self._waits.check()

    def _host_executor(self) -> str | None:
        """Return the executor for calls without user arrays: the one asked for if it serves the host, else None."""
        return self.executor if self.executor in ("mpi", "ucx", "shared", "hybrid", "native") else None

    def __repr__(self) -> str:
        return f"<gpucoll.Communicator rank={self.rank} size={self.size}>"
