"""The table of collectives: inputs, outputs, content of every output chunk, and the busbw factor of each.

A row gives the ranks with an input and the ranks with an output. A side is a single array ``s`` or a block for every
rank ``(size, *s)``. `Collective.result` gives the content of every output chunk after the call: the input chunk, and
the ranks contributing. `busbw` is nccl-tests' factor from algbw to busbw, a formula of P ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpucoll.errors import ArgumentError, nearest


class Side(NamedTuple):
    """The input or the output of a collective: a block per rank or a single array, on all ranks or on the root."""

    blocks: bool = False
    where: Literal["all", "root", "nowhere"] = "all"

    def exists(self, rank: int, root: int) -> bool:
        """Return whether `rank` has this side."""
        return self.where == "all" or (self.where == "root" and rank == root)


class Piece(NamedTuple):
    """The content of a chunk: chunk `chunk` of the inputs of `ranks`, combined."""

    chunk: int
    ranks: frozenset[int]


class Collective(NamedTuple):
    """A row of the table.

    `blocks` says whether the larger side has a block for every rank. `ragged` is set for the v-variants, with blocks of
    unequal length. The length of a block then depends on the source rank, on the target rank, or on the pair of both.
    """

    name: str
    input: Side
    output: Side
    reduces: bool
    rooted: bool
    busbw: str
    ragged: Literal["source", "target", "pair"] | None = None
    blocks: bool = False

    def result(self, rank: int, size: int, root: int, per_block: int, index: int) -> Piece:
        """Return the content of chunk `index` of the output of `rank`; a block has `per_block` chunks."""
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

CollectiveName = Literal[
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "scan",
    "exscan", "all_gather_v", "gather_v", "scatter_v", "reduce_scatter_v", "all_to_all_v", "barrier"]
COLLECTIVES: dict[str, Collective] = {
    row.name: row._replace(blocks=row.input.blocks or row.output.blocks)
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
    """Return the row of `name`; raise ArgumentError, with the nearest name, for an unknown collective."""
    try:
        return COLLECTIVES[name]
    except (KeyError, TypeError):
        raise ArgumentError(f"no collective is named {name!r}{nearest(name, COLLECTIVES)}",
                            code="GC-COLLECTIVE") from None
