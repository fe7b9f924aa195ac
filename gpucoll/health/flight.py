"""The flight recorder: what a rank has called, in a file that is mapped, so that it stays after SIGKILL.

One file a rank and communicator, in the folder that GPUCOLL_DUMP_DIR names. A head says who wrote it; then come records
of 256 bytes in a ring, the last CALLS calls. The engine writes them as this module does (kernels/flight.h).
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from gpucoll.core.signature import described
from gpucoll.errors import ArgumentError, BackendError

MAGIC = b"gpucoll flight 1"
HEAD, CALLS = 4096, 1024  # bytes, records
LAST = 16  # where in the head the number of the last call is
FACTS = 24  # where what is known of the rank begins, as JSON that ends with a zero
RECORD = numpy.dtype([("number", "<u8"), ("began", "<i8"), ("ended", "<i8"), ("nbytes", "<u8"), ("words", "S224")])
CLOSED = "closed"  # the last record of a communicator that was closed in good order


class Flight:
    """The recorder of one rank of a communicator; `group` is a name that all its ranks know it by."""

    def __init__(self, folder: Path, group: str, rank: int, size: int) -> None:
        facts = {"group": group, "rank": rank, "size": size, "process": os.getpid(), "host": socket.gethostname(),
                 "wall": time.time_ns() - time.monotonic_ns()}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{group}-rank{rank}-{os.getpid()}.flight"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.truncate(file, HEAD + CALLS * RECORD.itemsize)
                self._map = mmap.mmap(file, 0)
            finally:
                os.close(file)
        except OSError as error:
            raise BackendError(f"GPUCOLL_DUMP_DIR={folder}: {error}", code="GC-DUMP") from error
        text = json.dumps(facts).encode()
        self._map[:len(MAGIC)] = MAGIC
        self._map[FACTS:FACTS + len(text)] = text
        self.memory = numpy.frombuffer(self._map, numpy.uint8)
        self._last = self.memory[LAST:LAST + 8].view("<u8")
        self._records = self.memory[HEAD:].view(RECORD)

    def began(self, words: str, nbytes: int = 0) -> None:
        """Note a call that begins."""
        number = int(self._last[0]) + 1
        one = self._records[number % CALLS]
        one["number"] = 0
        one["began"], one["ended"], one["nbytes"] = time.monotonic_ns(), 0, nbytes
        one["words"] = words.encode()[:224]
        one["number"] = number
        self._last[0] = number

    def ended(self) -> None:
        """Note that it has ended."""
        self._records[int(self._last[0]) % CALLS]["ended"] = time.monotonic_ns()


class Call(NamedTuple):
    """A call that a rank has recorded; times are nanoseconds since 1970, `ended` None where it has not."""

    number: int
    began: int
    ended: int | None
    nbytes: int
    words: str


class Story(NamedTuple):
    """What one file tells."""

    group: str
    rank: int
    size: int
    process: int
    host: str
    calls: tuple[Call, ...]


def read(path: Path) -> Story:
    """Return what a file tells; ArgumentError for one that is no recorder's, whatever is in it."""
    try:
        content = path.read_bytes()
        if not content.startswith(MAGIC) or len(content) != HEAD + CALLS * RECORD.itemsize:
            raise ValueError("it is no flight recorder's file")
        facts = _kind(json.loads(content[FACTS:HEAD].partition(b"\0")[0]), dict)
        records = numpy.frombuffer(content, RECORD, offset=HEAD)
        chosen = {name: _kind(facts.get(name), kind) for name, kind in
                  (("group", str), ("rank", int), ("size", int), ("process", int), ("host", str), ("wall", int))}
        if not 0 <= chosen["rank"] < chosen["size"] <= 1 << 24:
            raise ValueError("it names no rank")
        wall = chosen.pop("wall")
        return Story(**chosen, calls=tuple(_calls(records, wall)))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: {error}", code="GC-DUMP") from error


def _kind(value: Any, kind: type) -> Any:
    if type(value) is not kind or (isinstance(value, int) and value.bit_length() > 63):
        raise ValueError("its head is damaged")
    return value


def _calls(records: Any, wall: int) -> list[Call]:
    """Return the calls in order; a record that was being written is left out."""
    found = [Call(int(one["number"]), int(one["began"]) + wall, int(one["ended"]) + wall if one["ended"] else None,
                  int(one["nbytes"]), described(one["words"].decode(errors="replace")))
             for one in records if one["number"]]
    return sorted(found)
