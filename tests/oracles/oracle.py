"""Exact data, different per rank and index, and NumPy's results; shares no code with the library."""

import ml_dtypes
import numpy

DTYPES = ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 "
          "complex128 float8_e4m3fn float8_e5m2").split()
OPS = "sum prod min max avg band bor bxor land lor lxor".split()
COUNTS = (0, 1, 1000, 65537)
SIZES = (1, 2, 3, 4, 5, 7, 8)


def kind(name):
    """Return the NumPy dtype of a name."""
    return numpy.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else numpy.dtype(name)


def legal(op, name):
    """Return whether the contract defines `op` on the dtype."""
    if name.startswith("complex"):
        return op in ("sum", "prod", "avg")
    if "float" in name:
        return op not in ("band", "bor", "bxor")
    return op != "avg"


def values(op, name, rank, count):
    """Return the input of `rank`: small enough for exact results and partial results in the dtype."""
    index = numpy.arange(count, dtype=numpy.int64)
    if op == "prod":  # at most three twos among eight ranks
        plain = numpy.where((index + rank) % 3 == 0, 2, 1)
    elif op in ("land", "lor", "lxor"):
        plain = (index + rank) % 3
    elif op in ("band", "bor", "bxor"):
        plain = (index * 37 + rank * 11) % 128
    elif op in ("min", "max"):
        plain = (index * 5 + rank * 3) % 7
    else:
        plain = (index * 7 + rank) % (2 if name.startswith("float8") else 4)
    if name.startswith("complex"):
        return (plain * 1j if (rank + count) % 2 else plain).astype(kind(name))
    return (plain % 2 if name == "bool" else plain).astype(kind(name))


def reduced(op, name, contributions):
    """Return the reduction of a list of arrays, in rank order, formed wide and rounded at the end."""
    wide = [x.astype(numpy.complex128 if x.dtype.kind == "c" else numpy.float64 if "float" in name else x.dtype)
            for x in contributions]
    total = wide[0].copy()
    for x in wide[1:]:
        total = PAIRS[op](total, x)
    if op == "avg":
        total = total.astype(numpy.complex64 if name == "complex64" else
                             numpy.float64 if name == "float64" else
                             numpy.complex128 if name == "complex128" else numpy.float32) / len(wide)
    if op in ("land", "lor", "lxor"):
        total = total != 0
    return total.astype(kind(name))


def outcome(collective, inputs, rank, root=0, op="sum", counts=()):
    """Return a rank's result from the arrays of all ranks, None without a result; blocks of equal length are stacked.
    """
    name = next(one.dtype.name for one in inputs if one is not None)
    if collective in ("scan", "exscan"):
        some = inputs[:rank + (collective == "scan")]
        return reduced(op, name, some) if some else numpy.full_like(inputs[0], identity(op, name))
    if collective in ("gather", "reduce") and rank != root:
        return None
    if "reduce" in collective:
        total, part = reduced(op, name, inputs), slice(sum(counts[:rank]), sum(counts[:rank + 1]))
        return {"reduce_scatter": lambda: total[rank], "reduce_scatter_v": lambda: total[part]}.get(
            collective, lambda: total)()
    if collective in ("broadcast", "scatter"):
        return inputs[root] if collective == "broadcast" else inputs[root][rank]
    return numpy.stack([one[rank] for one in inputs] if collective == "all_to_all" else inputs)


def identity(op, name):
    """Return the result of reducing nothing."""
    if op in ("min", "max"):
        if name == "bool":
            return op == "min"
        if "int" in name:
            return numpy.iinfo(name).max if op == "min" else numpy.iinfo(name).min
        limit = 448 if name == "float8_e4m3fn" else numpy.inf  # float8_e4m3fn has no infinity
        return limit if op == "min" else -limit
    if op == "band":
        return ~numpy.zeros(1, kind(name))[0]
    return 1 if op in ("prod", "land") else 0


PAIRS = {
    "sum": lambda a, b: a | b if a.dtype == bool else a + b,
    "avg": lambda a, b: a + b,
    "prod": lambda a, b: a & b if a.dtype == bool else a * b,
    "min": lambda a, b: numpy.where(a < b, a, b),
    "max": lambda a, b: numpy.where(a > b, a, b),
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
    "land": lambda a, b: (a != 0) & (b != 0),
    "lor": lambda a, b: (a != 0) | (b != 0),
    "lxor": lambda a, b: (a != 0) ^ (b != 0),
}


def same_bits(a, b):
    """Return whether two arrays have the same shape, dtype and bytes; zeros of either sign are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and (a.tobytes() == b.tobytes() or bool((a == b).all()))
