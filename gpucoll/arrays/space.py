"""A space: the memory of a call's arrays, and operations on the arrays other than moves between ranks.

The host's space uses NumPy: a function for each op and dtype, the same for every executor. The space of a device is
bound to a stream and enqueues its operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy

from gpucoll.arrays.accept import Array, on_gpu
from gpucoll.arrays.exact import combine_exactly
from gpucoll.core import parsing
from gpucoll.core.dtypes import SMALL_RANGE, Dtype, numpy_dtype, row_of
from gpucoll.core.ops import EXACT, EXACT_NAMES, FUNCTIONS, LOGICAL, OPS, Op, Order
from gpucoll.errors import ArgumentError, DtypeError

Combine: TypeAlias = Callable[[Array, Array, Sequence[Array]], None]
Pair: TypeAlias = Callable[..., Any]

# Ops whose bits in NumPy depend on the place of an element, because NumPy has other loops for whole registers than for
# the rest: min and max of 0 and -0, and complex products, fused or not. In `_uniform`, the engine and the kernels the
# place makes no difference.
UNIFORM = {name: OPS[name]._replace(numpy=f"uniform {OPS[name].numpy}") for name in ("min", "max", "prod")}

BLOCK = 1 << 14  # elements widened at a time: a block stays in the nearest cache


def check_op(name: str, op: Op, dtype: Dtype) -> None:
    """Raise DtypeError where `op` is not defined for `dtype`."""
    if dtype.kind not in op.kinds:
        raise DtypeError(f"{name}: op {op.name} is not defined for {dtype.name}, only for {', '.join(op.kinds)}",
                         code="GC-OP-DTYPE")
    if op.expression or op.factor is not None:
        _try_op(name, op, dtype)


def _try_op(name: str, op: Op, dtype: Dtype) -> None:
    """Try an op of the user on a single element, so a fault is found before data is sent."""
    one = numpy.ones(1, numpy_dtype(dtype.name))
    try:
        combiner(op, dtype)(one.copy(), HOST.premultiplied(op, one, dtype), [one])
        if op.expression:
            HOST.fill_identity(op, one, dtype)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise DtypeError(f"{name}: op {op.expression or op.name} does not give {dtype.name} for {dtype.name}: {error}",
                         code="GC-OP-DTYPE") from error


def promised(name: str, op: Op, dtype: Dtype, deterministic: bool | str) -> tuple[Op, Order]:
    """Return the op of a call, and the order of combination that gives the bits promised by `deterministic`.

    Integers have the same bits in any order. Floats are combined in rank order. A narrow float is rounded once, so all
    contributions are combined at once. So they are for an op that may return either of two equal numbers, as min of 0
    and -0: partial results need not come first. With "exact" the sum and the mean of floats are the exact ops. Raises
    ArgumentError with code GC-DETERMINISTIC for an op on floats that has no exact result.

    >>> from gpucoll.core.ops import OPS
    >>> promised("scan", OPS["sum"], row_of("float32"), True)[1], promised("scan", OPS["sum"], row_of("int8"), True)[1]
    ('in order', 'any')
    """
    if not deterministic or (dtype.kind in ("bool", "int") and not op.expression):
        return op, "any"
    if deterministic != "exact" or dtype.kind in ("bool", "int"):
        is_symmetric = op.name in ("sum", "avg", "prod", "premul_sum")
        return UNIFORM.get(op.name, op), "in order" if is_symmetric and dtype.wide is None else "at once"
    if op.name in ("sum", "avg", "premul_sum"):
        exact = EXACT["avg" if op.name == "avg" else "sum"]
        return exact if op.factor is None else exact._replace(factor=op.factor), "at once"
    if op.name in ("min", "max", *LOGICAL):
        return UNIFORM.get(op.name, op), "at once"
    raise ArgumentError(f'{name}: op {op.expression or op.name} on {dtype.name} rounds in every step, and '
                        'deterministic="exact" allows sum, avg, premul_sum, min, max and logical ops on floats; use '
                        "another op, or deterministic=True", code="GC-DETERMINISTIC")


def scaled_mean(op: Op, dtype: Dtype, ranks: int) -> Op:
    """Return `op`; an average of float16 or float8 gets a factor for each input, so no partial sum overflows.

    The factor is a power of two. Products are therefore exact, and the average has the bits of a sum and a division
    without overflow. A subnormal product loses bits: values up to `ranks` times the least number of the dtype may
    become 0, as in NCCL's own average.

    >>> from gpucoll.core.ops import OPS
    >>> [scaled_mean(OPS["avg"], row_of(name), 6).factor for name in ("float16", "float32")]
    [0.125, None]
    """
    if op.name != "avg" or dtype.name not in SMALL_RANGE or ranks == 1:
        return op
    return op._replace(factor=0.5 ** (ranks - 1).bit_length())


def divisor(op: Op, contributions: int) -> float:
    """Return the divisor for an average of `contributions` inputs."""
    return contributions if op.factor is None else contributions * op.factor


@functools.lru_cache(maxsize=256)
def combiner(op: Op, dtype: Dtype) -> Combine:
    """Return ``combine(dst, base, operands)``: dst = op(...op(base, operands[0])..., operands[-1]).

    float16, bfloat16 and float8 are combined in float32 and rounded once. Integers wrap around; NaN propagates. The
    exact ops are rounded once.
    """
    if op.name in EXACT_NAMES:
        return functools.partial(combine_exactly, dtype, op.name == EXACT["avg"].name)
    pair = _expression(op.expression) if op.expression else _uniform(op.numpy) if op.numpy.startswith("uniform ") else \
        getattr(numpy, op.numpy)
    if dtype.wide is None:
        return functools.partial(_combine, pair)
    return functools.partial(_combine_wide, pair, numpy.dtype(dtype.wide))


def _expression(text: str) -> Pair:
    """Return the checked expression of `gpucoll.elementwise_op` in the form of a binary NumPy function with `out`."""
    code = parsing.code_of(text, "<elementwise_op>", "eval")
    known = {name: getattr(numpy, function) for name, (function, _) in FUNCTIONS.items()}
    # Without builtins an expression reaches no other function; NumPy needs __import__ when raising errors.
    known["__builtins__"] = {"__import__": __import__}

    def pair(a: Array, b: Array, out: Array) -> None:
        numpy.copyto(out, eval(code, known, {"a": a, "b": b}), casting="same_kind")

    return pair


def _uniform(name: str) -> Pair:
    """Return the function of an op in `UNIFORM`, in the form of a binary NumPy function with `out`."""
    plain = getattr(numpy, name.removeprefix("uniform "))

    def extreme(a: Array, b: Array, out: Array) -> None:
        alike = a == b
        first = a[alike]  # before the call: `a` may be `out`
        plain(a, b, out=out)
        out[alike] = first

    def product(a: Array, b: Array, out: Array) -> None:
        if a.dtype.kind != "c":
            plain(a, b, out=out)
        else:
            real, imaginary = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
            out.real, out.imag = real, imaginary

    return product if plain is numpy.multiply else extreme


def _combine(pair: Pair, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    # Overflow and NaN are defined results here: no warnings.
    with numpy.errstate(all="ignore"):
        for operand in operands:
            pair(base, operand, out=dst)
            base = dst


def _combine_wide(pair: Pair, wide: numpy.dtype, dst: Array, base: Array, operands: Sequence[Array]) -> None:
    with numpy.errstate(all="ignore"):
        for start in range(0, len(dst), BLOCK):
            block = slice(start, start + BLOCK)
            total = base[block].astype(wide)
            for operand in operands:
                pair(total, operand[block].astype(wide), out=total)
            dst[block] = total.astype(dst.dtype)


def _extreme(dtype: numpy.dtype, *, highest: bool) -> Any:
    if dtype.kind == "b":
        return highest
    if row_of(dtype).kind == "int":
        return numpy.iinfo(dtype).max if highest else numpy.iinfo(dtype).min
    limit = numpy.float32(numpy.inf if highest else -numpy.inf).astype(dtype)
    if numpy.isinf(limit.astype(numpy.float32)):
        return limit
    # float8_e4m3fn has no infinity
    return numpy.array(0x7E if highest else 0xFE, numpy.uint8).view(dtype)


class Space:
    """The memory of a call's arrays, here NumPy's; the space of a device is a subclass.

    Rows are contiguous and one-dimensional.
    """

    device = "cpu"  # or "cuda", "emulated"
    stream: Any = None  # the stream for enqueued work; None on the host

    @property
    def current(self) -> AbstractContextManager[object]:
        """A context with `stream` as the current stream; arrays opened inside by DLPack follow this stream's order."""
        return nullcontext()

    def has_unsupported_capture(self) -> bool:
        """Return whether `stream` is being captured for a CUDA graph, and some executor cannot be captured."""
        return False

    def is_blocking(self) -> bool:
        """Return whether `stream` and the default stream of CUDA wait for each other, and some executor minds."""
        return False

    def check(self, name: str, what: str, array: Array) -> None:
        """Raise ArgumentError for an array in another memory."""
        if on_gpu(array):
            raise ArgumentError(f"{name}: {what} is on a GPU, other arrays of the call are on the host; pass all "
                                "arrays on the GPU or all on the host", code="GC-DEVICE")

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype) -> Array:
        return numpy.empty(shape, dtype)

    def works_on(self, x: Array) -> bool:
        """Return whether executors can work on the memory of `x` itself; otherwise `pack` and `unpack` copy."""
        return bool(x.flags.c_contiguous)

    def pack(self, x: Array, row: Array) -> None:
        """Write the elements of `x`, in C order, into `row`."""
        numpy.copyto(row.reshape(x.shape), x)

    def unpack(self, row: Array, out: Array) -> None:
        """Write `row` into `out` in C order, leaving the gaps of a strided `out` unchanged."""
        numpy.copyto(out, row.view(out.dtype).reshape(out.shape))

    def read_as(self, row: Array, dtype: Dtype) -> Array:
        """Return `row` in the form used by this space to reduce `dtype`."""
        return row.view(numpy_dtype(dtype.name))

    def premultiplied(self, op: Op, row: Array, dtype: Dtype) -> Array:
        """Return the contribution of this rank: `row`, or its product with the factor of the op."""
        if op.factor is None:
            return row
        with numpy.errstate(all="ignore"):
            product = (row if dtype.wide is None else row.astype(dtype.wide)) * op.factor
        return product.astype(row.dtype, casting="same_kind" if dtype.wide is None else "unsafe")

    def finish(self, op: Op, row: Array, dtype: Dtype, contributions: int) -> None:
        """Apply the last step of an op: avg divides; a lone contribution of a logical op becomes 0 or 1."""
        if op.name == "avg":
            parts = divisor(op, contributions)
            with numpy.errstate(all="ignore"):
                # Divide in place: new memory for the quotients would cost several times the division.
                if dtype.wide is None:
                    numpy.divide(row, parts, out=row)
                for start in range(0, len(row) if dtype.wide else 0, BLOCK):
                    block = row[start:start + BLOCK]
                    block[...] = (block.astype(dtype.wide) / parts).astype(row.dtype)
        elif op.name in LOGICAL and contributions == 1:
            row[...] = (row != 0).astype(row.dtype)

    def fill_identity(self, op: Op, row: Array, dtype: Dtype) -> None:
        """Write the identity of the op, the result of reducing nothing."""
        identity = op.identity
        if identity in ("lowest", "highest"):
            row[...] = _extreme(row.dtype, highest=identity == "highest")
        elif identity == "all ones":
            row[...] = numpy.invert(numpy.zeros(1, row.dtype))
        else:
            row[...] = numpy.asarray(identity if op.expression else int(identity)).astype(row.dtype)

    def begin(self) -> None:
        """Run the work deferred by `pack` and `premultiplied` during preparation; the host defers nothing."""

    def completion(self) -> Any:
        """Return an object for the end of an enqueued operation; None on the host, without enqueued work."""
        return None

    def end(self, keep: object) -> Iterator[Any]:
        """End an operation; `keep` lives until the operation has ended on its stream."""
        return iter(())

    def cancel(self, keep: object) -> None:
        """Release a failed operation; memory possibly still written is kept for ever.

        On the host the executors already keep the memory possibly written by MPI.
        """


HOST = Space()
