"""What each collective promises: one row each.

A row says on which ranks the input and the output exist and whether they are one array
``s`` or a block for every rank ``(size, *s)``; whose data, and which part of it, every
chunk of the output holds afterwards; and nccl-tests' factor from algbw to busbw.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpucoll.errors import ArgumentError, nearest


class Side(NamedTuple):
    """The input or the output: a block per rank or one array, on all ranks or on the root."""

    blocks: bool = False
    where: Literal["all", "root", "nowhere"] = "all"

    def exists(self, rank: int, root: int) -> bool:
        """Return whether `rank` has this side."""
        return self.where == "all" or (self.where == "root" and rank == root)


class Piece(NamedTuple):
    """The content of one chunk: chunk `chunk` of the inputs of `ranks`, combined."""

    chunk: int
    ranks: frozenset[int]


class Collective(NamedTuple):
    """One row: see the module's text.

    `ragged` is what the length of a block depends on where blocks are not alike: the rank it comes from, the rank it
    goes to, or both.
    """

    name: str
    input: Side
    output: Side
    reduces: bool
    rooted: bool
    busbw: str
    ragged: Literal["source", "target", "pair"] | None = None

    @property
    def blocks(self) -> bool:
        """Whether the larger side is a block for every rank."""
        return self.input.blocks or self.output.blocks

    def result(self, rank: int, size: int, root: int, per_block: int, index: int) -> Piece:
        """Return what chunk `index` of the output of `rank` holds, blocks being `per_block` chunks long."""
        first = rank * per_block if self.input.blocks else 0
        if self.output.blocks:
            return Piece(first + index % per_block, frozenset({index // per_block}))
        if self.rooted and not self.reduces:
            return Piece(first + index, frozenset({root}))
        ranks = {"scan": rank + 1, "exscan": rank}.get(self.name, size)
        return Piece(first + index, frozenset(range(ranks)))


_ARRAY, _BLOCKS = Side(), Side(blocks=True)
_ROOT, _ROOTS_BLOCKS, _NOWHERE = Side(where="root"), Side(blocks=True, where="root"), Side(where="nowhere")
_SHARE = "(P - 1) / P"

COLLECTIVES: dict[str, Collective] = {
    row.name: row
    for row in (
        Collective("all_reduce", _ARRAY, _ARRAY, True, False, "2 * (P - 1) / P"),
        Collective("reduce", _ARRAY, _ROOT, True, True, "1"),
        Collective("broadcast", _ROOT, _ARRAY, False, True, "1"),
        Collective("all_gather", _ARRAY, _BLOCKS, False, False, _SHARE),
        Collective("gather", _ARRAY, _ROOTS_BLOCKS, False, True, _SHARE),
        Collective("scatter", _ROOTS_BLOCKS, _ARRAY, False, True, _SHARE),
        Collective("reduce_scatter", _BLOCKS, _ARRAY, True, False, _SHARE),
        Collective("all_to_all", _BLOCKS, _BLOCKS, False, False, _SHARE),
        Collective("scan", _ARRAY, _ARRAY, True, False, "1"),
        Collective("exscan", _ARRAY, _ARRAY, True, False, "1"),
        Collective("all_gather_v", _ARRAY, _BLOCKS, False, False, _SHARE, "source"),
        Collective("gather_v", _ARRAY, _ROOTS_BLOCKS, False, True, _SHARE, "source"),
        Collective("scatter_v", _ROOTS_BLOCKS, _ARRAY, False, True, _SHARE, "target"),
        Collective("reduce_scatter_v", _BLOCKS, _ARRAY, True, False, _SHARE, "target"),
        Collective("all_to_all_v", _BLOCKS, _BLOCKS, False, False, _SHARE, "pair"),
        Collective("barrier", _NOWHERE, _NOWHERE, False, False, "1"),
    )
}


def collective(name: str) -> Collective:
    """Return the row of `name`; ArgumentError names the nearest where there is none."""
    try:
        return COLLECTIVES[name]
    except (KeyError, TypeError):
        raise ArgumentError(f"no collective is named {name!r}{nearest(name, COLLECTIVES)}",
                            code="GC-COLLECTIVE") from None
