"""Collectives of Python objects: pickled, they travel as bytes. Unpickling runs code: trust every rank.

A rank that refuses its arguments, or whose object cannot be pickled, tells the others: they raise PeerError.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.distributed.groups import ProcessGroup, member
from gpucoll.errors import ArgumentError


def _pickled(name: str, value: Any) -> Array:
    try:
        return numpy.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), numpy.uint8)
    except Exception as error:  # whatever the object's own code raises
        raise ArgumentError(f"{name}: a {type(value).__name__} cannot be pickled: {error}", code="GC-PICKLE") from error


def _unpickled(row: Array) -> Any:
    return pickle.loads(row.tobytes())


def _check_list(name: str, what: str, values: Any, least: int) -> list[Any]:
    if not isinstance(values, list) or len(values) < least:
        given = f"has {len(values)}" if isinstance(values, list) else f"is a {type(values).__name__}"
        raise ArgumentError(f"{name}: {what} must be a list with room for {least} objects, but {given}",
                            code="GC-COUNTS")
    return values


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Write `obj` of rank i into ``object_list[i]`` of every rank; the list may be longer than there are ranks."""
    name, pg = "all_gather_object", member("all_gather_object", group)
    if pg is None:
        return
    size = pg.size()
    with pg.refusing():
        _check_list(name, "object_list", object_list, size)
        row = _pickled(name, obj)
    object_list[:size] = map(_unpickled, pg.communicator.all_gather_v(row))


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = 0, group: Any = None,
                  group_dst: int | None = None) -> None:
    """Write `obj` of rank i into ``object_gather_list[i]`` of rank `dst`; elsewhere the list is None or empty."""
    name, pg = "gather_object", member("gather_object", group)
    if pg is None:
        return
    root = pg.number_of(name, "dst", dst, group_dst)
    with pg.refusing():
        if pg.rank() == root:
            _check_list(name, "object_gather_list", object_gather_list, pg.size())
        elif object_gather_list:
            raise ArgumentError(f"{name}: object_gather_list was given on a rank that is not dst; pass it there only",
                                code="GC-ROOT")
        row = _pickled(name, obj)
    rows = pg.communicator.gather_v(row, root)
    if object_gather_list:
        object_gather_list[:pg.size()] = map(_unpickled, rows)


def broadcast_object_list(object_list: list[Any], src: int | None = 0, group: Any = None, device: Any = None,
                          group_src: int | None = None) -> None:
    """Overwrite the objects of every rank's list with those of rank `src`; `device` has no effect.

    Raises ArgumentError, with nothing written, where a list is not as long as that of rank `src`.
    """
    name, pg = "broadcast_object_list", member("broadcast_object_list", group)
    if pg is None:
        return
    root = pg.number_of(name, "src", src, group_src)
    row = numpy.empty(0, numpy.uint8)
    if pg.rank() == root:
        with pg.refusing():
            row = _pickled(name, list(_check_list(name, "object_list", object_list, 0)))
    nbytes = pg.communicator._broadcast_metadata(root, {"bytes": row.size}, name)["bytes"]
    row = row if pg.rank() == root else numpy.empty(nbytes, numpy.uint8)
    pg.communicator.broadcast(row, root)
    if pg.rank() != root:
        came = _unpickled(row)
        if len(_check_list(name, "object_list", object_list, len(came))) != len(came):
            raise ArgumentError(f"{name}: object_list has {len(object_list)} objects, that of rank {src} has "
                                f"{len(came)}", code="GC-COUNTS")
        object_list[:] = came


def scatter_object_list(scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
                        src: int | None = 0, group: Any = None, group_src: int | None = None) -> None:
    """Write ``scatter_object_input_list[i]`` of rank `src` into ``scatter_object_output_list[0]`` of rank i.

    Elsewhere the input list is ignored. The output list has at least one element: ArgumentError.
    """
    name, pg = "scatter_object_list", member("scatter_object_list", group)
    if pg is None:
        return
    root = pg.number_of(name, "src", src, group_src)
    rows = _scattered_rows(name, pg, scatter_object_input_list) if pg.rank() == root else None
    row = pg.communicator.scatter_v(rows, root)
    # Checked after the others have been served: who refuses before would keep them waiting.
    _check_list(name, "scatter_object_output_list", scatter_object_output_list, 1)
    scatter_object_output_list[0] = _unpickled(row)


def _scattered_rows(name: str, pg: ProcessGroup, values: Any) -> list[Array]:
    """Return the root's objects pickled; what is wrong with them is raised, and the others raise PeerError."""
    with pg.refusing():
        if not isinstance(values, list | tuple) or len(values) != pg.size():
            raise ArgumentError(f"{name}: on rank src scatter_object_input_list must have {pg.size()} objects, one "
                                "for each rank of the group", code="GC-COUNTS")
        return [_pickled(name, value) for value in values]
