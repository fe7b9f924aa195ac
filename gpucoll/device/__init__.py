"""The device layer: compiled kernels and their launches, device memory, streams.

    sources     the source text of each kernel instance, made from kernels/device
    nvrtc       NVIDIA's compiler; store: g++, and the cache of compiled kernels; command: `gpucoll kernels`
    launch      work on streams: kernels with their arguments and grids, scratch memory, the order of operations
    gpus        the assignment of GPUs to ranks, the links between these GPUs, and CuPy or what stands in for it
    cuda        a GPU, through CuPy; memory that other processes open
    nccl        one rank's NCCL communicator; pairs: those of two ranks, for messages
    local       replaces NCCL between threads on one GPU

`Stream` and `Event` follow CuPy. Work is enqueued on a stream, and the host does not wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from gpucoll.errors import BackendError

if TYPE_CHECKING:
    from gpucoll.device.cuda import CudaDevice

Waiting: TypeAlias = Iterator[Callable[[], bool]]  # an operation of `gpucoll.progress.waits`, yielding predicates


# A stream has CuPy's wait_event, begin_capture, end_capture and is_capturing. An event has `record`, and `done`, true
# once all work before the record is complete. A graph, the result of end_capture, has `launch`.
Stream: TypeAlias = Any
Event: TypeAlias = Any
Graph: TypeAlias = Any
Device: TypeAlias = "CudaDevice"  # by a name that needs no CuPy

SOURCE_NAME = "kernels.cu"  # file name in the compilers' messages, since the sources are passed as text
# NVRTC: `reduce.cu(12): error: ...`; g++: `reduce.cu:12:7: error: ...`; assemblers and linkers often name no line.
_ERROR = re.compile(r"^(?:(?P<file>[^\s(:]+)[(:](?P<row>\d+)\S*: )?(?:.*?[ ;])?"
                    r"(?:error|Error|fatal)(?: #\S+?)? *: *(?P<text>.+)$", re.MULTILINE)


class CompileError(BackendError):
    """A compiler rejected the source. `line` is the text of the first error without the position.

    `row` is the number of the source line, 0 if unknown.

    >>> error = CompileError.of("g++", "src/kernels.cu:3:9: error: 'x' was not declared in this scope")
    >>> print(error)
    [GC-COMPILE] g++ at kernels.cu:3: 'x' was not declared in this scope
    >>> error.line, error.row
    ("'x' was not declared in this scope", 3)
    """

    default_code = "GC-COMPILE"
    line = ""
    row = 0

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


NO_CAPTURE = "ranks that are threads meet on the host in every call, and no CUDA graph holds that"


class GroupPart(NamedTuple):
    """A message of a group: `nbytes` bytes at `address`, to or from rank `peer`. NCCL ignores `tag`."""

    address: int
    nbytes: int
    peer: int
    tag: int = 0


class DeviceTransport(Protocol):
    """The means of moving data between the ranks of a communicator: NCCL or a substitute for NCCL.

    The k-th part sent from rank a to rank b is the k-th part received by b from a.
    """

    capturable: bool = True  # whether a CUDA graph can contain a group
    # Whether a graph tells the other ranks the addresses of its arrays. Such a graph must not be reused for a later
    # array at the same address, because the other ranks still map the old memory.
    registers: bool = False

    def group(self, sends: Sequence[GroupPart], receives: Sequence[GroupPart], stream: Any) -> Waiting:
        """Enqueue all parts as concurrent messages; yield a predicate whenever the host must wait."""

    def check(self) -> None:
        """Raise BackendError if the transport has failed; substitutes for NCCL raise errors in `group` instead."""
        return

    def close(self, *, captured: bool) -> None:
        """Free all resources, on every rank in the same order; `captured`: a user's graph may use the transport."""
        return

    def abort(self) -> None:
        """End the groups under way without the other ranks; nothing to do if none waits for another rank."""
        return
