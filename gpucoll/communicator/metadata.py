"""Host messages: shapes, dtypes and errors exchanged between ranks before data can move."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy

from gpucoll.arrays import Array, RankInfo, Space, on_gpu, prepare
from gpucoll.call.table import CallOptions
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import row_of
from gpucoll.errors import REFUSALS, ArgumentError, GpucollError, MismatchError, PeerError, minority

if TYPE_CHECKING:
    from gpucoll.communicator.core import Core

Metadata: TypeAlias = dict[str, Any]
Failure: TypeAlias = GpucollError | MemoryError | None  # the error of this rank's own part, or None

FIXED_BYTES, BYTES_PER_RANK = 1024, 24  # of a host message: the fixed part, and the part for each rank's count
CACHED_HEADERS = 256  # entries of caches of host messages


def metadata_of(x: Array, shape: Sequence[int]) -> Metadata:
    """Return the metadata of an array for the other ranks, with `shape` as its shape."""
    return {"shape": list(shape), "dtype": row_of(x.dtype).name, "gpu": on_gpu(x)}


class MetadataExchange:
    """Exchanges of small JSON objects by the communicator's own schedules, with its deadline."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def sizes(self, name: str, root: Any) -> RankInfo:
        """Return rank, size and root for a call that begins with an exchange; report a refusal in the exchange."""
        try:
            return self._core.calls.sizes(name, root)
        except REFUSALS as error:
            self._core.life.refuse(error)
            raise

    def broadcast(self, root: int, metadata: Metadata, name: str, mine: Failure = None) -> Metadata:
        """Return the root's metadata on every rank; with an error raise `mine` on the root, PeerError elsewhere."""
        if self._core.link.exchange is not None:
            everyone = self._exchanged(name, root, metadata, mine)
            return checked([everyone[root]], name, mine, first=root)[0]
        size = self._core.size
        row = row_with(metadata, size, mine) if self._core.rank == root else numpy.empty(_row_bytes(size), numpy.uint8)
        row = self.exchange("broadcast", row, name, root)
        return checked([_read(row, name)], name, mine, first=root)[0]

    def all_gather(self, metadata: Metadata, name: str, mine: Failure = None) -> list[Metadata]:
        """Return all ranks' metadata on every rank, in rank order; raise an error of any rank on all ranks.

        The error `mine` goes in place of the metadata: this rank raises the error, the other ranks raise PeerError.
        """
        if self._core.link.exchange is not None:
            return checked(self._exchanged(name, 0, metadata, mine), name, mine)
        return checked_rows(self.exchange("all_gather", row_with(metadata, self._core.size, mine), name), name, mine)

    def _exchanged(self, name: str, root: int, metadata: Metadata, mine: Failure) -> list[Metadata]:
        """Return all ranks' metadata, exchanged as objects by the transport."""
        core, found = self._core, list[Any]()
        assert core.link.exchange is not None
        core.waits.check_usable()
        given = metadata if mine is None else {"error": str(mine)}
        core.waits.run(core.link.exchange(name, root, given, found), name)
        everyone: list[Metadata] = found[0]
        return everyone

    def exchange(self, collective: str, row: Array, name: str, root: int = 0) -> Array:
        """Return the result of a collective on `row` at once, even inside a group of calls.

        Raises LengthsDiffer, a reason to repeat the exchange, if another rank took lengths from an earlier call.
        """
        # The call itself cannot be prepared without the result, so a group begins this exchange at once.
        core, cache_key = self._core, (f"{collective} of a header of {name}", "", root, "auto")
        result: Array = core.calls.fast_path(*cache_key, row, None)
        if result is NotImplemented:
            call = prepare(COLLECTIVES[collective], row, None, core.calls.sizes(name, root))
            shows = core.host.shows_calls is not None
            allowed = "shared" if shows else core.calls.host_executor()  # the other ranks look for the call there
            ready, call = core.calls.resolve(COLLECTIVES[collective], call, CallOptions(), allowed, None, root, name)
            core.waits.run(core.calls.measured(core.calls.operation(ready, call.space, call), ready.call.request), name)
            core.calls.keep(cache_key, row, None, ready, call, core.calls.seconds_of(ready.call))
            result = call.result
        return result

    def space_of(self, name: str, metadata: Metadata, source: Any, out: Any, stream: Any) -> Space:
        """Return the space of a call with the root's `metadata`; `source` and `out` are this rank's arrays or None."""
        here = [array for array in (source, out) if array is not None]
        # The executor must be the same on all ranks: the root's arrays decide.
        if any(on_gpu(array) != metadata["gpu"] for array in here):
            raise ArgumentError(f"{name}: out must be on the same device as the root's array, which is "
                                f"{'on a GPU' if metadata['gpu'] else 'on the host'}", code="GC-DEVICE")
        if not here and metadata["gpu"]:
            return self._core.gpu("cuda").space(stream)
        return self._core.space(name, *here, stream=stream)


def checked(metadata: list[Metadata], name: str, mine: Failure, first: int = 0) -> list[Metadata]:
    """Return the metadata of ranks from `first` on; raise `mine`, or PeerError if a rank refuses its arguments."""
    if mine is not None:
        raise mine
    # Every rank has the same rows, so all ranks raise for the same rank.
    refused = {first + rank: one["error"] for rank, one in enumerate(metadata) if "error" in one}
    if refused:
        rank, reason = next(iter(refused.items()))
        raise PeerError(f"{name}: rank {rank} refused its arguments: {reason}", ranks=tuple(refused))
    return metadata


def checked_rows(rows: Array, name: str, mine: Failure) -> list[Metadata]:
    """Return the metadata in the host messages of all ranks; errors as in `checked`."""
    return checked([_read(row, name) for row in rows], name, mine)


def _row_bytes(ranks: int) -> int:
    return FIXED_BYTES + BYTES_PER_RANK * ranks


def row_with(metadata: Metadata, ranks: int, error: Failure = None) -> Array:
    """Return a host message with `metadata`, or an `error`, in JSON, as a row of uint8; an error is cut to fit."""
    row = numpy.zeros(_row_bytes(ranks), numpy.uint8)
    text = json.dumps(metadata if error is None else {"error": str(error)}).encode()
    kept = len(str(error))
    while error is not None and len(text) > len(row):  # keep as many characters as fit in JSON
        kept -= (len(text) - len(row) + 5) // 6  # an escaped character takes up to 6 bytes, or 12 for two
        text = json.dumps({"error": str(error)[:kept]}).encode()
    row[:len(text)] = numpy.frombuffer(text, numpy.uint8)
    return row


def _read(row: Array, name: str) -> Metadata:
    """Return the metadata in a host message of the call `name`; raise MismatchError for data of another call."""
    try:
        return _parsed(row.tobytes())
    # With check="off" calls are not compared, and this rank may receive an array of another call.
    except ValueError as error:
        raise MismatchError(f"{name}: the data from another rank is not a message of this call; the ranks are in "
                            'different calls, and the default check= names them') from error


@functools.lru_cache(CACHED_HEADERS)
def _parsed(row: bytes) -> Metadata:
    found = json.loads(row.rstrip(b"\0"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def check_alike(name: str, metadata: Sequence[Metadata], key: str, code: str) -> None:
    """Raise MismatchError, on every rank, if the ranks' metadata differ in `key`."""
    values = [one[key] for one in metadata]
    if any(value != values[0] for value in values):
        differ = minority(values)
        like = next(rank for rank in range(len(metadata)) if rank not in differ)
        raise MismatchError(f"{name}: rank {like} has {key} {values[like]}, ranks {', '.join(map(str, differ))} have "
                            f"{values[differ[0]]}; pass the same value on all ranks", code=code, ranks=differ)
