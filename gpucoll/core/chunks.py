"""Cut a buffer into chunks and return the elements of each chunk; uneven and empty chunks are allowed.

The first ``elements % chunks`` chunks are 1 element longer than the rest. The lengths of two chunks therefore never
differ by more than 1 element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple


def bound(elements: int, chunks: int, index: int) -> int:
    """Return the first element of chunk `index`; ``bound(n, c, c) == n``.

    >>> [bound(10, 4, i) for i in range(5)]
    [0, 3, 6, 8, 10]
    >>> [bound(2, 4, i) for i in range(5)]
    [0, 1, 2, 2, 2]
    """
    length, longer = divmod(elements, chunks)
    return index * length + min(index, longer)


class Layout(NamedTuple):
    """The cut of a buffer of equal blocks: every block of `elements` is cut into `chunks`, block after block.

    A buffer of shape ``(size, *s)`` has a block for each rank. No chunk crosses the border between two blocks, and
    chunk i of every block has the same length.

    >>> layout = Layout(elements=5, chunks=2)
    >>> [layout.span(first, 1) for first in range(6)]
    [(0, 3), (3, 5), (5, 8), (8, 10), (10, 13), (13, 15)]
    >>> layout.span(1, 3)
    (3, 10)
    """

    elements: int
    chunks: int

    def start(self, chunk: int) -> int:
        """Return the first element of `chunk`; chunks are numbered through all blocks."""
        block, inside = divmod(chunk, self.chunks)
        return block * self.elements + bound(self.elements, self.chunks, inside)

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the half-open range of elements of `count` chunks from `first`."""
        return self.start(first), self.start(first + count)


class Ragged(NamedTuple):
    """The cut of a buffer of blocks of unequal length: block i is a single chunk, `starts[i]` to `starts[i + 1]`.

    >>> Ragged.of([2, 0, 3]).span(1, 2)
    (2, 5)
    """

    starts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Ragged:
        """Return the layout of consecutive blocks of these lengths."""
        return cls((0, *itertools.accumulate(lengths)))

    def start(self, chunk: int) -> int:
        """Return the first element of `chunk`."""
        return self.starts[chunk]

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the half-open range of elements of `count` chunks from `first`."""
        return self.starts[first], self.starts[first + count]
