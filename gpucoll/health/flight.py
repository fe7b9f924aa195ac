"""The flight recorder: the last calls of a rank, in a mapped file, so that the content survives SIGKILL.

Each rank writes a file per communicator into the folder named by GPUCOLL_DUMP_DIR. A head describes the rank; a ring
of CALLS records, 384 bytes each, follows. The engine writes records in the same layout (kernels/engine/flight.h).
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from gpucoll.core.signature import Signature
from gpucoll.errors import ArgumentError, BackendError
from gpucoll.executors import CallRequest, call_site
from gpucoll.health.clocks import ONE_CLOCK, ClockOffset, now

MAGIC = b"gpucoll flight 2"
# Layout of the file: MAGIC, the number of the last call (at LAST), the facts of the rank as JSON ended by a zero byte
# (from FACTS), then the records (from HEAD, one page). kernels/engine/flight.h has the same record.
HEAD, CALLS = 4096, 1024  # bytes, records
LAST = 16
FACTS = 24
RECORD = numpy.dtype([("number", "<u8"), ("began", "<i8"), ("ended", "<i8"), ("nbytes", "<u8"),
                      ("description", "S224"), ("site", "S128")])
SITE = 112  # bytes kept of the name of a file, at its end
THREADS = "threads-"  # begins the group of ranks that are threads
CLOSED = "closed"  # the description of the last record of a communicator that all ranks closed without a failure


class Flight:
    """The recorder of one rank; `group` is the name of the communicator, the same on all ranks."""

    def __init__(self, folder: Path, group: str, rank: int, size: int, clock: ClockOffset = ONE_CLOCK) -> None:
        # Records hold monotonic times, reports compare ranks by the time of rank 0's host: "wall" is the difference. A
        # process may lose its core between two readings: of several the shortest counts.
        readings = [(time.monotonic_ns(), now(), time.monotonic_ns()) for _ in range(9)]
        wall = clock.nanoseconds + min((after - before, here - after) for before, here, after in readings)[1]
        facts = {"group": group, "rank": rank, "size": size, "process": os.getpid(), "host": socket.gethostname(),
                 "wall": wall, "clock_offset": clock.nanoseconds, "clock_error": clock.error}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{group}-rank{rank}-{os.getpid()}.flight"
            # The folder may be shared with other users: mode x opens no existing file, and follows no planted link.
            with open(path, "x+b", opener=functools.partial(os.open, mode=0o600)) as file:
                try:
                    # Not `truncate`: on a full disk a write into a hole of the file would end the rank by SIGBUS.
                    os.posix_fallocate(file.fileno(), 0, HEAD + CALLS * RECORD.itemsize)
                    self._map = mmap.mmap(file.fileno(), 0)
                except OSError:
                    path.unlink()
                    raise
        except OSError as error:
            raise BackendError(f"GPUCOLL_DUMP_DIR={folder}: {error}", code="GC-FILE") from error
        text = json.dumps(facts).encode()
        self._map[:FACTS + len(text)] = MAGIC.ljust(FACTS, b"\0") + text
        self.memory = numpy.frombuffer(self._map, numpy.uint8)
        self._last = self.memory[LAST:LAST + 8].view("<u8")
        self._records = self.memory[HEAD:].view(RECORD)

    def began(self, description: str, nbytes: int = 0, site: str = "") -> None:
        """Record that a call begins; `site` is the file and the line of the call in the user's program."""
        number = int(self._last[0]) + 1
        one = self._records[number % CALLS]
        # Number 0 marks a record in the middle of a write: after a crash, `read` skips the half-written record.
        one["number"] = 0
        one["began"], one["ended"], one["nbytes"] = time.monotonic_ns(), 0, nbytes
        one["description"], one["site"] = description.encode()[:224], site.encode()[-SITE:]
        one["number"] = number
        self._last[0] = number

    def ended(self) -> None:
        self._records[int(self._last[0]) % CALLS]["ended"] = time.monotonic_ns()

    def on_phase(self, phase: str, request: CallRequest, rows: object) -> None:
        """Record a phase of a call not recorded by the engine; see `CallObserver`."""
        if phase == "before":
            self.began(request.description, request.nbytes, call_site())
        elif phase == "after":
            self.ended()


class RecordedCall(NamedTuple):
    """A recorded call of a rank; times are nanoseconds since 1970, `ended` is None for a call under way."""

    number: int
    began: int
    ended: int | None
    nbytes: int
    signature: Signature
    site: str = ""  # file and line in the user's program, if known

    @property
    def description(self) -> str:
        return self.signature.describe()


class Story(NamedTuple):
    """The content of a flight recorder file: the rank and the recorded calls, in order."""

    group: str
    rank: int
    size: int
    process: int
    host: str
    calls: tuple[RecordedCall, ...]
    clock_offset: int = 0  # nanoseconds: the times are by the clock of rank 0's host, the host's own clock plus this
    clock_error: int = 0  # nanoseconds: the largest error of the times


def read(path: Path) -> Story:
    """Return the content of a file; raise ArgumentError for anything but a valid flight recorder file."""
    try:
        content = path.read_bytes()
        if not content.startswith(MAGIC) or len(content) != HEAD + CALLS * RECORD.itemsize:
            raise ValueError("it is not a file of the flight recorder")
        facts = _kind(json.loads(content[FACTS:HEAD].partition(b"\0")[0]), dict)
        records = numpy.frombuffer(content, RECORD, offset=HEAD)
        chosen = {name: _kind(facts.get(name), kind) for name, kind in
                  (("group", str), ("rank", int), ("size", int), ("process", int), ("host", str), ("wall", int),
                   ("clock_offset", int), ("clock_error", int))}
        if not 0 <= chosen["rank"] < chosen["size"] <= 1 << 24:
            raise ValueError("it names no rank")
        wall = chosen.pop("wall")
        # A record whose write was interrupted has no number.
        calls = sorted(RecordedCall(int(one["number"]), int(one["began"]) + wall,
                                    int(one["ended"]) + wall if one["ended"] else None, int(one["nbytes"]),
                                    Signature.decode(one["description"].decode(errors="replace")),
                                    one["site"].decode(errors="replace")) for one in records if one["number"])
        return Story(**chosen, calls=tuple(calls))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: {error}", code="GC-FILE") from error


def _kind(value: Any, kind: type) -> Any:
    # `type` and not `isinstance`: true is no rank. Larger integers would overflow NumPy's and break the report.
    if type(value) is not kind or (isinstance(value, int) and value.bit_length() > 63):
        raise ValueError("its header is damaged")
    return value
