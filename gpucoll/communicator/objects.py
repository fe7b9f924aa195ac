"""Collectives of Python objects, pickled and sent as bytes. Unpickling runs code: trust every rank.

If a rank refuses its arguments, or cannot pickle its object, the other ranks raise PeerError. Not in a group of calls
(UsageError): the results would not exist before its end.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.communicator.methods import Collectives
from gpucoll.communicator.ragged import VectorVariants
from gpucoll.errors import ArgumentError


class Objects(VectorVariants, Collectives):
    """Methods of `Communicator`: collectives of pickled objects."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the list of all ranks' objects, in rank order, on every rank."""
        return [*map(_unpickled, self.all_gather_v(self._pickled("all_gather_object", obj)))]

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return the list of all ranks' objects, in rank order, on `root`; None elsewhere."""
        rows = self.gather_v(self._pickled("gather_object", obj), root)
        return None if rows is None else [*map(_unpickled, rows)]

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Return the root's object, a copy on other ranks; elsewhere `obj` is ignored."""
        self._check_apart("broadcast_object")
        root, row = self._checked_sizes("broadcast_object", root).root, numpy.empty(0, numpy.uint8)
        if self.rank == root:
            row = self._pickled("broadcast_object", obj)
        nbytes = self._broadcast_metadata(root, {"bytes": row.size}, "broadcast_object")["bytes"]
        row = row if self.rank == root else numpy.empty(nbytes, numpy.uint8)
        self.broadcast(row, root)
        return obj if self.rank == root else _unpickled(row)

    def scatter_object(self, objs: Any = None, root: int = 0) -> Any:
        """Return a copy of object `rank` of the root's list of `size` objects; elsewhere `objs` is ignored."""
        self._check_apart("scatter_object")
        root = self._checked_sizes("scatter_object", root).root
        return _unpickled(self.scatter_v(self._rows(objs) if self.rank == root else None, root))

    def _rows(self, objs: Any) -> list[Array]:
        with self._refusing():
            if not isinstance(objs, list | tuple) or len(objs) != self.size:
                raise ArgumentError(f"scatter_object: the root's list must have {self.size} objects, one for each rank",
                                    code="GC-COUNTS")
            return [_row("scatter_object", obj) for obj in objs]

    def _pickled(self, name: str, obj: Any) -> Array:
        self._check_apart(name)
        with self._refusing():
            return _row(name, obj)


def _row(name: str, obj: Any) -> Array:
    try:
        return numpy.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), numpy.uint8)
    except Exception as error:  # the object's own code may raise any error
        raise ArgumentError(f"{name}: a {type(obj).__name__} cannot be pickled: {error}", code="GC-PICKLE") from error


def _unpickled(row: Array) -> Any:
    return pickle.loads(row.tobytes())
