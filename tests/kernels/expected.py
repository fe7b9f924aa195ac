"""Test data of every bit pattern, and NumPy's results; shares no code with the library."""

import numpy

from oracles.oracle import DTYPES, OPS, kind, legal

SPECIAL = (0.0, -0.0, 1.0, -1.5, 2.0, numpy.nan, numpy.inf, -numpy.inf, 1e-45, -1e-41, 6e-8, -5e-6, 2.0**-9, 448.0,
           464.0, 465.0, 57344.0, 61439.0, 61440.0, 65504.0, 65519.0, 65520.0, 3.4e38, -3.4e38, 1.17549435e-38)
NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
quiet = numpy.errstate(all="ignore")  # the tests cover overflow and NaN


def wide(array):
    """Return the array as computed by the contract: narrow floats in float32, any byte but zero of a bool true."""
    if array.dtype == bool:
        return array.view(numpy.uint8) != 0
    return array.astype(numpy.float32) if array.dtype.name in NARROW else array


@quiet
def random_array(name, count, seed):
    """Return a third random bytes, a third special values, a third of middling size, in random order."""
    random = numpy.random.default_rng([seed, count])
    dtype = kind(name)
    values = numpy.frombuffer(random.bytes(count * dtype.itemsize), dtype).copy()
    if dtype.kind == "b" or "int" in name:
        return values
    parts = values.view(values.real.dtype) if dtype.kind == "c" else values
    choice = random.integers(0, 3, parts.size)
    parts[choice == 1] = random.choice(SPECIAL, int((choice == 1).sum())).astype(parts.dtype)
    parts[choice == 2] = (random.standard_normal(int((choice == 2).sum())) * 3).astype(parts.dtype)
    return values


@quiet
def total_of(x, before):
    """Return x + before, rounded to the dtype of `x`."""
    return wide((wide(x) + wide(before)).astype(x.dtype))


@quiet
def kept(lost, dtype):
    """Return residuals as they are stored: 0 if not finite."""
    return numpy.where(numpy.isfinite(lost), lost, 0).astype(dtype)


@quiet
def product(a, b):
    """Return the product; complex numbers by four products, as NumPy's own product is fused on some machines."""
    if a.dtype.kind != "c":
        return a * b
    result = numpy.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result


PAIRS = {"sum": numpy.add, "avg": numpy.add, "prod": product, "min": numpy.minimum, "max": numpy.maximum,
         "band": numpy.bitwise_and, "bor": numpy.bitwise_or, "bxor": numpy.bitwise_xor, "land": numpy.logical_and,
         "lor": numpy.logical_or, "lxor": numpy.logical_xor}


@quiet
def reduced(pair, arrays):
    """Reduce the arrays from the left, computed wide and rounded once."""
    total = wide(arrays[0])
    for array in arrays[1:]:
        total = pair(total, wide(array)).astype(total.dtype)
    return total.astype(arrays[0].dtype)


def same(found, expected, *, zeros_free=False):
    """Return whether the bits are the same; NaNs are equal, and with `zeros_free` so are zeros."""
    found, expected = (x.view(x.real.dtype) if x.dtype.kind == "c" else x for x in (found, expected))
    width = f"u{found.dtype.itemsize}"
    alike = found.view(width) == expected.view(width)
    if found.dtype.kind in "biu":
        return bool(alike.all())
    nan = numpy.isnan(wide(found)) & numpy.isnan(wide(expected))
    zero = (wide(found) == 0) & (wide(expected) == 0) & zeros_free
    return bool((alike | nan | zero).all())


CASES = [(op, name) for name in DTYPES for op in OPS if legal(op, name)]
REAL = [name for name in DTYPES if not name.startswith("complex")]
