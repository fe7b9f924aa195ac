"""What every rank puts in, what it must get out, and how many elements are wrong.

Inputs differ by rank, by index and from repetition to repetition, and every result is exact. A row
of pseudo-random bytes, the same on every rank, says for each index which of 256 draws applies
there; a draw is one small number for each rank. So the expected result needs no communication
and takes one look-up per element, whatever the number of ranks: its 256 values are reduced
beforehand, by NumPy and in wide numbers. Repetitions read the same row from different places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.dtypes import DTYPES, numpy_dtype

from .cases import Case

Array: TypeAlias = numpy.ndarray[Any, Any]

DRAWS = 256
PLACES = 32  # from which a row is read before the data come again
STRIDE = 64  # elements from one place to the next: whole cache lines
BLOCK = 1 << 16  # elements that are looked up at a time
BITS = 127  # all bits that an int8 has beside its sign
MOVED = "bxor"  # whose operands are drawn where nothing is reduced: any numbers do


class Draw(NamedTuple):
    """How an op's operands are drawn: at most `most` ranks give one of `choices`, the others `idle`.

    `choices` None stands for all numbers of a size that the dtype adds exactly.
    """

    choices: tuple[int, ...] | None
    idle: int = 0
    most: int | None = None


# An oracle of its own: the library's table of ops is what it judges.
UFUNCS: dict[str, numpy.ufunc] = {
    "sum": numpy.add, "avg": numpy.add, "prod": numpy.multiply, "min": numpy.minimum, "max": numpy.maximum,
    "band": numpy.bitwise_and, "bor": numpy.bitwise_or, "bxor": numpy.bitwise_xor,
    "land": numpy.logical_and, "lor": numpy.logical_or, "lxor": numpy.logical_xor,
}
# A few operands differ from the neutral one, so that every single one decides some results.
DRAWN: dict[str, Draw] = {
    "sum": Draw(None), "avg": Draw(None), "min": Draw(None), "max": Draw(None),
    "prod": Draw((1, 2, 2), 1, 6),
    "band": Draw(tuple(BITS - (1 << bit) for bit in range(7)), BITS, 4),
    "bor": Draw(tuple(1 << bit for bit in range(7)), 0, 4),
    "bxor": Draw(tuple(range(BITS + 1))),
    "land": Draw((0, 1, 2), 1, 4), "lor": Draw((0, 0, 3), 0, 4), "lxor": Draw((0, 1, 2)),
}
ON_BOOL = {"sum": "lor", "max": "lor", "bor": "lor", "prod": "land", "min": "land", "band": "land", "bxor": "lxor"}
# Up to here every whole number exists in the dtype; the wider ones are given no more either.
EXACT = {"float8_e5m2": 8, "float8_e4m3fn": 16, "int8": 127, "uint8": 127, "bfloat16": 256, "float16": 2048}
EXACT_ELSEWHERE = 1 << 20


def random_bytes(count: int, seed: int) -> Array:
    """Return `count` pseudo-random bytes, the same ones on every host (NumPy promises raw streams only)."""
    return numpy.random.PCG64(seed).random_raw(-(-count // 8)).view(numpy.uint8)[:count]


def operands(dtype: str, op: str, ranks: int) -> Array:
    """Return what each rank gives in each draw, shape (ranks, DRAWS): whole numbers, in NumPy's widest dtype."""
    draw = DRAWN[ON_BOOL.get(op, op) if dtype == "bool" else op]
    exact = EXACT.get(dtype, EXACT_ELSEWHERE)
    choices = numpy.array(draw.choices or _magnitudes(dtype, exact // ranks))
    numbers = choices[random_bytes(ranks * DRAWS, seed=ranks) % len(choices)].reshape(ranks, DRAWS)
    every = -(-ranks // (draw.most or exact))  # one rank in so many gives something
    gives = (numpy.arange(ranks)[:, None] + numpy.arange(DRAWS)) % every == 0
    unit = 1 + 1j if DTYPES[dtype].kind == "complex" else 1
    return numpy.where(gives, numbers * unit, draw.idle)


def _magnitudes(dtype: str, largest: int) -> range:
    """The numbers of which one per rank adds up exactly; a look-up by a byte reaches no more than 256."""
    largest = max(1, min(largest, 100))
    signed = not dtype.startswith(("uint", "bool"))
    return range(-largest if signed else 0, largest + 1)


def reduced(given: Array, op: str, dtype: str) -> Array:
    """Return the reduction of `given`, shape (ranks, DRAWS), in `dtype`: exact, rounded at most once."""
    if dtype == "bool":
        given = given.astype(bool)
    total = UFUNCS[op].reduce(given, axis=0)
    return (total / len(given) if op == "avg" else total).astype(numpy_dtype(dtype))


def look_up(table: Array, draws: Array) -> Array:
    """Return ``table[draws]``, shape of `draws`; block by block, since NumPy widens a whole index to 8 bytes each."""
    found = numpy.empty(draws.shape, table.dtype)
    source, target = draws.reshape(-1), found.reshape(-1)
    for start in range(0, len(target), BLOCK):
        target[start:start + BLOCK] = table[source[start:start + BLOCK]]
    return found


class Data:
    """The arrays of one rank for one case and one size; `count` as in `Case.count`.

    ``out`` is the array for the result, None where this rank gets none. Costs a row of bytes and
    a row of elements as long as the input.
    """

    def __init__(self, case: Case, rank: int, count: int) -> None:
        self.case, self.rank, self.count = case, rank, count
        given = operands(case.dtype, case.op if case.row.reduces else MOVED, case.ranks)
        self.given = given.astype(numpy_dtype(case.dtype))
        self.reduced = reduced(given, case.op, case.dtype) if case.row.reduces else None
        self._shape = (case.ranks, count) if case.row.input.blocks else (count,)
        self._draws = random_bytes(math.prod(self._shape) + PLACES * STRIDE, seed=0)
        self._row = look_up(self.given[rank], self._draws)
        self.out = self._room()

    def _room(self) -> Array | None:
        row, root = self.case.row, self.case.root
        is_source = row.name == "broadcast" and self.rank == root
        if is_source or not row.output.exists(self.rank, root):
            return None
        shape = (self.case.ranks, self.count) if row.output.blocks else (self.count,)
        return numpy.zeros(shape, self._row.dtype)

    def _place(self, repetition: int, row: Array) -> Array:
        start = repetition % PLACES * STRIDE
        return row[start:start + math.prod(self._shape)].reshape(self._shape)

    def arguments(self, repetition: int) -> tuple[Array | None, ...]:
        """Return the arrays to call with: (x, out), of broadcast (x,): off the root, that is `out`."""
        x = self._place(repetition, self._row)
        if self.case.collective == "broadcast":
            return (x if self.out is None else self.out,)
        return x, self.out

    def expected(self, repetition: int) -> Array:
        """Return what `out` must hold after that repetition, on a rank that has one."""
        return EXPECTED[self.case.collective](self, self._place(repetition, self._draws))

    def spoil(self, expected: Array) -> None:
        """Make every element of `out` another one than `expected`: what is not written will be found."""
        if self.out is not None:
            self.out[...] = expected
            self.out.view(numpy.uint8)[...] ^= 1

    def wrong(self, expected: Array) -> int:
        """Return how many elements of `out` are not as `expected`."""
        return 0 if self.out is None else int(numpy.count_nonzero(self.out != expected))


def _everyone(data: Data, draws: Array) -> Array:
    assert data.reduced is not None  # these collectives reduce
    return look_up(data.reduced, draws)


def _own_block(data: Data, draws: Array) -> Array:
    return _everyone(data, draws[data.rank])


def _from_root(data: Data, draws: Array) -> Array:
    return look_up(data.given[data.case.root], draws)


def _block_of_each(data: Data, draws: Array) -> Array:
    return numpy.stack([look_up(given, draws) for given in data.given])


EXPECTED: dict[str, Callable[[Data, Array], Array]] = {
    "all_reduce": _everyone, "reduce": _everyone, "broadcast": _from_root, "all_gather": _block_of_each,
    "reduce_scatter": _own_block,
}
