"""Shapes of rings and trees: who is whose neighbour, parent and child."""

from __future__ import annotations

from typing import NamedTuple


class Ring(NamedTuple):
    """The neighbours of a rank on the ring 0, 1, ..., size - 1, 0."""

    left: int
    right: int


def ring(rank: int, size: int) -> Ring:
    """Return the neighbours of `rank` (a number or a NumPy array of ranks).

    >>> ring(0, 4)
    Ring(left=3, right=1)
    """
    return Ring((rank - 1) % size, (rank + 1) % size)


class TreeNode(NamedTuple):
    """A rank's place in a binary tree; `height` is that of the whole tree."""

    parent: int | None
    children: tuple[int, ...]
    depth: int
    height: int


def binary_tree(rank: int, size: int) -> TreeNode:
    """Return the place of `rank` in a binary tree of `size` ranks with root 0 and height floor(log2 size).

    A node is the first rank of its subtree, its two halves follow: every subtree is an
    interval of ranks, so that ranks of one node of a cluster meet the network seldom.

        0 ─┬─ 1 ─┬─ 2 ─── 3        8 ranks
           │     └─ 4
           └─ 5 ─┬─ 6
                 └─ 7

    >>> [binary_tree(rank, 8).children for rank in range(8)]
    [(1, 5), (2, 4), (3,), (), (), (6, 7), (), ()]
    """
    first, count, parent, depth = 0, size, None, 0
    while rank != first:
        half = count // 2
        parent, depth = first, depth + 1
        first, count = (first + 1, half) if rank <= first + half else (first + 1 + half, count - 1 - half)
    half = count // 2
    children = tuple(child for child in (first + 1, first + 1 + half) if child < first + count)
    return TreeNode(parent, children if half else (), depth, size.bit_length() - 1)
