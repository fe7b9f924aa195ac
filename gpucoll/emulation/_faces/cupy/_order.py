"""The order of accesses to device memory: two streams on the same bytes, one of them writing, need one.

Every action has a clock: for each stream, the number of the actions known to be before it. Events, waits of the host,
and the null stream join clocks. So an access without order is found whatever order the streams have come in,
and the error names the lines of both. Accesses of kernels are known by their arguments: a pointer to const is only
read. A graph uses the memory of its capture at every launch, so this memory must still belong to an array.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy

from gpucoll.errors import UsageError

from . import _memory
from ._clocks import clock_of
from .hostile import on

INSIDE = (str(Path(__file__).parents[1]), str(Path(__file__).parents[3]), contextlib.__file__)
KEPT = 32  # accesses of a chunk, of each kind
UNWRITTEN = 4  # fewer bytes may have the value of unwritten memory by chance


class Access(NamedTuple):
    """Bytes from `low` to `high`, used by action `count` of a queue, enqueued at a line of the program.

    `kernel` is the name of a program's own kernel. From a single line, it may write parts of one array on several
    streams: the parts are then chosen by its other arguments.
    """

    low: int
    high: int
    queue: object
    count: int
    line: str
    kernel: str = ""


def span(array):
    """Return the first address of an array's bytes, and the one after the last."""
    return numpy.lib.array_utils.byte_bounds(array._host) if array.size else (0, 0)


def line():
    """Return the place in the program that has led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"


def touched(queue, reads, writes, kernel=""):
    """Note what the last action of a queue reads and writes, as pairs of addresses; raise UsageError without order."""
    if not on("order"):
        return
    for spans, is_write in ((reads, False), (writes, True)):
        for low, high in spans:
            chunk = _memory.chunk_at(low) if high > low else None
            if chunk is None:
                _memory.view(low, high - low, queue.device)  # raises CUDARuntimeError for memory that was freed
                continue
            chunk.is_written, chunk.is_used = chunk.is_written or is_write, True
            if queue.capture is not None:
                queue.capture.uses.append((chunk, low, high, is_write))
            else:
                _compare(chunk, Access(low, high, queue, queue.issued, line(), kernel), clock_of(queue), is_write)


def launches(queue, uses):
    """Note what a graph's launch, the last action of a queue, uses; raise UsageError if it reads memory that was freed.

    Memory that is freed after the capture may serve the graph's own intermediate results: they are written first.
    """
    written = set()
    for chunk, low, high, is_write in uses:
        if not (chunk.live or is_write or chunk in written):
            raise UsageError(f"{line()} launches a graph that reads memory of an array that was dropped after the "
                             "capture; keep the array as long as the graph", code="GC-EMULATION")
        written |= {chunk} if is_write else set()
        _compare(chunk, Access(low, high, queue, queue.issued, line()), clock_of(queue), is_write)


def written(arrays):
    """Return a check, for the begin of the work: UsageError if none of the bytes of an array was ever written."""
    if not on("order"):
        return lambda: None
    # The bytes and not the array: the check keeps no memory from the pool.
    found = [(array._host, _memory.chunk_at(array.data.ptr)) for array in arrays if array.nbytes >= UNWRITTEN]
    found = [(host, chunk) for host, chunk in found if chunk is not None and not chunk.is_written]
    place = line() if found else ""

    def check():
        for host, chunk in found:
            # Not all writes are known, so the bytes count: all are those of fresh memory.
            if not chunk.is_written and chunk.live and not numpy.ascontiguousarray(host).tobytes().strip(b"\xc5"):
                raise UsageError(f"{place} reads memory that nothing has written since its allocation at {chunk.made}",
                                 code="GC-EMULATION")

    return check


def _compare(chunk, mine, clock, is_write):
    before = chunk.writes + chunk.reads if is_write else chunk.writes
    for other in before:
        if other.low < mine.high and mine.low < other.high and other.queue is not mine.queue \
                and clock.get(other.queue, 0) < other.count \
                and not (mine.kernel and (mine.kernel, mine.line) == (other.kernel, other.line)):
            raise UsageError(f"{mine.line} {'writes' if is_write else 'reads'} memory that {other.line} "
                             f"{'writes' if other in chunk.writes else 'reads'} on another stream, and no event orders "
                             "them: the second stream must wait for the first (stream.wait_event), or the host "
                             "(stream.synchronize)", code="GC-EMULATION")
    kept = chunk.writes if is_write else chunk.reads
    kept[:] = [one for one in kept if not (mine.low <= one.low and one.high <= mine.high
                                           and (is_write or one.queue is mine.queue))][-KEPT:]
    kept.append(mine)
    if is_write:
        chunk.reads[:] = [one for one in chunk.reads if not (mine.low <= one.low and one.high <= mine.high)]
