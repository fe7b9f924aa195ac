"""The record of calls: their running sums for `stats`, and the last calls of a rank in a file that survives SIGKILL.

A call's time has three shares: this rank's own delay before the call, the wait for other ranks in the call, and the
rest, moving and reducing. `CallRecord` adds them up by kind of call; report.py and metrics.py show these sums. The
engine counts the shares of its calls itself (kernels/engine/walker.h), and device_shares.py those of calls on a GPU.
All other calls are counted here, from two readings of the clock and from the findings of the engine and of the
comparison by messages.

With GPUCOLL_DUMP_DIR each rank also writes a file per communicator into that folder (`Flight`). A head describes the
rank; a ring of CALLS records, 384 bytes each, follows. The engine writes records in the same layout
(kernels/engine/flight.h).
"""

from __future__ import annotations

import collections
import functools
import json
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from gpucoll.core.signature import Signature
from gpucoll.errors import ArgumentError, BackendError
from gpucoll.executors import CallRequest, call_site
from gpucoll.health.clocks import ONE_CLOCK, ClockOffset, now
from gpucoll.progress.operations import Operation

LONG_DELAY = 100_000  # nanoseconds of an own delay from which the call site is noted; as in kernels/binding/calls.h
SUMS = 5  # of a kind of calls: calls, bytes, then the seconds of the three shares; kernels/binding/calls.h adds alike
TIMED = 32  # timings kept for each kind of call
HEADER = -1  # in place of the bit length: the host messages that announce a collective
NAMES = ("calls", "bytes", "own_seconds", "waiting_seconds", "moving_seconds")
CallKind = tuple[str, int]  # the collective, and the bit length of the bytes
Stats = dict[CallKind, dict[str, float]]
MAGIC = b"gpucoll flight 3"
# Layout of the file: MAGIC, the number of the last call (at LAST), the facts of the rank as JSON ended by a zero byte
# (from FACTS), then the records (from PREAMBLE, one page). kernels/engine/flight.h has the same record.
PREAMBLE, CALLS = 4096, 1024  # bytes, records
LAST, FACTS = 16, 24
RECORD = numpy.dtype([("number", "<u8"), ("began", "<i8"), ("ended", "<i8"), ("own", "<i8"), ("waited", "<i8"),
                      ("nbytes", "<u8"), ("description", "S208"), ("site", "S128")])
SITE = 112  # bytes kept of the name of a file, at its end
CLOSED = "closed"  # the collective of the last record of a communicator that all ranks closed without a failure


class CallRecord:
    """The record of a communicator's calls: the sums of calls counted here, and of the engine's repeated calls.

    `counters` returns what else counts: the engines, and the comparison by messages. Their `shares` are own delays,
    waits, and the time of the end of the last call, in nanoseconds. `file` has the last calls, if the program asks for
    a file. `times` has timings of blocking calls on host arrays, by name, executor, algorithm and bit length of the
    size. Number 0 of a row is the number of calls, then comes a ring of the seconds of the last `TIMED` calls, then the
    sums of the engine's repeated calls.
    """

    def __init__(self, counters: Callable[[], Iterable[Any]] = tuple) -> None:
        self.python: dict[CallKind, list[float]] = collections.defaultdict(lambda: [0.0] * SUMS)
        self.delays: dict[str, float] = collections.defaultdict(float)  # seconds of own delays by place: see `delayed`
        self.times: dict[tuple[str, str, str, int], Any] = collections.defaultdict(
            lambda: numpy.zeros(1 + TIMED + SUMS))
        self.file: Flight | None = None
        self.left: int = time.monotonic_ns()
        self._counters = counters

    def delayed(self, nanoseconds: int, place: str | None = None) -> None:
        """Note an own delay before a call, if the delay is long.

        The place is the user's line running now, unless given: a description of the call, or "" for unknown.
        """
        if nanoseconds > LONG_DELAY:
            self.delays[call_site() if place is None else place] += 1e-9 * nanoseconds

    def enqueued(self, sums: list[float], nbytes: int) -> None:
        """Count a call that was only enqueued, on a GPU: events give its seconds."""
        self.left = time.monotonic_ns()
        sums[0] += 1
        sums[1] += nbytes

    def shared(self, sums: list[float], own: int, waited: int, moved: int, place: str | None) -> None:
        """Add the three shares of a call, in nanoseconds; `place` as for `delayed`."""
        sums[2:] = [seconds + 1e-9 * more for seconds, more in zip(sums[2:], (own, waited, moved), strict=True)]
        self.delayed(own, place)

    def measured(self, operation: Operation, kind: CallKind, nbytes: int, place: str | None = None, *,
                 by_events: bool = False) -> Operation:
        """Return an operation that carries out another and counts its shares; a failed call is not counted.

        `place` is None if the call ends in the user's line that makes the call, else "". If the call has events on a
        GPU, they give its shares. Own delay and wait are at most the time since the last call, and in the call.
        """
        began, (own_before, waited_before, left) = time.monotonic_ns(), self._totals()
        yield from operation
        (own, waited, _), sums = self._totals(), self.python[kind]
        self.enqueued(sums, nbytes)
        own = min(max(own - own_before, 0), began - left)
        waited = min(max(waited - waited_before, 0), self.left - began)
        if self.file is not None:
            self.file.ended(began, self.left, own, waited)
        if not by_events:
            self.shared(sums, own, waited, self.left - began - waited, place)

    def _totals(self) -> tuple[int, int, int]:
        """Return own delays and waits, nanoseconds summed over all calls, and the time of the end of the last call."""
        owns, waits, ends = zip((0, 0, self.left), *(one.shares() for one in self._counters()), strict=True)
        return sum(owns), sum(waits), max(ends)

    def rows(self) -> Iterator[tuple[CallKind, list[float]]]:
        """Yield the sums of each kind of calls, of one kind perhaps several."""
        # Copies of both tables: another thread may add a kind of call meanwhile.
        yield from (((name, bits), row[-SUMS:].tolist()) for (name, _, _, bits), row in list(self.times.items()))
        yield from list(self.python.items())

    def absorb(self, other: CallRecord) -> None:
        """Add the sums of another communicator."""
        for kind, row in other.rows():
            self.python[kind] = [*map(sum, zip(self.python[kind], row, strict=True))]
        for place, seconds in list(other.delays.items()):
            self.delays[place] += seconds

    def stats(self) -> Stats:
        """Return the figures by collective and size class: the largest power of two not above the bytes, or 0.

        The seconds of host messages that announce a collective are divided among the size classes of the collective, in
        proportion to the calls.
        """
        total = CallRecord()
        total.absorb(self)
        found = total.python
        for name in [name for name, bits in found if bits == HEADER]:
            header = found.pop((name, HEADER))
            announced = [row for (collective, _), row in found.items() if collective == name]
            calls = sum(row[0] for row in announced)
            for row in announced if calls else ():
                row[2:] = [seconds + more * row[0] / calls for seconds, more in zip(row[2:], header[2:], strict=True)]
            if not calls and header[0]:  # a call without a collective of its own, such as `check_numerics`
                found[name, int(header[1] / header[0]).bit_length()] = header
        return {(name, 1 << bits >> 1): dict(zip(NAMES, [int(row[0]), int(row[1]), *row[2:]], strict=True))
                for (name, bits), row in sorted(found.items()) if row[0]}


def kind_of(call: CallRequest | Signature) -> CallKind:
    """Return the kind of a call; messages that announce a collective are a kind of their own."""
    return (call.header, HEADER) if call.header else (call.collective, call.nbytes.bit_length())


class Flight:
    """The file of one rank; `group` is the name of the communicator, the same on all ranks.

    `threads` tells that the ranks are threads of a process.
    """

    def __init__(self, folder: Path, group: str, rank: int, size: int, clock: ClockOffset = ONE_CLOCK, *,
                 threads: bool = False) -> None:
        # Records hold monotonic times, reports compare ranks by the time of rank 0's host: "wall" is the difference. A
        # process may lose its core between two readings: of several the shortest counts.
        readings = [(time.monotonic_ns(), now(), time.monotonic_ns()) for _ in range(9)]
        wall = clock.nanoseconds + min((after - before, here - after) for before, here, after in readings)[1]
        facts = {"group": group, "rank": rank, "size": size, "process": os.getpid(), "host": socket.gethostname(),
                 "threads": threads, "wall": wall, "clock_offset": clock.nanoseconds, "clock_error": clock.error}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{group}-rank{rank}-{os.getpid()}.flight"
            # The folder may be shared with other users: mode x opens no existing file, and follows no planted link.
            with open(path, "x+b", opener=functools.partial(os.open, mode=0o600)) as file:
                try:
                    # Not `truncate`: on a full disk a write into a hole of the file would end the rank by SIGBUS.
                    os.posix_fallocate(file.fileno(), 0, PREAMBLE + CALLS * RECORD.itemsize)
                    self._map = mmap.mmap(file.fileno(), 0)
                except OSError:
                    path.unlink()
                    raise
        except OSError as error:
            raise BackendError(f"GPUCOLL_DUMP_DIR={folder}: {error}", code="GC-FILE") from error
        text = json.dumps(facts).encode()
        self._map[:FACTS + len(text)] = MAGIC.ljust(FACTS, b"\0") + text
        self.memory: Any = numpy.frombuffer(self._map, numpy.uint8)
        self._last = self.memory[LAST:LAST + 8].view("<u8")
        self._records = self.memory[PREAMBLE:].view(RECORD)
        self._begun: Any = None  # the record of the call under way, if begun here

    def began(self, description: str, nbytes: int = 0, site: str = "") -> None:
        """Record that a call begins; `site` is the file and the line of the call in the user's program."""
        number = int(self._last[0]) + 1
        self._begun = one = self._records[number % CALLS]
        # Number 0 marks a record in the middle of a write: after a crash, `read` skips the half-written record.
        one["number"] = 0
        one["began"], one["nbytes"] = time.monotonic_ns(), nbytes
        one["ended"] = one["own"] = one["waited"] = 0
        one["description"], one["site"] = description.encode()[:208], site.encode()[-SITE:]
        one["number"] = number
        self._last[0] = number

    def ended(self, began: int = 0, ended: int = 0, own: int = 0, waited: int = 0) -> None:
        """Record the times of the call begun here, if any: with its comparison it `began` earlier than noted."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun["began"], begun["own"], begun["waited"] = began or begun["began"], own, waited
            begun["ended"] = ended or time.monotonic_ns()

    def on_phase(self, phase: str, request: CallRequest, rows: object) -> None:
        """Record the begin of a call not recorded by the engine (`CallObserver`); `CallRecord.measured` has the end."""
        if phase == "before":
            self.began(request.description, request.nbytes, call_site())


class RecordedCall(NamedTuple):
    """A recorded call of a rank; times are nanoseconds since 1970, `ended` is None for a call under way."""

    number: int
    began: int
    ended: int | None
    nbytes: int
    signature: Signature
    site: str = ""  # file and line in the user's program, if known
    own: int = 0  # nanoseconds of own delay, and of waiting
    waited: int = 0

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
    threads: bool = False  # whether the ranks are threads of a process
    clock_offset: int = 0  # nanoseconds: the times are by the clock of rank 0's host, the host's own clock plus this
    clock_error: int = 0  # nanoseconds: the largest error of the times


def read(path: Path) -> Story:
    """Return the content of a file; raise ArgumentError for anything but a valid flight recorder file."""
    try:
        content = path.read_bytes()
        if not content.startswith(MAGIC) or len(content) != PREAMBLE + CALLS * RECORD.itemsize:
            raise ValueError("it is not a file of the flight recorder")
        facts = _kind(json.loads(content[FACTS:PREAMBLE].partition(b"\0")[0]), dict)
        records = numpy.frombuffer(content, RECORD, offset=PREAMBLE)
        kinds = {"group": str, "host": str, "threads": bool} | dict.fromkeys(
            ("rank", "size", "process", "wall", "clock_offset", "clock_error"), int)
        chosen = {name: _kind(facts.get(name), kind) for name, kind in kinds.items()}
        if not 0 <= chosen["rank"] < chosen["size"] <= 1 << 24:
            raise ValueError("it names no rank")
        wall = chosen.pop("wall")
        # A record whose write was interrupted has no number.
        calls = sorted(RecordedCall(number, began + wall, ended + wall if ended else None, nbytes,
                                    Signature.decode(description.decode(errors="replace")),
                                    site.decode(errors="replace"), own, waited)
                       for number, began, ended, own, waited, nbytes, description, site in records.tolist() if number)
        return Story(**chosen, calls=tuple(calls))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: {error}", code="GC-FILE") from error


def _kind(value: Any, kind: type) -> Any:
    # `type` and not `isinstance`: true is no rank. Larger integers would overflow NumPy's and break the report.
    if type(value) is not kind or (isinstance(value, int) and value.bit_length() > 63):
        raise ValueError("its header is damaged")
    return value
