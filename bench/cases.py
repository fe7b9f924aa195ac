"""What is measured: collectives and their sizes, those who compete, and in which order.

Pure arithmetic, as nccl-tests has it: neither MPI nor arrays.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from gpucoll.collectives import COLLECTIVES, Collective
from gpucoll.dtypes import DTYPES
from gpucoll.errors import ArgumentError

COLLECTIVE_NAMES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# nccl-tests' names of dtypes, where they are not NumPy's: those that it prints, and those that it only understands.
PRINTED = {"float16": "half", "float32": "float", "float64": "double",
           "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}
UNDERSTOOD = {printed: name for name, printed in PRINTED.items()} | {"char": "int8", "int": "int32"}


class Case(NamedTuple):
    """One collective as it is measured; `dtype` is a name of `gpucoll.dtypes`, op and root count where they apply."""

    collective: str
    dtype: str
    op: str
    root: int
    ranks: int

    @property
    def row(self) -> Collective:
        """What the collective promises."""
        return COLLECTIVES[self.collective]

    @property
    def factor(self) -> float:
        """busbw / algbw."""
        return bus_factor(self.collective, self.ranks)

    def count(self, nbytes: int) -> int:
        """Return the elements of a rank's array, or block, where the larger of input and output has `nbytes` bytes.

        >>> Case("all_gather", "float32", "sum", 0, 4).count(1000)
        62
        """
        return nbytes // DTYPES[self.dtype].itemsize // self._blocks

    def nbytes(self, count: int) -> int:
        """Return the bytes of the larger of input and output."""
        return count * DTYPES[self.dtype].itemsize * self._blocks

    @property
    def _blocks(self) -> int:
        return self.ranks if self.row.blocks else 1


class Contestant(NamedTuple):
    """Something to measure; `call` takes what `Data.arguments` returns, a `peer` is what others are compared with."""

    name: str
    call: Callable[..., Any]
    peer: bool = False


def turns(contestants: int, repetition: int) -> Iterator[int]:
    """Return in which order they are measured: nobody is always first, nobody always comes after the same one.

    >>> [list(turns(3, repetition)) for repetition in range(3)]
    [[0, 1, 2], [1, 0, 2], [2, 0, 1]]
    """
    direction = -1 if repetition % 2 else 1
    return ((repetition + direction * turn) % contestants for turn in range(contestants))


def bus_factor(collective: str, ranks: int) -> float:
    """Return what algbw is multiplied with: the share of the busiest link, so that the hardware's speed comes out.

    >>> bus_factor("all_reduce", 4)
    1.5
    """
    formula = COLLECTIVES[collective].busbw  # our own data, never a user's text
    return float(eval(formula, {"__builtins__": {}}, {"P": ranks}))


def size_of(text: str) -> int:
    """Return the bytes that `text` says, K, M and G being powers of 1024; raise ArgumentError.

    >>> size_of("1.5K")
    1536
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)", text.strip().upper(), re.ASCII)
    if not found:
        raise ArgumentError(f"{text!r} is no size such as 8, 64K, 1.5M or 2G", code="GC-SIZE")
    return int(Fraction(found[1]) * UNITS[found[2]])


def sizes(first: int, last: int, *, step: int, factor: int = 1) -> Sequence[int]:
    """Return the sizes from `first` to `last` bytes, growing by `factor` where that is above 1, else by `step` bytes.

    >>> sizes(8, 200, step=1, factor=4)
    (8, 32, 128)
    """
    if last < first:
        raise ArgumentError(f"-e/--maxbytes {last} is below -b/--minbytes {first}", code="GC-SIZE")
    if factor == 1:
        return range(first, last + 1, step)
    if first == 0:
        raise ArgumentError("-f/--stepfactor does not lead away from -b/--minbytes 0; use -i", code="GC-SIZE")
    growing = itertools.accumulate(itertools.repeat(factor), operator.mul, initial=first)
    return tuple(itertools.takewhile(lambda nbytes: nbytes <= last, growing))
