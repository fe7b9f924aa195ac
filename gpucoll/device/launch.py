"""Work on streams: kernel launches, scratch memory of successive calls, and the order of a communicator's operations.

A launch chooses the kernel's instance and grid, and writes the arguments as the bytes of a C struct. `Kernels` serves
the GPU and the emulated device alike. Addresses are integers. An operation is one enqueued call.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.arrays import address
from gpucoll.core.dtypes import Dtype
from gpucoll.core.formats import Format
from gpucoll.core.ops import Op
from gpucoll.device import CompileError, Device, Event, Stream
from gpucoll.device import sources as kernels
from gpucoll.device.sources import Instance, Scale
from gpucoll.errors import ArgumentError, GpucollError

Arguments: TypeAlias = numpy.ndarray[Any, Any]
Enqueue: TypeAlias = Callable[[Stream], object]  # enqueues work on a stream
Launch: TypeAlias = Callable[[int, int, Arguments], Enqueue]  # binds a kernel to blocks, threads and arguments

MOST_SOURCES, MOST_AXES = 64, 8  # the same constants as in the kernels
WORD = 16  # bytes read or written by a thread at once
WORDS_IN_FLIGHT = 4  # of a thread; for dtypes of one byte a thread has two words under way, in two passes
# Threads in a block: the registers of a processor suffice for three blocks of 256 threads, but only for one of 512.
THREADS = 256
MOMENT = 0.1  # seconds for recording an event, unless CUDA lets the thread wait
EVERY = 16  # operations per event of the watchdog: an event for every operation would slow down short calls
BLOCKS_PER_PROCESSOR = 32  # several times the capacity of a processor, so that all processors end at about one time
FEWEST_THREADS = 64
COPIES = 1024  # launches of copies kept for repetition, since programs call on the same arrays again and again


def opaque(dtype: numpy.dtype) -> numpy.dtype:
    """Return a dtype of the same size without fields, because CuPy's handling of kernel arguments reads all fields."""
    return numpy.dtype(f"V{dtype.itemsize}")


def _struct(form: str) -> Callable[..., Arguments]:
    """Return a function that packs kernel arguments into a C struct of the `form` of module struct."""
    pack, dtype = struct.Struct(form).pack, numpy.dtype(f"V{struct.calcsize(form)}")
    return lambda *values: numpy.frombuffer(bytearray(pack(*values)), dtype)


REDUCE_STRUCT = _struct(f"={MOST_SOURCES}QQQI4x")  # sources, dst, count, number of sources
COPY = _struct("=3Q")  # src, dst, count
SCALE = _struct("=3Q8x16s")  # src, dst, count, factor
PACK = _struct("=3QI4x8q8q")  # src, dst, count, number of axes, shape, strides
SHORTEN = _struct("=5Q")  # src, before, after, dst, count
# src, before, after, dst, maxima, count, share, stride, scales, tail, block, rows
QUANTISE = _struct("=10Q2I")
# src, dst, count, share, stride, scales, tail, block, terms, divisor, whether rows have scales
DEQUANTISE = _struct("=7Q4I")
MAXIMA = _struct("=5Q2I")  # src, before, dst, count, share, parts, rows
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

    `load` returns the `Launch` of an instance. `processors` is the number of multiprocessors of the device. `threads`,
    a power of two, is the largest number of threads in a block.
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
        launch(*self._grid(nbytes), arguments)(stream)

    def _grid(self, nbytes: int) -> tuple[int, int]:
        """Return the number of blocks and the threads per block for `nbytes` bytes."""
        wanted = -(-nbytes // (WORD * WORDS_IN_FLIGHT))
        threads = self._threads
        while wanted < self._few and threads > FEWEST_THREADS:
            threads >>= 1
            wanted <<= 1
        blocks = -(-nbytes // (WORD * WORDS_IN_FLIGHT * threads))
        return min(blocks, self._most_blocks), threads

    def reduce(self, op: Op, dtype: Dtype, sources: Sequence[int], dst: int, count: int, stream: Any) -> None:
        """Compute dst = op(...op(sources[0], sources[1])...) in the wide dtype, rounded once.

        More than `MOST_SOURCES` sources take several launches, rounded after each launch. `dst` may be a source of the
        first launch; a later source as `dst` is an ArgumentError.
        """
        for enqueue in self.reducers(op, dtype, sources, dst, count):
            enqueue(stream)

    def reducers(self, op: Op, dtype: Dtype, sources: Sequence[int], dst: int, count: int) -> list[Enqueue]:
        """Return the functions that enqueue the launches of `reduce`."""
        if count == 0:
            return []
        if dst in sources[MOST_SOURCES:]:
            raise ArgumentError(f"reduce: source {sources.index(dst, MOST_SOURCES)} of {len(sources)} is overwritten "
                                f"before being read; only one of the first {MOST_SOURCES} may be dst",
                                code="GC-OVERLAP")
        if len(sources) == 1:
            return self.copiers(sources[0], dst, count, dtype.itemsize)
        launch = self._get(("reduce", op.cuda, dtype.name), kernels.reducing, "reduce", op, dtype)
        grid = self._grid(count * dtype.itemsize)
        return [launch(*grid, REDUCE_STRUCT(*some, *_NO_SOURCES[len(some):], dst, count, len(some)))
                for some in _passes(sources, dst)]

    def copy(self, src: int, dst: int, count: int, width: int, stream: Any) -> None:
        """Compute dst = src for `count` elements of `width` bytes."""
        if count and src != dst:
            self._copy_of(src, dst, count * width)(stream)

    def copiers(self, src: int, dst: int, count: int, width: int) -> list[Enqueue]:
        """Return the function that enqueues the launch of `copy`, if there is one."""
        return [self._copy_of(src, dst, count * width)] if count and src != dst else []

    def _new_copy(self, src: int, dst: int, nbytes: int) -> Enqueue:
        unit = math.gcd(src | dst, nbytes, WORD)
        return self._get(("copy", unit), kernels.instance, "copy", unit)(*self._grid(nbytes),
                                                                        COPY(src, dst, nbytes // unit))

    def pack(self, src: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, dst: int,
             stream: Any) -> None:
        """Gather the elements at ``src + sum(index * strides)`` into `dst`, in C order; `strides` are in bytes."""
        self._strided("pack", src, dst, shape, strides, itemsize, stream)

    def unpack(self, src: int, dst: int, shape: Sequence[int], strides: Sequence[int], itemsize: int,
               stream: Any) -> None:
        """Scatter contiguous elements of `src` to ``dst + sum(index * strides)``; leave the bytes between untouched."""
        self._strided("unpack", src, dst, shape, strides, itemsize, stream)

    def _strided(self, kernel: str, src: int, dst: int, shape: Sequence[int], strides: Sequence[int], itemsize: int,
                 stream: Any) -> None:
        """Launch `kernel` for each part of the strided side; copy parts without gaps."""
        for offset, place, axes in _parts(tuple(shape), tuple(strides), itemsize, (src | dst) % WORD):
            ends = (src + offset, dst + place) if kernel == "pack" else (src + place, dst + offset)
            if axes.strides == (axes.unit,):
                self.copy(*ends, axes.shape[0], axes.unit, stream)
            else:
                count, none = math.prod(axes.shape), (0,) * (MOST_AXES - len(axes.shape))
                arguments = PACK(*ends, count, len(axes.shape), *axes.shape, *none, *axes.strides, *none)
                launch = self._get((kernel, axes.unit), kernels.instance, kernel, axes.unit)
                self._run(launch, count * WORD, arguments, stream)

    def scale(self, what: Scale, dtype: Dtype, src: int, dst: int, count: int, factor: Any, stream: Any) -> None:
        """Compute dst = src / factor ("divide"), src * factor ("multiply"), or src != 0 ("truth", without factor)."""
        if count == 0:
            return
        launch = self._get((what, dtype.name), kernels.instance, "scale", what, dtype)
        bits = _NO_FACTOR if what == "truth" else numpy.array(factor, dtype.wide or dtype.name).tobytes()
        self._run(launch, count * dtype.itemsize, SCALE(src, dst, count, bits), stream)

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
            form.rows))(stream)

    def maxima(self, dtype: Dtype, form: Quantised, src: int, before: int, dst: int, parts: int, count: int,
               stream: Any) -> None:
        """Store in `dst` the largest magnitudes of src + before in `parts` parts of each row, in the wide dtype."""
        launch = self._get(("maxima", dtype.name), kernels.instance, "maxima", dtype)
        arguments = MAXIMA(src, before, dst, count, form.share, parts, form.rows)
        launch(form.rows * parts, self._threads, arguments)(stream)

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


class DeviceRow:
    """A row of device memory in the form for executors: address, elements, bytes, dtype."""

    __slots__ = ("data", "dtype", "nbytes", "ptr", "size")

    def __init__(self, row: Any) -> None:
        self.ptr: int = address(row)
        self.size: Any = row.size
        self.nbytes: Any = row.nbytes
        self.dtype: Any = row.dtype
        self.data: DeviceRow = self  # CuPy's arrays have their address in `data.ptr`


class Workspace:
    """Scratch arrays by name. An outgrown array stays allocated, since a stream may still be using the array."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rows: dict[str, Any] = {}
        self._outgrown: list[Any] = []

    def row(self, name: str, nbytes: int, stream: Stream) -> Any:
        """Return the array `name` with at least `nbytes` bytes; None for 0 bytes."""
        row = self._rows.get(name)
        if nbytes and (row is None or row.nbytes < nbytes):
            self._outgrown.append(row)
            # Sizes are powers of two, so all outgrown arrays together are smaller than the current array.
            wanted = 1 << max(nbytes - 1, 16).bit_length()
            row = self._rows[name] = self._device.empty(wanted, numpy.dtype("u1"), stream)
        return row if nbytes else None

    def rows(self) -> list[Any]:
        """Return all arrays, including the outgrown arrays."""
        return [row for row in (*self._rows.values(), *self._outgrown) if row is not None]

    def clear(self) -> None:
        self._rows.clear()
        self._outgrown.clear()


class Output(NamedTuple):
    """Memory of a result, set to NaN if the call fails. `owner` is a weak reference to the array of this memory."""

    owner: Callable[[], object]
    address: int
    nbytes: int


def output_of(request: Any, result: Any, row: Any) -> Output | None:
    """Return the result of a call on a GPU for the watchdog; None if the result cannot be NaN or must stay.

    The watchdog fills incomplete results with NaN. The result must be formed in the memory of the user's array. A weak
    reference to the array tells whether the memory is still in use; CuPy's memory objects allow no such reference. The
    root of a broadcast keeps its own data.
    """
    given = request.collective == "broadcast" and request.has_input
    if row is None or request.dtype.kind not in ("float", "complex") or given or not row.nbytes:
        return None
    array = result[0] if isinstance(result, list) and result else result
    base = getattr(array, "base", None)
    try:
        return Output(weakref.ref(array if base is None else base), address(row), row.nbytes)
    except TypeError:  # another library's array
        return None


class StreamOrder:
    """The execution order of a communicator's operations: each starts after the previous one, on any streams."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Stream of the last operation, and the event at the end of that operation, made on demand.
        self._last: Stream | None = None
        self._event: Event | None = None
        # Events of operations under way, each with the memory in use until the event completes.
        self._flying: collections.deque[tuple[Event, object]] = collections.deque()
        # Memory used by the user's CUDA graphs. The time of the last launch is unknown, so nothing is ever released.
        self._captured: list[object] = []
        self.is_watched: bool = False  # whether a watchdog monitors the operations
        self._look: Event | None = None  # the watchdog's event, see `watch`
        self._recording: _Recording | None = None  # the batch ending with this event, until completion
        # The watchdog's batches: the event at the end of at most EVERY operations, and the results of the operations.
        self._batches: collections.deque[tuple[Event, list[Output]]] = collections.deque()
        self._outputs: list[Output] = []  # results of the operations after the last batch
        self._unmarked = self._asked = 0  # number of operations after the last batch: now, and at the last `oldest()`

    def follow(self, stream: Stream) -> None:
        """Make `stream` wait for the previous operation, unless `stream` is being captured."""
        # Operations on one stream need no event.
        if self._event is None and (self._last is None or self._last is stream or self._last == stream):
            return
        # The user is responsible for the order of a CUDA graph.
        if stream.is_capturing():
            return
        # Made only now, because most programs use one stream and never need the event.
        if self._event is None:
            self._event = self._device.mark(self._last)
        stream.wait_event(self._event)

    def enqueue(self, launch: Callable[[Stream], None], stream: Stream, output: Output | None = None,
                keep: object = None) -> None:
        """Enqueue an operation on `stream` by calling `launch`, after the previous operation; not during a capture.

        `keep` lives until the end of the operation.
        """
        # The conditions spare the common case, successive calls on one stream, two calls of Python functions.
        if stream is not self._last or self._event is not None:
            self.follow(stream)
        launch(stream)
        if stream is not self._last or self._event is not None or self._flying:
            self.passed(stream, None)
        if self.is_watched or keep is not None:
            self.noted(stream, output, None if keep is None else self.hold(stream, keep))

    def passed(self, stream: Stream, keep: object) -> None:
        """Record the operation just enqueued on `stream` as the last; in a capture only keep `keep` alive."""
        if self.keep_captured(stream, keep):
            return
        self._last, self._event = stream, None
        # Another library may destroy a foreign stream before the next operation: record the event at once.
        if not self._device.lasts(stream):
            self._event = self._device.mark(stream)
        self.let_go()

    def mark(self, stream: Stream, keep: object) -> Event:
        """Call `passed`, return an event at the end of the operation, and keep `keep` alive until the event."""
        self.passed(stream, keep)
        event = self.hold(stream, keep)
        if not stream.is_capturing():
            self._event = event
        return event

    def hold(self, stream: Stream, keep: object) -> Event:
        """Return an event at the current end of `stream`, and keep `keep` alive until the event completes."""
        event = self._device.mark(stream)
        if not self.keep_captured(stream, keep):
            self._flying.append((event, keep))
            self.let_go()
        return event

    def keep_captured(self, stream: Stream, memory: object) -> bool:
        """Return whether `stream` is being captured; if so, keep `memory` alive for the user's graph."""
        if stream.is_capturing():
            self._captured.append(memory)
            return True
        return False

    @property
    def has_captured(self) -> bool:
        """Whether a CUDA graph of the user contains calls of this communicator."""
        return bool(self._captured)

    def let_go(self) -> None:
        """Release the memory kept for completed operations."""
        while self._flying and self._flying[0][0].done:
            self._flying.popleft()

    def watch(self) -> None:
        """Start to keep the batches for a watchdog.

        The watchdog's event is made here. While a thread copies to ordinary host memory, CUDA makes no event until the
        end of the copy, and the watchdog is there to end a copy waiting in vain.
        """
        self._look = self._look or self._device.new_event()
        self.is_watched = True

    def noted(self, stream: Stream, output: Output | None = None, event: Event | None = None) -> None:
        """Report an operation enqueued on `stream`, and its result, to the watchdog.

        `event` is the event at the end of the operation, if available. Otherwise every EVERY-th operation gets an
        event. Operations complete in order, so the event also covers all earlier operations.
        """
        if not self.is_watched:
            return
        if output is not None:
            self._outputs.append(output)
        self._unmarked += 1
        if event is not None or self._unmarked >= EVERY:
            self._cut(self._device.mark(stream) if event is None else event)

    def noted_message(self, event: Event) -> None:
        """Report point-to-point messages, ending at `event`, to the watchdog; messages are outside the order."""
        if self.is_watched:
            self._batches.append((event, []))

    def _cut(self, event: Event) -> None:
        outputs, self._outputs, self._unmarked = self._outputs, [], 0
        self._batches.append((event, outputs))

    def oldest(self) -> object:
        """Return an object identifying the oldest batch under way, the same until the batch completes; else None.

        Only the watchdog calls this method.
        """
        recording, self._recording = self._recording, None
        if recording is not None and not self._is_recorded(recording):
            self._recording = recording
            return recording
        while self._batches and self._batches[0][0].done:
            self._batches.popleft()
        if self._batches:
            return self._batches[0]
        # Close a batch here only if no operation was added since the last call: an event recorded now also waits for
        # later work on the stream. A thread enqueuing more operations closes the batch in `noted`.
        before, self._asked = self._asked, self._unmarked
        if self._unmarked and self._unmarked == before and self._last is not None and not self._last.is_capturing():
            if self._event is not None:
                self._cut(self._event)
                return self._batches[0]
            if self._look is not None:
                outputs, self._outputs, self._unmarked = self._outputs, [], 0
                self._recording = _Recording(self._device, self._look, self._last, outputs)
                return self._recording
        return None

    def _is_recorded(self, recording: _Recording) -> bool:
        try:
            return recording.done
        # CUDA refuses, for example during a capture: the next look tries again.
        except Exception:
            self._outputs[:0] = recording.outputs
            self._unmarked += 1
            raise

    def unfinished(self) -> list[Output]:
        """Return the results of all operations not known to be complete."""
        # Iterate over a copy, because the watchdog's thread calls this method while another thread may add batches.
        batches = [outputs for event, outputs in list(self._batches) if not _is_done(event)]
        recording = [] if self._recording is None else self._recording.outputs
        return [output for outputs in (recording, *batches, self._outputs) for output in outputs]

    def awaited(self) -> list[Event]:
        """Return the events of all operations and messages under way; all are complete when every event is."""
        return [event for event, _ in self._flying] + self.last()

    def last(self) -> list[Event]:
        """Return the event at the end of the last operation, which follows all operations before; [] without one."""
        if self._last is not None and self._event is None:
            # The null stream has one address on all GPUs: the current device decides whose null stream is meant.
            with self._device.current:
                self._event = self._device.mark(self._last)
        return [self._event] if self._event else []


class _Recording:
    """A batch ending with the present work of `stream`, where a thread of the batch records `event`.

    CUDA may let the thread wait until the end of a copy in the same stream; the watchdog must not wait for that.
    """

    def __init__(self, device: Device, event: Event, stream: Stream, outputs: list[Output]) -> None:
        self._device, self._event, self._stream, self.outputs = device, event, stream, outputs
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        threading.Thread(target=self._record, name="gpucoll event", daemon=True).start()
        self._has_ended.wait(MOMENT)

    def _record(self) -> None:
        try:
            with self._device.relaxed:
                self._event.record(self._stream)
        except Exception as error:
            self._error = error
        self._has_ended.set()

    @property
    def done(self) -> bool:
        """Whether the operations of the batch have completed; raises an error of CUDA."""
        if self._error is not None:
            raise self._error
        return self._has_ended.is_set() and self._event.done


def _is_done(event: Event) -> bool:
    """Return whether an event is complete; False for an event of a capture or a failed GPU."""
    try:
        return event.done
    except GpucollError:
        return False
