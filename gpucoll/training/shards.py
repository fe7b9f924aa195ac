"""Arrays divided over ranks: the elements owned by a rank, and messages with the shards of several arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from gpucoll import Communicator
from gpucoll.internal import Array
from gpucoll.training.buckets import Phases
from gpucoll.training.parameters import Like, Parameters


def owned(elements: int, rank: int, size: int) -> slice:
    """Return the range of `elements` (in C order) owned by `rank`: equal parts, with fewer or none on the last ranks.

    >>> [owned(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    each = -(-elements // size)
    return slice(min(elements, rank * each), min(elements, (rank + 1) * each))


class Shards:
    """A layout of arrays of one dtype as a matrix: row r has rank r's shard of every array, one after another."""

    def __init__(self, arrays: Mapping[str, Like], rank: int, size: int) -> None:
        self.arrays: Mapping[str, Like] = arrays
        self._rank, self._size = rank, size
        # Shards are padded to equal lengths, so a single reduce-scatter or all-gather serves all the arrays.
        self._start: dict[str, int] = {}  # the start of each array's shard in a row
        self.length: int = 0  # of a row
        for name, array in arrays.items():
            self._start[name] = self.length
            self.length += -(-array.size // size)

    def empty(self) -> Array:
        """Return a matrix of zeros in this layout."""
        return next(iter(self.arrays.values())).new((self._size, self.length))

    def put(self, name: str, array: Array, matrix: Array) -> None:
        """Write the shards of `array` into the rows of all ranks."""
        for rank, shard in enumerate(self._shards(name, array)):
            matrix[rank, self._place(name, shard)] = shard

    def get(self, name: str, matrix: Array, out: Array) -> None:
        """Write the shards in the rows of all ranks into the contiguous array `out`."""
        for rank, shard in enumerate(self._shards(name, out)):
            shard[...] = matrix[rank, self._place(name, shard)]

    def own(self, row: Array) -> Parameters:
        """Return this rank's shards as views of `row`, this rank's row."""
        found = {}
        for name, array in self.arrays.items():
            mine = owned(array.size, self._rank, self._size)
            found[name] = row[self._start[name]:self._start[name] + mine.stop - mine.start]
        return found

    def _shards(self, name: str, array: Array) -> Iterable[Array]:
        flat = array.reshape(-1)
        return (flat[owned(flat.size, rank, self._size)] for rank in range(self._size))

    def _place(self, name: str, shard: Array) -> slice:
        return slice(self._start[name], self._start[name] + shard.size)

    def reduce_scatter(self, matrix: Array, comm: Communicator, found: Parameters, *, stays: bool) -> Phases:
        """Put this rank's shards of the means over all ranks into `found`, as views.

        With `stays` the caller keeps `matrix`, and the shards are views of this rank's row.
        """
        row = yield functools.partial(comm.reduce_scatter, matrix, op="avg")
        if stays:
            matrix[self._rank] = row
            row = matrix[self._rank]
        found.update(self.own(row))

    def all_gather(self, shards: Parameters, comm: Communicator, found: Parameters) -> Phases:
        """Gather whole arrays from all ranks' `shards` into the contiguous arrays of `found`."""
        row = next(iter(self.arrays.values())).new(self.length)
        for name, place in self.own(row).items():
            place[...] = shards[name]
        gathered = yield functools.partial(comm.all_gather, row)
        for name in self.arrays:
            self.get(name, gathered, found[name])
