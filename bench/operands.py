"""Inputs of the ranks and NumPy's results: small tables of exact numbers, and look-ups in the tables.

A row of pseudo-random bytes, the same on every rank, selects one of 256 draws for each index. A draw has one small
number for each rank. So an expected result needs no communication, and a single look-up per element for any number
of ranks: the 256 results are reduced beforehand, by NumPy and in wide numbers.
"""

from __future__ import annotations

import numpy

from gpucoll.core.dtypes import DTYPES, numpy_dtype

from .summary import Array

DRAWS = 256
LOOKUP_BLOCK = 1 << 16  # elements per look-up
BITS = 127  # all bits of an int8 except the sign
MOVED = "bxor"  # the op of the operands if nothing is reduced; any numbers are fine


# An independent oracle: the library's own table of ops is under test.
UFUNCS: dict[str, numpy.ufunc] = {
    "sum": numpy.add, "avg": numpy.add, "prod": numpy.multiply, "min": numpy.minimum, "max": numpy.maximum,
    "band": numpy.bitwise_and, "bor": numpy.bitwise_or, "bxor": numpy.bitwise_xor,
    "land": numpy.logical_and, "lor": numpy.logical_or, "lxor": numpy.logical_xor,
}
# The operands of an op: the choices for a few ranks, the number for all other ranks, and the most ranks with a choice.
# So every single rank decides some results. For other ops, the choices are all numbers small enough for exact sums.
DRAWN: dict[str, tuple[tuple[int, ...], int, int | None]] = {
    "prod": ((1, 2, 2), 1, 6), "band": (tuple(BITS - (1 << bit) for bit in range(7)), BITS, 4),
    "bor": (tuple(1 << bit for bit in range(7)), 0, 4), "bxor": (tuple(range(BITS + 1)), 0, None),
    "land": ((0, 1, 2), 1, 4), "lor": ((0, 0, 3), 0, 4), "lxor": ((0, 1, 2), 0, None),
}
ON_BOOL = {"sum": "lor", "max": "lor", "bor": "lor", "prod": "land", "min": "land", "band": "land", "bxor": "lxor"}
# Up to this number the dtype has every integer; wider dtypes get no larger numbers either.
EXACT_UP_TO = {"float8_e5m2": 8, "float8_e4m3fn": 16, "int8": 127, "uint8": 127, "bfloat16": 256, "float16": 2048}
EXACT_ELSEWHERE = 1 << 20


def random_bytes(count: int, seed: int) -> Array:
    """Return `count` pseudo-random bytes, equal on every host (NumPy promises only raw streams)."""
    return numpy.random.PCG64(seed).random_raw(-(-count // 8)).view(numpy.uint8)[:count]


def operands(dtype: str, op: str, ranks: int) -> Array:
    """Return each rank's number in each draw, shape (ranks, DRAWS): integers, in NumPy's widest dtype."""
    exact = EXACT_UP_TO.get(dtype, EXACT_ELSEWHERE)
    largest = max(1, min(exact // ranks, 100))  # one per rank must add up exactly; a byte selects at most 256 numbers
    least = 0 if dtype.startswith(("uint", "bool")) else -largest
    drawn, idle, most = DRAWN.get(ON_BOOL.get(op, op) if dtype == "bool" else op, (range(least, largest + 1), 0, None))
    choices = numpy.array(drawn)
    numbers = choices[random_bytes(ranks * DRAWS, seed=ranks) % len(choices)].reshape(ranks, DRAWS)
    every = -(-ranks // (most or exact))  # only one rank in `every` has a choice
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
    """Return ``table[draws]``, shape of `draws`, in blocks: NumPy widens an index array to 8 bytes per element."""
    found = numpy.empty(draws.shape, table.dtype)
    source, target = draws.reshape(-1), found.reshape(-1)
    for start in range(0, len(target), LOOKUP_BLOCK):
        target[start:start + LOOKUP_BLOCK] = table[source[start:start + LOOKUP_BLOCK]]
    return found


def identity(op: str, dtype: str) -> Array:
    """Return the identity element of `op`, as an array of shape ()."""
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
