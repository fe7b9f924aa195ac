"""Kernel launches: the choice of instance and grid, and the arguments as the bytes of a C struct.

`Kernels` serves the GPU and the emulated device alike. Addresses are integers.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.core.dtypes import Dtype
from gpucoll.core.formats import Format
from gpucoll.core.ops import Op
from gpucoll.device import CompileError
from gpucoll.device import sources as kernels
from gpucoll.device.sources import Instance, Scale
from gpucoll.errors import ArgumentError

Arguments: TypeAlias = numpy.ndarray[Any, Any]
Launch: TypeAlias = Callable[[int, int, Arguments, Any], None]

MOST_SOURCES, MOST_AXES = 64, 8  # the same constants as in the kernels
WORD = 16  # bytes read or written by a thread at once
AT_ONCE = 4  # words under way per thread; for dtypes of one byte a thread has two words under way, in two passes
# Threads in a block: the registers of a processor suffice for three blocks of 256 threads, but only for one of 512.
THREADS = 256
BLOCKS_PER_PROCESSOR = 32  # several times the capacity of a processor, so that all processors end at about one time
FEWEST_THREADS = 64
COPIES = 1024  # launches of copies kept for repetition, since programs call on the same arrays again and again


def opaque(dtype: numpy.dtype) -> numpy.dtype:
    """Return a dtype of the same size without fields, because CuPy's handling of kernel arguments reads all fields."""
    return numpy.dtype(f"V{dtype.itemsize}")


class _Struct:
    """A C struct of kernel arguments, described twice: `fields` for `numpy.dtype`, and `form` for `struct`."""

    def __init__(self, form: str, fields: list[Any]) -> None:
        self._pack = struct.Struct(form).pack
        self.fields = fields
        self.dtype = numpy.dtype(fields, align=True)
        self._bytes = opaque(self.dtype)

    def __call__(self, *values: Any) -> Arguments:
        return numpy.frombuffer(bytearray(self._pack(*values)), self._bytes)


_ENDS = [("src", "u8"), ("dst", "u8"), ("count", "u8")]
REDUCE = _Struct(f"={MOST_SOURCES}QQQI4x", [("sources", "u8", MOST_SOURCES), *_ENDS[1:], ("source_count", "u4")])
COPY = _Struct("=3Q", _ENDS)
SCALE = _Struct("=3Q8x16s", [*_ENDS, ("none", "u8"), ("factor", "u1", 16)])
PACK = _Struct("=3QI4x8q8q", [*_ENDS, ("dims", "u4"), ("shape", "i8", MOST_AXES), ("strides", "i8", MOST_AXES)])
SHORTEN = _Struct("=5Q", [("src", "u8"), ("before", "u8"), ("after", "u8"), ("dst", "u8"), ("count", "u8")])
_ROWS = [("count", "u8"), ("share", "u8"), ("stride", "u8"), ("scales", "u8"), ("tail", "u8"), ("block", "u4")]
QUANTISE = _Struct("=10Q2I", [*SHORTEN.fields[:4], ("maxima", "u8"), *_ROWS, ("rows", "u4")])
DEQUANTISE = _Struct("=7Q4I", [*_ENDS[:2], *_ROWS, ("terms", "u4"), ("divisor", "u4"), ("has_row_scales", "u4")])
MAXIMA = _Struct("=5Q2I", [("src", "u8"), ("before", "u8"), ("dst", "u8"), *_ROWS[:2], ("parts", "u4"), ("rows", "u4")])
_NO_FACTOR = bytes(16)


class Axes(NamedTuple):
    """A strided array in units of `unit` bytes, with as few axes as possible; strides are in bytes."""

    unit: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Quantised(NamedTuple):
    """The layout of quantised elements: `rows` rows of `share` elements in `format`, a multiple of its blocks.

    A row has the elements, the scales of its blocks, and the float32 scale of the row if the format has one; each of
    these is padded to a multiple of 16 bytes.
    """

    rows: int
    share: int
    format: Format

    @property
    def scales(self) -> int:
        """The offset of the scales in a row, in bytes."""
        return _words(self.share * self.format.bits // 8)

    @property
    def tail(self) -> int:
        """The offset of the row's scale, in bytes."""
        return self.scales + _words(self.format.scale_bytes * self.share // self.format.block)

    @property
    def stride(self) -> int:
        """The bytes of a row."""
        return self.tail + WORD * (self.format.scale == "e4m3")


def _words(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of 16."""
    return -(-nbytes // WORD) * WORD


class Kernels:
    """The kernels of one device, each loaded by `load` at the first use and kept.

    `load` returns a function that launches the instance on a stream. `processors` is the number of multiprocessors of
    the device. `threads`, a power of two, is the largest number of threads in a block.
    """

    def __init__(self, load: Callable[[Instance], Launch], processors: int, *, threads: int = THREADS) -> None:
        self._load = load
        self._threads = threads
        self._most_blocks = BLOCKS_PER_PROCESSOR * processors
        # Grids of fewer threads than this use smaller blocks, to reach more processors.
        self._few = processors * threads
        self._loaded: dict[Any, Launch] = {}
        self._copy_of = functools.lru_cache(COPIES)(self._new_copy)

    def launcher(self, instance: Instance) -> Launch:
        """Return the kernel, compiled and loaded, so that the first launch takes no longer than later launches."""
        launch = self._loaded.get(instance)
        if launch is None:
            launch = self._loaded[instance] = self._load(instance)
        return launch

    def load(self, instance: Instance, collective: str, op: Op | None, dtype: Dtype) -> None:
        """Load a kernel before any data move; raise ArgumentError if a user's `op` does not compile for `dtype`."""
        try:
            self.launcher(instance)
        except CompileError as error:
            if op is None or not op.expression:
                raise
            raise ArgumentError(f"{collective}: {op.expression!r} is not valid for {dtype.name}: {error.line}",
                                code="GC-OP") from error

    def _get(self, key: tuple[Any, ...], make: Callable[..., Instance], *arguments: Any) -> Launch:
        """Return the kernel for `key`; build the instance by ``make(*arguments)`` only at the first use."""
        # Making a key is faster than making the text of an instance.
        launch = self._loaded.get(key)
        if launch is None:
            launch = self._loaded[key] = self.launcher(make(*arguments))
        return launch

    def _run(self, launch: Launch, nbytes: int, arguments: Arguments, stream: Any) -> None:
        launch(*self._grid(nbytes), arguments, stream)

    def _grid(self, nbytes: int) -> tuple[int, int]:
        """Return the number of blocks and the threads per block for `nbytes` bytes."""
        wanted = -(-nbytes // (WORD * AT_ONCE))
        threads = self._threads
        while wanted < self._few and threads > FEWEST_THREADS:
            threads >>= 1
            wanted <<= 1
        blocks = -(-nbytes // (WORD * AT_ONCE * threads))
        return min(blocks, self._most_blocks), threads

    def reduce(self, op: Op, dtype: Dtype, sources: Sequence[int], dst: int, count: int, stream: Any) -> None:
        """Compute dst = op(...op(sources[0], sources[1])...) in the wide dtype, rounded once.

        More than `MOST_SOURCES` sources take several launches, rounded after each launch. `dst` may be a source of the
        first launch; a later source as `dst` is an ArgumentError.
        """
        if count == 0:
            return
        if dst in sources[MOST_SOURCES:]:
            raise ArgumentError(f"reduce: source {sources.index(dst, MOST_SOURCES)} of {len(sources)} is overwritten "
                                f"before being read; only one of the first {MOST_SOURCES} may be dst",
                                code="GC-OVERLAP")
        if len(sources) == 1:
            self.copy(sources[0], dst, count, dtype.itemsize, stream)
            return
        launch = self._get(("reduce", op.cuda, dtype.name), kernels.reducing, "reduce", op, dtype)
        for some in _passes(sources, dst):
            padded = (*some, *_NO_SOURCES[len(some):])
            self._run(launch, count * dtype.itemsize, REDUCE(*padded, dst, count, len(some)), stream)

    def copy(self, src: int, dst: int, count: int, width: int, stream: Any) -> None:
        """Compute dst = src for `count` elements of `width` bytes."""
        nbytes = count * width
        if nbytes and src != dst:
            launch, blocks, threads, arguments = self._copy_of(src, dst, nbytes)
            launch(blocks, threads, arguments, stream)

    def _new_copy(self, src: int, dst: int, nbytes: int) -> tuple[Launch, int, int, Arguments]:
        unit = math.gcd(src | dst, nbytes, WORD)
        launch = self._get(("copy", unit), kernels.instance, "copy", unit)
        return launch, *self._grid(nbytes), COPY(src, dst, nbytes // unit)

    def pack(self, src: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, dst: int,
             stream: Any) -> None:
        """Gather the elements at ``src + sum(index * strides)`` into `dst`, in C order; `strides` are in bytes."""
        parts = _parts(tuple(shape), tuple(strides), itemsize, (src | dst) % WORD)
        self._strided("pack", ((src + offset, dst + place, axes) for offset, place, axes in parts), stream)

    def unpack(self, src: int, dst: int, shape: Sequence[int], strides: Sequence[int], itemsize: int,
               stream: Any) -> None:
        """Scatter contiguous elements of `src` to ``dst + sum(index * strides)``; leave the bytes between untouched."""
        parts = _parts(tuple(shape), tuple(strides), itemsize, (src | dst) % WORD)
        self._strided("unpack", ((src + place, dst + offset, axes) for offset, place, axes in parts), stream)

    def _strided(self, kernel: str, parts: Iterable[tuple[int, int, Axes]], stream: Any) -> None:
        """Launch `kernel` for each part: source, destination, and axes of the strided side; copy parts without gaps."""
        for src, dst, axes in parts:
            if axes.strides == (axes.unit,):
                self.copy(src, dst, axes.shape[0], axes.unit, stream)
            else:
                count, none = math.prod(axes.shape), (0,) * (MOST_AXES - len(axes.shape))
                arguments = PACK(src, dst, count, len(axes.shape), *axes.shape, *none, *axes.strides, *none)
                launch = self._get((kernel, axes.unit), kernels.instance, kernel, axes.unit)
                self._run(launch, count * WORD, arguments, stream)

    def scale(self, what: Scale, dtype: Dtype, src: int, dst: int, count: int, factor: Any, stream: Any) -> None:
        """Compute dst = src / factor ("divide"), src * factor ("multiply"), or src != 0 ("truth", without factor)."""
        if count == 0:
            return
        launch = self._get((what, dtype.name), kernels.instance, "scale", what, dtype)
        bits = _NO_FACTOR if what == "truth" else numpy.array(factor, dtype.wide or dtype.name).tobytes()
        self._run(launch, count * dtype.itemsize, SCALE(src, dst, count, bits), stream)

    def cast(self, source: Dtype, target: Dtype, src: int, dst: int, count: int, stream: Any) -> None:
        """Convert `src` to the dtype `target`; neither dtype is complex, and `src` and `dst` do not overlap."""
        if count == 0:
            return
        launch = self._get(("cast", source.name, target.name), kernels.instance, "cast", source, target)
        self._run(launch, count * max(source.itemsize, target.itemsize), COPY(src, dst, count), stream)

    def shorten(self, source: Dtype, target: Dtype, src: int, before: int, after: int, dst: int, count: int,
                stream: Any) -> None:
        """Compute dst = src + before in `target`, after = src + before - dst; `after` must not be `src` or `before`."""
        if count:
            launch = self._get(("shorten", source.name, target.name), kernels.instance, "shorten", source, target)
            self._run(launch, count * source.itemsize, SHORTEN(src, before, after, dst, count), stream)

    def quantise(self, dtype: Dtype, form: Quantised, src: int, before: int, after: int, dst: int, maxima: int,
                 count: int, stream: Any) -> None:
        """Quantise src + before into `dst` with the layout `form`; store the quantisation error in `after`.

        Elements of `dst` from `count` on are zero. `before` may be 0 for no addend. `after` must not be `src` or
        `before`. `maxima` has the largest magnitude of each row, if the format has a scale for each row; else it is 0.
        """
        launch = self._get(("quantise", dtype.name, form.format.name), kernels.instance, "quantise", dtype, form.format)
        blocks = min(form.rows * form.share // form.format.block, 4 * self._most_blocks)
        launch(blocks, min(FEWEST_THREADS, self._threads), QUANTISE(
            src, before, after, dst, maxima, count, form.share, form.stride, form.scales, form.tail, form.format.block,
            form.rows), stream)

    def maxima(self, dtype: Dtype, form: Quantised, src: int, before: int, dst: int, parts: int, count: int,
               stream: Any) -> None:
        """Store in `dst` the largest magnitudes of src + before in `parts` parts of each row, in the wide dtype."""
        launch = self._get(("maxima", dtype.name), kernels.instance, "maxima", dtype)
        launch(form.rows * parts, self._threads, MAXIMA(src, before, dst, count, form.share, parts, form.rows), stream)

    def dequantise(self, dtype: Dtype, form: Quantised, src: int, dst: int, count: int, terms: int, divisor: int,
                   stream: Any) -> None:
        """Compute dst = the first `count` elements of the rows of `form`, or of a sum of `terms` rows, / `divisor`."""
        launch = self._get(("dequantise", dtype.name, form.format.name), kernels.instance, "dequantise", dtype,
                           form.format)
        self._run(launch, count * dtype.itemsize, DEQUANTISE(
            src, dst, count, form.share, form.stride, form.scales, form.tail, form.format.block, terms, divisor,
            form.format.scale == "e4m3"), stream)


_NO_SOURCES = (0,) * MOST_SOURCES


def _passes(sources: Sequence[int], dst: int) -> Iterator[Sequence[int]]:
    """Yield the sources of each launch; each launch but the first begins with the result of the launch before."""
    yield sources[:MOST_SOURCES]
    for first in range(MOST_SOURCES, len(sources), MOST_SOURCES - 1):
        yield (dst, *sources[first:first + MOST_SOURCES - 1])


def axes_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int) -> Axes:
    """Return the axes of a strided array in the widest units, with adjacent axes joined, without axes of length 1.

    `address` holds the low bits of the source and destination addresses. The unit divides `address` and every stride.

    >>> axes_of((5, 2, 8), (128, 32, 4), 4, 0)
    Axes(unit=16, shape=(5, 4), strides=(128, 16))
    >>> axes_of((3, 1), (-6, 0), 2, 0)
    Axes(unit=2, shape=(3,), strides=(-6,))
    """
    if 0 in shape:
        return Axes(1, (0,), (1,))
    joined: list[tuple[int, int]] = []
    # Treat the bytes of an element as an axis, so that units may be wider or narrower than elements.
    for length, stride in [*zip(shape, strides, strict=True), (itemsize, 1)]:
        if joined and joined[-1][1] == length * stride:
            joined[-1] = joined[-1][0] * length, stride
        elif length != 1 or stride == 1:
            joined.append((length, stride))
    *outer, (run, _) = joined
    unit = math.gcd(run, address, WORD, *(stride for _, stride in outer))
    axes = [*outer, (run // unit, unit)] if run > unit or not outer else outer
    return Axes(unit, tuple(length for length, _ in axes), tuple(stride for _, stride in axes))


@functools.lru_cache(maxsize=256)
def _parts(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int,
           address: int) -> tuple[tuple[int, int, Axes], ...]:
    """Return the launches for a strided array: offset on the strided side, offset on the contiguous side, axes."""
    axes = axes_of(shape, strides, itemsize, address)
    # The kernels take eight axes; the outer axes beyond these become one launch per index.
    extra = max(0, len(axes.shape) - MOST_AXES)
    inner = Axes(axes.unit, axes.shape[extra:], axes.strides[extra:])
    nbytes = math.prod(inner.shape) * axes.unit
    if nbytes == 0:
        return ()
    outer = itertools.product(*map(range, axes.shape[:extra]))
    offsets = [sum(map(int.__mul__, index, axes.strides)) for index in outer]
    return tuple((offset, position * nbytes, inner) for position, offset in enumerate(offsets))
