"""The `native` executor: MPI's own collectives, the baseline and the choice for small messages.

MPI's predefined ops serve where their meaning is the library's. Elsewhere (float16, NaN in min and max, logical ops on
floats) MPI calls back into the engine through an op created here.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy
from mpi4py import MPI

from gpucoll.arrays import address, at
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import DTYPES, Dtype, numpy_dtype
from gpucoll.core.ops import LOGICAL, Op
from gpucoll.errors import CollectiveTimeout
from gpucoll.executors import IN_PLACE, WAITS, Call, CallRequest, Executor, Refusal
from gpucoll.executors.engine.instructions import combine
from gpucoll.progress.operations import Operation, keep_for_ever

# The threads of a process share the datatypes, and each datatype must be made once.
_MAKING = threading.Lock()
MPI_NAMES = {"all_reduce": "Allreduce", "reduce": "Reduce", "broadcast": "Bcast", "all_gather": "Allgather",
             "gather": "Gather", "scatter": "Scatter", "reduce_scatter": "Reduce_scatter_block", "scan": "Scan",
             "all_to_all": "Alltoall", "exscan": "Exscan", "all_gather_v": "Allgatherv", "gather_v": "Gatherv",
             "scatter_v": "Scatterv", "reduce_scatter_v": "Reduce_scatter", "all_to_all_v": "Alltoallv",
             "barrier": "Barrier"}
# Collectives with the library's meaning of in-place calls in MPI. For all others in place, the input is copied.
MAY_BE_IN_PLACE = {"all_reduce", "reduce", "all_gather", "gather", "all_to_all", "scan", "exscan"}
CALL_INTERVAL = 0.5  # seconds between two looks at a blocking call
MPI_ON_BOOL = {"sum": "LOR", "max": "LOR", "bor": "LOR", "lor": "LOR", "prod": "LAND", "min": "LAND", "band": "LAND",
               "land": "LAND", "bxor": "LXOR", "lxor": "LXOR"}


class NativeExecutor(Executor):
    """An executor of MPI's collectives over `comm`, a communicator used by nothing else.

    If the engine of `node`, an `NodeEngine`, compares calls, ranks first meet in the engine, and MPI's call
    follows. The blocking function of MPI is used if on every rank a thread waits for the call: Open MPI's non-blocking
    collectives take up to four times as long. All ranks are in the call then, so the call ends unless a process stops
    or dies inside. MPI's collectives cannot be cancelled: at the deadline a watching thread raises CollectiveTimeout,
    and the job ends. All other calls use MPI's non-blocking functions, and the rank checks its deadline between two
    tests of the request.
    """

    name = "native"

    def __init__(self, comm: MPI.Intracomm, node: Any = None, timeout: float = math.inf) -> None:
        self._comm, self._node = comm, node if node is not None and node.compares_calls else None
        self.on_engine: bool = self._node is not None
        self.watch: BlockingWatch = BlockingWatch(timeout, self._calling)
        self._copied = numpy.empty(0, numpy.uint8)
        with _MAKING:
            for dtype in DTYPES.values():
                _datatype(dtype)

    def _calling(self) -> int:
        engine = None if self._node is None else self._node.engine  # None after close
        return 0 if engine is None else engine.calling()

    @property
    def shows_calls(self) -> Any:
        """The engine's service that shows each rank's call to all others before data is sent, or None."""
        return self._node

    def serves(self, request: CallRequest) -> str | None:
        """Return None for every collective and op of MPI."""
        if request.op is not None and request.op.expression:
            return "MPI has no op for an expression"
        return None

    def compile(self, request: CallRequest) -> Call | Refusal:
        """Return the call of MPI's collective; refuse a named algorithm."""
        if request.algorithm != "native":
            return Refusal("MPI takes no algorithm for a call")
        return NativeCall(self, request, self._comm, self._node)

    def copied(self, source: int, nbytes: int) -> int:
        """Return the address of a copy of this memory, in a buffer kept for the next call: new pages cost more."""
        if self._copied.nbytes < nbytes:
            self._copied = numpy.empty(nbytes, numpy.uint8)
        self._copied[:nbytes] = at(source, nbytes)
        return address(self._copied)

    def close(self) -> None:
        """Release the memory, and end the watching thread."""
        self.watch.close()
        self._copied = numpy.empty(0, numpy.uint8)


class BlockingWatch:
    """A thread that watches blocking calls of MPI, and raises the error from `late` for a call of `timeout` seconds.

    `calling` returns the number of the call in which a thread waits for MPI, or 0.
    """

    def __init__(self, timeout: float, calling: Callable[[], int]) -> None:
        self._timeout, self._calling = timeout, calling
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.late: Callable[[str], CollectiveTimeout] = CollectiveTimeout

    def start(self) -> None:
        """Start the thread, if there is a deadline; idempotent."""
        if self._thread is None and self._timeout < math.inf:
            self._thread = threading.Thread(target=self._look, name="gpucoll deadline", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        pause, looks, seen = min(CALL_INTERVAL, self._timeout / 4), 0, 0
        while not self._closed.wait(pause):
            number = self._calling()
            # Count looks, not seconds: while this process is stopped, the clock goes on, and the call would seem late.
            looks, seen = looks + 1 if number == seen != 0 else 0, number
            if looks * pause >= self._timeout:
                raise self.late("MPI's own collective")

    def close(self) -> None:
        """End the thread."""
        self._closed.set()


class NativeCall(Call):
    """A request as a collective of MPI, repeated by the engine of `node` if there is an engine."""

    executor: NativeExecutor

    def __init__(self, executor: NativeExecutor, request: CallRequest, comm: MPI.Intracomm, node: Any) -> None:
        super().__init__(executor, request)
        self._comm, self._node = comm, node
        # MPI leaves the first rank's exscan undefined.
        self.completes: bool = node is not None and request.collective != "exscan"

    @functools.cached_property
    def _plan(self) -> Any:
        assert self._node is not None
        return self._node.plans.by_calls(self.request, _Collective(self.executor, self._comm, self.request))

    @property
    def engine_plan(self) -> Any:
        return self._plan if self.completes else None

    def run(self, source: Any, target: Any, stream: Any = None, *, repeated: bool = False) -> Operation:
        """Start MPI's collective and wait for its end."""
        request = self.request
        if request.collective == "broadcast" and source is not None and not request.in_place:
            numpy.copyto(target, source)
        if self._node is not None:
            yield from self._node.walk(lambda: self._plan, source, target)
            return
        call = _Collective(self.executor, self._comm, request)
        to, given = (0 if row is None else address(row) for row in (target, source))

        def ended() -> bool:
            return call(to, given, 0) is True

        try:
            if not ended():
                yield ended
        except BaseException:
            # MPI's collectives cannot be cancelled, and may still write to the buffers.
            keep_for_ever((source, target, call))
            raise


class _Collective:
    """MPI's collective for `request`, called with the addresses of one call's buffers until the result is True.

    `to` and `source` are the addresses of result and input, 0 for none; `modes` are the modes open to all ranks. If all
    ranks may wait, the result is a blocking function, valid for all calls with the same arguments.
    """

    def __init__(self, executor: NativeExecutor, comm: MPI.Intracomm, request: CallRequest) -> None:
        name = MPI_NAMES[request.collective]
        self._wait, self._begin = getattr(comm, name), getattr(comm, f"I{name.lower()}")
        self._executor, self._name, self._lengths = executor, request.collective, request.cut.lengths
        row = COLLECTIVES[request.collective]
        self._row, self._dtype, self._is_in_place = row, request.dtype, request.in_place and row.name != "broadcast"
        self._sizes = request.sizes
        self._more: list[Any] = [_op(request)] if row.reduces else []
        if row.reduces and request.cut.lengths is not None:
            self._more.insert(0, request.cut.lengths[0])
        self._more += [request.root] if row.rooted else []
        self._request: Any = None

    def __call__(self, to: int, source: int, modes: int) -> bool | Callable[[], object]:
        if self._request is None:
            # Either all ranks pass MPI_IN_PLACE or none does, except in rooted collectives, where the root alone passes
            # it.
            may_be_in_place = self._name in MAY_BE_IN_PLACE and (modes & IN_PLACE or self._row.rooted)
            is_copied = self._is_in_place and not may_be_in_place
            arguments = self._arguments(to, source, is_copied)
            # The engine calls the blocking function, so the copy of an input is made there, anew in each call.
            if modes & WAITS:
                self._executor.watch.start()
                return functools.partial(self._wait_on_copy if is_copied else self._wait, *arguments)
            if is_copied:
                arguments[0] = self._side(0, self._executor.copied(source, self._sizes[0] or 0))
            self._request = self._begin(*arguments)
        if not self._request.Test():
            return False
        self._request = None
        return True

    def _wait_on_copy(self, source: int, *arguments: Any) -> None:
        self._wait(self._side(0, self._executor.copied(source, self._sizes[0] or 0)), *arguments)

    def _arguments(self, to: int, source: int, is_copied: bool) -> list[Any]:
        """Return mpi4py's arguments; for an input to be copied, the first argument is the input's address."""
        if self._name == "barrier":
            return []
        result = [self._side(1, to), *self._more]
        if self._name == "broadcast":
            return result
        if self._is_in_place:
            return [source if is_copied else MPI.IN_PLACE, *result]
        return [self._side(0, source), *result]

    def _side(self, side: int, place: int) -> list[Any] | None:
        """Return one side as mpi4py takes buffers, as bytes if nothing is reduced; None for a side not on this rank."""
        nbytes, promised = self._sizes[side], (self._row.input, self._row.output)[side]
        if nbytes is None:
            return None
        memory = MPI.buffer.fromaddress(place, nbytes)
        if self._row.reduces:
            return [memory, _datatype(self._dtype)]
        if self._lengths is None or not promised.blocks:
            return [memory, MPI.BYTE]
        return [memory, [length * self._dtype.itemsize for length in self._lengths[side]], MPI.BYTE]


@functools.cache
def _datatype(dtype: Dtype) -> MPI.Datatype:
    """Return MPI's datatype; for a dtype unknown to MPI, a duplicate of an integer type, recognized by callbacks."""
    return getattr(MPI, dtype.mpi) if dtype.mpi else getattr(MPI, f"UINT{8 * dtype.itemsize}_T").Dup()


def _op(request: CallRequest) -> MPI.Op:
    """Return MPI's op of the same meaning, or an op that calls the engine."""
    assert request.op is not None
    op, dtype = request.op, request.dtype
    name = MPI_ON_BOOL.get(op.name) if dtype.kind == "bool" else op.mpi if _means_the_same(op, dtype) else None
    known = getattr(MPI, name or "", None)
    return _own_op(op) if known is None else known


def _means_the_same(op: Op, dtype: Dtype) -> bool:
    """Return whether MPI's op has the library's meaning."""
    # Open MPI's narrow integer sums saturate; NaN may lose in MPI's min, max and logical ops.
    narrow = dtype.kind == "int" and dtype.itemsize < 4 and op.mpi in ("SUM", "PROD")
    unordered = dtype.kind == "float" and op.name in ("min", "max", *LOGICAL)
    return dtype.mpi is not None and not narrow and not unordered


@functools.cache
def _own_op(op: Op) -> MPI.Op:
    """Return an op that combines by the engine; one op for all dtypes, since MPI's bindings allow few."""

    def call(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        dtype = next(row for row in DTYPES.values() if _datatype(row) == datatype)
        kind = numpy_dtype(dtype.name)
        a, b = numpy.frombuffer(source, kind), numpy.frombuffer(target, kind)
        combine(op, dtype, b, (a, b))

    return MPI.Op.Create(call, commute=True)
