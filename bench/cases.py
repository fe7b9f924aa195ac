"""The cases to measure: tests and sizes, contestants, and the order of measuring.

Pure arithmetic in the manner of nccl-tests, without MPI and arrays. A test is a collective, or one of two further
tests of nccl-tests: `sendrecv`, from every rank to the right neighbour, and `hypercube`, the all_gather by recursive
doubling.
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
ONE_FORM = {"broadcast", "barrier", "sendrecv"}  # tests without a second array for the result, besides the ragged tests
SAME_SHAPE = {"all_reduce", "reduce", "all_to_all", "scan", "exscan"}  # tests allowing out=x
ALIGNMENT = 16  # bytes; nccl-tests rounds blocks to a multiple
# nccl-tests' names of dtypes, if different from NumPy's: names printed by nccl-tests, and names only accepted.
PRINTED = {"float16": "half", "float32": "float", "float64": "double",
           "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}
UNDERSTOOD = {printed: name for name, printed in PRINTED.items()} | {"char": "int8", "int": "int32"}
# The least bytes read and written by the memories of all ranks together, in multiples of N, the larger of input and
# output. Each input is read once and each output is written once; in a broadcast in place, the root writes nothing.
# In an all_reduce each rank, in addition, reads the results reduced by other ranks.
TRAFFIC = {"all_reduce": "3 * P", "reduce": "P + 1", "broadcast": "P", "all_gather": "P + 1", "gather": "2",
           "scatter": "2", "reduce_scatter": "P + 1", "all_to_all": "2 * P", "scan": "2 * P", "exscan": "2 * P",
           "sendrecv": "2 * P", "hypercube": "P + 1", "barrier": "0"}


class BenchCase(NamedTuple):
    """One test to measure; `dtype` is a name of `gpucoll.core.dtypes`; `op` and `root` are ignored by some tests."""

    test: str
    dtype: str
    op: str
    root: int
    ranks: int

    @property
    def row(self) -> Collective:
        """The properties of the collective."""
        return TESTS[self.test]

    @property
    def factor(self) -> float:
        """busbw / algbw: converts to the traffic of the busiest link, comparable with the speed of the hardware."""
        return _formula(self.row.busbw, self.ranks)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    def count(self, nbytes: int) -> int:
        """Return the elements of a rank's array, or block, if the larger of input and output has `nbytes` bytes.

        Blocks are rounded down to a multiple of 16 bytes, as in nccl-tests.
        """
        if not self.row.blocks:
            return nbytes // self.itemsize if self.test != "barrier" else 0
        block = nbytes // self.itemsize // self.ranks
        return block - block % max(1, ALIGNMENT // self.itemsize)

    def nbytes(self, count: int) -> int:
        """Return the bytes of the larger of input and output."""
        return self.itemsize * (sum(self.lengths(count)) if self.row.blocks else count)

    def moved(self, count: int) -> int:
        """Return the bytes counted by algbw: the larger side; in hypercube the bytes received from other ranks."""
        return count * self.itemsize * (self.ranks - 1) if self.test == "hypercube" else self.nbytes(count)

    def length(self, count: int, source: int, target: int) -> int:
        """Return the elements of the block from `source` to `target`; in the ragged tests the blocks differ."""
        if self.row.ragged is None:
            return count
        turn = {"source": source, "target": target, "pair": source + target}[self.row.ragged]
        return 2 * count * (turn % self.ranks + 1) // (self.ranks + 1)

    def lengths(self, count: int) -> list[int]:
        """Return the elements of each block of a rank's larger side; the sum is the same on every rank."""
        return [self.length(count, 0 if self.row.ragged == "pair" else turn, turn) for turn in range(self.ranks)]

    @property
    def printed(self) -> tuple[str, str, int]:
        """Type, redop and root as printed by nccl-tests: sendrecv has an op, although without reduction."""
        redop = self.op if self.row.reduces or self.test == "sendrecv" else "none"
        return PRINTED.get(self.dtype, self.dtype), redop, self.root if self.row.rooted else -1


class Contestant(NamedTuple):
    """A call to measure, with the arguments of `Data.arguments`; a `peer` is a library compared with gpucoll."""

    name: str
    call: Callable[..., Any]
    peer: bool = False


def least_traffic(test: str, ranks: int) -> int:
    """Return the bytes moved at least by all memories, in multiples of N; see `TRAFFIC`."""
    return int(_formula(TRAFFIC[test.removesuffix("_v")], ranks))


def _formula(text: str, ranks: int) -> float:
    return float(eval(text, {"__builtins__": {}}, {"P": ranks}))  # our own formulas, never a user's text


def sizes(first: int, last: int, *, step: int, factor: int = 1) -> Sequence[int]:
    """Return the sizes from `first` to `last` bytes: multiplied by `factor` if above 1, otherwise growing by `step`."""
    if last < first:
        raise ArgumentError(f"-e/--maxbytes {last} is below -b/--minbytes {first}", code="GC-SIZE")
    if factor == 1:
        return range(first, last + 1, step)
    if first == 0:
        raise ArgumentError("-f/--stepfactor does not lead away from -b/--minbytes 0; use -i", code="GC-SIZE")
    growing = itertools.accumulate(itertools.repeat(factor), operator.mul, initial=first)
    return tuple(itertools.takewhile(lambda nbytes: nbytes <= last, growing))
