"""How the mean of a bucket's gradients over all ranks is formed: exactly, or from fewer bytes."""

from __future__ import annotations

from typing import Protocol

from gpucoll.arrays import Array
from gpucoll.communicator import Communicator
from gpucoll.training.buckets import Phases


class Compression(Protocol):
    """Forms means over ranks. `wire_bytes` are those that this rank has given to collectives, `exact_bytes` those that
    it would have given without compression."""

    collectives: int  # how many a reduction makes
    wire_bytes: int
    exact_bytes: int

    def reduce(self, rows: dict[str, Array], whole: Array, comm: Communicator) -> Phases:
        """Replace each of `rows`, which are views of the one-dimensional `whole`, by its mean over all ranks."""


class Exact:
    """The mean as `all_reduce` forms it."""

    collectives: int = 1

    def __init__(self) -> None:
        self.wire_bytes = self.exact_bytes = 0

    def reduce(self, rows: dict[str, Array], whole: Array, comm: Communicator) -> Phases:
        self.wire_bytes += whole.nbytes
        self.exact_bytes += whole.nbytes
        yield comm.all_reduce(whole, out=whole, op="avg", async_op=True)
