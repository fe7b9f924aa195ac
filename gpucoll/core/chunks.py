"""Where chunk i of n lies in a row of elements: uneven and empty chunks included.

The first ``elements % chunks`` chunks are one element longer than the rest, so that two
chunks never differ by more than one element.
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
    """How a buffer is cut: every block of `elements` into `chunks`, block after block.

    A buffer of shape ``(size, *s)`` has a block for each rank, so that no chunk crosses
    from one rank's data into the next and chunk i of every block is equally long.

    >>> layout = Layout(elements=5, chunks=2)
    >>> [layout.span(first, 1) for first in range(6)]
    [(0, 3), (3, 5), (5, 8), (8, 10), (10, 13), (13, 15)]
    >>> layout.span(1, 3)
    (3, 10)
    """

    elements: int
    chunks: int

    def start(self, chunk: int) -> int:
        """Return the first element of `chunk`, counted through all blocks."""
        block, inside = divmod(chunk, self.chunks)
        return block * self.elements + bound(self.elements, self.chunks, inside)

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the half-open range of elements of `count` chunks from `first`."""
        return self.start(first), self.start(first + count)


class Ragged(NamedTuple):
    """How a buffer of blocks that are not alike is cut: block i is one chunk, from `starts[i]` to `starts[i + 1]`.

    >>> Ragged.of([2, 0, 3]).span(1, 2)
    (2, 5)
    """

    starts: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Ragged:
        """Return the layout of blocks of these lengths, one after the other."""
        return cls((0, *itertools.accumulate(lengths)))

    def start(self, chunk: int) -> int:
        """Return the first element of `chunk`."""
        return self.starts[chunk]

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return the half-open range of elements of `count` chunks from `first`."""
        return self.starts[first], self.starts[first + count]
