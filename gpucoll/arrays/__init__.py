"""The arrays of a call: check them, make them flat, and allocate the result.

A space is the memory of a call's arrays, with the operations on them other than moves between ranks. The host's space
uses NumPy; the space of a device is bound to a stream and enqueues its operations.

    blocks              arrays of the v-variants, which differ in the first axis
    reductions          ops written by the user
    segments            memory mapped by other processes, and blocks at the same position on all ranks
    dlpack              objects with DLPack as the only access to their memory

Nothing here communicates: a call refused here has sent and written nothing.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy

from gpucoll.arrays.dlpack import of_dlpack
from gpucoll.arrays.reductions import WIDENED, combine_written, extreme_of
from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.core.dtypes import ROWS, SMALL_RANGE, Array, Dtype, numpy_dtype, row_of
from gpucoll.core.ops import EXACT, LOGICAL, Op, Order, op_of
from gpucoll.errors import ArgumentError, DtypeError

# An exact answer on overlap can take exponential time; beyond this work the arrays count as overlapping.
OVERLAP_WORK = 100_000
CUDA_MEMORY = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged
_WRITABLE = 0x200  # PyBUF_WRITE
_NOTHING = numpy.empty(0, numpy.uint8)
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)



def on_gpu(x: Any) -> bool:
    """Return whether `x` is an array in GPU memory, without importing a GPU library."""
    if type(x) is numpy.ndarray:
        return False
    if isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ())):  # quick: the attribute is made anew each time
        return True
    if has(x, "__cuda_array_interface__"):  # PyTorch's host tensors lack this attribute
        return True
    try:
        return has(x, "__dlpack_device__") and not isinstance(x, type) and x.__dlpack_device__()[0] in CUDA_MEMORY
    # A foreign object may raise any error here; `as_array` reports the error when opening the object.
    except Exception:
        return False


def is_on_device(argument: Any) -> bool:
    """Return whether an argument of a call is on a device: array, list of arrays, space, or a root's metadata."""
    if isinstance(argument, dict):
        return bool(argument.get("gpu"))
    if isinstance(argument, Space):
        return argument.device != "cpu"
    return any(map(on_gpu, argument)) if isinstance(argument, list) else on_gpu(argument)


def has(x: Any, name: str) -> bool:
    """Return whether `x` has an attribute; an attribute raising another error counts as present.

    PyTorch raises another error for a tensor requiring grad.
    """
    try:
        getattr(x, name)
    except Exception as error:
        return not isinstance(error, AttributeError)
    return True


def torch_stream(arrays: Iterable[object]) -> Callable[[], Any]:
    """Return a function giving PyTorch's current stream, or without a PyTorch GPU tensor None, for CuPy's.

    PyTorch and CuPy have different current streams, and both may change between a call and its wait.
    """
    torch = sys.modules.get("torch")
    tensors = [x for x in arrays if torch is not None and isinstance(x, torch.Tensor) and on_gpu(x)]
    if torch is None or not tensors:
        return lambda: None
    return functools.partial(torch.cuda.current_stream, tensors[0].device)


def is_borrowed(x: Any) -> bool:
    """Return whether `x` is GPU memory outside CuPy's pool: its owner may reuse the memory at any time.

    The pool reuses memory in the same stream only; other owners regard no stream of this library.
    """
    return on_gpu(x) and not isinstance(x, getattr(sys.modules.get("cupy"), "ndarray", ()))


def module_of(x: Any) -> Any:
    return numpy if isinstance(x, numpy.ndarray) else sys.modules["cupy"]


def address(x: Any) -> int:
    """Return the address of the first element, 0 for None."""
    if x is None:
        return 0
    return x.__array_interface__["data"][0] if isinstance(x, numpy.ndarray) else x.data.ptr


def at(place: int, nbytes: int) -> Array:
    """Return the bytes at an address of this process; the result does not keep the memory alive."""
    return numpy.frombuffer(_view(place, nbytes, _WRITABLE), numpy.uint8) if nbytes else _NOTHING


def bounds(x: Any) -> Array:
    """Return an array with the same addresses for NumPy's arithmetic; its elements are unreadable for a GPU array."""
    if isinstance(x, numpy.ndarray):
        return x
    return numpy.asarray(SimpleNamespace(__array_interface__={
        "version": 3, "shape": x.shape, "strides": x.strides, "data": (x.data.ptr, True),
        "typestr": f"|V{x.dtype.itemsize}"}))


def same_memory(x: Any, out: Any) -> bool:
    """Return whether both arrays are the same elements in the same order: the call is in place."""
    if x is out:
        return True
    if x.size != out.size or address(x) != address(out):
        return False
    both_flat = x.flags.c_contiguous and out.flags.c_contiguous
    return both_flat or x.strides == out.strides


def is_block_of(x: Any, out: Any, rank: int, size: int) -> bool:
    """Return whether `x` is block `rank` of the `size` blocks of `out`, stacked or concatenated."""
    if x.size * size != out.size or (x.size and not numpy.may_share_memory(bounds(x), bounds(out))):
        return False
    rows = out.shape[0] // size
    block = out[rank * rows:(rank + 1) * rows]
    return same_memory(x, block.reshape(x.shape) if out.ndim > x.ndim else block)


def overlap(x: Any, out: Any) -> bool:
    """Return whether two arrays share an element; True also where the exact answer takes too long."""
    if on_gpu(x) != on_gpu(out):
        return False
    try:
        return numpy.shares_memory(bounds(x), bounds(out), max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except numpy.exceptions.TooHardError:
        return True


def overlaps_itself(array: Any) -> bool:
    """Return whether an axis steps by less than the extent of the inner axes; False for an empty array."""
    if array.flags.c_contiguous:
        return False
    reach = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach and array.size:
            return True
        reach += stride * (length - 1)
    return False


def as_array(name: str, what: str, x: object) -> Array:
    """Return `x` as a NumPy or CuPy array on the memory of `x`; raise ArgumentError where the memory is inaccessible.

    Accepted are NumPy and CuPy arrays, PyTorch tensors, and objects with DLPack, ``__array_interface__`` or
    ``__cuda_array_interface__``.
    """
    if type(x) is numpy.ndarray:
        return x
    if on_gpu(x):
        return _gpu_array(name, what, x)
    if isinstance(x, numpy.ma.MaskedArray):
        raise ArgumentError(f"{name}: {what} is a masked array, and its mask would be lost; pass x.filled(value)",
                            code="GC-ARRAY")
    if isinstance(x, numpy.ndarray):
        return x.view(numpy.ndarray)  # numpy.matrix stays 2-D when reshaped
    if isinstance(x, numpy.generic) or not (has(x, "__dlpack__") or has(x, "__array_interface__")):
        raise ArgumentError(f"{name}: {what} is a {type(x).__name__}, not an array{_advice(what, x)}", code="GC-ARRAY")
    return _opened(name, what, x, "NumPy", lambda tensor: tensor.numpy(),
                   numpy.asarray if has(x, "__array_interface__") else of_dlpack)


def _advice(what: str, x: object) -> str:
    """Return the end of an error message for a non-array: a guess at the intended argument, or ""."""
    if type(x).__name__ == "InPlaceType":  # mpi4py's MPI.IN_PLACE
        return "; out=x works in place"
    if what == "out" and _is_op(x):
        return "; pass the op as op="
    if isinstance(x, list | tuple) and any(isinstance(one, numpy.ndarray) for one in x):
        return "; pass one array, its dtype and length are known"
    is_data = isinstance(x, bool | int | float | complex | list | tuple | numpy.generic)
    return f"; pass numpy.asarray({what})" if is_data and what != "out" else ""


def _is_op(x: object) -> bool:
    try:
        op_of(x)
    except ArgumentError:
        return False
    return True


def _gpu_array(name: str, what: str, x: Any) -> Array:
    """Return a GPU array as CuPy's; raise ArgumentError.

    DLPack is preferred: DLPack orders streams by an event, while CuPy's import by the CUDA array interface waits on the
    host.
    """
    try:
        import cupy
    except ImportError as error:
        raise ArgumentError(f"{name}: {what} is a GPU array ({type(x).__module__}) and needs CuPy: {error}",
                            code="GC-ARRAY") from error
    if isinstance(x, cupy.ndarray):
        return x
    return _opened(name, what, x, "CuPy", cupy.from_dlpack, cupy.from_dlpack if has(x, "__dlpack__") else cupy.asarray)


def _opened(name: str, what: str, x: Any, library: str, of_tensor: Callable[[Any], Any],
            of_others: Callable[[Any], Any]) -> Array:
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(x, torch.Tensor):
            return _tensor(torch, x, of_tensor)
        return of_others(x)
    # A foreign object may raise any error.
    except Exception as error:
        raise ArgumentError(f"{name}: {what}, a {type(x).__name__}, gives {library} no access to the memory: {error}",
                            code="GC-ARRAY") from error


def _tensor(torch: Any, x: Any, opened: Callable[[Any], Any]) -> Array:
    """Return a PyTorch tensor as an array.

    NumPy has no names for PyTorch's bfloat16 and float8, so these are opened as integers of the same width. On a GPU
    float8 stays an integer, because CuPy has no float8.
    """
    x = x.detach()
    own = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
    if x.dtype not in own:
        return opened(x)
    carrier = opened(x.view(torch.int16 if x.element_size() == 2 else torch.uint8))
    return carrier if on_gpu(carrier) and x.element_size() == 1 else carrier.view(numpy_dtype(own[x.dtype]))


def carried_dtype(x: object) -> str | None:
    """Return the name of the dtype behind a GPU array of integers: float8 of PyTorch, missing in CuPy; else None."""
    name = str(getattr(x, "dtype", "")).removeprefix("torch.")
    return name if name.startswith("float8") and on_gpu(x) else None


def check_input(name: str, x: object, what: str = "x") -> Array:
    """Return `x` as an array of a supported dtype; raise ArgumentError or DtypeError."""
    array = as_array(name, what, x)
    if array.dtype not in ROWS:
        row_of(array.dtype)
    return array


def check_output(name: str, out: object, shapes: Sequence[tuple[int, ...]], dtype: numpy.dtype,
                 x: Array | None, what: str = "out") -> Array:
    """Return `out` as an array of one of `shapes` (of any shape without them), writable by the call.

    Raises ArgumentError or DtypeError.
    """
    array = as_array(name, what, out)
    if shapes and array.shape not in shapes:
        raise ArgumentError(f"{name}: {what} has shape {array.shape}, expected {' or '.join(map(str, shapes))}; "
                            "out=None allocates it", code="GC-SHAPE")
    if array.dtype != dtype:
        raise DtypeError(f"{name}: {what} has dtype {array.dtype}, expected {dtype}")
    check_writable(name, what, array)
    if x is not None and not same_memory(x, array) and overlap(x, array):
        raise ArgumentError(f"{name}: x and out overlap partly; pass the same array for in place, or a copy",
                            code="GC-OVERLAP")
    return array


def check_writable(name: str, what: str, array: Array) -> None:
    """Raise ArgumentError for a read-only array, and for an array with elements sharing memory."""
    if not getattr(array.flags, "writeable", True):  # CuPy has no read-only arrays
        raise ArgumentError(f"{name}: {what} is read-only; pass a writable array or a copy", code="GC-READONLY")
    if overlaps_itself(array):
        raise ArgumentError(f"{name}: {what} has elements that share memory (strides {array.strides} for shape "
                            f"{array.shape}); pass a copy", code="GC-OVERLAP")


def is_alike(array: Array, like: Array, shape: tuple[int, ...], dtype: object) -> bool:
    """Return whether `array` has this shape and dtype, and is on the host or a GPU as `like` is."""
    return array.shape == shape and array.dtype == dtype and module_of(array) is module_of(like)


class Space:
    """The memory of a call's arrays, here NumPy's; the space of a device is a subclass.

    Rows are contiguous and one-dimensional.
    """

    device = "cpu"  # or "cuda", "emulated"
    stream: Any = None  # the stream for enqueued work; None on the host
    gpu: Any = None  # the `gpucoll.communicator.gpu.Gpu`; None on the host

    @property
    def current(self) -> AbstractContextManager[object]:
        """A context with `stream` as the current stream; arrays opened inside by DLPack follow this stream's order."""
        return nullcontext()

    def on_side_stream(self) -> Space:
        """Return the space for an asynchronous call: on a GPU of another stream."""
        return self

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
        return row if row.dtype.name == dtype.name else row.view(numpy_dtype(dtype.name))

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
                for start in range(0, len(row) if dtype.wide else 0, WIDENED):
                    block = row[start:start + WIDENED]
                    block[...] = (block.astype(dtype.wide) / parts).astype(row.dtype)
        elif op.name in LOGICAL and contributions == 1:
            row[...] = (row != 0).astype(row.dtype)

    def fill_identity(self, op: Op, row: Array, dtype: Dtype) -> None:
        """Write the identity of the op, the result of reducing nothing."""
        identity = op.identity
        if identity in ("lowest", "highest"):
            row[...] = extreme_of(row.dtype, highest=identity == "highest")
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
        HOST.premultiplied(op, one, dtype)
        if op.expression:
            combine_written(op, dtype, one.copy(), one, [one])
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
        return op, "in order" if is_symmetric and dtype.wide is None else "at once"
    if op.name in ("sum", "avg", "premul_sum"):
        exact = EXACT["avg" if op.name == "avg" else "sum"]
        return exact if op.factor is None else exact._replace(factor=op.factor), "at once"
    if op.name in ("min", "max", *LOGICAL):
        return op, "at once"
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


class Target(NamedTuple):
    """The memory where a result is formed (`row`) and the array of the caller (`out`)."""

    out: Array
    row: Array

    def deliver(self, space: Space) -> None:
        """Write the result into a strided `out`, leaving the gaps unchanged."""
        if not space.works_on(self.out):
            space.unpack(self.row, self.out)


class Targets(NamedTuple):
    """The memory where blocks are formed, block after block (`row`), and the arrays of the caller (`outs`)."""

    outs: Sequence[Array]
    row: Array

    def deliver(self, space: Space) -> None:
        """Write every block into its array, leaving the gaps of strided arrays unchanged."""
        start = 0
        for out in self.outs:
            space.unpack(self.row[start:start + out.size], out)
            start += out.size


def target(out: Array, space: Space) -> Target:
    """Return the target for `out`: the memory of `out` itself where executors can work on it, else a new row."""
    return Target(out, out.reshape(-1) if space.works_on(out) else space.empty(out.size, out.dtype))


def flat(x: Array, space: Space) -> Array:
    """Return the elements of `x` in C order as a contiguous row: a view where possible, see `Space.works_on`."""
    return x.reshape(-1) if space.works_on(x) else joined([x], space)


def joined(xs: Sequence[Array], space: Space) -> Array:
    """Return the elements of all `xs`, arrays of the same dtype, as a new row."""
    row = space.empty(sum(x.size for x in xs), xs[0].dtype)
    start = 0
    for x in xs:
        space.pack(x, row[start:start + x.size])
        start += x.size
    return row


class Cut(NamedTuple):
    """The number of elements in a block; for unequal blocks the lengths of the blocks of input and output.

    `digest` tells the lengths of all ranks' blocks apart, where this rank took these from an earlier call.
    """

    elements: int
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    digest: str = ""


class Prepared(NamedTuple):
    """The checked arrays of a call: flat input, target and result for the caller, bytes of the larger side.

    `shape` is compared between ranks: the shape of the array, or of a block, without the first axis where blocks may
    differ in the first axis. `given` is the array behind the input, kept alive as long as the call.
    """

    input: Array | None
    target: Target | Targets | None
    dtype: Dtype
    cut: Cut
    nbytes: int
    result: Any
    space: Space
    shape: tuple[int, ...]
    given: Any = None

    @property
    def in_place(self) -> bool:
        """Whether the input lies within the memory of the result: the whole result or this rank's block."""
        if self.input is None or self.target is None:
            return False
        first, begin = address(self.target.row), address(self.input)
        return first <= begin and begin + self.input.nbytes <= first + self.target.row.nbytes


NOTHING = Prepared(None, None, row_of("uint8"), Cut(0), 0, None, HOST, ())


class RankInfo(NamedTuple):
    """The place of the caller: its rank, the number of ranks, and the root."""

    rank: int
    size: int
    root: int


def prepare(row: Collective, x: object, out: object, rank_info: RankInfo, dtype: object = None,
            space: Space = HOST) -> Prepared:
    """Check the arrays of a call of collective `row`, and return the prepared call.

    Raises ArgumentError or DtypeError.
    """
    with space.current:
        source = check_input(row.name, x)
    space.check(row.name, "x", source)
    if row.name == "broadcast":
        return _prepare_broadcast(row, x, source, rank_info, space)
    shape = block_shape(row.name, source, rank_info.size) if row.input.blocks else source.shape
    kind = kind_of(row.name, source, carried_dtype(x) if dtype is None else dtype)
    shapes = _result_shapes(row, source.shape, shape, rank_info.size)
    formed, result = _prepare_output(row, source, source.dtype, out, shapes, rank_info, space)
    # Device executors do not recognize an input inside `out`: copy it, or peers may read the block after its overwrite.
    copies = formed is not None and space is not HOST and _is_own_block(row, source, formed.out, rank_info)
    given = space.read_as(joined([source], space) if copies else flat(source, space), kind)
    if formed is not None:
        formed = Target(formed.out, space.read_as(formed.row, kind))
    call = _prepared(row, given, formed, kind, shape, rank_info.size, result, space)._replace(given=source)
    return call._replace(shape=_without_ones(shape)) if row.input.blocks else call


def _prepared(row: Collective, source: Array | None, formed: Target | None, kind: Dtype,
              shape: tuple[int, ...], size: int, result: Any, space: Space) -> Prepared:
    elements = math.prod(shape)
    nbytes = elements * (size if row.blocks else 1) * kind.itemsize
    return Prepared(source, formed, kind, Cut(elements), nbytes, result, space, shape)


def kind_of(name: str, x: Array, dtype: object) -> Dtype:
    """Return the dtype used to reduce the elements of `x`.

    `dtype` reads the bytes of an unsigned carrier as another dtype of the same width, e.g. uint8 as float8_e4m3fn; None
    means the array's own dtype. Raises DtypeError.
    """
    own = ROWS.get(x.dtype) or row_of(x.dtype)
    if dtype is None:
        return own
    row = row_of(dtype)
    carrier = x.dtype.kind == "u" and x.dtype.itemsize == row.itemsize
    if own != row and not carrier:
        raise DtypeError(f"{name}: dtype={row.name} cannot be read from an array of {x.dtype}; "
                         f"pass x.astype(...) or an unsigned array of {row.itemsize} bytes per element")
    return row


def block_shape(name: str, x: Array, size: int) -> tuple[int, ...]:
    """Return the shape s of a block of `x`: `x` is (size, \\*s), or has the blocks one after another.

    Raises ArgumentError where the first axis of `x` is no multiple of `size`.
    """
    if x.ndim == 0 or x.shape[0] % size:
        raise ArgumentError(f"{name}: x has shape {x.shape}; the first axis must be {size}, a block for each rank, or "
                            f"a multiple of {size}: (size, *s) or (size * s[0], *s[1:])", code="GC-SHAPE")
    return x.shape[1:] if x.shape[0] == size else (x.shape[0] // size, *x.shape[1:])


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a block without leading ones: a rank may read (\\*s) where another rank reads (1, \\*s)."""
    return tuple(itertools.dropwhile(lambda length: length == 1, shape))


def _result_shapes(row: Collective, given: tuple[int, ...], shape: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Return the shapes allowed for `out`; the first is the shape of allocated results.

    `shape` is the shape of a block. An input (size, \\*s) may also mean concatenated blocks (1, \\*s).
    """
    is_both = row.input.blocks and given[:1] == (size,)
    if not row.output.blocks:
        return [shape, (1, *shape)] if is_both else [shape]
    concatenated = [(size * shape[0], *shape[1:])] if shape else []
    return [(size, *shape), *concatenated, *([(size, 1, *shape)] if is_both else [])]


def _is_own_block(row: Collective, x: Array | None, out: Array, rank_info: RankInfo) -> bool:
    """Return whether a gathering call is in place: `x` is this rank's block of a longer `out`."""
    return x is not None and row.output.blocks and not row.input.blocks and rank_info.size > 1 \
        and is_block_of(x, out, rank_info.rank, rank_info.size)


def _prepare_output(row: Collective, x: Array | None, dtype: numpy.dtype, out: Any, shapes: Sequence[tuple[int, ...]],
                    rank_info: RankInfo, space: Space) -> tuple[Target | None, Any]:
    """Return the target and the result for the caller: `out`, once checked, or a new array; (None, None) off root."""
    exists, array = row.output.where == "all" or rank_info.rank == rank_info.root, out
    if out is not None:
        with space.current:
            array = as_array(row.name, "out", out)
            is_own = array.shape in shapes and _is_own_block(row, x, array, rank_info)
            check_output(row.name, array, shapes, dtype, None if is_own else x)
        space.check(row.name, "out", array)
    elif exists:
        array = out = space.empty(shapes[0], dtype)
    return (target(array, space), out) if exists else (None, None)


def _prepare_broadcast(row: Collective, x: object, array: Array, rank_info: RankInfo, space: Space) -> Prepared:
    """Return the prepared broadcast: `x` is read on the root and written on the other ranks.

    A schedule may write the same values to the root's array, so a read-only array of the root takes part as a copy.
    """
    kind = ROWS.get(array.dtype) or row_of(array.dtype)
    if rank_info.rank == rank_info.root:
        source = flat(array, space) if getattr(array.flags, "writeable", True) else joined([array], space)
        return _prepared(row, source, Target(source, source), kind, array.shape, 1, x, space)._replace(given=array)
    check_writable(row.name, "x", array)
    return _prepared(row, None, target(array, space), kind, array.shape, 1, x, space)


def prepare_scatter(x: Array | None, out: object, shape: tuple[int, ...], dtype: numpy.dtype, rank_info: RankInfo,
                    space: Space) -> Prepared:
    """Return the prepared scatter; `shape` (size, \\*s) and `dtype` are the root's, `x` is None on other ranks."""
    row = COLLECTIVES["scatter"]
    shapes = _result_shapes(row, shape, shape[1:], rank_info.size)
    formed, result = _prepare_output(row, x, dtype, out, shapes, rank_info, space)
    source = None if x is None else flat(x, space)
    return _prepared(row, source, formed, row_of(dtype), shape[1:], rank_info.size, result, space)._replace(given=x)
