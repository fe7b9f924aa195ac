"""What is measured: tests and their sizes, those who compete, and in which order.

Pure arithmetic, as nccl-tests has it: neither MPI nor arrays. A test is a collective, or one of nccl-tests' two that
are none: `sendrecv`, every rank to its right neighbour, and `hypercube`, the all_gather by recursive doubling.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.core.dtypes import DTYPES
from gpucoll.errors import ArgumentError

TESTS: dict[str, Collective] = {
    **COLLECTIVES,
    "sendrecv": COLLECTIVES["scan"]._replace(name="sendrecv", reduces=False),
    "hypercube": COLLECTIVES["all_gather"]._replace(name="hypercube", busbw="1"),
}
ONE_FORM = {"broadcast", "barrier", "sendrecv"}  # and the ragged ones: there is no second array to work into
SAME_SHAPE = {"all_reduce", "reduce", "all_to_all", "scan", "exscan"}  # where out=x is possible
ALIGNMENT = 16  # bytes of which nccl-tests makes blocks a multiple
# nccl-tests' names of dtypes, where they are not NumPy's: those that it prints, and those that it only understands.
PRINTED = {"float16": "half", "float32": "float", "float64": "double",
           "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}
UNDERSTOOD = {printed: name for name, printed in PRINTED.items()} | {"char": "int8", "int": "int32"}
# The least bytes that all ranks' memories together read and write, N being the larger of input and output: each
# input is read once and each output written once; of broadcast, in place, the root writes nothing. In an all_reduce
# each rank, moreover, reads what the others have reduced.
TRAFFIC = {"all_reduce": "3 * P", "reduce": "P + 1", "broadcast": "P", "all_gather": "P + 1", "gather": "2",
           "scatter": "2", "reduce_scatter": "P + 1", "all_to_all": "2 * P", "scan": "2 * P", "exscan": "2 * P",
           "sendrecv": "2 * P", "hypercube": "P + 1", "barrier": "0"}


class Case(NamedTuple):
    """One test as it is measured; `dtype` is a name of `gpucoll.core.dtypes`, op and root count where they apply."""

    test: str
    dtype: str
    op: str
    root: int
    ranks: int

    @property
    def row(self) -> Collective:
        """What the collective promises."""
        return TESTS[self.test]

    @property
    def factor(self) -> float:
        """busbw / algbw: the share of the busiest link, so that the hardware's speed comes out."""
        return _formula(self.row.busbw, self.ranks)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    def count(self, nbytes: int) -> int:
        """Return the elements of a rank's array, or block, where the larger of input and output has `nbytes` bytes.

        Blocks are cut down to a multiple of 16 bytes, as in nccl-tests.
        """
        if not self.row.blocks:
            return nbytes // self.itemsize if self.test != "barrier" else 0
        block = nbytes // self.itemsize // self.ranks
        return block - block % max(1, ALIGNMENT // self.itemsize)

    def nbytes(self, count: int) -> int:
        """Return the bytes of the larger of input and output."""
        return self.itemsize * (sum(self.lengths(count)) if self.row.blocks else count)

    def moved(self, count: int) -> int:
        """Return the bytes that algbw counts: those of the larger side, of hypercube those that come from others."""
        return count * self.itemsize * (self.ranks - 1) if self.test == "hypercube" else self.nbytes(count)

    def length(self, count: int, source: int, target: int) -> int:
        """Return the elements of the block from `source` to `target`; those of the ragged tests differ."""
        if self.row.ragged is None:
            return count
        turn = {"source": source, "target": target, "pair": source + target}[self.row.ragged]
        return 2 * count * (turn % self.ranks + 1) // (self.ranks + 1)

    def lengths(self, count: int) -> list[int]:
        """Return the elements of each block of a rank's larger side; their sum is the same on every rank."""
        return [self.length(count, 0 if self.row.ragged == "pair" else turn, turn) for turn in range(self.ranks)]

    @property
    def printed(self) -> tuple[str, str, int]:
        """Type, redop and root as nccl-tests prints them; sendrecv has an op there, though nothing is reduced."""
        redop = self.op if self.row.reduces or self.test == "sendrecv" else "none"
        return PRINTED.get(self.dtype, self.dtype), redop, self.root if self.row.rooted else -1


class Contestant(NamedTuple):
    """Something to measure; `call` takes what `Data.arguments` returns, a `peer` is what others are compared with."""

    name: str
    call: Callable[..., Any]
    peer: bool = False


def turns(contestants: int, repetition: int) -> list[int]:
    """Return in which order they are measured: nobody is always first, nobody always comes after the same one."""
    direction = -1 if repetition % 2 else 1
    return [(repetition + direction * turn) % contestants for turn in range(contestants)]


def least_traffic(test: str, ranks: int) -> int:
    """Return the multiple of N that memory has to move; see `TRAFFIC`."""
    return int(_formula(TRAFFIC[test.removesuffix("_v")], ranks))


def _formula(text: str, ranks: int) -> float:
    return float(eval(text, {"__builtins__": {}}, {"P": ranks}))  # our own data, never a user's text


def sizes(first: int, last: int, *, step: int, factor: int = 1) -> Sequence[int]:
    """Return the sizes from `first` to `last` bytes, growing by `factor` where that is above 1, else by `step`."""
    if last < first:
        raise ArgumentError(f"-e/--maxbytes {last} is below -b/--minbytes {first}", code="GC-SIZE")
    if factor == 1:
        return range(first, last + 1, step)
    if first == 0:
        raise ArgumentError("-f/--stepfactor does not lead away from -b/--minbytes 0; use -i", code="GC-SIZE")
    growing = itertools.accumulate(itertools.repeat(factor), operator.mul, initial=first)
    return tuple(itertools.takewhile(lambda nbytes: nbytes <= last, growing))
