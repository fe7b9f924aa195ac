"""The communicator: a group of ranks, with one method for each collective.

Each method with the same shapes on all ranks takes the options of `Communicator.all_reduce`. The methods delegate to
the parts of a communicator in the other files of this room. A repeated call goes from here into the engine at once,
which leaves unknown calls to Python (`Calls.do`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from gpucoll.call.table import CallOptions, Key
from gpucoll.communicator import elastic, objects
from gpucoll.communicator.advice import check_numerics, explain
from gpucoll.communicator.core import Core
from gpucoll.communicator.elastic import NEWCOMER_TIMEOUT, same_options
from gpucoll.communicator.extrema import located
from gpucoll.communicator.lifecycle import tell_meeting
from gpucoll.communicator.links import MpiLink
from gpucoll.communicator.overloads import (
    ExchangingBlocks,
    GatheringBlocks,
    GatheringBlocksToRoot,
    Moving,
    MovingToRoot,
    Overwriting,
    Probing,
    Receiving,
    Reducing,
    ReducingBlocks,
    ReducingToRoot,
    ScatteringBlocks,
    shaped,
)
from gpucoll.communicator.persistent import PersistentCall, planned
from gpucoll.communicator.points import ANY_SOURCE, ANY_TAG, PointToPoint, Status
from gpucoll.communicator.ragged import VectorVariants
from gpucoll.communicator.scatter import scatter
from gpucoll.communicator.symmetric import SymmetricHeaps
from gpucoll.communicator.transports import Transport
from gpucoll.errors import RankFailedError, UsageError
from gpucoll.health.farewell import Farewell, Sent, Why
from gpucoll.health.flight import Stats
from gpucoll.launch import bootstrap, regroup
from gpucoll.tuner.explanation import Explanation


class Communicator:
    """A group of ranks and their collective operations; made by `gpucoll.init`, `from_mpi`, `init_local` or `split`.

    ``rank size local_rank local_size node nodes`` are numbers. ``device`` is the CUDA ordinal or None. ``mpi`` is the
    duplicated mpi4py communicator, or None without MPI. ``timeout check executor`` are the options. ``address`` is
    "tcp://host:port" for newcomers (`grow`), or None.
    """

    def __init__(self, link: Transport, options: bootstrap.Options) -> None:
        try:
            core = Core(link, options)
        except BaseException as error:
            # E.g. no memory left: the other ranks would wait for this rank until their deadlines.
            if link.mpi is not None:
                culprit = error.ranks[0] if isinstance(error, RankFailedError) and error.ranks else link.place.rank
                others = {*range(link.place.size)} - {link.place.rank, culprit, *link.processes.ended()}
                words = "has failed in init: " + str(error).partition("\n")[0]
                with contextlib.suppress(*link.foreign):  # the store may have ended with its host
                    Sent(link.wire, others, Farewell(Why.FAILED, (culprit,), words=words)).abandon()
            raise
        self.options = core.options
        self.mpi: Any = link.mpi if link.has_collectives else None
        self.address = None if link.members is None else regroup.text_of(link.members.address)
        self._core, self._calls, self._memory = core, core.calls, SymmetricHeaps(core)
        self._points = PointToPoint(core)
        self._blocks = VectorVariants(core)
        self._survivors: Communicator | None = None  # the survivors' communicator, once this one has been shrunk
        self._heir: Transport | None = None  # of the group that `grow` gave up: its other ranks may have completed it

    @classmethod
    def from_mpi(cls, mpi: Any, **options: Unpack[bootstrap.GivenOptions]) -> Communicator:
        """Return a communicator of the ranks of an mpi4py intracommunicator, after duplicating `mpi`.

        A collective call. Options as in `gpucoll.init`. An object with a method ``__gpucoll_transport__()``, which
        returns a `Transport`, counts as a communicator. Raises ArgumentError if `mpi` is not an intracommunicator,
        UsageError if the options differ between ranks, BackendError if MPI cannot make another communicator.
        """
        wanted = bootstrap.options(options)
        # A communicator whose ranks reach each other in another way than by MPI.
        if hasattr(mpi, "__gpucoll_transport__"):
            return cls(mpi.__gpucoll_transport__(), wanted)
        tell_meeting(mpi)
        return cls(same_options(MpiLink(mpi, wanted.timeout), wanted), wanted)

    rank = property(lambda self: self._core.link.place.rank, doc="This rank, 0 .. size - 1.")
    size = property(lambda self: self._core.link.place.size, doc="The number of ranks.")
    local_rank = property(lambda self: self._core.link.place.local_rank, doc="This rank's number on its node.")
    local_size = property(lambda self: self._core.link.place.local_size, doc="How many ranks this node has.")
    node = property(lambda self: self._core.link.place.node, doc="This rank's node, 0 .. nodes - 1.")
    nodes = property(lambda self: max(self._core.link.place.nodes) + 1, doc="How many nodes there are.")
    timeout = property(lambda self: self.options.timeout, doc="Seconds: the deadline of every wait.")
    check = property(lambda self: self.options.check, doc="full, deferred, off, or None for the default.")
    executor = property(lambda self: self.options.executor, doc="The executor asked for, or None.")
    closed = property(lambda self: self._core.life.closed, doc="Whether this communicator was closed.")

    def _over(self, link: Transport) -> Communicator:
        """Return a communicator of the ranks joined by `link`, with the options of this communicator."""
        return type(self)(link, self.options)

    @property
    def device(self) -> int | None:
        """The CUDA ordinal of this rank; None without a GPU.

        `device=` or GPUCOLL_DEVICE sets the ordinal; otherwise it is the number of the rank on its host, modulo the
        number of GPUs. A communicator made by `split` has the device of its parent. Threads as ranks use the current
        device of their thread.
        """
        return self._core.device

    # ------------------------------------------------------------------------------------- collectives of equal shapes

    @shaped(Reducing)
    def all_reduce(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                   stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all ranks' `x` (shape s) on every rank.

        `out` (shape s) receives the result, with ``out=x`` in place; otherwise the result is allocated. `op`: sum prod
        min max avg band bor bxor land lor lxor, a `ReduceOp`, an mpi4py op, `premul_sum` or `elementwise_op`. With
        `dtype` an array of unsigned integers is read as another dtype of the same width. `algorithm`: a name of
        ``gpucoll.algorithms("all_reduce")``, "native" or "auto". ``async_op=True`` returns a `Work`. A call on GPU
        arrays only enqueues work on `stream`; None is the current stream of CuPy, or of PyTorch for its tensors. Raises
        ArgumentError and DtypeError before data is sent, MismatchError if the ranks' calls differ, PeerError if another
        rank refuses its arguments, RankFailedError, and CollectiveTimeout at the deadline. MPI-5.0, 6.9.6.
        """
        return self._calls.do("all_reduce", op, 0, algorithm, x, out, dtype, stream, async_op)

    @shaped(ReducingToRoot)
    def reduce(self, x: Any, out: Any = None, op: Any = "sum", root: int = 0, *, dtype: Any = None,
               algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all `x` (shape s) on `root`, None elsewhere; no `x` changes. MPI-5.0, 6.9.1."""
        return self._calls.do("reduce", op, root, algorithm, x, out, dtype, stream, async_op)

    @shaped(Overwriting)
    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Overwrite every rank's `x` (shape s) with the root's, and return `x`. MPI-5.0, 6.4."""
        return self._calls.do("broadcast", "", root, algorithm, x, None, None, stream, async_op)

    @shaped(Moving)
    def all_gather(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return all ranks' `x` (shape s) in rank order, shape (size, \\*s), on every rank. MPI-5.0, 6.7."""
        return self._calls.do("all_gather", "", 0, algorithm, x, out, None, stream, async_op)

    @shaped(MovingToRoot)
    def gather(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
               async_op: bool = False) -> Any:
        """Return all ranks' `x` (shape s) in rank order, shape (size, \\*s), on `root`; else None. MPI-5.0, 6.5."""
        return self._calls.do("gather", "", root, algorithm, x, out, None, stream, async_op)

    def scatter(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                async_op: bool = False) -> Any:
        """Return block `rank` (shape s) of the root's `x` (shape (size, \\*s); None elsewhere). MPI-5.0, 6.6.

        The other ranks read shape and dtype from the root's call descriptor in shared memory, or from one host message.
        If the root refuses its arguments, the other ranks raise PeerError.
        """
        calls = self._calls
        cache_key: Key = ()
        if stream is None and not async_op and calls.group is None:
            cache_key = ("scatter", "", root, algorithm)
            result = calls.fast_path(*cache_key, x, out)
            if result is not NotImplemented:
                return result
        return scatter(self._core, x, out, root, CallOptions(algorithm, async_op, stream), cache_key)

    @shaped(Reducing)
    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                       stream: Any = None, async_op: bool = False) -> Any:
        """Return block `rank` (shape s) of the reduction of all ranks' `x` (shape (size, \\*s)). MPI-5.0, 6.10.1."""
        return self._calls.do("reduce_scatter", op, 0, algorithm, x, out, dtype, stream, async_op)

    @shaped(Moving)
    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return block `rank` of every rank's `x`, in rank order; both have shape (size, \\*s). MPI-5.0, 6.8."""
        return self._calls.do("all_to_all", "", 0, algorithm, x, out, None, stream, async_op)

    @shaped(Reducing)
    def scan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
             stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` (shape s) of ranks 0 to `rank`. MPI-5.0, 6.11.1."""
        return self._calls.do("scan", op, 0, algorithm, x, out, dtype, stream, async_op)

    @shaped(Reducing)
    def exscan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
               stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` (shape s) of ranks 0 to `rank` - 1, the op's identity on rank 0.

        MPI-5.0, 6.11.2, with an undefined result on rank 0.
        """
        return self._calls.do("exscan", op, 0, algorithm, x, out, dtype, stream, async_op)

    def maxloc(self, x: Any, index: Any = None) -> tuple[Any, Any]:
        """Return the maximum of all ranks' `x` (shape s), element by element, and its `index`, on every rank.

        `index` (integers, shape s) is the origin of each element of `x`; None means the number of the rank, as int64.
        Among equal values the lowest index wins. NaN is the maximum, as in `numpy.argmax`. Cost: two all-reduces, "max"
        of `x` and "min" of the indices of the maxima; the host waits for nothing else. Not in a group (UsageError).
        Raises ArgumentError and DtypeError before data is sent. MPI-5.0, 6.9.4.

        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.maxloc(numpy.array([3 - comm.rank, 4])), 2)[0]
        (array([3, 4]), array([0, 0]))
        """
        return located(self._core, "maxloc", "max", x, index)

    def minloc(self, x: Any, index: Any = None) -> tuple[Any, Any]:
        """Return the minimum of all ranks' `x` and its `index`, as `maxloc`; NaN is the minimum."""
        return located(self._core, "minloc", "min", x, index)

    def barrier(self, *, algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return when every rank has called `barrier`; with `stream` the stream waits, not the host. MPI-5.0, 6.3."""
        calls = self._calls
        cache_key: Key = ()
        if stream is None and not async_op and calls.group is None:
            cache_key = ("barrier", "", 0, algorithm)
            if calls.fast_path(*cache_key, None, None) is not NotImplemented:
                return None
        return calls.barrier(CallOptions(algorithm, async_op, stream), cache_key)

    # ---------------------------------------------------------------------------------------- blocks of unlike lengths

    @shaped(GatheringBlocks)
    def all_gather_v(self, x: Any, out: Any = None, counts: Sequence[int] | None = None, *, algorithm: str = "auto",
                     stream: Any = None, async_op: bool = False) -> Any:
        """Return the list of all ranks' `x` (shape (n_i, \\*s)) on every rank; views of one array. MPI-5.0, 6.7.

        `out` receives the result and is returned. It is one array (sum(n_i), \\*s), and `x` may be this rank's block in
        it; or it is a list of arrays (n_i, \\*s), at the same speed. `counts` are the lengths n_i of all ranks, the
        same numbers on every rank: nothing is exchanged then. None means that the ranks tell each other the lengths,
        with one host message if these differ from the last call's.
        """
        if counts is not None:
            return self._calls.do("all_gather_v counts", 0, counts, algorithm, x, out, None, stream, async_op)
        return self._blocks.known("all_gather_v", 0, algorithm, x, out, stream, async_op)

    @shaped(GatheringBlocksToRoot)
    def gather_v(self, x: Any, root: int = 0, out: Any = None, counts: Sequence[int] | None = None, *,
                 algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the list of all ranks' `x` (shape (n_i, \\*s)) on `root`, None elsewhere. MPI-5.0, 6.5.

        `out` and `counts` are as in `all_gather_v`.
        """
        if counts is not None:
            return self._calls.do("gather_v counts", root, counts, algorithm, x, out, None, stream, async_op)
        return self._blocks.known("gather_v", root, algorithm, x, out, stream, async_op)

    @shaped(ScatteringBlocks)
    def scatter_v(self, xs: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Return array `rank` (shape (n_i, \\*s)) of the list `xs` of arrays on the root. MPI-5.0, 6.6.

        Other ranks pass None for `xs`. `out` (n_i, \\*s) receives the array and is returned.
        """
        given = xs if self._core.rank == root else None  # the lists of other ranks are ignored
        return self._blocks.known("scatter_v", root, algorithm, given, out, stream, async_op)

    @shaped(ExchangingBlocks)
    def all_to_all_v(self, xs: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                     async_op: bool = False) -> Any:
        """Return the list whose array i is array `rank` of rank i's list `xs` (shapes (n_ij, \\*s)). MPI-5.0, 6.8.

        `out` receives the result and is returned: a list of arrays (``out=xs`` if each array has the length of its
        replacement), or one array for all blocks in rank order, which saves a copy.
        """
        return self._blocks.known("all_to_all_v", 0, algorithm, xs, out, stream, async_op)

    @shaped(ReducingBlocks)
    def reduce_scatter_v(self, x: Any, counts: Sequence[int], op: Any = "sum", *, out: Any = None, dtype: Any = None,
                         algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return `counts[rank]` rows of the reduction of all ranks' `x` (shape (sum(counts), \\*s)).

        The blocks of rows follow in rank order. `counts` is the same on all ranks; `out` (counts[rank], \\*s) receives
        the result and is returned. MPI-5.0, 6.10.2.
        """
        return self._calls.do("reduce_scatter_v counts", op, counts, algorithm, x, out, dtype, stream, async_op)

    # ------------------------------------------------------------------------------------------------- pickled objects

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the list of all ranks' objects, in rank order, on every rank."""
        return objects.all_gather(self, obj)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the list of all ranks' objects, in rank order, on `root`; None elsewhere."""
        return objects.gather(self, obj, root)

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Return the root's object, a copy on other ranks; elsewhere `obj` is ignored."""
        return objects.broadcast(self, obj, root)

    def scatter_object(self, objs: Any = None, root: int = 0) -> Any:
        """Return a copy of object `rank` of the root's list of `size` objects; elsewhere `objs` is ignored."""
        return objects.scatter(self, objs, root)

    # ---------------------------------------------------------------------------- messages, groups, parts of the ranks

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` (shape s) to rank `dst`, for a `recv` there with the same `tag`, 0 .. 32767. MPI-5.0, 3.2.

        Returns None, or a `Work` with ``async_op=True``. To ``gpucoll.PROC_NULL``, or mpi4py's, nothing is sent; `recv`
        from PROC_NULL receives nothing, and `out` is unchanged. Raises ArgumentError.
        """
        if x is not None and not async_op and self._calls.group is None:
            return self._points.blocking("send", x, dst, None, -1, tag)
        return self._points.point("send", x, dst, None, -1, tag, async_op=async_op)

    @shaped(Receiving)
    def recv(self, out: Any, src: int = ANY_SOURCE, tag: int = 0, status: Any = None, *, async_op: bool = False) -> Any:
        """Receive a message from rank `src` into `out` (shape s) and return `out`. MPI-5.0, 3.2.

        Raises MismatchError for a message of another length, or, on the host, of another dtype. `out` is then
        unchanged, with one exception: a message of another length by MPI, UCX, a store or between threads may overwrite
        the first part of `out`.

        On the host `src` may be ``gpucoll.ANY_SOURCE`` and `tag` ``gpucoll.ANY_TAG``, or mpi4py's. NCCL has neither, so
        such a receive into a GPU array raises UsageError, as does ``ANY_TAG`` if messages go through a store. The
        receive takes the first message available; messages of one rank are received in the order sent. A receive from a
        given rank has precedence if it begins before the message is available. `status`, a `Status` or mpi4py's, is set
        to source, tag and bytes of the message.
        """
        if out is not None and status is None and not async_op and self._calls.group is None:
            return self._points.blocking("recv", None, -1, out, src, tag)
        return self._points.point("recv", None, -1, out, src, tag, status, async_op=async_op)

    def sendrecv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` to rank `dst` while receiving `out` from rank `src`; return `out`. MPI-5.0, 3.11."""
        if x is not None and out is not None and not async_op and self._calls.group is None:
            return self._points.blocking("sendrecv", x, dst, out, src, tag)
        return self._points.point("sendrecv", x, dst, out, src, tag, async_op=async_op)

    @shaped(Probing)
    def probe(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Wait for a message available to `recv`; return its `Status`, or `status`. The message stays available.

        `count` is in bytes; for a message above 1 GiB it may be that of the first piece. Host only: UsageError on the
        emulated device. MPI-5.0, 3.8.1.
        """
        return self._points.probe(src, tag, Status() if status is None else status)

    def iprobe(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Status | None:
        """Return the status as `probe` does if a message is available now, else None; never wait. MPI-5.0, 3.8.1."""
        return self._points.iprobe(src, tag, Status() if status is None else status)

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Run all calls of the block together at its end; their results are valid after the block.

        All messages between two ranks start before the first wait; collectives follow in the order of the calls. On a
        GPU the collectives wait for the messages, as on one stream. So the other rank may not make its end of a message
        after its calls of these collectives, unless in a group with them. Groups do not nest: UsageError.
        """
        return self._points.group()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks of the same `color`, ordered by `key` and rank; None if `color` is None.

        A collective call; the options are inherited. Raises ArgumentError, and PeerError on the other ranks. MPI-5.0,
        7.4.2.
        """
        return self._points.split(color, key, self._over)

    # ---------------------------------------------------------------------------------------- planned calls and memory

    def plan(self, collective: str, x: Any = None, out: Any = None, **options: Any) -> PersistentCall:
        """Return a callable that repeats `collective` on `x` and `out`; executor and algorithm are chosen once.

        `options` are those of the collective: op, root, dtype, algorithm, stream. If `out` is None, the result is
        allocated once. The callable keeps the arrays; their content may change between calls. `plan` itself sends no
        data. On a GPU a call enqueues work on `stream` (None: CuPy's current stream), and can be captured in a CUDA
        graph. All ranks must make the same plans and calls. Raises ArgumentError and DtypeError like the collective,
        and TypeError for an unknown option.

        The ranks of a message can also plan the message: ``plan("send", x, dst=, tag=0)``,
        ``plan("recv", out=, src=, tag=0, status=None)`` and ``plan("sendrecv", x, out, dst=, src=, tag=0)``.
        """
        return planned(self, collective, x, out, **options)

    def empty(self, shape: Any, dtype: Any, device: str | None = None) -> Any:
        """Return an array in memory mapped by all ranks of this node; its elements are undefined. A collective call.

        `shape` and `dtype` are the same on all ranks; `device` is "cpu" or "cuda" (None: "cpu"). A later call reuses a
        block once every rank has dropped its array. On a GPU, the current stream of this call waits for what still runs
        on the old array. After `close` the memory is freed with the last array. Raises ArgumentError, DtypeError,
        MismatchError (ranks differ), PeerError (another rank refuses), BackendError (no memory, no GPU).
        """
        return self._memory.empty("empty", shape, dtype, device)

    def zeros(self, shape: Any, dtype: Any, device: str | None = None) -> Any:
        """Return an array of zeros, otherwise as `empty`. A collective call."""
        array = self._memory.empty("zeros", shape, dtype, device)
        with self._core.current(None, [array]):
            array[...] = 0
        return array

    # ---------------------------------------------------------------------------------------- explanations and figures

    def explain(self, collective: str, nbytes: int, dtype: Any = "float32", device: str | None = None) -> Explanation:
        """Return why ``algorithm="auto"`` chooses its algorithm for `nbytes` bytes, the larger of input and output.

        `dtype` is the dtype of the elements; a reduction is a sum. `device` is "cpu", "cuda" or "emulated", by default
        the device of NumPy arrays. The `gpucoll.tuner.explanation.Explanation` prints as a table and is a dictionary.
        After calls of about this size on host arrays it also has measured seconds. Users' own algorithms come last,
        because "auto" never chooses them. No rank waits for another. Raises ArgumentError and DtypeError.
        """
        return explain(self._core, collective, nbytes, dtype, device)

    def check_numerics(self, x: Any, name: str = "x") -> None:
        """Raise ArgumentError on every rank if a rank's `x` (any shape) has a NaN or an infinity.

        A collective call. The error has `name` for the array, the first such rank, and the first index and value on
        that rank; ``ranks`` lists all such ranks. Cost: one host message.
        """
        check_numerics(self._core, x, name)

    def stats(self) -> Stats:
        """Return figures of all completed collective calls of this rank, by collective and size class.

        The keys are pairs such as ``("all_reduce", 4096)``. The size class is the largest power of two not above the
        bytes of the call (the larger of input and output over all ranks), 0 for a call without data. The values have
        the keys ``calls``, ``bytes``, ``own_seconds``, ``waiting_seconds`` and ``moving_seconds``. Own seconds: this
        rank's delay behind the first rank before calls, at most the time since its last call. Waiting seconds: in
        calls, until the other ranks arrived. Moving seconds: the rest of the calls. No rank waits for another, and the
        figures remain after `close`. The page on performance has the limits for each executor.

        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: (comm.barrier(), comm.stats()["barrier", 0]["calls"])[1], 2)
        [1, 1]
        """
        return self._core.record.stats()

    # ---------------------------------------------------------------------------------------------- lost and new ranks

    def shrink(self) -> Communicator:
        """Return a communicator of the surviving ranks, in the order of their old ranks; this one fails and is closed.

        A collective call of all surviving ranks; a rank waiting in another call is woken. A rank does not survive if
        its process has ended, or if the rank has closed this communicator after the failure. The launcher must let
        survivors live, as ``gpucoll run --standalone --survive`` and Open MPI's ``mpiexec --continuous`` do. Survivors
        go on without MPI: ``mpi`` is then None. Under Open MPI's ``mpiexec --with-ft ulfm``, MPI itself shrinks.

        If a further rank dies meanwhile, the others begin again without it. Repeated after a `replace` without
        newcomers, the call returns the survivors' communicator. Raises CollectiveTimeout if a living rank does not come
        within ``timeout`` seconds (the call may be repeated), RankFailedError if ranks still die then, UsageError if
        MPI ends with its first process and the ranks cannot go on without MPI: with ``executor="native"``, or on
        several hosts that do not reach rank 0 by TCP. Source: MPI forum's User Level Failure Mitigation.
        """
        return elastic.shrink(self)

    def grow(self, size: int, timeout: float = NEWCOMER_TIMEOUT) -> Communicator:
        """Return a communicator of `size` ranks: members keep their ranks, newcomers (`gpucoll.join`) follow.

        A collective call of all members. Newcomers connect to `address` and prove themselves by GPUCOLL_SECRET. They
        inherit the options of the members. This communicator remains usable. Raises CollectiveTimeout after `timeout`
        seconds without enough newcomers, RankFailedError if a member dies, ArgumentError (on the other ranks PeerError)
        for a wrong `size`, MismatchError if sizes differ, UsageError without a secret and for ranks that are threads or
        cannot go on without MPI, see `shrink`. The new communicator works without MPI: its ``mpi`` is None.
        """
        return elastic.grow(self, size, range(self.size), timeout, "grow")

    def replace(self, timeout: float = NEWCOMER_TIMEOUT) -> Communicator:
        """Return a communicator of as many ranks as before: survivors keep their ranks, newcomers take the lost ones.

        A collective call of all surviving ranks: `shrink`, then `grow`; this communicator fails and is closed. Raises
        the errors of both; ranks that die in the meantime are replaced too. After a CollectiveTimeout without
        newcomers, `replace` can be called again, and `shrink` returns the communicator of the survivors.
        """
        return elastic.replace(self, timeout)

    # --------------------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Complete all running operations and release all resources; idempotent.

        A collective call unless the communicator has failed. If another rank has failed, or does not call `close`
        within the timeout, MPI's communicators are not freed: after a free on some ranks only, late messages could
        reach the next communicators. Threads as ranks do not wait for each other: the last `close` frees the memory of
        all.

        Raises the error of an incomplete call on a GPU, unless a call or a wait has already raised it.
        """
        self._core.life.close()

    def __reduce__(self) -> Any:
        raise UsageError("a communicator cannot be pickled or copied: its connections belong to this process; pass its "
                         "rank and size, or make a communicator in the other process by gpucoll.init or gpucoll.join")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._core.life.leaving.leave_block(error)
        self.close()

    def __repr__(self) -> str:
        return f"<gpucoll.Communicator rank={self.rank} size={self.size}>"


def _of_mpi4py(comm: Communicator) -> Any:
    raise AttributeError("a gpucoll communicator has names such as 'all_reduce'; gpucoll.mpi.Comm has mpi4py's calls")


# Properties, because `__getattr__` would slow down each call. Python itself tells names that are nearly right.
for _name in ("Allgather Allgatherv Allreduce Alltoall Alltoallv Barrier Bcast Exscan Gather Gatherv Get_rank Get_size "
              "Irecv Isend Recv Reduce Reduce_scatter Scan Scatter Scatterv Send Sendrecv Split").split():
    setattr(Communicator, _name, property(_of_mpi4py))
