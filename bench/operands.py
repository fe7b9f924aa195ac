"""What the ranks give, and what NumPy makes of it: small tables of exact numbers, and look-ups in them.

A row of pseudo-random bytes, the same on every rank, says for each index which of 256 draws applies there; a draw is
one small number for each rank. So an expected result needs no communication and takes one look-up per element,
whatever the number of ranks: its 256 values are reduced beforehand, by NumPy and in wide numbers.
"""

from __future__ import annotations

import numpy

from gpucoll.core.dtypes import DTYPES, numpy_dtype

from .summary import Array

DRAWS = 256
BLOCK = 1 << 16  # elements that are looked up at a time
BITS = 127  # all bits that an int8 has beside its sign
MOVED = "bxor"  # whose operands are drawn where nothing is reduced: any numbers do


# An oracle of its own: the library's table of ops is what it judges.
UFUNCS: dict[str, numpy.ufunc] = {
    "sum": numpy.add, "avg": numpy.add, "prod": numpy.multiply, "min": numpy.minimum, "max": numpy.maximum,
    "band": numpy.bitwise_and, "bor": numpy.bitwise_or, "bxor": numpy.bitwise_xor,
    "land": numpy.logical_and, "lor": numpy.logical_or, "lxor": numpy.logical_xor,
}
# How an op's operands are drawn: from which choices, and what all but a few ranks give instead, so that every single
# one decides some results. Of the other ops the choices are all numbers of a size that the dtype adds exactly.
DRAWN: dict[str, tuple[tuple[int, ...], int, int | None]] = {
    "prod": ((1, 2, 2), 1, 6), "band": (tuple(BITS - (1 << bit) for bit in range(7)), BITS, 4),
    "bor": (tuple(1 << bit for bit in range(7)), 0, 4), "bxor": (tuple(range(BITS + 1)), 0, None),
    "land": ((0, 1, 2), 1, 4), "lor": ((0, 0, 3), 0, 4), "lxor": ((0, 1, 2), 0, None),
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
    exact = EXACT.get(dtype, EXACT_ELSEWHERE)
    largest = max(1, min(exact // ranks, 100))  # of which one per rank adds up; a byte looks up no more than 256
    least = 0 if dtype.startswith(("uint", "bool")) else -largest
    drawn, idle, most = DRAWN.get(ON_BOOL.get(op, op) if dtype == "bool" else op, (range(least, largest + 1), 0, None))
    choices = numpy.array(drawn)
    numbers = choices[random_bytes(ranks * DRAWS, seed=ranks) % len(choices)].reshape(ranks, DRAWS)
    every = -(-ranks // (most or exact))  # one rank in so many gives something
    gives = (numpy.arange(ranks)[:, None] + numpy.arange(DRAWS)) % every == 0
    unit = 1 + 1j if DTYPES[dtype].kind == "complex" else 1
    return numpy.where(gives, numbers * unit, idle)


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


def identity(op: str, dtype: str) -> Array:
    """Return the element that leaves every other as it is, as an array of shape ()."""
    kind = numpy_dtype(dtype)
    name = ON_BOOL.get(op, op) if dtype == "bool" else op
    if name == "band":
        return numpy.invert(numpy.zeros((), kind))
    if name not in ("min", "max"):
        return numpy.array(1 if name in ("prod", "land") else 0, kind)
    if DTYPES[dtype].kind == "int":
        return numpy.array(numpy.iinfo(kind).max if name == "min" else numpy.iinfo(kind).min, kind)
    sign = 1 if name == "min" else -1
    infinite = numpy.array(sign * numpy.inf).astype(kind)
    return infinite if numpy.isinf(infinite.astype(float)) else numpy.array(sign * 448, kind)  # float8_e4m3fn
