"""Cases for the contract of bits: inputs of any bits, and oracles that share no code with the library.

The oracles are additions in rank order, with `deterministic=True`, and fractions, with `deterministic="exact"`.
"""

import itertools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy

import gpucoll as gc
from oracles.oracle import kind

FLOATS = "float16 bfloat16 float32 float64 complex64 complex128 float8_e4m3fn float8_e5m2".split()
NARROW = "float16 bfloat16 float8_e4m3fn float8_e5m2".split()
ORDERED, ROUNDED = "sum avg prod min max".split(), ("sum", "avg")  # ops of either option
COLUMNS = 40  # different columns of inputs in a case: an oracle of fractions takes 10 us for an element
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v", "scan", "exscan")
# Bits of the mantissa with the leading bit, exponent of the least number, exponent of the first number too large
FORMATS = {"float16": (11, -24, 16), "bfloat16": (8, -133, 128), "float32": (24, -149, 128),
           "float64": (53, -1074, 1024), "float8_e5m2": (3, -16, 16)}
SPECIAL = [0.0, -0.0, numpy.inf, -numpy.inf, numpy.nan, 1.0, -1.0, 3e38, -3e38, 65504.0, 1e-7, -1e-7]


class Case(NamedTuple):
    """A case drawn alike on all ranks: dtype, op, seed of the data, elements, cuts into calls, and an offset."""

    name: str
    op: str
    seed: int
    count: int
    cuts: tuple
    offset: int


def case(random, name, op, size):
    """Return a case of any length; calls of other lengths and offsets than a whole array's end at the cuts."""
    count = random.choice((1, 7, 65, 1000, 4099, 20011)) + size
    inner = sorted({random.randrange(count + 1) for _ in range(random.choice((0, 1, 3)))})
    return Case(name, op, random.getrandbits(32), count, (0, *inner, count), random.randrange(4))


def real(name):
    """Return the NumPy dtype of the parts of a complex dtype, or the dtype itself."""
    return numpy.dtype(f"f{kind(name).itemsize // 2}") if name.startswith("complex") else kind(name)


def columns(name, size, seed):
    """Return inputs for `size` ranks: any bits, numbers alike, numbers of any magnitude, and special numbers."""
    draw, part = numpy.random.default_rng(seed), real(name)
    shape = size, COLUMNS * kind(name).itemsize // part.itemsize
    how = int(draw.integers(5))
    with numpy.errstate(all="ignore"):
        plain = draw.standard_normal(shape)
        if how == 0:
            found = draw.integers(0, 256, (size, shape[1] * part.itemsize), numpy.uint8).view(part)
        elif how == 1:
            found = plain.astype(part)
        elif how == 2:
            found = (plain * 2.0 ** draw.integers(-30, 30, shape)).astype(part)
            found[size // 2:size // 2 * 2] = -found[:size // 2]  # what is left is small
        elif how == 3:  # ties and values below the normal numbers
            found = (draw.integers(-3, 4, shape) * 2.0 ** draw.choice([-149.0, -24, -8, 0], shape)).astype(part)
        else:
            found = numpy.where(draw.random(shape) < 0.3, draw.choice(SPECIAL, shape), plain).astype(part)
    return numpy.ascontiguousarray(found).view(kind(name))


def same_bits(a, b):
    """Return whether two arrays have the same bits; a NaN is a NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and _settled(a) == _settled(b)


def _settled(a):
    parts = numpy.ascontiguousarray(a).reshape(-1).view(real(a.dtype.name)).copy()
    with numpy.errstate(all="ignore"):
        parts[numpy.isnan(parts.astype("f8"))] = numpy.nan
    return parts.tobytes()


# ---------------------------------------------------------------- the oracles


def in_order(op, rows):
    """Return the reduction in rank order; narrow floats are formed in float32 and rounded once."""
    with numpy.errstate(all="ignore"):
        return _mean(rows) if op == "avg" else _folded(op, rows)


def _folded(op, rows):
    narrow = rows.dtype.name in NARROW
    total, *more = rows.astype("f4") if narrow else rows
    for row in more:
        total = PAIRS[op](total, row)
    return total.astype(rows.dtype)


def _mean(rows):
    """Return the mean: float16 and float8 are scaled first, so that no sum overflows (`scaled_mean`)."""
    name, size = rows.dtype.name, len(rows)
    if name not in NARROW:
        return _folded("sum", rows) / size
    scale = 0.5 ** (size - 1).bit_length() if name != "bfloat16" else 1.0
    total = _folded("sum", (rows.astype("f4") * numpy.float32(scale)).astype(rows.dtype))
    return (total.astype("f4") / numpy.float32(size * scale)).astype(rows.dtype)


def _product(a, b):
    if a.dtype.kind != "c":
        return a * b
    found = numpy.empty_like(a)  # by parts: NumPy's own loops may fuse a multiplication and an addition
    found.real, found.imag = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return found


PAIRS = {"sum": lambda a, b: a + b, "prod": _product,
         "min": lambda a, b: numpy.where((b < a) | numpy.isnan(b), b, a),
         "max": lambda a, b: numpy.where((b > a) | numpy.isnan(b), b, a)}


def exact(op, rows):
    """Return the exact sum or mean of the rows, rounded once."""
    name = rows.dtype.name
    part = real(name)
    with numpy.errstate(all="ignore"):
        values = numpy.ascontiguousarray(rows).view(part).astype("f8").T.tolist()
        found = [_exactly(column, op == "avg", part.name) for column in values]
        return numpy.array(found, "f8").astype(part).view(kind(name))


def _exactly(values, is_mean, name):
    if any(map(math.isnan, values)) or {math.inf, -math.inf} <= {*values}:
        return math.nan
    if any(map(math.isinf, values)):
        return next(one for one in values if math.isinf(one))
    total = sum(map(Fraction, values)) / (len(values) if is_mean else 1)
    if not total:
        return -0.0 if all(math.copysign(1, one) < 0 for one in values) else 0.0
    return math.copysign(rounded(abs(total), name), total)


def rounded(value, name):
    """Return a positive fraction rounded to the nearest number of a format, ties to even.

    >>> rounded(Fraction(2049), "float16"), rounded(Fraction(2051), "float16"), rounded(Fraction(65520), "float16")
    (2048.0, 2052.0, inf)
    """
    precision, least, limit = FORMATS[name]
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > value
    step = Fraction(2) ** max(exponent - precision + 1, least)
    found = round(value / step) * step
    return math.inf if found >= Fraction(2) ** limit else float(found)


# ---------------------------------------------------------------- the calls


def check(comm, drawn, oracle, random):
    """Make every reduction of a case, by `auto` and by another algorithm, and compare with `oracle(op, rows)`.

    Return the number of results compared on this rank.
    """
    results = 0
    inputs = columns(drawn.name, comm.size, drawn.seed)
    place = numpy.random.default_rng(drawn.seed).integers(0, COLUMNS, drawn.count)
    everyone = inputs[:, place]
    mine = numpy.zeros(drawn.count + drawn.offset, everyone.dtype)[drawn.offset:]
    mine[...] = everyone[comm.rank]
    for collective in COLLECTIVES:
        if drawn.op == "avg" and collective in ("scan", "exscan"):
            continue
        last = {"scan": comm.rank + 1, "exscan": comm.rank}.get(collective, comm.size)
        wanted = oracle(drawn.op, inputs[:last])[place] if last else None
        names = [one for one in gc.algorithms(collective, size=comm.size) if not one.startswith("own")]
        for algorithm in ("auto", random.choice(names)):
            try:
                results += _check_call(comm, collective, algorithm, drawn, mine, wanted)
            except gc.ArgumentError as refused:
                if refused.code != "GC-DETERMINISTIC" or algorithm == "auto":
                    raise
    return results


def _check_call(comm, collective, algorithm, drawn, mine, wanted):
    options, count = {"op": drawn.op, "algorithm": algorithm}, drawn.count
    if collective == "reduce_scatter":
        each = count // comm.size
        found = comm.reduce_scatter(mine[:each * comm.size].reshape(comm.size, each), **options)
        _compare(found, wanted[comm.rank * each:][:each], collective, algorithm, drawn)
        return 1
    if collective == "reduce_scatter_v":
        bounds = [count * place * place // comm.size ** 2 for place in range(comm.size + 1)]
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        found = comm.reduce_scatter_v(mine, lengths, **options)
        _compare(found, wanted[bounds[comm.rank]:bounds[comm.rank + 1]], collective, algorithm, drawn)
        return 1
    root, results = drawn.seed % comm.size, 0
    for start, stop in itertools.pairwise(drawn.cuts):
        more = {"root": root} if collective == "reduce" else {}
        found = getattr(comm, collective)(mine[start:stop], **options, **more)
        if found is not None and wanted is not None:
            _compare(found, wanted[start:stop], collective, algorithm, drawn)
            results += 1
    return results


def _compare(found, wanted, *context):
    if not same_bits(found, wanted):
        places = [place for place in range(len(wanted))
                  if not same_bits(found[place:place + 1], wanted[place:place + 1])]
        raise AssertionError(f"{context}: {len(places)} of {len(wanted)} elements differ, the first at {places[0]}: "
                             f"{found[places[0]]!r}, not {wanted[places[0]]!r}")
