"""Collectives of Python objects, pickled and sent as bytes. Unpickling runs code: trust every rank.

If a rank refuses its arguments, or cannot pickle its object, the other ranks raise PeerError. Not in a group of calls
(UsageError): the results would not exist before its end.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy

from gpucoll.arrays import Array
from gpucoll.errors import ArgumentError

if TYPE_CHECKING:
    from gpucoll.communicator.methods import Communicator


def all_gather(comm: Communicator, obj: Any) -> list[Any]:
    """Gather pickled objects on every rank; see `Communicator.all_gather_object`."""
    return [*map(_unpickled, comm.all_gather_v(_pickled(comm, "all_gather_object", obj)))]


def gather(comm: Communicator, obj: Any, root: int) -> list[Any] | None:
    rows = comm.gather_v(_pickled(comm, "gather_object", obj), root)
    return None if rows is None else [*map(_unpickled, rows)]


def broadcast(comm: Communicator, obj: Any, root: int) -> Any:
    """Send the root's pickled object to all ranks; see `Communicator.broadcast_object`."""
    core, row = comm._core, numpy.empty(0, numpy.uint8)
    core.check_apart("broadcast_object")
    root = core.metadata.sizes("broadcast_object", root).root
    if comm.rank == root:
        row = _pickled(comm, "broadcast_object", obj)
    nbytes = core.metadata.broadcast(root, {"bytes": row.size}, "broadcast_object")["bytes"]
    row = row if comm.rank == root else numpy.empty(nbytes, numpy.uint8)
    comm.broadcast(row, root)
    return obj if comm.rank == root else _unpickled(row)


def scatter(comm: Communicator, objs: Any, root: int) -> Any:
    """Send each rank its pickled object of the root's list; see `Communicator.scatter_object`."""
    core = comm._core
    core.check_apart("scatter_object")
    root = core.metadata.sizes("scatter_object", root).root
    return _unpickled(comm.scatter_v(_rows(comm, objs) if comm.rank == root else None, root))


def _rows(comm: Communicator, objs: Any) -> list[Array]:
    with comm._core.life.refusing():
        if not isinstance(objs, list | tuple) or len(objs) != comm.size:
            raise ArgumentError(f"scatter_object: the root's list must have {comm.size} objects, one for each rank",
                                code="GC-COUNTS")
        return [_row("scatter_object", obj) for obj in objs]


def _pickled(comm: Communicator, name: str, obj: Any) -> Array:
    comm._core.check_apart(name)
    with comm._core.life.refusing():
        return _row(name, obj)


def _row(name: str, obj: Any) -> Array:
    try:
        return numpy.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), numpy.uint8)
    except Exception as error:  # the object's own code may raise any error
        raise ArgumentError(f"{name}: a {type(obj).__name__} cannot be pickled: {error}") from error


def _unpickled(row: Array) -> Any:
    return pickle.loads(memoryview(row))  # type: ignore[arg-type] # an array is a buffer
