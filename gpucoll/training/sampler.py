"""A rank's share of the samples of an index range, in a different order each epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy

from gpucoll.errors import ArgumentError


class Sampler:
    """The index arrays of one rank: the rank's share of each batch of `batch` samples out of `length`.

    The ranks, given the same other arguments, divide every batch and together take each sample exactly once in an
    epoch. The order depends on `seed` and the epoch only, so runs on any number of ranks take the same global batches.
    The last batch may be smaller, and the shares of ranks differ by at most one sample: weight a rank's gradient by the
    number of its samples, not by batch / size.

    Parameters
    ----------
    length : int
        The number of samples.
    rank : int
        This rank.
    size : int
        The number of ranks.
    batch : int
        The number of samples of a batch, over all ranks.
    seed : int, optional
        The seed of the order.
    shuffle : bool, optional
        False keeps the order of the indices.

    Raises
    ------
    ArgumentError
        A number is out of range (GC-ARGUMENT).

    Examples
    --------
    >>> from gpucoll.training import Sampler
    >>> [share.tolist() for share in Sampler(7, rank=0, size=2, batch=4, shuffle=False).epoch(0)]
    [[0, 1], [4, 5]]
    >>> [share.tolist() for share in Sampler(7, rank=1, size=2, batch=4, shuffle=False).epoch(0)]
    [[2, 3], [6]]
    """

    def __init__(self, length: int, *, rank: int, size: int, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        if length < 0 or batch < 1 or not 0 <= rank < size:
            raise ArgumentError(f"Sampler: length {length}, batch {batch}, rank {rank} of {size}: a length of at least "
                                "0, a batch of at least 1 and a rank in 0..size - 1 are needed")
        self._length, self._rank, self._size, self._batch = length, rank, size, batch
        self._seed, self._shuffle = seed, shuffle

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-self._length // self._batch)

    def epoch(self, number: int) -> Iterator[numpy.ndarray]:
        """Yield this rank's indices of each batch of epoch `number`; an empty array if the batch is too small.

        Parameters
        ----------
        number : int
            The number of the epoch, from 0.

        Yields
        ------
        array of int
            The indices of this rank's samples.

        Examples
        --------
        >>> from gpucoll.training import Sampler
        >>> [share.tolist() for share in Sampler(4, rank=1, size=2, batch=2, shuffle=False).epoch(0)]
        [[1], [3]]
        """
        order = numpy.arange(self._length)
        if self._shuffle:
            numpy.random.default_rng([self._seed, number]).shuffle(order)
        for start in range(0, self._length, self._batch):
            batch = order[start:start + self._batch]
            # Like `numpy.array_split`, at equal cost for any number of ranks: the first ranks get one index more.
            each, more = divmod(len(batch), self._size)
            first = self._rank * each + min(self._rank, more)
            yield batch[first:first + each + (self._rank < more)]
