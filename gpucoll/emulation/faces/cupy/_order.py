"""The order of accesses to device memory: two streams on the same bytes, one of them writing, need one.

Every action has a clock: for each stream, the number of the actions known to be before it. Events, waits of the host,
and the null stream join clocks. So an access without order is found whatever order the streams have come in,
and the error names the lines of both. Accesses of kernels are known by their arguments: a pointer to const is only
read.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

from gpucoll.errors import UsageError

from . import _memory
from ._machine import clock_of
from .hostile import on

INSIDE = (str(Path(__file__).parents[1]), str(Path(__file__).parents[3]))
KEPT = 32  # accesses of a chunk, of each kind


class Access(NamedTuple):
    """Bytes from `low` to `high`, used by action `count` of a queue, enqueued at a line of the program."""

    low: int
    high: int
    queue: object
    count: int
    line: str


def span(array):
    """Return the first address of an array's bytes, and the one after the last."""
    host = array._host
    if not host.size:
        return 0, 0
    reach = [(length - 1) * stride for length, stride in zip(host.shape, host.strides, strict=True)]
    start = host.ctypes.data
    return start + sum(one for one in reach if one < 0), start + sum(one for one in reach if one > 0) + host.itemsize


def line():
    """Return the place in the program that has led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"


def touched(queue, reads, writes):
    """Note what the last action of a queue reads and writes, as pairs of addresses; raise UsageError without order."""
    if not on("order") or queue.capture is not None:
        return
    place, clock = line(), clock_of(queue)
    for spans, is_write in ((reads, False), (writes, True)):
        for low, high in spans:
            chunk = _memory.chunk_at(low) if high > low else None
            if chunk is not None:
                _compare(chunk, Access(low, high, queue, queue.issued, place), clock, is_write)


def _compare(chunk, mine, clock, is_write):
    before = chunk.writes + chunk.reads if is_write else chunk.writes
    for other in before:
        if other.low < mine.high and mine.low < other.high and other.queue is not mine.queue \
                and clock.get(other.queue, 0) < other.count:
            verb = "writes" if other in chunk.writes else "reads"
            raise UsageError(f"{mine.line} {'writes' if is_write else 'reads'} memory that {other.line} {verb} on "
                             "another stream, and no event orders them: the second stream must wait for the first "
                             "(stream.wait_event), or the host (stream.synchronize)", code="GC-EMULATION")
    kept = chunk.writes if is_write else chunk.reads
    kept[:] = [one for one in kept if not (mine.low <= one.low and one.high <= mine.high
                                           and (is_write or one.queue is mine.queue))][-KEPT:]
    kept.append(mine)
    if is_write:
        chunk.reads[:] = [one for one in chunk.reads if not (mine.low <= one.low and one.high <= mine.high)]
