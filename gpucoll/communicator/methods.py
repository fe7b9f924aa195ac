"""The communicator: a group of ranks, with one method for each collective.

Each method with the same shapes on all ranks takes the options of `Communicator.all_reduce`. The methods delegate to
the parts of a communicator in the other files of this room. A repeated call goes from here into the engine at once,
which leaves unknown calls to Python (`Calls.do`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from gpucoll.communicator import elastic, objects, overloads
from gpucoll.communicator.advice import check_numerics, explain
from gpucoll.communicator.core import Core
from gpucoll.communicator.elastic import NEWCOMER_TIMEOUT, same_options
from gpucoll.communicator.extrema import located
from gpucoll.communicator.lifecycle import tell_meeting
from gpucoll.communicator.links import MpiLink
from gpucoll.communicator.overloads import Shown
from gpucoll.communicator.persistent import PersistentCall, planned
from gpucoll.communicator.points import ANY_SOURCE, ANY_TAG, PointToPoint, Status
from gpucoll.communicator.ragged import VectorVariants
from gpucoll.communicator.scatter import scatter
from gpucoll.communicator.symmetric import SymmetricHeaps
from gpucoll.communicator.transports import Transport
from gpucoll.core.collectives import CollectiveName
from gpucoll.errors import RankFailedError, UsageError
from gpucoll.health.farewell import Farewell, Sent, Why
from gpucoll.health.flight import Stats
from gpucoll.launch import bootstrap, regroup
from gpucoll.tuner.explanation import Explanation


class Communicator:
    """A group of ranks and their collective operations.

    Made by `gpucoll.init`, `from_mpi`, `init_local`, `split`, and by `shrink`, `grow` and `replace`. A program does not
    call the class.

    A communicator is a context manager: the end of the block calls `close`.

    Parameters
    ----------
    link : Transport
        The connection between the ranks.
    options : gpucoll.launch.bootstrap.Options
        The checked options of `gpucoll.init`.

    See Also
    --------
    gpucoll.init : The communicator of all ranks.
    gpucoll.mpi.Comm : The spelling of mpi4py.

    Examples
    --------
    >>> import gpucoll as gc
    >>> with gc.init_local(1)[0] as comm:
    ...     print(comm, comm.rank, comm.size, comm.device, comm.timeout)
    <gpucoll.Communicator rank=0 size=1> 0 1 None 300.0
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
        self.options: bootstrap.Options = core.options
        self.mpi: Any = link.mpi if link.has_collectives else None
        self.address: str | None = None if link.members is None else regroup.text_of(link.members.address)
        self._core, self._calls, self._memory = core, core.calls, SymmetricHeaps(core)
        self._points = PointToPoint(core)
        self._blocks = VectorVariants(core)
        core.calls.others["scatter"] = functools.partial(scatter, core)
        self._survivors: Communicator | None = None  # the survivors' communicator, once this one has been shrunk
        self._heir: Transport | None = None  # of the group that `grow` gave up: its other ranks may have completed it

    @classmethod
    def from_mpi(cls, mpi: Any, **options: Unpack[bootstrap.GivenOptions]) -> Communicator:
        """Return a communicator of the ranks of an mpi4py intracommunicator, after duplicating `mpi`.

        A collective call. An object with a method ``__gpucoll_transport__()``, which returns a `Transport`, counts as a
        communicator.

        Parameters
        ----------
        mpi : mpi4py.MPI.Intracomm
            The communicator of mpi4py.
        **options : object
            As in `gpucoll.init`.

        Returns
        -------
        Communicator
            A communicator of the same ranks.

        Raises
        ------
        ArgumentError
            `mpi` is not an intracommunicator (GC-ARGUMENT).
        UsageError
            The options differ between ranks (GC-INIT).
        BackendError
            MPI cannot make another communicator.

        See Also
        --------
        gpucoll.mpi.Comm : The spelling of mpi4py.

        Examples
        --------
        >>> from mpi4py import MPI
        >>> import gpucoll as gc
        >>> with gc.Communicator.from_mpi(MPI.COMM_SELF) as comm:
        ...     print(comm.size)
        1
        """
        wanted = bootstrap.options(options)
        # A communicator whose ranks reach each other in another way than by MPI.
        if hasattr(mpi, "__gpucoll_transport__"):
            return cls(mpi.__gpucoll_transport__(), wanted)
        tell_meeting(mpi)
        return cls(same_options(MpiLink(mpi, wanted.timeout), wanted), wanted)

    rank: Shown[int] = property(lambda self: self._core.link.place.rank, doc="This rank, 0 .. size - 1.")
    size: Shown[int] = property(lambda self: self._core.link.place.size, doc="The number of ranks.")
    local_rank: Shown[int] = property(lambda self: self._core.link.place.local_rank,
                                      doc="This rank's number on its node.")
    local_size: Shown[int] = property(lambda self: self._core.link.place.local_size,
                                      doc="How many ranks this node has.")
    node: Shown[int] = property(lambda self: self._core.link.place.node, doc="This rank's node, 0 .. nodes - 1.")
    nodes: Shown[int] = property(lambda self: max(self._core.link.place.nodes) + 1, doc="How many nodes there are.")
    timeout: Shown[float] = property(lambda self: self.options.timeout, doc="Seconds: the deadline of every wait.")
    check: Shown[str | None] = property(lambda self: self.options.check,
                                        doc="full, deferred, off, or None for the default.")
    executor: Shown[str | None] = property(lambda self: self.options.executor, doc="The executor asked for, or None.")
    closed: Shown[bool] = property(lambda self: self._core.life.closed, doc="Whether this communicator was closed.")

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

    @overloads.shaped(overloads.Reducing)
    def all_reduce(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                   stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all ranks' `x` on every rank.

        A call on GPU arrays only enqueues work on `stream`.

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank: NumPy's, CuPy's, or an array with DLPack.
        out : array of shape s or None, optional
            Receives the result, with ``out=x`` in place; None allocates one.
        op : str, ReduceOp or op of mpi4py, optional
            The reduction: sum prod min max avg band bor bxor land lor lxor, or one of `premul_sum` or `elementwise_op`.
        dtype : dtype or None, optional
            With a dtype, unsigned integers are read as this dtype of the same width, such as "bfloat16".
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, or Work
            The reduction: `out` if given. With ``async_op=True`` the handle of the call.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        reduce : The result on one rank.
        reduce_scatter : Each rank has a block of the result.
        plan : The same call, many times.

        References
        ----------
        MPI-5.0, 6.9.6.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.all_reduce(numpy.array([comm.rank, 10])), 3)[0]
        array([ 3, 30])
        """
        return self._calls.do("all_reduce", op, 0, algorithm, x, out, dtype, stream, async_op)

    @overloads.shaped(overloads.ReducingToRoot)
    def reduce(self, x: Any, out: Any = None, op: Any = "sum", root: int = 0, *, dtype: Any = None,
               algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all ranks' `x` on `root`, None elsewhere.

        No `x` changes.

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank: NumPy's, CuPy's, or an array with DLPack.
        out : array of shape s or None, optional
            Receives the result on the root; ignored elsewhere.
        op : str, ReduceOp or op of mpi4py, optional
            The reduction: sum prod min max avg band bor bxor land lor lxor, or one of `premul_sum` or `elementwise_op`.
        root : int, optional
            The rank of the root.
        dtype : dtype or None, optional
            With a dtype, unsigned integers are read as this dtype of the same width, such as "bfloat16".
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, None, or Work
            The reduction on the root, None on the other ranks.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        all_reduce : The result on every rank.

        References
        ----------
        MPI-5.0, 6.9.1.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.reduce(numpy.array([comm.rank, 10]), root=1), 3)
        [None, array([ 3, 30]), None]
        """
        return self._calls.do("reduce", op, root, algorithm, x, out, dtype, stream, async_op)

    @overloads.shaped(overloads.Overwriting)
    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Overwrite every rank's `x` with the root's, and return `x`.

        Parameters
        ----------
        x : array of shape s
            The array to send on the root, and to overwrite on the other ranks.
        root : int, optional
            The rank of the root.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, or Work
            `x` itself.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        scatter : A block for each rank.

        References
        ----------
        MPI-5.0, 6.4.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.broadcast(numpy.array([comm.rank]), root=2), 3)
        [array([2]), array([2]), array([2])]
        """
        return self._calls.do("broadcast", "", root, algorithm, x, None, None, stream, async_op)

    @overloads.shaped(overloads.Moving)
    def all_gather(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return all ranks' `x` in rank order, on every rank.

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank: NumPy's, CuPy's, or an array with DLPack.
        out : array of shape (size, \\*s) or None, optional
            Receives the result; None allocates one.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape (size, \\*s), or Work
            The arrays of all ranks, stacked.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        gather : The result on one rank.
        all_gather_v : Blocks of different lengths.

        References
        ----------
        MPI-5.0, 6.7.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.all_gather(numpy.array([comm.rank, 7])), 2)[0]
        array([[0, 7],
               [1, 7]])
        """
        return self._calls.do("all_gather", "", 0, algorithm, x, out, None, stream, async_op)

    @overloads.shaped(overloads.MovingToRoot)
    def gather(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
               async_op: bool = False) -> Any:
        """Return all ranks' `x` in rank order on `root`, None elsewhere.

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank: NumPy's, CuPy's, or an array with DLPack.
        out : array of shape (size, \\*s) or None, optional
            Receives the result on the root; ignored elsewhere.
        root : int, optional
            The rank of the root.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape (size, \\*s), None, or Work
            The arrays of all ranks on the root, None on the other ranks.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        all_gather : The result on every rank.
        gather_v : Blocks of different lengths.

        References
        ----------
        MPI-5.0, 6.5.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.gather(numpy.array([comm.rank])), 2)
        [array([[0],
               [1]]), None]
        """
        return self._calls.do("gather", "", root, algorithm, x, out, None, stream, async_op)

    def scatter(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                async_op: bool = False) -> Any:
        """Return block `rank` of the root's `x`.

        The other ranks read shape and dtype from the root's call descriptor in shared memory, or from one host message.
        If the root refuses its arguments, the other ranks raise PeerError.

        Parameters
        ----------
        x : array of shape (size, \\*s) or None
            The blocks on the root; ignored on the other ranks.
        out : array of shape s or None, optional
            Receives the block; None allocates one.
        root : int, optional
            The rank of the root.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, or Work
            The block of this rank.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        broadcast : The same array for each rank.
        scatter_v : Blocks of different lengths.

        References
        ----------
        MPI-5.0, 6.6.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.scatter(numpy.arange(4).reshape(2, 2) if comm.rank == 0 else None), 2)
        [array([0, 1]), array([2, 3])]
        """
        return self._calls.do("scatter", "", root, algorithm, x, out, None, stream, async_op)

    @overloads.shaped(overloads.Reducing)
    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                       stream: Any = None, async_op: bool = False) -> Any:
        """Return block `rank` of the reduction of all ranks' `x`.

        Parameters
        ----------
        x : array of shape (size, \\*s)
            A block for each rank.
        out : array of shape s or None, optional
            Receives the block; None allocates one.
        op : str, ReduceOp or op of mpi4py, optional
            The reduction: sum prod min max avg band bor bxor land lor lxor, or one of `premul_sum` or `elementwise_op`.
        dtype : dtype or None, optional
            With a dtype, unsigned integers are read as this dtype of the same width, such as "bfloat16".
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, or Work
            The reduced block of this rank.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        all_reduce : Every rank has all blocks.
        reduce_scatter_v : Blocks of different lengths.

        References
        ----------
        MPI-5.0, 6.10.1.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.reduce_scatter(numpy.array([[1, 2], [3, 4]])), 2)
        [array([2, 4]), array([6, 8])]
        """
        return self._calls.do("reduce_scatter", op, 0, algorithm, x, out, dtype, stream, async_op)

    @overloads.shaped(overloads.Moving)
    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return block `rank` of every rank's `x`, in rank order.

        Parameters
        ----------
        x : array of shape (size, \\*s)
            A block for each rank.
        out : array of shape (size, \\*s) or None, optional
            Receives the result; None allocates one.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape (size, \\*s), or Work
            Block i came from rank i.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        all_to_all_v : Blocks of different lengths.

        References
        ----------
        MPI-5.0, 6.8.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.all_to_all(numpy.array([10, 11]) + 10 * comm.rank), 2)
        [array([10, 20]), array([11, 21])]
        """
        return self._calls.do("all_to_all", "", 0, algorithm, x, out, None, stream, async_op)

    @overloads.shaped(overloads.Reducing)
    def scan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
             stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` of ranks 0 to `rank`.

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank: NumPy's, CuPy's, or an array with DLPack.
        out : array of shape s or None, optional
            Receives the result, with ``out=x`` in place; None allocates one.
        op : str, ReduceOp or op of mpi4py, optional
            The reduction: sum prod min max avg band bor bxor land lor lxor, or one of `premul_sum` or `elementwise_op`.
        dtype : dtype or None, optional
            With a dtype, unsigned integers are read as this dtype of the same width, such as "bfloat16".
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, or Work
            The prefix sum, or the prefix reduction by another op.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        exscan : Without the rank's own `x`.

        References
        ----------
        MPI-5.0, 6.11.1.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.scan(numpy.array([1, comm.rank])), 3)
        [array([1, 0]), array([2, 1]), array([3, 3])]
        """
        return self._calls.do("scan", op, 0, algorithm, x, out, dtype, stream, async_op)

    @overloads.shaped(overloads.Reducing)
    def exscan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
               stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` of ranks 0 to `rank` - 1, the op's identity on rank 0.

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank: NumPy's, CuPy's, or an array with DLPack.
        out : array or None, optional
            The array for the result; None allocates one.
        op : str, ReduceOp or op of mpi4py, optional
            The reduction: sum prod min max avg band bor bxor land lor lxor, or one of `premul_sum` or `elementwise_op`.
        dtype : dtype or None, optional
            With a dtype, unsigned integers are read as this dtype of the same width, such as "bfloat16".
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, or Work
            The prefix reduction without this rank's `x`.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        scan : With the rank's own `x`.

        References
        ----------
        MPI-5.0, 6.11.2, with an undefined result on rank 0.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.exscan(numpy.array([1, comm.rank])), 3)
        [array([0, 0]), array([1, 0]), array([2, 1])]
        """
        return self._calls.do("exscan", op, 0, algorithm, x, out, dtype, stream, async_op)

    def maxloc(self, x: Any, index: Any = None) -> tuple[Any, Any]:
        """Return the maximum of all ranks' `x`, element by element, and its `index`, on every rank.

        Among equal values the lowest index wins. NaN is the maximum, as in `numpy.argmax`. Cost: two all-reduces, "max"
        of `x` and "min" of the indices of the maxima; the host waits for nothing else.

        Parameters
        ----------
        x : array of shape s
            The values of this rank.
        index : array of integers of shape s, or None, optional
            The origin of each element of `x`; None means the number of the rank, as int64.

        Returns
        -------
        values : array of shape s
            The maxima.
        indices : array of shape s
            Where the maxima come from.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        UsageError
            The call is made in a group (GC-GROUP).

        See Also
        --------
        minloc : The minimum.

        References
        ----------
        MPI-5.0, 6.9.4.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.maxloc(numpy.array([3 - comm.rank, 4])), 2)[0]
        (array([3, 4]), array([0, 0]))
        """
        return located(self._core, "maxloc", "max", x, index)

    def minloc(self, x: Any, index: Any = None) -> tuple[Any, Any]:
        """Return the minimum of all ranks' `x`, element by element, and its `index`, on every rank.

        NaN is the minimum; otherwise as `maxloc`.

        Parameters
        ----------
        x : array of shape s
            The values of this rank.
        index : array of integers of shape s, or None, optional
            The origin of each element of `x`; None means the number of the rank, as int64.

        Returns
        -------
        values : array of shape s
            The minima.
        indices : array of shape s
            Where the minima come from.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        UsageError
            The call is made in a group (GC-GROUP).

        See Also
        --------
        maxloc : The maximum.

        References
        ----------
        MPI-5.0, 6.9.4.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.minloc(numpy.array([3 - comm.rank, 4])), 2)[0]
        (array([2, 4]), array([1, 0]))
        """
        return located(self._core, "minloc", "min", x, index)

    def barrier(self, *, algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return when every rank has called `barrier`.

        With `stream` the stream waits, not the host.

        Parameters
        ----------
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        None or Work
            None, or the handle of the call.

        Raises
        ------
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        References
        ----------
        MPI-5.0, 6.3.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.barrier(), 2)
        [None, None]
        """
        return self._calls.do("barrier", "", 0, algorithm, None, None, None, stream, async_op)

    # ---------------------------------------------------------------------------------------- blocks of unlike lengths

    @overloads.shaped(overloads.GatheringBlocks)
    def all_gather_v(self, x: Any, out: Any = None, counts: Sequence[int] | None = None, *, algorithm: str = "auto",
                     stream: Any = None, async_op: bool = False) -> Any:
        """Return the list of all ranks' `x`, of different lengths, on every rank.

        Without `counts` one host message is exchanged if the lengths differ from the last call's.

        Parameters
        ----------
        x : array of shape (n_i, \\*s)
            The block of this rank; lengths may differ from rank to rank.
        out : array of shape (sum(n_i), \\*s), list of arrays, or None, optional
            Receives the result and is returned. `x` may be this rank's block in it.
        counts : sequence of int or None, optional
            The lengths n_i of all ranks, the same on every rank: nothing is exchanged then. None: the ranks tell each
            other the lengths.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        list of arrays of shape (n_i, \\*s), or Work
            The blocks of all ranks in rank order, views of one array.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).
        ArgumentError
            `counts` is wrong (GC-COUNTS).

        See Also
        --------
        all_gather : Blocks of equal lengths.

        References
        ----------
        MPI-5.0, 6.7.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.all_gather_v(numpy.arange(comm.rank + 1)), 2)[0]
        [array([0]), array([0, 1])]
        """
        if counts is not None:
            return self._calls.do("all_gather_v counts", 0, counts, algorithm, x, out, None, stream, async_op)
        return self._blocks.known("all_gather_v", 0, algorithm, x, out, stream, async_op)

    @overloads.shaped(overloads.GatheringBlocksToRoot)
    def gather_v(self, x: Any, root: int = 0, out: Any = None, counts: Sequence[int] | None = None, *,
                 algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the list of all ranks' `x`, of different lengths, on `root`; None elsewhere.

        Parameters
        ----------
        x : array of shape (n_i, \\*s)
            The block of this rank; lengths may differ from rank to rank.
        root : int, optional
            The rank of the root.
        out : array of shape (sum(n_i), \\*s), list of arrays, or None, optional
            Receives the result and is returned. `x` may be this rank's block in it.
        counts : sequence of int or None, optional
            The lengths n_i of all ranks, the same on every rank: nothing is exchanged then. None: the ranks tell each
            other the lengths.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        list of arrays of shape (n_i, \\*s), None, or Work
            The blocks of all ranks on the root, None on the other ranks.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        gather : Blocks of equal lengths.

        References
        ----------
        MPI-5.0, 6.5.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.gather_v(numpy.arange(comm.rank + 1)), 2)
        [[array([0]), array([0, 1])], None]
        """
        if counts is not None:
            return self._calls.do("gather_v counts", root, counts, algorithm, x, out, None, stream, async_op)
        return self._blocks.known("gather_v", root, algorithm, x, out, stream, async_op)

    @overloads.shaped(overloads.ScatteringBlocks)
    def scatter_v(self, xs: Any, root: int = 0, *, out: Any = None, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Return array `rank` of the root's list `xs` of arrays.

        Parameters
        ----------
        xs : list of arrays of shape (n_i, \\*s), or None
            An array for each rank on the root; None on the other ranks.
        root : int, optional
            The rank of the root.
        out : array of shape (n_i, \\*s) or None, optional
            Receives the array and is returned.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape (n_i, \\*s), or Work
            The array of this rank.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        scatter : Blocks of equal lengths.

        References
        ----------
        MPI-5.0, 6.6.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.scatter_v([numpy.arange(1), numpy.arange(2)] if comm.rank == 0 else None), 2)
        [array([0]), array([0, 1])]
        """
        given = xs if self._core.rank == root else None  # the lists of other ranks are ignored
        return self._blocks.known("scatter_v", root, algorithm, given, out, stream, async_op)

    @overloads.shaped(overloads.ExchangingBlocks)
    def all_to_all_v(self, xs: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                     async_op: bool = False) -> Any:
        """Return the list whose array i is array `rank` of rank i's list `xs`.

        Parameters
        ----------
        xs : list of arrays of shape (n_ij, \\*s)
            An array for each rank j, of any lengths.
        out : list of arrays, array, or None, optional
            Receives the result and is returned: a list (``out=xs`` if each array has the length of its replacement), or
            one array for all blocks in rank order, which saves a copy.
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        list of arrays of shape (n_ij, \\*s), or Work
            Array i came from rank i.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        all_to_all : Blocks of equal lengths.

        References
        ----------
        MPI-5.0, 6.8.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.all_to_all_v([numpy.full(comm.rank + 1, j) for j in range(2)]), 2)
        [[array([0]), array([0, 0])], [array([1]), array([1, 1])]]
        """
        return self._blocks.known("all_to_all_v", 0, algorithm, xs, out, stream, async_op)

    @overloads.shaped(overloads.ReducingBlocks)
    def reduce_scatter_v(self, x: Any, counts: Sequence[int], op: Any = "sum", *, out: Any = None, dtype: Any = None,
                         algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return `counts[rank]` rows of the reduction of all ranks' `x`.

        The blocks of rows follow in rank order.

        Parameters
        ----------
        x : array of shape (sum(counts), \\*s)
            The rows for all ranks.
        counts : sequence of int
            The number of rows of each rank, the same on all ranks.
        op : str, ReduceOp or op of mpi4py, optional
            The reduction: sum prod min max avg band bor bxor land lor lxor, or one of `premul_sum` or `elementwise_op`.
        out : array of shape (counts[rank], \\*s) or None, optional
            Receives the result and is returned.
        dtype : dtype or None, optional
            With a dtype, unsigned integers are read as this dtype of the same width, such as "bfloat16".
        algorithm : str, optional
            A name from `gpucoll.algorithms`, "native" for MPI's or NCCL's own collective, or "auto": the fastest by the
            tuner's prediction.
        stream : stream or None, optional
            The stream for GPU arrays; None is the current stream of CuPy, or of PyTorch for its tensors.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape (counts[rank], \\*s), or Work
            The reduced rows of this rank.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        MismatchError
            The calls of the ranks differ (GC-MISMATCH, GC-SHAPE, GC-DTYPE, GC-OP, GC-ROOT).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        reduce_scatter : Blocks of equal lengths.

        References
        ----------
        MPI-5.0, 6.10.2.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.reduce_scatter_v(numpy.array([1, 2, 3]), [1, 2]), 2)
        [array([2]), array([4, 6])]
        """
        return self._calls.do("reduce_scatter_v counts", op, counts, algorithm, x, out, dtype, stream, async_op)

    # ------------------------------------------------------------------------------------------------- pickled objects

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the list of all ranks' objects, in rank order, on every rank.

        Parameters
        ----------
        obj : object
            Any object that can be pickled.

        Returns
        -------
        list
            Object i is a copy of rank i's.

        Raises
        ------
        Exception
            The pickling of an object fails, on the rank of the object; PeerError on the other ranks (GC-PEER).

        See Also
        --------
        all_gather : Arrays, without pickling.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.all_gather_object({"rank": comm.rank}), 2)[0]
        [{'rank': 0}, {'rank': 1}]
        """
        return objects.all_gather(self, obj)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the list of all ranks' objects, in rank order, on `root`; None elsewhere.

        Parameters
        ----------
        obj : object
            Any object that can be pickled.
        root : int, optional
            The rank of the root.

        Returns
        -------
        list or None
            The objects on the root, None on the other ranks.

        Raises
        ------
        Exception
            The pickling of an object fails, on the rank of the object; PeerError on the other ranks (GC-PEER).

        See Also
        --------
        gather : Arrays, without pickling.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.gather_object("ab"[comm.rank]), 2)
        [['a', 'b'], None]
        """
        return objects.gather(self, obj, root)

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Return the root's object, a copy on other ranks.

        Parameters
        ----------
        obj : object, optional
            The object on the root; ignored on the other ranks.
        root : int, optional
            The rank of the root.

        Returns
        -------
        object
            The root's object.

        Raises
        ------
        Exception
            The pickling of an object fails, on the rank of the object; PeerError on the other ranks (GC-PEER).

        See Also
        --------
        broadcast : Arrays, without pickling.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.broadcast_object({"lr": 0.1} if comm.rank == 0 else None), 2)[1]
        {'lr': 0.1}
        """
        return objects.broadcast(self, obj, root)

    def scatter_object(self, objs: Any = None, root: int = 0) -> Any:
        """Return a copy of object `rank` of the root's list.

        Parameters
        ----------
        objs : list or None, optional
            `size` objects on the root; ignored on the other ranks.
        root : int, optional
            The rank of the root.

        Returns
        -------
        object
            The object of this rank.

        Raises
        ------
        Exception
            The pickling of an object fails, on the rank of the object; PeerError on the other ranks (GC-PEER).

        See Also
        --------
        scatter : Arrays, without pickling.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.scatter_object(["a", "b"] if comm.rank == 0 else None), 2)
        ['a', 'b']
        """
        return objects.scatter(self, objs, root)

    # ---------------------------------------------------------------------------- messages, groups, parts of the ranks

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` to rank `dst`, for a `recv` there with the same `tag`.

        Parameters
        ----------
        x : array of shape s
            The message: NumPy's or CuPy's array.
        dst : int
            The rank that receives. To ``gpucoll.PROC_NULL``, or mpi4py's, nothing is sent.
        tag : int, optional
            The number of the message, 0 to 32767; sender and receiver use the same.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        None or Work
            None, or the handle of the message with ``async_op=True``.

        Raises
        ------
        ArgumentError
            A wrong rank or tag (GC-ROOT, GC-TAG).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        recv : The other end.
        sendrecv : Both ends at once.
        group : Several messages together.

        References
        ----------
        MPI-5.0, 3.2.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> def program(comm):
        ...     x = numpy.array([1.5, 2.5])
        ...     if comm.rank == 0:
        ...         comm.send(x, dst=1, tag=3)
        ...     else:
        ...         return comm.recv(numpy.empty(2), src=0, tag=3)
        >>> gc.run_local(program, 2)[1]
        array([1.5, 2.5])
        """
        return self._points.make("send", x, dst, None, -1, tag, async_op=async_op)

    @overloads.shaped(overloads.Receiving)
    def recv(self, out: Any, src: int = ANY_SOURCE, tag: int = 0, status: Any = None, *, async_op: bool = False) -> Any:
        """Receive a message from rank `src` into `out`, and return `out`.

        The receive takes the first message available; messages of one rank are received in the order sent. A receive
        from a given rank has precedence if it begins before the message is available. From PROC_NULL nothing is
        received, and `out` is unchanged.

        NCCL has no wildcards, so a receive from any rank, or with any tag, into a GPU array raises UsageError, as does
        ``ANY_TAG`` if messages go through a store.

        Parameters
        ----------
        out : array of shape s
            The place of the message.
        src : int, optional
            The rank that sends; on the host also ``gpucoll.ANY_SOURCE``, or mpi4py's.
        tag : int, optional
            The tag of the message, 0 to 32767; on the host also ``gpucoll.ANY_TAG``, or mpi4py's.
        status : Status, MPI.Status or None, optional
            Is set to source, tag and bytes of the message.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array of shape s, or Work
            `out` itself, or the handle with ``async_op=True``.

        Raises
        ------
        MismatchError
            The message has another length, or, on the host, another dtype (GC-SHAPE, GC-DTYPE). `out` is then
            unchanged, with one exception: a message of another length by MPI, UCX, a store or between threads may
            overwrite the first part of `out`.
        UsageError
            A wildcard where there is none (GC-WILDCARD).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        send : The other end.
        probe : The length before the receive.

        References
        ----------
        MPI-5.0, 3.2.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> def program(comm):
        ...     x = numpy.array([1.5, 2.5])
        ...     if comm.rank == 0:
        ...         comm.send(x, dst=1, tag=3)
        ...     else:
        ...         return comm.recv(numpy.empty(2), src=0, tag=3)
        >>> gc.run_local(program, 2)[1]
        array([1.5, 2.5])
        """
        return self._points.make("recv", None, -1, out, src, tag, status, async_op=async_op)

    def sendrecv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` to rank `dst` while receiving `out` from rank `src`; return `out`.

        Parameters
        ----------
        x : array of shape s
            The message to send.
        out : array
            The place of the message received.
        dst : int
            The rank that receives.
        src : int
            The rank that sends.
        tag : int, optional
            The number of the message, 0 to 32767; sender and receiver use the same.
        async_op : bool, optional
            True returns a `Work` at once.

        Returns
        -------
        array or Work
            `out` itself, or the handle with ``async_op=True``.

        Raises
        ------
        MismatchError
            The message has another length or dtype than `out` (GC-SHAPE, GC-DTYPE).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        group : Several messages together.

        References
        ----------
        MPI-5.0, 3.11.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> def shifted(comm):
        ...     right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        ...     return comm.sendrecv(numpy.array([comm.rank]), numpy.empty(1, int), dst=right, src=left)
        >>> gc.run_local(shifted, 3)
        [array([2]), array([0]), array([1])]
        """
        return self._points.make("sendrecv", x, dst, out, src, tag, async_op=async_op)

    @overloads.shaped(overloads.Probing)
    def probe(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Wait for a message available to `recv`, and return its status.

        The message stays available. `count` is in bytes; for a message above 1 GiB it may be that of the first piece.

        Parameters
        ----------
        src : int, optional
            The rank that sends; ``gpucoll.ANY_SOURCE`` is any.
        tag : int, optional
            The tag; ``gpucoll.ANY_TAG`` is any.
        status : Status, MPI.Status or None, optional
            Is set to source, tag and bytes of the message.

        Returns
        -------
        Status
            Source, tag and bytes of the message: `status` if given.

        Raises
        ------
        UsageError
            The device is emulated: only messages of the host can be probed (GC-WILDCARD).
        RankFailedError or CollectiveTimeout
            A rank has ended (GC-RANK), or has not come within `timeout` seconds (GC-TIMEOUT).

        See Also
        --------
        iprobe : Without waiting.

        References
        ----------
        MPI-5.0, 3.8.1.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> def program(comm):
        ...     if comm.rank == 0:
        ...         comm.send(numpy.zeros(3), dst=1, tag=5)
        ...         return None
        ...     seen = comm.probe()
        ...     comm.recv(numpy.empty(3), src=0, tag=5)
        ...     return seen
        >>> gc.run_local(program, 2)[1]
        Status(source=0, tag=5, count=24)
        """
        return self._points.probe(src, tag, Status() if status is None else status)

    def iprobe(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Status | None:
        """Return the status of a message available to `recv`, None without one; never wait.

        Parameters
        ----------
        src : int, optional
            The rank that sends; ``gpucoll.ANY_SOURCE`` is any.
        tag : int, optional
            The tag; ``gpucoll.ANY_TAG`` is any.
        status : Status, MPI.Status or None, optional
            Is set to source, tag and bytes of the message.

        Returns
        -------
        Status or None
            Source, tag and bytes of the message, as of `probe`.

        Raises
        ------
        UsageError
            The device is emulated: only messages of the host can be probed (GC-WILDCARD).

        See Also
        --------
        probe : With waiting.

        References
        ----------
        MPI-5.0, 3.8.1.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.iprobe(), 2)
        [None, None]
        """
        return self._points.iprobe(src, tag, Status() if status is None else status)

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Run all calls of the block together at its end; their results are valid after the block.

        All messages between two ranks start before the first wait; collectives follow in the order of the calls. On a
        GPU the collectives wait for the messages, as on one stream. So the other rank may not make its end of a message
        after its calls of these collectives, unless in a group with them.

        Returns
        -------
        context manager
            For a ``with`` block; its value is None.

        Raises
        ------
        UsageError
            Groups do not nest (GC-GROUP).

        See Also
        --------
        sendrecv : One message in each direction.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> def swapped(comm):
        ...     out, other = numpy.empty(1, int), 1 - comm.rank
        ...     with comm.group():
        ...         comm.send(numpy.array([comm.rank]), dst=other)
        ...         comm.recv(out, src=other)
        ...     return out
        >>> gc.run_local(swapped, 2)
        [array([1]), array([0])]
        """
        return self._points.group()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks of the same `color`, ordered by `key` and rank.

        A collective call; the options are inherited.

        Parameters
        ----------
        color : int or None
            The number of this rank's part; None: in no part.
        key : int, optional
            The place among the ranks of the part.

        Returns
        -------
        Communicator or None
            The communicator of the part; None if `color` is None.

        Raises
        ------
        ArgumentError
            A wrong color or key (GC-SPLIT); PeerError on the other ranks.

        See Also
        --------
        shrink : The surviving ranks.

        References
        ----------
        MPI-5.0, 7.4.2.

        Examples
        --------
        >>> import gpucoll as gc
        >>> def parts(comm):
        ...     with comm.split(comm.rank % 2) as part:
        ...         return comm.rank, part.rank, part.size
        >>> gc.run_local(parts, 4)
        [(0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 1, 2)]
        """
        return self._points.split(color, key, self._over)

    # ---------------------------------------------------------------------------------------- planned calls and memory

    def plan(self, collective: CollectiveName | Literal["send", "recv", "sendrecv"], x: Any = None, out: Any = None,
             **options: Any) -> PersistentCall:
        """Return a callable that repeats `collective` on `x` and `out`; executor and algorithm are chosen once.

        If `out` is None, the result is allocated once. The callable keeps the arrays; their content may change between
        calls. `plan` itself sends no data. On a GPU a call enqueues work on `stream` (None: CuPy's current stream), and
        can be captured in a CUDA graph. All ranks must make the same plans and calls.

        The ranks of a message can also plan the message: ``plan("send", x, dst=, tag=0)``, ``plan("recv", out=, src=,
        tag=0, status=None)`` and ``plan("sendrecv", x, out, dst=, src=, tag=0)``.

        Parameters
        ----------
        collective : str
            The name of the method, such as "all_reduce".
        x : array or None, optional
            The input, as for the collective.
        out : array or None, optional
            The output, as for the collective.
        **options : object
            The options of the collective: op, root, dtype, algorithm, stream.

        Returns
        -------
        PersistentCall
            Repeats the collective when called, and returns the result.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-ALGO, GC-DTYPE).
        TypeError
            An unknown option.

        See Also
        --------
        empty : Memory for the fastest calls.

        References
        ----------
        MPI-5.0, 6.13.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> def program(comm):
        ...     x = numpy.zeros(2)
        ...     again = comm.plan("all_reduce", x)
        ...     totals = []
        ...     for step in range(3):
        ...         x[:] = step
        ...         totals.append(float(again()[0]))
        ...     return totals
        >>> gc.run_local(program, 2)[0]
        [0.0, 2.0, 4.0]
        """
        return planned(self, collective, x, out, **options)

    def empty(self, shape: Any, dtype: Any, device: str | None = None) -> Any:
        """Return an array in memory mapped by all ranks of this node; its elements are undefined.

        A collective call. A later call reuses a block once every rank has dropped its array. On a GPU, the current
        stream of this call waits for what still runs on the old array. After `close` the memory is freed with the last
        array.

        Parameters
        ----------
        shape : int or tuple of int
            The shape, the same on all ranks.
        dtype : dtype
            The dtype of the elements, the same on all ranks.
        device : str or None, optional
            "cpu" or "cuda"; None is "cpu".

        Returns
        -------
        array
            A NumPy or CuPy array: collectives on it need no copies.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong shape, dtype or device (GC-SHAPE, GC-DTYPE, GC-DEVICE).
        MismatchError
            Shape, dtype or device differ between ranks.
        PeerError
            Another rank has refused its arguments (GC-PEER).
        BackendError
            There is no memory, or no GPU (GC-MEMORY, GC-DEVICE).

        See Also
        --------
        zeros : With zeros.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.empty((2, 3), "float32").shape, 2)
        [(2, 3), (2, 3)]
        """
        return self._memory.empty("empty", shape, dtype, device)

    def zeros(self, shape: Any, dtype: Any, device: str | None = None) -> Any:
        """Return an array of zeros in memory mapped by all ranks of this node.

        A collective call; as `empty` in all else.

        Parameters
        ----------
        shape : int or tuple of int
            The shape, the same on all ranks.
        dtype : dtype
            The dtype of the elements, the same on all ranks.
        device : str or None, optional
            "cpu" or "cuda"; None is "cpu".

        Returns
        -------
        array
            A NumPy or CuPy array: collectives on it need no copies.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong shape, dtype or device (GC-SHAPE, GC-DTYPE, GC-DEVICE).
        MismatchError
            Shape, dtype or device differ between ranks.
        PeerError
            Another rank has refused its arguments (GC-PEER).
        BackendError
            There is no memory, or no GPU (GC-MEMORY, GC-DEVICE).

        See Also
        --------
        empty : Without a value.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.zeros(3, "int32"), 2)[0]
        array([0, 0, 0], dtype=int32)
        """
        array = self._memory.empty("zeros", shape, dtype, device)
        with self._core.current(None, [array]):
            array[...] = 0
        return array

    # ---------------------------------------------------------------------------------------- explanations and figures

    def explain(self, collective: CollectiveName, nbytes: int, dtype: Any = "float32",
                device: str | None = None) -> Explanation:
        """Return why ``algorithm="auto"`` chooses its algorithm for `nbytes` bytes.

        A reduction is a sum. The result prints as a table and is a dictionary. After calls of about this size on host
        arrays it also has measured seconds. Users' own algorithms come last, because "auto" never chooses them. No rank
        waits for another.

        Parameters
        ----------
        collective : str
            The name of the collective, such as "all_reduce".
        nbytes : int
            Bytes, the larger of input and output.
        dtype : dtype, optional
            The dtype of the elements.
        device : str or None, optional
            "cpu", "cuda" or "emulated"; None is the device of NumPy arrays.

        Returns
        -------
        gpucoll.tuner.explanation.Explanation
            The candidates with predicted seconds, the fastest first, and the reason.

        Raises
        ------
        ArgumentError or DtypeError
            An unknown collective, device or dtype (GC-COLLECTIVE, GC-DEVICE, GC-DTYPE).

        See Also
        --------
        gpucoll.algorithms : All names.

        Examples
        --------
        >>> import gpucoll as gc
        >>> found = gc.run_local(lambda comm: comm.explain("all_reduce", 1024), 4)[0]
        >>> "all_reduce" in str(found)
        True
        """
        return explain(self._core, collective, nbytes, dtype, device)

    def check_numerics(self, x: Any, name: str = "x") -> None:
        """Raise ArgumentError on every rank if a rank's `x` has a NaN or an infinity.

        A collective call. Cost: one host message.

        Parameters
        ----------
        x : array of any shape
            The array to look at.
        name : str, optional
            The name of the array in the error's text.

        Raises
        ------
        ArgumentError
            The error has `name` for the array, the first such rank, and the first index and value on that rank;
            ``ranks`` lists all such ranks (GC-NUMERICS).

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.check_numerics(numpy.array([1.0, comm.rank / 2])), 2)
        [None, None]
        """
        check_numerics(self._core, x, name)

    def stats(self) -> Stats:
        """Return figures of all completed collective calls of this rank, by collective and size class.

        No rank waits for another, and the figures remain after `close`. The page on performance has the limits for each
        executor.

        Returns
        -------
        dict
            The keys are pairs such as ``("all_reduce", 4096)``. The size class is the largest power of two not above
            the bytes of the call (the larger of input and output over all ranks), 0 for a call without data. The values
            have the keys ``calls``, ``bytes``, ``own_seconds`` (this rank's delay behind the first rank before calls,
            at most the time since its last call), ``waiting_seconds`` (in calls, until the other ranks arrived) and
            ``moving_seconds`` (the rest of the calls).

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: (comm.barrier(), comm.stats()["barrier", 0]["calls"])[1], 2)
        [1, 1]
        """
        return self._core.record.stats()

    # ---------------------------------------------------------------------------------------------- lost and new ranks

    def shrink(self) -> Communicator:
        """Return a communicator of the surviving ranks, in the order of their old ranks.

        A collective call of all surviving ranks; this communicator fails and is closed, and a rank waiting in another
        call is woken. A rank does not survive if its process has ended, or if the rank has closed this communicator
        after the failure. The launcher must let survivors live, as ``gpucoll run --standalone --survive`` and Open
        MPI's ``mpiexec --continuous`` do. Survivors go on without MPI: ``mpi`` is then None. Under Open MPI's ``mpiexec
        --with-ft ulfm``, MPI itself shrinks.

        If a further rank dies meanwhile, the others begin again without it. Repeated after a `replace` without
        newcomers, the call returns the survivors' communicator.

        Returns
        -------
        Communicator
            The communicator of the survivors.

        Raises
        ------
        CollectiveTimeout
            A living rank does not come within ``timeout`` seconds; the call may be repeated (GC-TIMEOUT).
        RankFailedError
            Ranks still die then (GC-RANK).
        UsageError
            MPI ends with its first process and the ranks cannot go on without MPI: with ``executor="native"``, or on
            several hosts that do not reach rank 0 by TCP (GC-GROW).

        See Also
        --------
        replace : With newcomers in the lost places.

        References
        ----------
        MPI Forum, User Level Failure Mitigation.

        Examples
        --------
        >>> import gpucoll as gc
        >>> def halved(comm):
        ...     if comm.rank % 2:
        ...         return None  # these ranks leave
        ...     with comm.shrink() as survivors:
        ...         return survivors.rank, survivors.size
        >>> gc.run_local(halved, 4)
        [(0, 2), None, (1, 2), None]
        """
        return elastic.shrink(self)

    def grow(self, size: int, timeout: float = NEWCOMER_TIMEOUT) -> Communicator:
        """Return a communicator of `size` ranks: members keep their ranks, newcomers follow.

        A collective call of all members. Newcomers call `gpucoll.join`: they connect to `address`, prove themselves by
        GPUCOLL_SECRET, and inherit the options of the members. This communicator remains usable. The new communicator
        works without MPI: its ``mpi`` is None.

        Parameters
        ----------
        size : int
            The number of ranks with the newcomers.
        timeout : float, optional
            Seconds to wait for newcomers.

        Returns
        -------
        Communicator
            The communicator of members and newcomers.

        Raises
        ------
        CollectiveTimeout
            Too few newcomers within `timeout` seconds (GC-TIMEOUT).
        RankFailedError
            A member has died (GC-RANK).
        ArgumentError
            A wrong `size` (GC-SIZE); PeerError on the other ranks.
        MismatchError
            The sizes differ.
        UsageError
            There is no secret, or the ranks are threads or cannot go on without MPI, see `shrink` (GC-GROW).

        See Also
        --------
        gpucoll.join : The newcomer's call.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.address, 2)  # threads have no address, and so no newcomers
        [None, None]
        """
        return elastic.grow(self, size, range(self.size), timeout, "grow")

    def replace(self, timeout: float = NEWCOMER_TIMEOUT) -> Communicator:
        """Return a communicator of as many ranks as before: newcomers take the places of lost ranks.

        A collective call of all surviving ranks, which keep their ranks: `shrink`, then `grow`; this communicator fails
        and is closed. Ranks that die in the meantime are replaced too. After a CollectiveTimeout without newcomers,
        `replace` can be called again, and `shrink` returns the communicator of the survivors.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for newcomers.

        Returns
        -------
        Communicator
            The communicator of survivors and newcomers.

        Raises
        ------
        GpucollError
            The errors of `shrink` and `grow`.

        See Also
        --------
        shrink : Without newcomers.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.size, 2)  # what `replace` keeps
        [2, 2]
        """
        return elastic.replace(self, timeout)

    # --------------------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Complete all running operations and release all resources; idempotent.

        A collective call unless the communicator has failed. If another rank has failed, or does not call `close`
        within the timeout, MPI's communicators are not freed: after a free on some ranks only, late messages could
        reach the next communicators. Threads as ranks do not wait for each other: the last `close` frees the memory of
        all.

        Raises
        ------
        GpucollError
            The error of an incomplete call on a GPU, unless a call or a wait has already raised it.

        Examples
        --------
        >>> import gpucoll as gc
        >>> comm, = gc.init_local(1)
        >>> comm.close()
        >>> comm.closed
        True
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

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name not in _OTHERS]

    def __repr__(self) -> str:
        return f"<gpucoll.Communicator rank={self.rank} size={self.size}>"


def _of_others(name: str, own: str, comm: Communicator) -> Any:
    raise AttributeError(f"{name}: a gpucoll communicator has {own!r}; gpucoll.mpi.Comm has mpi4py's calls")


# Names of other libraries. Properties, because `__getattr__` would slow down each call.
_OTHERS = {name: own for own, names in {
        "all_gather": "Allgather allgather", "all_gather_v": "Allgatherv allgatherv",
        "all_reduce": "Allreduce allreduce", "all_to_all": "Alltoall alltoall", "all_to_all_v": "Alltoallv alltoallv",
        "barrier": "Barrier", "broadcast": "Bcast bcast", "exscan": "Exscan", "gather": "Gather",
        "gather_v": "Gatherv gatherv", "rank": "Get_rank get_rank", "size": "Get_size get_size world_size",
        "recv": "Recv Irecv irecv", "send": "Send Isend isend", "reduce": "Reduce",
        "reduce_scatter": "Reduce_scatter_block reduce_scatter_tensor", "reduce_scatter_v": "Reduce_scatter",
        "scan": "Scan", "scatter": "Scatter", "scatter_v": "Scatterv scatterv", "sendrecv": "Sendrecv",
        "split": "Split new_group"}.items() for name in names.split()}
for _name, _own in _OTHERS.items():
    setattr(Communicator, _name, property(functools.partial(_of_others, _name, _own)))
