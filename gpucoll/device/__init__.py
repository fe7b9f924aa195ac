"""The device layer: kernels compiled and launched, memory, streams; a GPU, or what stands for one.

    sources     kernels/*.cu and one row for each instance: what is compiled
    nvrtc gxx   the two compilers; store: their results on disk, made once; command: before they are asked for
    launch      arguments and grids of the kernels
    gpus        which GPU a rank has
    cuda        a GPU, by CuPy; driver: calls that CuPy does not have
    emulated    the same kernels on NumPy arrays, on the CPU
    nccl        one rank's NCCL communicator
    local       what stands for NCCL between threads that share a GPU; messages: on the emulated device

`Device`, `Stream` and `Event` are CuPy's notions; work is enqueued on a stream and nothing waits on the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy

from gpucoll.errors import BackendError

if TYPE_CHECKING:
    from gpucoll.device.launch import Kernels

Waiting: TypeAlias = Iterator[Callable[[], bool]]  # an operation in the sense of `gpucoll.progress.waits`


# Streams have CuPy's wait_event, begin_capture, end_capture and is_capturing; events have record, and `done`: whether
# all work before has ended; graphs, which end_capture returns, have launch.
Stream: TypeAlias = Any
Event: TypeAlias = Any
Graph: TypeAlias = Any

SOURCE_NAME = "kernels.cu"  # what compilers call a source that has no file
# NVRTC: `reduce.cu(12): error: ...`; g++: `reduce.cu:12:7: error: ...`; assemblers and linkers: often without a place.
_ERROR = re.compile(r"^(?:(?P<file>[^\s(:]+)[(:](?P<row>\d+)\S*: )?(?:.*?[ ;])?"
                    r"(?:error|Error|fatal)(?: #\S+?)? *: *(?P<text>.+)$", re.MULTILINE)


class CompileError(BackendError):
    """A compiler refused the source: `line` is the text of its first error without the place, `row` the source's line.

    >>> error = CompileError.of("g++", "src/kernels.cu:3:9: error: 'x' was not declared in this scope")
    >>> print(error)
    [GC-COMPILE] g++ at kernels.cu:3: 'x' was not declared in this scope
    >>> error.line, error.row
    ("'x' was not declared in this scope", 3)
    """

    default_code = "GC-COMPILE"
    line = ""
    row = 0  # where there is none

    @classmethod
    def of(cls, compiler: str, log: str) -> CompileError:
        match = _ERROR.search(log)
        said = (line.strip() for line in log.splitlines() if line.strip())
        line = match["text"] if match else next(said, "it failed and did not say why")
        place = f" at {match['file'].rpartition('/')[2]}:{match['row']}" if match and match["row"] else ""
        error = cls(f"{compiler}{place}: {line}")
        error.line, error.row = line, int(match["row"] or 0) if match else 0
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return (*super().__reduce__(), {"line": self.line, "row": self.row})


class Device(Protocol):
    """A GPU as one communicator uses it."""

    name: str  # "cuda" or "emulated"
    asynchronous: bool = False  # whether work goes on after the call that has enqueued it
    kernels: Kernels
    most_threads: int  # in a block
    warp: int  # threads that go on as one
    staging: int = 1 << 22  # bytes of a section of arrays that ranks do not share
    current: AbstractContextManager[object]  # inside it is the device of the calling thread, afterwards whatever was
    relaxed: AbstractContextManager[object] = nullcontext()  # `current`, and calls of the thread break no capture

    def channels(self, ranks: int) -> int:
        """Return how many blocks of each of so many ranks there is room for at a time, should all of them be on it."""

    def owns(self, array: Any) -> str | None:
        """Return None for an array in its memory, else where the array is."""

    def stream(self, given: Any) -> Stream:
        """Return the stream of a call: `given`, or the current one where it is None."""

    def lasts(self, stream: Any) -> bool:
        """Return whether `stream` is there as long as its object, not somebody else's to destroy."""
        return True

    def within(self, stream: Any) -> AbstractContextManager[object]:
        """Inside, `stream` is the current one of the calling thread."""
        return self.current

    def is_open(self, stream: Any) -> bool:
        """Return whether to enqueue work on `stream` is all: nothing need be made current, awaited or kept."""
        return False

    def is_blocking(self, stream: Any) -> bool:
        """Return whether `stream` and the null stream wait for each other."""
        return False

    def new_stream(self) -> Stream:
        """Return a stream that waits for no other."""

    def new_event(self) -> Event:
        """Return an event."""

    def mark(self, stream: Any) -> Event:
        """Return an event that stands for what `stream` has been given so far."""
        event = self.new_event()
        event.record(stream)
        return event

    def empty(self, shape: int | tuple[int, ...], dtype: numpy.dtype, stream: Any) -> Any:
        """Return a new array, to be used on `stream`."""

    def fill(self, row: Any, value: numpy.ndarray[Any, Any], stream: Any) -> None:
        """Write the one element of `value` into every element of `row`, which is as wide."""

    def fill_with_nan(self, places: Iterable[tuple[int, int]]) -> None:
        """Set all bits of memory, which is NaN in every floating-point format; a place is an address and bytes.

        Kernels that wait on other streams do not delay it. On the emulated device the host waits for every call, so
        that no result is left that is not complete.
        """
        return

    def settle(self, stream: Any) -> Waiting:
        """Wait until what `stream` has may be read: not at all on a GPU, where streams order everything."""
        return iter(())

    def cancel(self) -> None:
        """Let go of what is under way: nothing may be written later where it can be seen.

        What runs on a GPU cannot be called back but by its transport.
        """
        return


NO_CAPTURE = "ranks that are threads meet on the host in every call, and no CUDA graph holds that"


class Part(NamedTuple):
    """A message of a group: `nbytes` at `address`, to or from `peer`. NCCL knows no tags, others heed them."""

    address: int
    nbytes: int
    peer: int
    tag: int = 0


class Transport(Protocol):
    """What moves data between the ranks of a communicator: NCCL, or what stands for it.

    The k-th part sent from a to b is the k-th received by b from a.
    """

    capturable: bool = True  # whether a group can become part of a graph
    registers: bool = False  # whether a graph tells other ranks where the memory is that it works on

    def group(self, sends: Sequence[Part], receives: Sequence[Part], stream: Any) -> Waiting:
        """Enqueue all parts, to be under way together; yield a predicate whenever the host must wait."""

    def check(self) -> None:
        """Raise BackendError where the transport has failed; one over a wire raises its failures there."""
        return

    def close(self, *, captured: bool) -> None:
        """Give back what it holds, in the same order on every rank. `captured`: a graph of the user's may use it."""
        return

    def abort(self) -> None:
        """End what is under way, without the other ranks; what a stream's own end calls back needs no more."""
        return
