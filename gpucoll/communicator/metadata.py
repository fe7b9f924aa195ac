"""Host messages: what ranks must tell each other of shapes before data can move."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy

from gpucoll.arrays import Array, Sizes, Space, on_gpu, prepare
from gpucoll.communicator.core import CallOptions
from gpucoll.communicator.lifecycle import Lifecycle
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import row_of
from gpucoll.errors import ArgumentError, GpucollError, MismatchError, PeerError, minority

Metadata: TypeAlias = dict[str, Any]
Failure: TypeAlias = GpucollError | MemoryError | None  # what is wrong with this rank's part

BYTES, BYTES_PER_RANK = 1024, 24  # bytes
KEPT = 256  # of what others told


def metadata_of(x: Array, shape: Sequence[int]) -> Metadata:
    """Return what the other ranks must know of an array, which has that `shape` to them."""
    return {"shape": list(shape), "dtype": row_of(x.dtype).name, "gpu": on_gpu(x)}


class MetadataExchange(Lifecycle):
    """Exchanges of small JSON objects, by the communicator's own schedules: with a deadline like every wait."""

    def _checked_sizes(self, name: str, root: Any) -> Sizes:
        """Return who is asking, in a call that begins with such an exchange; what is wrong is told in it."""
        with self._refusing():
            return self._sizes(name, root)

    def _broadcast_metadata(self, root: int, metadata: Metadata, name: str, mine: Failure = None) -> Metadata:
        """Return the root's on every rank; where it is an error, raise it: `mine` there, PeerError elsewhere."""
        row = row_with(metadata, self.size) if self.rank == root else numpy.empty(_row_bytes(self.size), numpy.uint8)
        row = self._exchange("broadcast", row, name, root)
        return self._checked_metadata([_read(row.tobytes())], name, mine, first=root)[0]

    def _all_gather_metadata(self, metadata: Metadata, name: str, mine: Failure = None) -> list[Metadata]:
        """Return everybody's metadata on every rank; an error of any rank is raised on all."""
        return self._checked_rows(self._exchange("all_gather", row_with(metadata, self.size), name), name, mine)

    def _checked_rows(self, rows: Array, name: str, mine: Failure) -> list[Metadata]:
        return self._checked_metadata([_read(row.tobytes()) for row in rows], name, mine)

    def _exchange(self, collective: str, row: Array, name: str, root: int = 0) -> Array:
        """Return what a collective on `row` results in, at once, whatever a group of calls puts off."""
        same = (f"{collective} of a header of {name}", "", root, "auto")
        result = self._express(*same, row, None)
        if result is NotImplemented:
            call = prepare(COLLECTIVES[collective], row, None, self._sizes(name, root))
            shows = self._host.shows_calls is not None
            allowed = "shared" if shows else self._host_executor()  # where the others look for it
            executor, task = self._resolve(COLLECTIVES[collective], call, CallOptions(), allowed, root=root)
            task.header = name
            self._waits.run(self._operation(executor, task, call.space, call), name)
            self._calls.keep(same, row, None, executor, task, call, self._seconds(executor, task))
            result = call.result
        return result

    def _metadata_space(self, name: str, metadata: Metadata, source: Any, out: Any, stream: Any) -> Space:
        """Return where a call runs whose root has told of its arrays; `source` and `out` are this rank's, or None."""
        here = [array for array in (source, out) if array is not None]
        if any(on_gpu(array) != metadata["gpu"] for array in here):
            raise ArgumentError(f"{name}: out is not where the root's array is, which is "
                                f"{'on a GPU' if metadata['gpu'] else 'on the host'}", code="GC-DEVICE")
        if not here and metadata["gpu"]:
            return self._gpu("cuda").space(stream)
        return self._space(name, *here, stream=stream)

    def _checked_metadata(self, metadata: list[Metadata], name: str, mine: Failure,
                          first: int = 0) -> list[Metadata]:
        if mine is not None:
            raise mine
        refused = {first + rank: one["error"] for rank, one in enumerate(metadata) if "error" in one}
        if refused:
            rank, words = next(iter(refused.items()))
            raise PeerError(f"{name}: rank {rank} refused its arguments: {words}", ranks=tuple(refused))
        return metadata


def _row_bytes(ranks: int) -> int:
    """Return the bytes of a host message: the same on all ranks."""
    return BYTES + BYTES_PER_RANK * ranks


def row_with(metadata: Metadata, ranks: int) -> Array:
    """Return a host message that says so."""
    row = numpy.zeros(_row_bytes(ranks), numpy.uint8)
    text = json.dumps(metadata).encode()
    if "error" in metadata:  # nothing else then: as many of its characters as there is room for, escaped as they are
        kept = len(metadata["error"])
        while len(text) > len(row):
            kept -= (len(text) - len(row) + 5) // 6  # an escaped character takes up to 6 bytes, or 12 for two
            text = json.dumps({"error": metadata["error"][:kept]}).encode()
    row[:len(text)] = numpy.frombuffer(text, numpy.uint8)
    return row


@functools.lru_cache(KEPT)
def _read(row: bytes) -> Metadata:
    found: Metadata = json.loads(row.rstrip(b"\0"))
    return found


def check_alike(name: str, metadata: Sequence[Metadata], key: str, code: str) -> None:
    """Raise MismatchError, on every rank alike, where ranks differ in `key` of what all of them have told."""
    values = [one[key] for one in metadata]
    if any(value != values[0] for value in values):
        differ = minority(values)
        like = next(rank for rank in range(len(metadata)) if rank not in differ)
        raise MismatchError(f"{name}: rank {like} has {key} {values[like]}, ranks {', '.join(map(str, differ))} have "
                            f"{values[differ[0]]}; it must be the same on all ranks", code=code, ranks=differ)
