"""The collectives whose shapes are alike on all ranks. All have the options of `Collectives.all_reduce`."""

from __future__ import annotations

from typing import Any

import numpy

from gpucoll.arrays import NOTHING, Sizes, check_input, prepare_scatter
from gpucoll.communicator.core import How, Key, counted
from gpucoll.communicator.headers import Headers, header_of
from gpucoll.communicator.shapes import Moving, MovingToRoot, Overwriting, Reducing, ReducingToRoot, shaped
from gpucoll.dtypes import numpy_dtype
from gpucoll.errors import ArgumentError, GpucollError


class Collectives(Headers):
    """Methods of `Communicator`."""

    @shaped(Reducing)
    def all_reduce(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                   stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all ranks' `x` (shape s) on every rank.

        `out` (shape s; ``out=x`` is in place) takes the result, else it is allocated. `op`: sum prod min max avg
        band bor bxor land lor lxor, a `ReduceOp`, an mpi4py op, `premul_sum` or `elementwise_op`. `dtype` reads an
        unsigned carrier as another dtype. `algorithm`: a name of ``gpucoll.algorithms("all_reduce")``, "native" or
        "auto". `async_op` returns a `Work`. GPU arrays are worked on in `stream`, CuPy's current one where it is None:
        the call enqueues and returns. Raises ArgumentError and DtypeError before data moves. MPI-5.0, 6.9.6.
        """
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._express("all_reduce", op, 0, algorithm, x, out)
            if result is not None:
                return result
        return self._collective("all_reduce", x, out, op, dtype, 0, algorithm, async_op, stream)

    @shaped(ReducingToRoot)
    def reduce(self, x: Any, out: Any = None, op: Any = "sum", root: int = 0, *, dtype: Any = None,
               algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of all `x` (shape s) on `root`, None elsewhere; no `x` changes. MPI-5.0, 6.9.1."""
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._express("reduce", op, root, algorithm, x, out)
            if result is not None:
                return None if result is self._engine else result  # which stand for no result
        return self._collective("reduce", x, out, op, dtype, root, algorithm, async_op, stream)

    @shaped(Overwriting)
    def broadcast(self, x: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Overwrite every rank's `x` (shape s) with the root's and return it. MPI-5.0, 6.4."""
        if stream is None and not async_op and self._group is None:
            result = self._express("broadcast", "", root, algorithm, x, None)
            if result is not None:
                return result
        return self._collective("broadcast", x, None, "", None, root, algorithm, async_op, stream)

    @shaped(Moving)
    def all_gather(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return all ranks' `x` (shape s) in rank order, shape (size, \\*s), on every rank. MPI-5.0, 6.7."""
        if stream is None and not async_op and self._group is None:
            result = self._express("all_gather", "", 0, algorithm, x, out)
            if result is not None:
                return result
        return self._collective("all_gather", x, out, "", None, 0, algorithm, async_op, stream)

    @shaped(MovingToRoot)
    def gather(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
               async_op: bool = False) -> Any:
        """Return all ranks' `x` (shape s) in rank order, shape (size, \\*s), on `root`; else None. MPI-5.0, 6.5."""
        if stream is None and not async_op and self._group is None:
            result = self._express("gather", "", root, algorithm, x, out)
            if result is not None:
                return None if result is self._engine else result
        return self._collective("gather", x, out, "", None, root, algorithm, async_op, stream)

    def scatter(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                async_op: bool = False) -> Any:
        """Return block `rank` (shape s) of the root's `x` (shape (size, \\*s); None elsewhere). MPI-5.0, 6.6.

        One host message tells the other ranks shape and dtype, or that the root refuses its own arguments: PeerError.
        """
        is_plain = stream is None and not async_op and self._group is None
        found = self._express("scatter", "", root, algorithm, x, out) if is_plain else None
        if found is not None and found is not self._inbox:
            return found
        who = self._sizes("scatter", root)
        source: Any = None
        row = found
        if row is None:
            news: dict[str, Any] = {}
            if self.rank == who.root:
                with self._current(stream, [x]):
                    source, news = self._root_blocks(x)
            row = self._tell(who.root, news, "scatter")
        told = self._read_from(who.root, row, "scatter")
        return self._scatter_told(source, out, who, How(algorithm, async_op, stream), told, row if is_plain else None)

    @counted
    def _scatter_told(self, source: Any, out: Any, who: Sizes, how: How, told: dict[str, Any], row: Any) -> Any:
        """Scatter what all ranks know of; calls like one that told so by `row` are the engine's from then on."""
        shape, dtype, may_learn = tuple(told["shape"]), numpy_dtype(told["dtype"]), row is not None and not told["gpu"]
        same: Key = ("blocks of scatter", "", who.root, how.algorithm) if may_learn else ()
        if may_learn and out is None:
            out = numpy.empty(shape[1:], dtype)
        fits = may_learn and type(out) is numpy.ndarray and out.shape == shape[1:] and out.dtype == dtype
        result = self._express(*same, source, out) if fits else None
        if result is None:
            space = self._told_space("scatter", told, source, out, how.stream)
            call = prepare_scatter(source, out, shape, dtype, who, space)
            result = self._run("scatter", call, how, root=who.root, same=same, x=source, out=out)
        telling = self._telling.get(who.root)
        if fits and telling is not None and self._engine is not None:
            self._engine.tell("scatter", *same, source, result, (telling, row.copy(), self._inbox))
        return result

    def _root_blocks(self, x: Any) -> tuple[Any, dict[str, Any]]:
        """Return the root's array and what is told of it; an error of its own is told, and then raised."""
        try:
            source = check_input("scatter", x)
            if source.ndim == 0 or source.shape[0] != self.size:
                raise ArgumentError(f"scatter: x has shape {source.shape}; its first axis must be {self.size}, a block "
                                    "for each rank", code="GC-SHAPE")
        except GpucollError as error:
            self._told_by(self.rank, {"error": str(error)}, "scatter", mine=error)
        return source, header_of(source)

    @shaped(Reducing)
    def reduce_scatter(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                       stream: Any = None, async_op: bool = False) -> Any:
        """Return block `rank` (shape s) of the reduction of all ranks' `x` (shape (size, \\*s)). MPI-5.0, 6.10.1."""
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._express("reduce_scatter", op, 0, algorithm, x, out)
            if result is not None:
                return result
        return self._collective("reduce_scatter", x, out, op, dtype, 0, algorithm, async_op, stream)

    @shaped(Moving)
    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                   async_op: bool = False) -> Any:
        """Return block `rank` of every rank's `x`, in rank order; both have shape (size, \\*s). MPI-5.0, 6.8."""
        if stream is None and not async_op and self._group is None:
            result = self._express("all_to_all", "", 0, algorithm, x, out)
            if result is not None:
                return result
        return self._collective("all_to_all", x, out, "", None, 0, algorithm, async_op, stream)

    @shaped(Reducing)
    def scan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
             stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` (shape s) of ranks 0 to `rank`. MPI-5.0, 6.11.1."""
        if dtype is None and stream is None and not async_op and self._group is None:
            result = self._express("scan", op, 0, algorithm, x, out)
            if result is not None:
                return result
        return self._collective("scan", x, out, op, dtype, 0, algorithm, async_op, stream)

    @shaped(Reducing)
    def exscan(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
               stream: Any = None, async_op: bool = False) -> Any:
        """Return the reduction of the `x` (shape s) of ranks 0 to `rank` - 1, the op's identity on rank 0.

        MPI-5.0, 6.11.2, where rank 0's result is undefined.
        """
        return self._collective("exscan", x, out, op, dtype, 0, algorithm, async_op, stream)

    def barrier(self, *, algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return when every rank has called it; with `stream` that waits instead of the host. MPI-5.0, 6.3."""
        same = () if async_op or stream is not None or self._group is not None else ("barrier", "", 0, algorithm)
        if same and self._express(*same, None, None) is not None:
            return None
        self._check_usable()
        if stream is None and not self.options.emulated:
            return self._run("barrier", NOTHING, How(algorithm, async_op), same=same)
        space = self._gpu("emulated" if self.options.emulated else "cuda").space(stream)
        return self._run("barrier", NOTHING._replace(space=space), How(algorithm, async_op))
