"""The collectives with the same shapes on all ranks. All take the options of `Collectives.all_reduce`."""

from __future__ import annotations

from typing import Any

import numpy

from gpucoll.arrays import (
    NOTHING,
    Prepared,
    RankInfo,
    as_array,
    block_shape,
    carried_dtype,
    check_input,
    module_of,
    prepare_scatter,
)
from gpucoll.communicator.core import CallOptions, Key, counted
from gpucoll.communicator.gpu import on_side_stream
from gpucoll.communicator.metadata import Metadata, MetadataExchange, metadata_of
from gpucoll.communicator.overloads import Moving, MovingToRoot, Overwriting, Reducing, ReducingToRoot, shaped
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import numpy_dtype, row_of
from gpucoll.core.signature import Signature
from gpucoll.errors import ArgumentError, DtypeError, GpucollError
from gpucoll.executors import ReadyCall
from gpucoll.executors.engine.tables import TEXT
from gpucoll.progress.operations import Operation


class Collectives(MetadataExchange):
    """Methods of `Communicator`: the collectives with the same shapes on all ranks."""

    @shaped(Reducing)
    def all_reduce(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                   stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all ranks' `x` (shape s) on every rank.

        `out` (shape s) receives the result, with ``out=x`` in place; otherwise the result is allocated. `op`: sum prod
        min max avg band bor bxor land lor lxor, a `ReduceOp`, an mpi4py op, `premul_sum` or `elementwise_op`. `dtype`
        reads unsigned integers as another dtype of the same width. `algorithm`: a name of
        ``gpucoll.algorithms("all_reduce")``, "native" or "auto". ``async_op=True`` returns a `Work`. A call on GPU
        arrays only enqueues in `stream`; None is the current stream of CuPy (PyTorch's for its tensors). Raises
        ArgumentError and DtypeError before data moves; MismatchError if the ranks' calls differ, PeerError if another
        rank refuses its arguments, RankFailedError, and CollectiveTimeout at the deadline. MPI-5.0, 6.9.6.
        """
        if dtype is None and stream is None and not async_op and self._group is None:
            # The engine repeats known calls without checks in Python; NotImplemented means an unknown call.
            result = self._fast_path("all_reduce", op, 0, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("all_reduce", x, out, op, dtype, 0, algorithm, async_op, stream)

    @shaped(ReducingToRoot)
    def reduce(self, x: Any, out: Any = None, op: Any = "sum", root: int = 0, *, dtype: Any = None,
               algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all `x` (shape s) on `root`, None elsewhere; no `x` changes. MPI-5.0, 6.9.1."""
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._fast_path("reduce", op, root, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("reduce", x, out, op, dtype, root, algorithm, async_op, stream)

    @shaped(Overwriting)
    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Overwrite every rank's `x` (shape s) with the root's, and return `x`. MPI-5.0, 6.4."""
        if stream is None and not async_op and self._group is None:
            result = self._fast_path("broadcast", "", root, algorithm, x, None)
            if result is not NotImplemented:
                return result
        return self._collective("broadcast", x, None, "", None, root, algorithm, async_op, stream)

    @shaped(Moving)
    def all_gather(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return all ranks' `x` (shape s) in rank order, shape (size, \\*s), on every rank. MPI-5.0, 6.7."""
        if stream is None and not async_op and self._group is None:
            result = self._fast_path("all_gather", "", 0, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("all_gather", x, out, "", None, 0, algorithm, async_op, stream)

    @shaped(MovingToRoot)
    def gather(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
               async_op: bool = False) -> Any:
        """Return all ranks' `x` (shape s) in rank order, shape (size, \\*s), on `root`; else None. MPI-5.0, 6.5."""
        if stream is None and not async_op and self._group is None:
            result = self._fast_path("gather", "", root, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("gather", x, out, "", None, root, algorithm, async_op, stream)

    def scatter(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                async_op: bool = False) -> Any:
        """Return block `rank` (shape s) of the root's `x` (shape (size, \\*s); None elsewhere). MPI-5.0, 6.6.

        The other ranks learn shape and dtype from the root's call descriptor in shared memory, or from one host
        message. If the root refuses its arguments, the other ranks raise PeerError.
        """
        cache_key: Key = ()
        if stream is None and not async_op and self._group is None:
            result = self._fast_path("scatter", "", root, algorithm, x, out)
            if result is not NotImplemented:
                return result
            cache_key = ("scatter", "", root, algorithm) if self._host.shows_calls is not None else ()
        rank_info, options = self._checked_sizes("scatter", root), CallOptions(algorithm, async_op, stream)
        if self.rank != rank_info.root:
            return self._scatter_to(out, rank_info, options, cache_key)
        shows, made = self._host.shows_calls if cache_key else None, None
        metadata: Metadata = {}
        try:
            with self._current(stream, [x]):
                source = check_input("scatter", x)
            metadata = metadata_of(source, (self.size, *block_shape("scatter", source, self.size)))
            if shows and not metadata["gpu"] and not self.options.emulated:
                made = self._scattering(x, source, out, rank_info, options, metadata)
        except (GpucollError, MemoryError) as error:
            # Without call descriptors the other ranks wait for this message.
            if shows is None:
                self._broadcast_metadata(self.rank, {"error": str(error)}, "scatter", mine=error)
            known = {"dtype": metadata["dtype"], "shape": (*metadata["shape"][1:],)} if metadata else {}
            self._refuse(error, Signature("scatter" if known else "", root=rank_info.root, **known))
            raise
        # The call descriptor replaces the message only if the executor shows it, and its text fits.
        executor = made and made[0].call.executor
        if made and getattr(executor, "shows_calls", executor) is shows and len(made[0].request.description) < TEXT:
            return self._begin(*made, options, cache_key, source, out)
        self._broadcast_metadata(self.rank, metadata, "scatter")
        # Without a key: each call needs the message.
        return self._scatter_known(x, source, out, rank_info, options, metadata, ())

    def _scatter_to(self, out: Any, rank_info: RankInfo, options: CallOptions, cache_key: Key) -> Any:
        metadata = self._shown_by(rank_info, out, options) or self._broadcast_metadata(rank_info.root, {}, "scatter")
        return self._scatter_known(None, None, out, rank_info, options, metadata, cache_key)

    @counted
    def _scatter_known(self, x: Any, source: Any, out: Any, rank_info: RankInfo, options: CallOptions,
                       metadata: Metadata, cache_key: Key) -> Any:
        """Scatter, with the root's metadata known."""
        made = self._scattering(x, source, out, rank_info, options, metadata)
        return self._begin(*made, options, cache_key, source, out)

    def _scattering(self, x: Any, source: Any, out: Any, rank_info: RankInfo, options: CallOptions,
                    metadata: Metadata) -> tuple[ReadyCall, Prepared]:
        space = self._metadata_space("scatter", metadata, x, out, options.stream)
        call = prepare_scatter(source, out, tuple(metadata["shape"]), numpy_dtype(metadata["dtype"]), rank_info, space)
        call = on_side_stream(call) if options.async_op else call
        return self._resolve(COLLECTIVES["scatter"], call, options, self.executor, root=rank_info.root), call

    def _shown_by(self, rank_info: RankInfo, out: Any, options: CallOptions) -> Metadata | None:
        """Return the metadata in the root's call descriptor; None if the root sends a message or makes another call.

        If the root refuses its arguments, an error in this rank's own arguments comes first, else PeerError.
        """
        shows, description = self._host.shows_calls, ""
        if shows is None:
            return None

        def shown() -> bool:
            nonlocal description
            self._check_usable()
            description = shows.next_call(rank_info.root)
            return description is not None

        # `look` polls the root's call descriptor.
        def look() -> Operation:
            try:
                yield shown
            except BaseException as error:
                if not self.closed:
                    # The root may run ahead of this rank: only this note ends the root's wait for this rank later.
                    self._host.fail(error)
                raise

        self._waits.run(look(), "scatter")
        call = Signature.decode(description)
        metadata: Metadata | None = None
        if (call.collective, call.root, call.where, call.header) == ("scatter", rank_info.root, "", "") and call.dtype:
            metadata = {"shape": [self.size, *call.shape], "dtype": call.dtype, "gpu": False}
        if not call.refusal:
            return metadata
        if metadata is not None:
            counted(Collectives._scattering)(self, None, None, out, rank_info, options, metadata)
        self._waits.run(shows.compare(Signature("scatter", root=rank_info.root).encode()), "scatter")
        return None

    @shaped(Reducing)
    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                       stream: Any = None, async_op: bool = False) -> Any:
        """Return block `rank` (shape s) of the reduction of all ranks' `x` (shape (size, \\*s)). MPI-5.0, 6.10.1."""
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._fast_path("reduce_scatter", op, 0, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("reduce_scatter", x, out, op, dtype, 0, algorithm, async_op, stream)

    @shaped(Moving)
    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return block `rank` of every rank's `x`, in rank order; both have shape (size, \\*s). MPI-5.0, 6.8."""
        if stream is None and not async_op and self._group is None:
            result = self._fast_path("all_to_all", "", 0, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("all_to_all", x, out, "", None, 0, algorithm, async_op, stream)

    @shaped(Reducing)
    def scan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
             stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` (shape s) of ranks 0 to `rank`. MPI-5.0, 6.11.1."""
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._fast_path("scan", op, 0, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("scan", x, out, op, dtype, 0, algorithm, async_op, stream)

    @shaped(Reducing)
    def exscan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
               stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` (shape s) of ranks 0 to `rank` - 1, the op's identity on rank 0.

        MPI-5.0, 6.11.2, with an undefined result on rank 0.
        """
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._fast_path("exscan", op, 0, algorithm, x, out)
            if result is not NotImplemented:
                return result
        return self._collective("exscan", x, out, op, dtype, 0, algorithm, async_op, stream)

    def maxloc(self, x: Any, index: Any = None) -> tuple[Any, Any]:
        """Return the maximum of all ranks' `x` (shape s), element by element, and its `index`, on every rank.

        `index` (integers, shape s) gives an origin for each element of `x`; None means the number of the rank, as
        int64. Of equal values the lowest index counts. NaN is the maximum, as in `numpy.argmax`. Cost: two all-reduces
        on any executor, "max" of `x` and "min" of the indices of the maxima; the host waits for nothing else. Not in a
        group (UsageError). Raises ArgumentError and DtypeError before data moves. MPI-5.0, 6.9.4.

        >>> import gpucoll as gc
        >>> gc.run_local(lambda comm: comm.maxloc(numpy.array([3 - comm.rank, 4])), 2)[0]
        (array([3, 4]), array([0, 0]))
        """
        return self._located("maxloc", "max", x, index)

    def minloc(self, x: Any, index: Any = None) -> tuple[Any, Any]:
        """Return the minimum of all ranks' `x` and its `index`, as `maxloc`; NaN is the minimum."""
        return self._located("minloc", "min", x, index)

    @counted
    def _located(self, name: str, op: str, x: Any, index: Any) -> tuple[Any, Any]:
        self._check_apart(name)
        with self._current(None, [x]):
            source = check_input(name, x)
            indices = module_of(source).full(source.shape, self.rank, "int64") if index is None \
                else as_array(name, "index", index)
        self._space(name, x).check(name, "index", indices)
        if row_of(indices.dtype).kind != "int" or carried_dtype(x):
            raise DtypeError(f"{name}: x is an array of {x.dtype}, index of {indices.dtype}; index must be integers, "
                             "and x of a dtype known to CuPy, so not float8")
        if indices.shape != source.shape:
            raise ArgumentError(f"{name}: index has shape {indices.shape}, expected {source.shape}, one for each "
                                "element of x", code="GC-SHAPE")
        values = self.all_reduce(x, op=op)
        with self._current(None, [x]):
            is_there = (source == values) | (source != source)  # NaN equals nothing, and wins
            # Ranks without the extreme give the largest integer, which loses in "min".
            indices = module_of(source).where(is_there, indices, indices.dtype.type(numpy.iinfo(indices.dtype).max))
        return values, self.all_reduce(indices, op="min")

    def barrier(self, *, algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return when every rank has called `barrier`; with `stream` the stream waits, not the host. MPI-5.0, 6.3."""
        cache_key = () if async_op or stream is not None or self._group is not None else ("barrier", "", 0, algorithm)
        if cache_key and self._fast_path(*cache_key, None, None) is not NotImplemented:
            return None
        return self._barrier(CallOptions(algorithm, async_op, stream), cache_key)

    @counted
    def _barrier(self, options: CallOptions, cache_key: Key) -> Any:
        self._check_usable()
        if options.stream is None and not self.options.emulated:
            return self._run("barrier", NOTHING, options, cache_key=cache_key)
        space = self._gpu("emulated" if self.options.emulated else "cuda").space(options.stream)
        return self._run("barrier", NOTHING._replace(space=space), options)
