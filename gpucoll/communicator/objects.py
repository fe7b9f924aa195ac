"""Collectives of Python objects, pickled and sent as bytes. Unpickling runs code: trust every rank.

Long buffers, such as the elements of large arrays, are not copied into the pickle. `broadcast` and `all_gather` send
from the memory of an object into the memory of a new object. `gather` and `scatter` send one row from a rank: the
sender copies long buffers into the row, and the new objects are views of the row.

If a rank refuses its arguments, or cannot pickle its object, the other ranks raise PeerError. Not in a group of calls
(UsageError): the results would not exist before its end.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Any

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.blocks import split
from gpucoll.errors import ArgumentError

if TYPE_CHECKING:
    from gpucoll.communicator.methods import Communicator

LONG_BYTES = 1 << 18  # bytes of a buffer whose copies take longer than a call of its own
ALIGNED = 16  # bytes: the longest element of an array


def all_gather(comm: Communicator, obj: Any) -> list[Any]:
    """Gather pickled objects on every rank; see `Communicator.all_gather_object`."""
    row, mine = _pickled(comm, "all_gather_object", obj)
    rows = comm.all_gather_v(row)
    buffers = [_spread(comm, row, mine, root) for root, row in enumerate(rows)]
    buffers[comm.rank] = [one.copy() for one in mine]
    return [*map(_unpickled, rows, buffers)]


def gather(comm: Communicator, obj: Any, root: int) -> list[Any] | None:
    rows = comm.gather_v(_joined(*_pickled(comm, "gather_object", obj)), root)
    return None if rows is None else [_unpickled(row, _inside(row)) for row in rows]


def broadcast(comm: Communicator, obj: Any, root: int) -> Any:
    """Send the root's pickled object to all ranks; see `Communicator.broadcast_object`."""
    core, row, mine = comm._core, numpy.empty(0, numpy.uint8), list[Array]()
    core.calls.check_apart("broadcast_object")
    root = core.metadata.sizes("broadcast_object", root).root
    if comm.rank == root:
        row, mine = _pickled(comm, "broadcast_object", obj)
    nbytes = core.metadata.broadcast(root, {"bytes": row.size}, "broadcast_object")["bytes"]
    row = row if comm.rank == root else numpy.empty(nbytes, numpy.uint8)
    comm.broadcast(row, root)
    buffers = _spread(comm, row, mine, root)
    return obj if comm.rank == root else _unpickled(row, buffers)


def scatter(comm: Communicator, objs: Any, root: int) -> Any:
    """Send each rank its pickled object of the root's list; see `Communicator.scatter_object`."""
    core = comm._core
    core.calls.check_apart("scatter_object")
    root = core.metadata.sizes("scatter_object", root).root
    row = comm.scatter_v(_rows(comm, objs) if comm.rank == root else None, root)
    return _unpickled(row, _inside(row))


def _rows(comm: Communicator, objs: Any) -> list[Array]:
    with comm._core.life.refusing():
        if not isinstance(objs, list | tuple) or len(objs) != comm.size:
            raise ArgumentError(f"scatter_object: the root's list must have {comm.size} objects, one for each rank",
                                code="GC-COUNTS")
        return [_joined(*_row("scatter_object", obj)) for obj in objs]


def _pickled(comm: Communicator, name: str, obj: Any) -> tuple[Array, list[Array]]:
    comm._core.calls.check_apart(name)
    with comm._core.life.refusing():
        return _row(name, obj)


def _row(name: str, obj: Any) -> tuple[Array, list[Array]]:
    """Return the pickle of an object, and the long buffers. Before the pickle: number and lengths of the buffers."""
    buffers: list[Array] = []

    def is_short(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LONG_BYTES:
            return True
        buffers.append(numpy.frombuffer(buffer.raw(), numpy.uint8))
        return False

    try:
        pickled = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL, buffer_callback=is_short)
    except Exception as error:  # the object's own code may raise any error
        raise ArgumentError(f"{name}: a {type(obj).__name__} cannot be pickled: {error}") from error
    if buffers:  # the number is below 2^56: no pickle begins with a zero
        pickled = struct.pack(f">{len(buffers) + 1}q", len(buffers), *[one.size for one in buffers]) + pickled
    return numpy.frombuffer(pickled, numpy.uint8), buffers


def _lengths(row: Array) -> tuple[int, ...]:
    """Return the lengths of the long buffers of a pickle."""
    return () if row[0] else struct.unpack_from(f">{struct.unpack_from('>q', row.data)[0]}q", row.data, 8)


def _spread(comm: Communicator, row: Array, mine: list[Array], root: int) -> list[Array]:
    """Return the root's long buffers, `mine` on the root, on all ranks."""
    buffers = mine if comm.rank == root else [numpy.empty(length, numpy.uint8) for length in _lengths(row)]
    for one in buffers:
        comm.broadcast(one, root)
    return buffers


def _joined(row: Array, buffers: list[Array]) -> Array:
    """Return one row of a pickle and long buffers, each in a place for the elements of an array."""
    gap = numpy.empty(ALIGNED, numpy.uint8)
    return numpy.concatenate([part for one in (row, *buffers) for part in (one, gap[:-one.size % ALIGNED])]) \
        if buffers else row


def _inside(row: Array) -> list[Array]:
    """Return the long buffers in a row: views, or copies if the row begins in a place for no array."""
    if not (lengths := _lengths(row)):
        return []
    room = [length + -length % ALIGNED for length in lengths]
    rest = row[len(row) - sum(room):]
    parts = split(rest if address(rest) % ALIGNED == 0 else rest.copy(), room, ())
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _unpickled(row: Array, buffers: list[Array]) -> Any:
    start = 0 if row[0] else 8 * (len(buffers) + 1)
    return pickle.loads(row.data[start:], buffers=buffers)
