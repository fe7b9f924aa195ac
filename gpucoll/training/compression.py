"""Means of gradients over all ranks: exact, or formed from fewer bytes with error feedback.

    Exact       the mean of `all_reduce`
    Cast        a shorter floating-point type
    BlockScaled 8 or 4 bits per element and a scale per block; Int8 with blocks of any length
    TopK        the largest elements only
    PowerSGD    matrices as products of two thin matrices
    Policy      a compression for each parameter, by name

Error feedback: the residual (the part of a sum lost by compression) is added to the gradients of the next step.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy

from gpucoll import Communicator, internal
from gpucoll.block_scaled.conversion import keep_finite, total_of
from gpucoll.block_scaled.steps import messages, two_steps
from gpucoll.errors import ArgumentError, nearest
from gpucoll.internal import SHORT_FLOATS, Array
from gpucoll.training.buckets import Bucket, Phases
from gpucoll.training.feedback import RIGHT, Compression
from gpucoll.training.parameters import Like, to_array

Memory: TypeAlias = list[tuple[Compression, dict[str, dict[str, Array]]]]  # attributes of each compression, by name


class Exact(Compression):
    """The mean formed by `all_reduce` with `algorithm`.

    Parameters
    ----------
    algorithm : str, optional
        A name from `gpucoll.algorithms`.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import DataParallel, Exact
    >>> def program(comm):
    ...     training = DataParallel({"w": numpy.zeros((4, 4), "f4")}, comm, compression=Exact("ring"))
    ...     training.ready("w", numpy.full((4, 4), comm.rank + 1.0, "f4"))
    ...     training.finish()
    ...     return training.gradients["w"][0, :2].tolist()
    >>> gc.run_local(program, 2)[0]
    [1.5, 1.5]
    """

    def __init__(self, algorithm: str = "auto") -> None:
        super().__init__()
        self._algorithm = algorithm

    def reduce(self, gradients: Mapping[str, Array], whole: Array, comm: Communicator) -> Phases:
        self._count(whole, comm, (whole, 2 * (comm.size - 1) / comm.size))
        yield functools.partial(comm.all_reduce, whole, out=whole, op="avg", algorithm=self._algorithm)


class Cast(Compression):
    """All-reduce in a shorter floating-point type.

    For CuPy arrays CuPy must support the dtype.

    Parameters
    ----------
    dtype : str, optional
        "float16" or "bfloat16".

    Raises
    ------
    ArgumentError
        A wrong value (GC-COMPRESSION).

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import DataParallel, Cast
    >>> def program(comm):
    ...     training = DataParallel({"w": numpy.zeros((4, 4), "f4")}, comm, compression=Cast("float16"))
    ...     training.ready("w", numpy.full((4, 4), comm.rank + 1.0, "f4"))
    ...     training.finish()
    ...     return training.gradients["w"][0, :2].tolist()
    >>> gc.run_local(program, 2)[0]
    [1.5, 1.5]
    """

    def __init__(self, dtype: str = "bfloat16") -> None:
        super().__init__()
        if internal.row_of(dtype).name not in SHORT_FLOATS:
            raise ArgumentError(f"Cast: {dtype!r} is neither of {' and '.join(SHORT_FLOATS)}", code="GC-COMPRESSION")
        self._dtype = internal.numpy_dtype(internal.row_of(dtype).name)

    def reduce(self, gradients: Mapping[str, Array], whole: Array, comm: Communicator) -> Phases:
        before, after = self._rows_of(gradients, whole)
        short = self._workspace(gradients, whole, "short", whole.shape, self._dtype)
        shorten(whole, before, after, short)
        self._count(whole, comm, (short, 2 * (comm.size - 1) / comm.size))
        yield functools.partial(comm.all_reduce, short, out=short, op="avg")
        whole[...] = short


def shorten(x: Array, before: Array, after: Array, out: Array) -> None:
    """Write out = x + before, in the dtype of `out`, and the residuals after = x + before - out, or 0 if not finite.

    All arrays are contiguous, on the host or on one GPU. A host without a compiler computes the same bits by NumPy.
    """
    kernels, stream = internal.kernels_of(x)
    if kernels is not None:
        kernels.shorten(internal.row_of(x.dtype), internal.row_of(out.dtype), internal.address(x),
                        internal.address(before), internal.address(after), internal.address(out), x.size, stream)
        return
    with numpy.errstate(all="ignore"):
        total = total_of(x, before)
        out[...] = total
        keep_finite(after, total - out.astype(total.dtype))


class BlockScaled(Compression):
    """Elements of 8 or 4 bits and a scale per block.

    Each value is rounded once to each rank that sums its share, and once from there. `gpucoll.core.formats` has the
    table of formats, `gpucoll.block_scaled.steps` the two steps and their source.

    Parameters
    ----------
    format : str
        "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4" or "int8".

    Raises
    ------
    ArgumentError
        A wrong value (GC-COMPRESSION).

    See Also
    --------
    gpucoll.block_scaled.BlockScaledCollectives : The same for any arrays, with a bound of the error.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import DataParallel, BlockScaled
    >>> def program(comm):
    ...     training = DataParallel({"w": numpy.zeros((4, 4), "f4")}, comm, compression=BlockScaled("mxfp8_e4m3"))
    ...     training.ready("w", numpy.full((4, 4), comm.rank + 1.0, "f4"))
    ...     training.finish()
    ...     return training.gradients["w"][0, :2].tolist()
    >>> gc.run_local(program, 2)[0]
    [1.5, 1.5]
    """

    collectives = 2

    def __init__(self, format: str) -> None:
        super().__init__()
        self._format = internal.format_of(format)

    def reduce(self, gradients: Mapping[str, Array], whole: Array, comm: Communicator) -> Phases:
        if not whole.size:
            return
        before, after = self._rows_of(gradients, whole)
        workspace = functools.partial(self._workspace, gradients, whole)
        sent = messages(self._format, comm.size, whole.size, workspace)
        yield from two_steps(comm, sent, whole, before, after, whole, workspace, comm.size)
        self._count(whole, comm, (sent.packed, (comm.size - 1) / comm.size), (sent.row, comm.size - 1))


class Int8(BlockScaled):
    """One byte per element and a scale of 4 bytes per `block` elements.

    Both are padded to 16 bytes for each rank's share.

    Parameters
    ----------
    block : int, optional
        The number of elements of a block.

    Raises
    ------
    ArgumentError
        A wrong value (GC-COMPRESSION).

    References
    ----------
    Dettmers et al., arXiv 2110.02861.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import DataParallel, Int8
    >>> def program(comm):
    ...     training = DataParallel({"w": numpy.zeros((4, 4), "f4")}, comm, compression=Int8())
    ...     training.ready("w", numpy.full((4, 4), comm.rank + 1.0, "f4"))
    ...     training.finish()
    ...     return training.gradients["w"][0, :2].tolist()
    >>> gc.run_local(program, 2)[0]
    [1.5, 1.5]
    """

    def __init__(self, block: int = 256) -> None:
        super().__init__("int8")
        if not internal.is_whole(block) or block < 1:
            raise ArgumentError(f"Int8: a block of {block!r} elements is not a whole number above 0",
                                code="GC-COMPRESSION")
        self._format = self._format._replace(block=int(block))


class TopK(Compression):
    """The `fraction` of elements largest in magnitude, each sent with its index: 8 bytes (float32) or 12 (float64).

    Every rank sends each other rank the largest elements of that rank's share of a bucket. Each rank forms the mean of
    its own share, and sends the largest elements of this mean to all ranks. So the bytes do not grow with the number of
    ranks.

    Parameters
    ----------
    fraction : float, optional
        Above 0 and at most 1.

    Raises
    ------
    ArgumentError
        A wrong value (GC-COMPRESSION).

    References
    ----------
    Aji and Heafield, arXiv 1704.05021; Li and Hoefler, arXiv 2201.07598, for the two steps.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import DataParallel, TopK
    >>> def program(comm):
    ...     training = DataParallel({"w": numpy.zeros((4, 4), "f4")}, comm, compression=TopK(1.0))
    ...     training.ready("w", numpy.full((4, 4), comm.rank + 1.0, "f4"))
    ...     training.finish()
    ...     return training.gradients["w"][0, :2].tolist()
    >>> gc.run_local(program, 2)[0]
    [1.5, 1.5]
    """

    collectives = 2

    def __init__(self, fraction: float = 0.01) -> None:
        super().__init__()
        if not isinstance(fraction, float | int | numpy.number) or fraction is True or not 0 < fraction <= 1:
            raise ArgumentError(f"TopK: a fraction of {fraction!r} is not above 0 and at most 1", code="GC-COMPRESSION")
        self._fraction = fraction

    def reduce(self, gradients: Mapping[str, Array], whole: Array, comm: Communicator) -> Phases:
        if not whole.size:
            return
        before, after = self._rows_of(gradients, whole)
        size, share = comm.size, -(-whole.size // comm.size)
        table = self._workspace(gradients, whole, "table", (size, share), whole.dtype)
        flat = table.reshape(-1)
        flat[:whole.size] = whole
        flat[:whole.size] += before
        sent = self._largest(table)
        keep_finite(after, flat[:whole.size])
        first = yield functools.partial(comm.all_to_all, sent)
        mean = self._workspace(gradients, whole, "mean", (1, share), whole.dtype)
        mean[...] = 0
        # Rank by rank: `_add` needs distinct indices, and an index is distinct only within the message of one rank.
        for theirs in first:
            self._add(mean, theirs[None])
        mean /= size
        row = self._largest(mean)[0]
        # `mean` has the elements not sent. The next mean weights this rank's residual by 1 / size: multiply by size.
        own = after[comm.rank * share:(comm.rank + 1) * share]
        own += mean[0, :own.size] * size
        keep_finite(own, own)
        second = yield functools.partial(comm.all_gather, row)
        table[...] = 0
        self._add(table, second)
        whole[...] = flat[:whole.size]
        self._count(whole, comm, (sent, (size - 1) / size), (row, size - 1))

    def _largest(self, table: Array) -> Array:
        """Return the largest elements of each row and their columns as bytes; set these elements of `table` to 0."""
        xp, share = internal.module_of(table), table.shape[1]
        count = max(1, math.ceil(self._fraction * share))
        places = xp.argpartition(xp.abs(table), share - count, axis=1)[:, share - count:].astype("i4")
        rows = xp.arange(len(table))[:, None]
        values, table[rows, places] = table[rows, places], 0
        # A message row has the values, then the indices as int32, each padded to 8 bytes for aligned reads.
        message = xp.zeros((len(table), _padded(values[0]) + _padded(places[0])), "u1")
        message[:, :values[0].nbytes] = values.view("u1")
        message[:, _padded(values[0]):][:, :places[0].nbytes] = xp.ascontiguousarray(places).view("u1")
        return message

    def _add(self, table: Array, message: Array) -> None:
        """Add the elements of each message row (see `_largest`) to the same row of `table`."""
        xp = internal.module_of(table)
        count = max(1, math.ceil(self._fraction * table.shape[1]))
        values = xp.ascontiguousarray(message[:, :count * table.itemsize]).view(table.dtype)
        start = _padded(values[0])
        places = xp.ascontiguousarray(message[:, start:start + 4 * count]).view("i4")
        table[xp.arange(len(table))[:, None], places] += values


class PowerSGD(Compression):
    """An n x m matrix sent as two factors of n x `rank` and m x `rank` elements.

    All axes of a parameter after the first count as a single axis. Vectors and small matrices are sent whole. Each
    training step makes one step of the power method, starting from the factor of the last training step.

    Parameters
    ----------
    rank : int, optional
        The number of columns of a factor.
    dtype : str or None, optional
        The floating-point type of all messages; None is that of the gradients.
    seed : int, optional
        The seed of the first factors.

    Raises
    ------
    ArgumentError
        A wrong value (GC-COMPRESSION).

    References
    ----------
    Vogels et al., arXiv 1905.13727, algorithm 1 and 2; Ramesh et al., arXiv 2102.12092, for 16 bits.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import DataParallel, PowerSGD
    >>> def program(comm):
    ...     training = DataParallel({"w": numpy.zeros((4, 4), "f4")}, comm, compression=PowerSGD(4))
    ...     training.ready("w", numpy.full((4, 4), comm.rank + 1.0, "f4"))
    ...     training.finish()
    ...     return training.gradients["w"][0, :2].tolist()
    >>> gc.run_local(program, 2)[0]
    [1.5, 1.5]
    """

    collectives = 2

    def __init__(self, rank: int = 4, dtype: str | None = None, seed: int = 0) -> None:
        super().__init__()
        if not internal.is_whole(rank) or rank < 1:
            raise ArgumentError(f"PowerSGD: rank {rank!r} is not a whole number above 0", code="GC-COMPRESSION")
        if dtype is not None and internal.row_of(dtype).kind != "float":
            raise ArgumentError(f"PowerSGD: {dtype} is not a floating-point type", code="GC-COMPRESSION")
        self._rank, self._seed = rank, seed
        self._dtype = None if dtype is None else internal.numpy_dtype(internal.row_of(dtype).name)
        self.right: dict[str, Array] = {}  # the factors of m rows, equal on all ranks; part of a checkpoint
        self._starts: dict[str, Array] = {}  # random factors of m rows, for the first step

    def remember(self) -> dict[str, dict[str, Array]]:
        return super().remember() | {"right": dict(self.right)}

    @property
    def state(self) -> dict[str, Array]:
        return super().state | {f"{RIGHT}/{name}": row for name, row in self.right.items()}

    def restore(self, name: str, like: Like, state: Mapping[str, Array]) -> None:
        super().restore(name, like, state)
        if f"{RIGHT}/{name}" in state:
            right = state[f"{RIGHT}/{name}"]
            self.right[name] = like._replace(dtype=right.dtype).new(right.shape)
            to_array(self.right[name], right)

    def reduce(self, gradients: Mapping[str, Array], whole: Array, comm: Communicator) -> Phases:
        if not whole.size:
            return
        before, after = self._rows_of(gradients, whole)
        internal.module_of(whole).add(whole, before, out=after)
        wide = whole.dtype if whole.dtype.itemsize >= 4 else numpy.dtype("f4")
        given = {name: row.astype(wide) for name, row in Bucket(gradients, after).gradients.items()}
        matrices = {name: gradient.reshape(len(gradient), -1) for name, gradient in given.items()
                    if self._is_worth(gradient)}
        others = {name: gradient for name, gradient in given.items() if name not in matrices}
        left = {name: matrix @ self._right_of(name, matrix) for name, matrix in matrices.items()}
        first = _joined({**left, **others}, self._dtype)
        # Arrays sent whole lose only the rounding to `dtype`. Subtract before the all-reduce overwrites `first.row`.
        for name, gradient in others.items():
            gradient -= first.gradients[name].astype(wide)
        yield functools.partial(comm.all_reduce, first.row, out=first.row, op="avg")
        for name in others:
            gradients[name][...] = first.gradients[name].astype(whole.dtype)
        each = 2 * (comm.size - 1) / comm.size
        if matrices:
            left = {name: _orthogonal(first.gradients[name].astype(wide)) for name in matrices}
            second = _joined({name: matrix.T @ left[name] for name, matrix in matrices.items()}, self._dtype)
            yield functools.partial(comm.all_reduce, second.row, out=second.row, op="avg")
            self._count(whole, comm, (first.row, each), (second.row, each))
        else:
            self._count(whole, comm, (first.row, each))
        for name, matrix in matrices.items():
            self.right[name] = second.gradients[name].astype(wide)
            mean = left[name] @ self.right[name].T
            matrix -= mean
            gradients[name][...] = mean.reshape(gradients[name].shape).astype(whole.dtype)
        for name, place in Bucket(gradients, after).gradients.items():
            keep_finite(place, given[name])

    def _is_worth(self, gradient: Array) -> bool:
        """Return whether the two factors have fewer elements than the gradient."""
        if gradient.ndim < 2 or not gradient.size:
            return False
        high, wide = len(gradient), gradient.size // len(gradient)
        return self._rank * (high + wide) < high * wide

    def _right_of(self, name: str, matrix: Array) -> Array:
        """Return the factor of m rows to begin a step with: the last step's, with columns scaled to length 1.

        If a column is zero or not finite, return the random start. The factors are equal on all ranks.
        """
        xp, shape = internal.module_of(matrix), (matrix.shape[1], self._rank)
        if name not in self._starts or not internal.is_alike(self._starts[name], matrix, shape, matrix.dtype):
            chance = numpy.random.default_rng([self._seed, zlib.crc32(name.encode())])
            self._starts[name] = xp.asarray(chance.standard_normal(shape).astype(matrix.dtype))
        start = self._starts[name]
        last = self.right.get(name, start)
        if not internal.is_alike(last, matrix, shape, matrix.dtype):  # left by another trainer using this object
            last = start
        with numpy.errstate(all="ignore"):
            squares = (last * last).sum(axis=0)
            right: Array = xp.where((xp.isfinite(squares) & (squares > 0)).all(), last, start)
            # Columns of length 1 keep the products in the range of the gradients: float16 has little range.
            right /= (right * right).sum(axis=0) ** 0.5
        return right


class Policy:
    """A compression for each parameter, by the first file-name pattern matching the name; without a match `Exact`.

    Parameters
    ----------
    patterns : mapping of str to compression
        The compression of the parameters whose names match the pattern.

    Raises
    ------
    ArgumentError
        A wrong value (GC-COMPRESSION).

    Examples
    --------
    >>> from gpucoll.training import Cast, Exact, Policy, PowerSGD
    >>> Policy({"embedding*": PowerSGD(2), "*norm*": Exact(), "*": Cast("bfloat16")}).of("head.norm")
    Exact()
    """

    def __init__(self, patterns: Mapping[str, Compression]) -> None:
        if not isinstance(patterns, Mapping) or not all(isinstance(one, str) for one in patterns):
            raise ArgumentError(f"Policy: {patterns!r} does not map patterns of names to compressions",
                                code="GC-COMPRESSION")
        for one in patterns.values():
            check_kind("Policy", one, Compression)
        self._patterns = dict(patterns)
        self._exact = Exact()

    def of(self, name: str) -> Compression:
        """Return the compression of the parameter `name`.

        Parameters
        ----------
        name : str
            The name of the parameter.

        Returns
        -------
        Compression
            The compression.

        Examples
        --------
        >>> from gpucoll.training import Cast, Policy
        >>> Policy({"*": Cast("bfloat16")}).of("w")
        Cast()
        """
        return next((found for pattern, found in self._patterns.items() if fnmatch.fnmatchcase(name, pattern)),
                    self._exact)

    @property
    def members(self) -> list[Compression]:
        """All compressions, each once."""
        return list(dict.fromkeys((*self._patterns.values(), self._exact)))

    @property
    def wire_bytes(self) -> float:
        """The sum over all members."""
        return sum(one.wire_bytes for one in self.members)

    @property
    def exact_bytes(self) -> float:
        """The sum over all members."""
        return sum(one.exact_bytes for one in self.members)


def check_kind(call: str, compression: object, kinds: Any = Compression | Policy | None) -> None:
    if not isinstance(compression, kinds):
        raise ArgumentError(f"{call}: {compression!r} is not a compression; pass for example Cast(\"bfloat16\")",
                            code="GC-COMPRESSION")


def remembered(compression: Compression | Policy) -> Memory:
    """Return the state to restore after a failed step: see `Averaging`."""
    return [(one, one.remember()) for one in compression.members]


def restore(before: Memory) -> None:
    """Put back the residuals that `remembered` has returned."""
    for one, arrays in before:
        for name, found in arrays.items():
            setattr(one, name, dict(found))


def _padded(row: Array) -> int:
    """Return the bytes of a row rounded up to a multiple of 8, since a GPU reads words at aligned addresses only."""
    return -(-row.nbytes // 8) * 8


def _joined(arrays: Mapping[str, Array], dtype: numpy.dtype | None) -> Bucket:
    """Return copies of the arrays in one bucket, converted to `dtype` if given."""
    rows = [array.reshape(-1) for array in arrays.values()]
    row = internal.module_of(rows[0]).concatenate(rows)
    return Bucket(arrays, row if dtype is None else row.astype(dtype))


def _orthogonal(columns: Array) -> Array:
    """Return orthonormal columns with the same span, by Gram-Schmidt; a zero column stays zero."""
    # No library routine: the same operations on every rank give equal bits on all ranks.
    found = columns.copy()
    for index in range(found.shape[1]):
        column = found[:, index]
        for _ in range(2):  # the second pass removes the components left by rounding in the first
            before = found[:, :index]
            column -= before @ (before.T @ column)
        length = (column * column).sum() ** 0.5
        column /= length + (length == 0)
    return found


COMPRESSIONS: dict[str, Callable[[], Compression]] = {
    "none": Exact, "float16": lambda: Cast("float16"), "bfloat16": lambda: Cast("bfloat16"), "int8": Int8,
    **{name: functools.partial(BlockScaled, name) for name in internal.FORMATS if name != "int8"},
    "topk": lambda: TopK(0.25), "powersgd": lambda: PowerSGD(2, "float16")}


def compression_named(name: str) -> Compression:
    """Return a new compression by its command-line name; raise ArgumentError for an unknown name."""
    if name not in COMPRESSIONS:
        raise ArgumentError(f"no compression is named {name!r}{nearest(name, COMPRESSIONS)}", code="GC-COMPRESSION")
    return COMPRESSIONS[name]()
