"""Collectives in block-scaled formats: a quarter or an eighth of the bytes of float32, with an error bound.

    conversion   to and from the formats; the error bound
    steps        the two steps of a sum, also of compressed gradients

The table of the formats is in `gpucoll.core.formats`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import numpy

from gpucoll import Communicator, internal
from gpucoll.block_scaled.conversion import dequantise, largest_and_errors, largest_magnitude, quantise, wide_dtype
from gpucoll.block_scaled.steps import ScaledMessages, messages, two_steps
from gpucoll.errors import ArgumentError, ClosedError, DtypeError, GpucollError
from gpucoll.internal import FORMATS, Array, Format, on_gpu

__all__ = ["FORMATS", "BlockScaledCollectives", "Bounded"]

SCALED_OPS = ("sum", "avg")
# Elements of a segment: while one segment is on the way, the next is converted. A multiple of all blocks: the blocks of
# a segment are blocks of the whole array.
SEGMENT = 1 << 20
# What ranks compare before data is sent, and the code of the error.
COMPARED = {"call": "GC-MISMATCH", "shape": "GC-SHAPE", "dtype": "GC-DTYPE", "gpu": "GC-DEVICE", "op": "GC-OP",
            "format": "GC-COMPRESSION"}
# Half of the spacing of numbers, relative to a number and at the least number.
ROUNDING = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134), "float32": (2.0**-24, 2.0**-150),
            "float64": (2.0**-53, 0.0)}
RANGE = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.40e38, "float64": 1.79e308}


class Bounded(NamedTuple):
    """A result, and the error bound of its elements.

    The error is the distance to the exact sum (or mean, or value). The bound is the same on every rank for `all_reduce`
    and `all_gather`. It is infinite if the result has a NaN, or if the result or the sum may leave the dtype's range.

    Parameters
    ----------
    result : array
        The result.
    bound : array without axes
        A float64, on the host or on the GPU of the result.

    Examples
    --------
    >>> from gpucoll.block_scaled import Bounded
    >>> Bounded(1.5, 0.0).bound
    0.0
    """

    result: Any
    bound: Any


class BlockScaledCollectives:
    """Collectives on `comm` with messages in a block-scaled format.

    Making the object is a collective call. An element takes 8.25 bits in the mxfp8 formats, 4.25 in mxfp4, 4.5 in
    nvfp4, 8.125 in int8. Sums are computed in float32 (float64 for float64), and are equal on all ranks. Each value is
    rounded once in each direction. On several hosts with equal numbers of ranks, `all_reduce` first adds the arrays of
    each host without rounding to the format, and sends only these sums between hosts; `close`, or a ``with`` block,
    frees the two communicators for this.

    At the start of a call the ranks compare shape, dtype, op and format by one host message, so every rank raises
    errors before data is sent. Buffers are kept from call to call: on a GPU an object serves one stream, and its calls
    are not for CUDA graphs.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    format : str
        "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4" or "int8", the same on all ranks.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-COMPRESSION, GC-OP, GC-DTYPE, GC-SHAPE).
    MismatchError
        Shape, dtype, op or format differ between ranks (GC-MISMATCH).
    PeerError
        Another rank has refused its arguments (GC-PEER).
    UsageError
        The call is made in an open group (GC-GROUP).

    See Also
    --------
    gpucoll.training.BlockScaled : The same for gradients, with feedback of the error.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.block_scaled import BlockScaledCollectives
    >>> def program(comm):
    ...     with BlockScaledCollectives(comm, "mxfp8_e4m3") as scaled:
    ...         return scaled.all_reduce(numpy.full(64, 1 + comm.rank, "f4"), "avg")
    >>> gc.run_local(program, 2)[0].result[:2]
    array([1.5, 1.5], dtype=float32)
    """

    def __init__(self, comm: Communicator, format: str) -> None:
        error: ArgumentError | None = None
        try:
            self.format: Format = internal.format_of(format)
        except ArgumentError as found:
            error = found
        internal.all_gather_metadata(comm, {}, type(self).__name__, error)
        self._comm, self._is_closed = comm, False
        self._buffers: dict[str, Array] = {}
        self._parts = contextlib.ExitStack()
        # The ranks of this host, and one rank of each host; None and all ranks if this saves nothing.
        self._inner: Communicator | None = None
        self._outer = comm
        hosts = collections.Counter(internal.link_of(comm).place.nodes).values()
        if len(hosts) > 1 and min(hosts) == max(hosts) > 1:
            # Every rank has a color, so that neither split returns None.
            self._inner, self._outer = (self._parts.enter_context(cast(Communicator, comm.split(color)))
                                        for color in (comm.node, comm.local_rank))

    def close(self) -> None:
        """Close the communicators made for several hosts; `comm` stays open.

        A collective call, idempotent.

        Examples
        --------
        >>> import gpucoll as gc
        >>> from gpucoll.block_scaled import BlockScaledCollectives
        >>> gc.run_local(lambda comm: BlockScaledCollectives(comm, "int8").close(), 2)
        [None, None]
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_closed = True
        self._buffers.clear()
        self._parts.__exit__(*error)

    def all_reduce(self, x: Any, op: Any = "sum", out: Any = None) -> Bounded:
        """Return the sum of all ranks' `x` on every rank; the mean for `op` "avg".

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank, of float16, bfloat16, float32 or float64.
        op : str, optional
            "sum" or "avg".
        out : array of shape s or None, optional
            Receives the result; None allocates one.

        Returns
        -------
        Bounded
            The result, and the bound of its error.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-COMPRESSION, GC-OP, GC-DTYPE, GC-SHAPE).
        MismatchError
            Shape, dtype, op or format differ between ranks (GC-MISMATCH).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        UsageError
            The call is made in an open group (GC-GROUP).

        See Also
        --------
        gpucoll.Communicator.all_reduce : Without rounding to a format.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.block_scaled import BlockScaledCollectives
        >>> def program(comm):
        ...     with BlockScaledCollectives(comm, "mxfp8_e4m3") as scaled:
        ...         return scaled.all_reduce(numpy.full(64, 1 + comm.rank, "f4"))
        >>> gc.run_local(program, 2)[0].result[:2]
        array([3., 3.], dtype=float32)
        """
        return self._call("all_reduce", x, out, op, self._reduce_all)

    def reduce_scatter(self, x: Any, op: Any = "sum", out: Any = None) -> Bounded:
        """Return block `rank` of the sum, or the mean, of all ranks' `x`.

        The bound is for this block.

        Parameters
        ----------
        x : array of shape (size, \\*s)
            A block for each rank.
        op : str, optional
            "sum" or "avg".
        out : array of shape s or None, optional
            Receives the result; None allocates one.

        Returns
        -------
        Bounded
            The result, and the bound of its error.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-COMPRESSION, GC-OP, GC-DTYPE, GC-SHAPE).
        MismatchError
            Shape, dtype, op or format differ between ranks (GC-MISMATCH).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        UsageError
            The call is made in an open group (GC-GROUP).

        See Also
        --------
        gpucoll.Communicator.reduce_scatter : Without rounding to a format.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.block_scaled import BlockScaledCollectives
        >>> def program(comm):
        ...     with BlockScaledCollectives(comm, "mxfp8_e4m3") as scaled:
        ...         return scaled.reduce_scatter(numpy.ones((2, 64), "f4"))
        >>> gc.run_local(program, 2)[0].result[:2]
        array([2., 2.], dtype=float32)
        """
        return self._call("reduce_scatter", x, out, op, self._reduce_blocks)

    def all_gather(self, x: Any, out: Any = None) -> Bounded:
        """Return all ranks' `x` in rank order, on every rank.

        Parameters
        ----------
        x : array of shape s
            The contribution of this rank, of float16, bfloat16, float32 or float64.
        out : array of shape (size, \\*s) or None, optional
            Receives the result; None allocates one.

        Returns
        -------
        Bounded
            The result, and the bound of its error.

        Raises
        ------
        ArgumentError or DtypeError
            A wrong argument of this rank, before data is sent (GC-COMPRESSION, GC-OP, GC-DTYPE, GC-SHAPE).
        MismatchError
            Shape, dtype, op or format differ between ranks (GC-MISMATCH).
        PeerError
            Another rank has refused its arguments (GC-PEER).
        UsageError
            The call is made in an open group (GC-GROUP).

        See Also
        --------
        gpucoll.Communicator.all_gather : Without rounding to a format.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.block_scaled import BlockScaledCollectives
        >>> def program(comm):
        ...     with BlockScaledCollectives(comm, "mxfp8_e4m3") as scaled:
        ...         return scaled.all_gather(numpy.full(64, 1 + comm.rank, "f4"))
        >>> gc.run_local(program, 2)[0].result[:, 0]
        array([1., 2.], dtype=float32)
        """
        return self._call("all_gather", x, out, "sum", self._gather_all)

    def _call(self, name: str, x: Any, out: Any, op: Any, run: Callable[[Array, Array, int], Any]) -> Bounded:
        with internal.current_stream(self._comm, [x]), numpy.errstate(all="ignore"):  # an infinite bound is no error
            source, target, divisor = self._agreed(name, x, out, op)
            # Kernels write contiguous arrays.
            place = target if target is not None and target.flags.c_contiguous else self._result(name, source)
            bound = run(source, place, divisor) if source.size else internal.module_of(source).zeros(1, "f8")
            if target is not None and place is not target:
                target[...] = place
            return Bounded(place if out is None else out, bound.reshape(()))

    def _agreed(self, name: str, x: Any, out: Any, op: Any) -> tuple[Array, Array | None, int]:
        """Return `x`, contiguous, `out` as an array, and the divisor; raise an error of any rank on every rank."""
        error: GpucollError | None = None
        facts: dict[str, Any] = {}
        try:
            internal.check_apart(self._comm, name)
            if self._is_closed:
                raise ClosedError(f"{name}: this object was closed; make a new one from the communicator")
            source = internal.check_input(name, x)
            if internal.row_of(source.dtype).name not in ROUNDING:
                raise DtypeError(f"{name}: x is {source.dtype}; block-scaled formats are for floating-point numbers of "
                                 "16 bits and more")
            op = internal.op_of(op).name
            if op not in SCALED_OPS:
                raise ArgumentError(f"{name}: op {op!r} is neither of {' and '.join(SCALED_OPS)}", code="GC-OP")
            shape = _shape_of_result(name, source, self._comm.size)
            target = None if out is None else internal.check_output(name, out, [shape], source.dtype, source)
            facts = {"call": name, "shape": list(source.shape), "dtype": source.dtype.name, "gpu": on_gpu(source),
                     "op": op, "format": self.format.name}
        except GpucollError as found:
            error = found
        everyone = internal.all_gather_metadata(self._comm, facts, f"block-scaled {name}", error)
        for what, code in COMPARED.items():
            internal.check_alike(name, everyone, what, code)
        whole = internal.module_of(source).ascontiguousarray(source).reshape(source.shape)
        return whole, target, self._comm.size if op == "avg" else 1

    def _result(self, name: str, source: Array) -> Array:
        return internal.module_of(source).empty(_shape_of_result(name, source, self._comm.size), source.dtype)

    def _reduce_all(self, source: Array, out: Array, divisor: int) -> Any:
        if self._inner is None:
            bound = self._sum(self._comm, source.reshape(-1), out.reshape(-1), divisor, source)
            return self._comm.all_reduce(bound, out=bound, op="max")
        inner, workspace = self._inner, functools.partial(self._workspace, source, "")
        wide = wide_dtype(source.dtype)
        is_padded = wide != source.dtype or source.size % inner.size > 0
        rows, result = source, out
        if is_padded:
            rows = result = workspace("rows", (inner.size, -(-source.size // inner.size)), wide)
            rows.reshape(-1)[:source.size] = source.reshape(-1)
            rows.reshape(-1)[source.size:] = 0
        largest = largest_magnitude(source.reshape(-1))
        shares = rows.reshape(inner.size, -1)
        share = inner.reduce_scatter(shares, out=workspace("share", shares.shape[1:], wide))
        bound = self._sum(self._outer, share, share, divisor, source)
        inner.all_gather(share, out=result.reshape(shares.shape))
        if is_padded:
            out.reshape(-1)[...] = rows.reshape(-1)[:source.size]
        both = self._comm.all_reduce(internal.module_of(source).concatenate([bound, largest]), op="max")
        # Each of the additions inside a host rounds a number of at most the sum of the host's magnitudes.
        return both[:1] + both[1:] * (self._comm.size * inner.size * ROUNDING[wide.name][0] * 1.01 / divisor)

    def _sum(self, comm: Communicator, x: Array, out: Array, divisor: int, like: Array) -> Any:
        """Write the quotient of the sum of all `x` on `comm` to `out`; return the bound for this rank's shares of it.

        The bound allows for a result stored in the dtype of `like`.
        """
        begun, gathering, bounds = [], [], []
        overlaps = x.size > SEGMENT and comm.nodes > 1
        for first in range(0, x.size, SEGMENT):
            part, workspace = slice(first, first + SEGMENT), functools.partial(self._workspace, like, f"{first} ")
            sent = messages(self.format, comm.size, len(x[part]), workspace)
            steps = two_steps(comm, sent, x[part], None, None, out[part], workspace, divisor)
            begun.append((sent, steps, next(steps)(async_op=overlaps)))
        for sent, steps, came in begun:
            if overlaps:
                came.wait()
            gather = next(steps)  # sums this rank's share, and quantises the result
            # Before the results of other ranks overwrite the rows that came.
            largest, errors = largest_and_errors(sent.form._replace(rows=1), sent.row)
            bounds.append(_error_of_sum(sent, like, divisor) + errors[0] + _rounding(like, largest[0]))
            gathering.append((steps, gather(async_op=overlaps)))
        for steps, came in gathering:
            if overlaps:
                came.wait()
            next(steps, None)
        return _most(like, internal.module_of(like).concatenate(bounds))

    def _reduce_blocks(self, source: Array, out: Array, divisor: int) -> Any:
        comm, workspace = self._comm, functools.partial(self._workspace, source, "")
        sent = messages(self.format, comm.size, source.size, workspace)
        rows = source.reshape(comm.size, -1)
        if rows.shape[1] < sent.form.share:  # each rank's share has whole blocks
            padded = workspace("padded", (comm.size, sent.form.share), source.dtype)
            padded[:, :rows.shape[1]] = rows
            padded[:, rows.shape[1]:] = 0
            rows = padded
        quantise(sent.form, rows.reshape(-1), None, None, sent.packed.reshape(-1))
        comm.all_to_all(sent.packed, out=sent.came)
        dequantise(sent.form, sent.came, out.reshape(-1), comm.size, divisor)
        largest, _ = largest_and_errors(sent.form, sent.came)
        return _most(source, _error_of_sum(sent, source, divisor) + _rounding(source, largest.sum(axis=0) / divisor))

    def _gather_all(self, source: Array, out: Array, _: int) -> Any:
        comm, workspace = self._comm, functools.partial(self._workspace, source, "")
        sent = messages(self.format, comm.size, source.size * comm.size, workspace)
        quantise(sent.form._replace(rows=1), source.reshape(-1), None, None, sent.row)
        comm.all_gather(sent.row, out=sent.came)
        if sent.form.share == source.size:
            dequantise(sent.form, sent.came, out.reshape(-1))
        else:
            padded = workspace("padded", (comm.size, sent.form.share), source.dtype)
            dequantise(sent.form, sent.came, padded.reshape(-1))
            out.reshape(comm.size, -1)[...] = padded[:, :source.size]
        largest, errors = largest_and_errors(sent.form, sent.came)
        return _most(source, errors + _rounding(source, largest))

    def _workspace(self, like: Array, of: str, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a buffer reused in the next call of the same kind; `of` names a part of the call."""
        kept = self._buffers.get(of + name)
        if kept is None or not internal.is_alike(kept, like, shape, dtype):
            kept = self._buffers[of + name] = internal.module_of(like).empty(shape, dtype)
        return kept


def _shape_of_result(name: str, source: Array, size: int) -> tuple[int, ...]:
    if name == "reduce_scatter":
        return internal.block_shape(name, source, size)
    return (size, *source.shape) if name == "all_gather" else source.shape


def _error_of_sum(sent: ScaledMessages, source: Array, divisor: int) -> Any:
    """Return the bounds of the errors of a sum of the rows that came, one for each block."""
    largest, errors = largest_and_errors(sent.form, sent.came)
    terms, relative = len(largest), ROUNDING["float64" if source.dtype == "float64" else "float32"][0]
    total = largest.sum(axis=0)
    # Each of the additions, and the division, rounds a number of at most the sum of the magnitudes; a sum beyond the
    # range is infinite before the division.
    beyond = total > RANGE["float64" if source.dtype == "float64" else "float32"]
    bounds = (errors.sum(axis=0) + total * (terms * relative * 1.01)) / divisor
    return internal.module_of(source).where(beyond, numpy.inf, bounds)


def _rounding(source: Array, largest: Any) -> Any:
    """Return the errors of numbers up to `largest` stored in the dtype of `source`; infinite beyond its range."""
    relative, least = ROUNDING[internal.row_of(source.dtype).name]
    beyond = largest > RANGE[internal.row_of(source.dtype).name]
    return internal.module_of(source).where(beyond, numpy.inf, largest * relative + least)


def _most(source: Array, bounds: Any) -> Any:
    """Return the largest bound as an array of one element; infinity for NaN."""
    xp = internal.module_of(source)
    most = bounds.max().reshape(1)
    return xp.where(most == most, most, numpy.inf)
