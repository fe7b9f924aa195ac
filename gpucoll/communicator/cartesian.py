"""Ranks on a Cartesian grid: neighbours, and exchanges between neighbours. MPI-5.0, 8.5 and 8.6."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from gpucoll.arrays import Array, check_input, check_output, overlap
from gpucoll.communicator.metadata import check_alike
from gpucoll.communicator.methods import Communicator
from gpucoll.communicator.overloads import Neighbouring, shaped
from gpucoll.communicator.transports import Transport
from gpucoll.communicator.wildcards import PROC_NULL
from gpucoll.core.dtypes import are_whole, is_whole
from gpucoll.errors import ArgumentError
from gpucoll.launch.bootstrap import Options


class Cartesian(Communicator):
    """Ranks on a Cartesian grid; made by `Communicator.cart`.

    ``dims`` are the lengths of the grid, ``periods`` the flags of ring dimensions, ``coords`` the coordinates of this
    rank. Ranks are in C order: the last coordinate varies fastest. `split` returns an ordinary
    `Communicator`.
    """

    def __init__(self, link: Transport, halo: Transport, options: Options, dims: tuple[int, ...],
                 periods: tuple[bool, ...]) -> None:
        super().__init__(link, options)
        self.dims, self.periods = dims, periods
        self._halo = self._over(halo)  # a second communicator of these ranks: no message can match a user's

    def _over(self, link: Transport) -> Communicator:
        return Communicator(link, self.options)

    @property
    def coords(self) -> tuple[int, ...]:
        """The coordinates of this rank."""
        return self.coords_of(self.rank)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of `rank`; raise ArgumentError if there is no such rank."""
        return tuple(map(int, numpy.unravel_index(self._core.check_rank("coords_of", "rank", rank), self.dims)))

    def rank_of(self, coords: Sequence[int]) -> int:
        """Return the rank at `coords`, wrapped in periodic dimensions; raise ArgumentError outside the grid."""
        if not are_whole(coords) or len(coords) != len(self.dims):
            raise ArgumentError(f"rank_of: {coords!r} are not {len(self.dims)} coordinates", code="GC-CART")
        rank = self._at(coords)
        if rank is PROC_NULL:
            raise ArgumentError(f"rank_of: {tuple(coords)} is outside the grid {self.dims}", code="GC-CART")
        return rank

    def shift(self, direction: int, displacement: int = 1) -> tuple[int, int]:
        """Return the ranks (src, dst) `displacement` below and above this rank in a dimension.

        Beyond an edge the rank is ``PROC_NULL``. Raises ArgumentError.
        """
        if not is_whole(direction) or not 0 <= direction < len(self.dims):
            raise ArgumentError(f"shift: direction {direction!r} is not in 0..{len(self.dims) - 1}", code="GC-CART")
        if not is_whole(displacement):
            raise ArgumentError(f"shift: displacement {displacement!r} is not a whole number", code="GC-CART")
        places = []
        for step in (-displacement, displacement):
            there = list(self.coords)
            there[direction] += step
            places.append(self._at(there))
        return places[0], places[1]

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The neighbours of this rank in MPI's order: for each dimension the rank below, then the rank above."""
        return tuple(itertools.chain.from_iterable(self.shift(axis) for axis in range(len(self.dims))))

    @shaped(Neighbouring)
    def neighbor_all_gather(self, x: Any, out: Any = None) -> Any:
        """Return the `x` (shape s) of all neighbours, shape (2 * ndims, \\*s), in the order of `neighbours`.

        Blocks beyond an edge keep the values of `out`, or are 0 if `out` is None. Raises ArgumentError. MPI-5.0, 8.6.1.
        """
        with self._core.current(None, [x]):
            source = check_input("neighbor_all_gather", x)
            blocks = [source] * (2 * len(self.dims))
            return self._exchange_blocks("neighbor_all_gather", x, source, blocks, source.shape, out)

    @shaped(Neighbouring)
    def neighbor_all_to_all(self, x: Any, out: Any = None) -> Any:
        """Send block i of `x` to neighbour i and return the blocks received, in the order of `neighbours`.

        `x` and the result have shape (2 * ndims, \\*s). A block sent down in a dimension arrives as the block from
        above, even if both neighbours are the same rank. Blocks beyond an edge keep the values of `out`, or are 0 if
        `out` is None. Raises ArgumentError. MPI-5.0, 8.6.3.
        """
        with self._core.current(None, [x]):
            source = check_input("neighbor_all_to_all", x)
        many = 2 * len(self.dims)
        if source.shape[:1] != (many,):
            raise ArgumentError(f"neighbor_all_to_all: x has shape {source.shape}; the first axis must be {many}, a "
                                "block for each neighbour", code="GC-SHAPE")
        with self._core.current(None, [x]):
            return self._exchange_blocks("neighbor_all_to_all", x, source, list(source), source.shape[1:], out)

    def _exchange_blocks(self, name: str, given: Any, x: Array, blocks: list[Array], shape: tuple[int, ...],
                         out: Any) -> Any:
        """Send each neighbour its block and receive one block; messages between two ranks match in this order."""
        self._core.life.check_usable()
        space = self._core.space(name, given)
        space.check(name, "x", x)
        if out is None:
            out = array = space.empty((len(blocks), *shape), x.dtype)
            array[...] = 0
        else:
            array = check_output(name, out, [(len(blocks), *shape)], x.dtype, None)
            space.check(name, "out", array)
            if overlap(x, array):
                raise ArgumentError(f"{name}: x and out overlap; pass another array", code="GC-OVERLAP")
        with self._halo.group():
            for axis in range(len(self.dims)):
                below, above = self.shift(axis)
                self._halo.send(blocks[2 * axis], below)
                self._halo.send(blocks[2 * axis + 1], above)
                self._halo.recv(array[2 * axis + 1, ...], above)  # what goes down comes from above
                self._halo.recv(array[2 * axis, ...], below)
        return out

    def close(self) -> None:
        """Close the communicator of the neighbour messages, then this one; see `Communicator.close`."""
        try:
            self._halo.close()
        finally:
            super().close()

    def _at(self, coords: Sequence[int]) -> int:
        """Return the rank at `coords`, PROC_NULL outside of the grid."""
        rank = 0
        for place, length, wraps in zip(coords, self.dims, self.periods, strict=True):
            if not wraps and not 0 <= place < length:
                return PROC_NULL
            rank = rank * length + int(place) % length
        return rank


def made_grid(comm: Communicator, dims: Any, periods: Any) -> Cartesian | None:
    core = comm._core
    core.life.check_usable()
    mine: ArgumentError | None = None
    lengths: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    try:
        lengths, wraps = checked_grid(dims, periods, comm.size)
    except ArgumentError as error:
        mine = error
    everyone = core.metadata.all_gather({"dims": lengths, "periods": wraps}, "cart", mine)
    for what in ("dims", "periods"):
        check_alike("cart", everyone, what, "GC-CART")
    # A rank interrupted in the first exchange never comes to the second. All other ranks then stop here, and not in
    # a split by MPI, which nothing can interrupt.
    core.metadata.all_gather({}, "cart")
    color = 0 if comm.rank < math.prod(lengths) else None
    link, halo = (comm._points.part(color, 0) for _ in range(2))
    return None if link is None or halo is None else Cartesian(link, halo, comm.options, lengths, wraps)


def checked_grid(dims: Any, periods: Any, size: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the lengths of a grid for at most `size` ranks and its ring flags; raise ArgumentError."""
    if not are_whole(dims) or any(one < 1 for one in dims):
        raise ArgumentError(f"cart: dims {dims!r} is not a list of positive numbers, as made by gpucoll.dims_create",
                            code="GC-CART")
    if math.prod(dims) > size:
        raise ArgumentError(f"cart: a grid {tuple(dims)} has {math.prod(dims)} places for {size} ranks", code="GC-CART")
    wraps = [bool(periods)] * len(dims) if periods is None or isinstance(periods, bool) else periods
    if not isinstance(wraps, Sequence | numpy.ndarray) or not all(one in (False, True) for one in wraps):
        raise ArgumentError(f"cart: periods {periods!r} are neither a truth value nor a list of truth values",
                            code="GC-CART")
    if len(wraps) != len(dims):
        raise ArgumentError(f"cart: {len(wraps)} periods for {len(dims)} dimensions", code="GC-CART")
    return tuple(map(int, dims)), tuple(map(bool, wraps))


def dims_create(size: int, ndims: int) -> tuple[int, ...]:
    """Return `ndims` lengths with product `size`, as even as possible, the longest first. MPI-5.0, 8.5.2.

    Raises ArgumentError.
    """
    for what, value in (("size", size), ("ndims", ndims)):
        if not is_whole(value) or value < 1:
            raise ArgumentError(f"dims_create: {what} {value!r} is not a positive number", code="GC-CART")
    return min(_factors(int(size), ndims, int(size)))


def _factors(size: int, ndims: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write `size` as a product of `ndims` non-increasing numbers up to `most`."""
    if ndims == 1:
        if size <= most:
            yield (size,)
        return
    for first in range(1, min(size, most) + 1):
        if size % first == 0 and first ** ndims >= size:
            yield from ((first, *rest) for rest in _factors(size // first, ndims - 1, first))
