"""A grid of ranks with named axes. Arrays are divided along the axes: see `gpucoll.training.layout`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy

from gpucoll import Communicator
from gpucoll.errors import ArgumentError, nearest
from gpucoll.internal import are_whole
from gpucoll.training.shards import owned

Spec: TypeAlias = tuple[tuple[str, ...], ...]  # for each axis of an array: the mesh axes dividing the axis
Box: TypeAlias = tuple[slice, ...]  # part of a global array


class Mesh:
    """The ranks of `comm`, in C order, as a grid of `shape` with axes `names`.

    The constructor is a collective call.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    shape : sequence of int
        The number of ranks along each axis.
    names : sequence of str
        The name of each axis.

    Attributes
    ----------
    coordinates : dict of str to int
        The place of this rank, by axis name.

    Raises
    ------
    ArgumentError
        The product of the shape is not the number of ranks; on all ranks (GC-SPEC).

    See Also
    --------
    shard : An array over a mesh.

    Examples
    --------
    >>> import gpucoll as gc
    >>> from gpucoll.training import Mesh
    >>> def program(comm):
    ...     mesh = Mesh(comm, (2, 2), ("rows", "columns"))
    ...     return mesh.coordinates
    >>> gc.run_local(program, 4)[3]
    {'rows': 1, 'columns': 1}
    """

    def __init__(self, comm: Communicator, shape: Sequence[int], names: Sequence[str]) -> None:
        if not are_whole(shape) or not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names):
            raise ArgumentError(f"Mesh: shape {shape!r} must be a list of integers, names {names!r} a list of words",
                                code="GC-SPEC")
        self.comm: Communicator = comm
        self.shape: tuple[int, ...] = tuple(map(int, shape))
        self.names: tuple[str, ...] = tuple(names)
        if len(self.shape) != len(self.names) or len(set(self.names)) < len(self.names):
            raise ArgumentError(f"Mesh: {len(self.shape)} axes need as many different names, not {self.names}",
                                code="GC-SPEC")
        if math.prod(self.shape) != comm.size or any(length < 1 for length in self.shape):
            raise ArgumentError(f"Mesh: shape {self.shape} does not have {comm.size} places, one for each rank",
                                code="GC-SPEC")
        self.coordinates: dict[str, int] = self.of(comm.rank)
        self._along: dict[str, Communicator] = {}
        for name in self.names:
            # Ranks with equal coordinates on all other axes share a communicator.
            others = [here for axis, here in self.coordinates.items() if axis != name]
            color = int(numpy.ravel_multi_index(others, [self.size(axis) for axis in self.names if axis != name])) \
                if others else 0
            part = comm.split(color, key=self.coordinates[name])
            assert part is not None
            self._along[name] = part

    def of(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by axis name.

        Parameters
        ----------
        rank : int
            The rank in the communicator of the mesh.

        Returns
        -------
        dict of str to int
            A coordinate for each axis.

        Examples
        --------
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2, 2), ("rows", "columns"))
        ...     return mesh.of(2)
        >>> gc.run_local(program, 4)[3]
        {'rows': 1, 'columns': 0}
        """
        return {name: int(here) for name, here in zip(self.names, numpy.unravel_index(rank, self.shape), strict=True)}

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis.

        Parameters
        ----------
        name : str
            The name of the axis.

        Returns
        -------
        int
            The number of ranks.

        Raises
        ------
        ArgumentError
            The mesh has no such axis (GC-SPEC).

        Examples
        --------
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2, 2), ("rows", "columns"))
        ...     return mesh.size("rows")
        >>> gc.run_local(program, 4)[3]
        2
        """
        self._check_name("size", name, "GC-SPEC")
        return self.shape[self.names.index(name)]

    def along(self, name: str) -> Communicator:
        """Return the communicator of the ranks that differ from this rank only along axis `name`, in axis order.

        Parameters
        ----------
        name : str
            The name of the axis.

        Returns
        -------
        Communicator
            The communicator of the ranks of a line of the grid.

        Raises
        ------
        ArgumentError
            The mesh has no such axis (GC-SPEC).

        Examples
        --------
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2, 2), ("rows", "columns"))
        ...     return mesh.along("columns").rank
        >>> gc.run_local(program, 4)[3]
        1
        """
        self._check_name("along", name, "GC-SPEC")
        return self._along[name]

    def _check_name(self, call: str, name: object, code: str) -> None:
        if name not in self.names:
            raise ArgumentError(f"{call}: the mesh has no axis {name!r}{nearest(name, self.names)}", code=code)

    def spec(self, call: str, given: Any, shape: Sequence[int]) -> Spec:
        """Return the specification `given` with every entry as a tuple.

        Parameters
        ----------
        call : str
            The name of the call, for the error's text.
        given : sequence
            An entry for each axis of an array: None, a name, or a tuple of names.
        shape : sequence of int
            The shape of the array.

        Returns
        -------
        tuple of tuples
            The mesh axes that divide each axis of the array.

        Raises
        ------
        ArgumentError
            The specification is invalid (GC-SPEC).

        Examples
        --------
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2, 2), ("rows", "columns"))
        ...     return mesh.spec("shard", ["rows", None], (4, 4))
        >>> gc.run_local(program, 4)[3]
        (('rows',), ())
        """
        entries = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else None
        if entries is None or len(entries) != len(shape):
            raise ArgumentError(f"{call}: specification {given!r} does not have an entry for each of {len(shape)} axes",
                                code="GC-SPEC")
        found = tuple(() if one is None else tuple(one) if isinstance(one, list | tuple) else (one,) for one in entries)
        named = [name for entry in found for name in entry]
        for name in named:
            self._check_name(call, name, "GC-SPEC")
        if len(set(named)) < len(named):
            raise ArgumentError(f"{call}: a mesh axis divides twice in {given!r}", code="GC-SPEC")
        return found

    def box(self, spec: Spec, shape: Sequence[int], rank: int) -> Box:
        """Return the part of a global array held by `rank`.

        Parameters
        ----------
        spec : tuple of tuples
            A specification, as of `spec`.
        shape : sequence of int
            The shape of the global array.
        rank : int
            The rank in the communicator of the mesh.

        Returns
        -------
        tuple of slice
            A slice for each axis.

        Examples
        --------
        >>> import gpucoll as gc
        >>> from gpucoll.training import Mesh
        >>> def program(comm):
        ...     mesh = Mesh(comm, (2, 2), ("rows", "columns"))
        ...     return mesh.box((("rows",), ()), (4, 4), 0)
        >>> gc.run_local(program, 4)[3]
        (slice(0, 2, None), slice(0, 4, None))
        """
        here = self.of(rank)
        found = []
        for names, length in zip(spec, shape, strict=True):
            index, parts = 0, 1
            for name in names:
                index, parts = index * self.size(name) + here[name], parts * self.size(name)
            found.append(owned(length, index, parts))
        return tuple(found)
