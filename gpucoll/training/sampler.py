"""Which samples a rank takes: its share of an index range, in another order each epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy

from gpucoll.errors import ArgumentError


class Sampler:
    """Index arrays of one rank: its share of batches of `batch` out of `length` samples.

    All ranks with the same arguments divide every batch among them: together they take each sample exactly once in an
    epoch, in an order that depends on `seed` and the epoch only, so that runs on any number of ranks take the same
    global batches. The last batch may be smaller, and ranks' shares differ by one sample at most: weight a rank's
    gradient by its own number of samples, not by batch / size. `shuffle=False` keeps the order.

    >>> [share.tolist() for share in Sampler(7, rank=0, size=2, batch=4, shuffle=False).epoch(0)]
    [[0, 1], [4, 5]]
    >>> [share.tolist() for share in Sampler(7, rank=1, size=2, batch=4, shuffle=False).epoch(0)]
    [[2, 3], [6]]
    """

    def __init__(self, length: int, *, rank: int, size: int, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        if length < 0 or batch < 1 or not 0 <= rank < size:
            raise ArgumentError(f"Sampler: length {length}, batch {batch}, rank {rank} of {size}: a length of at least "
                                "0, a batch of at least 1 and a rank in 0..size - 1 are needed", code="GC-SAMPLER")
        self._length, self._rank, self._size, self._batch = length, rank, size, batch
        self._seed, self._shuffle = seed, shuffle

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return -(-self._length // self._batch)

    def epoch(self, number: int) -> Iterator[numpy.ndarray]:
        """Yield this rank's indices of each batch of epoch `number`; none of a batch that has too few samples."""
        order = numpy.arange(self._length)
        if self._shuffle:
            numpy.random.default_rng([self._seed, number]).shuffle(order)
        for start in range(0, self._length, self._batch):
            yield numpy.array_split(order[start:start + self._batch], self._size)[self._rank]
