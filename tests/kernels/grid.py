"""The grid of kernels, and the default tier's part: kernels catching mutants, every op, every dtype.

The default tier compiles four units; nightly tests compile the whole grid, in a unit for each dtype.
"""

import numpy
import pytest
from expected import CASES, NARROW

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS, elementwise_op
from gpucoll.device import sources
from oracles.oracle import DTYPES as NAMES

WIDTHS = (1, 2, 4, 8, 16)
MOVES = [sources.instance(kernel, width) for kernel in sources.MOVE_KERNELS for width in WIDTHS]
SCALES = [(what, name) for what, kinds in (("divide", ("float", "complex")), ("multiply", ("int", "float", "complex")),
                                           ("truth", ("bool", "int", "float")))
          for name in NAMES if DTYPES[name].kind in kinds]
# A user's expressions, their dtypes, and the equivalent functions of NumPy.
EXPRESSIONS = {
    "a + b - a*b": (["int8", "uint16", "int64", "float16", "float64"], lambda a, b: a + b - a * b),
    "max(a + b, b)": (["int8", "int32", "uint8", "bfloat16"], lambda a, b: numpy.maximum(a + b, b)),
    "~(a ^ b)": (["bool", "int16", "uint64"], lambda a, b: ~(a ^ b)),
    "a << b | a >> b": (["int8", "uint8", "int32", "uint64"], lambda a, b: a << b | a >> b),
    "min(abs(a), -b) * 3": (["int8", "int64", "float32"], lambda a, b: numpy.minimum(numpy.abs(a), -b) * 3),
    "(a + b) * (1 / 2) + 0.1": (["float16", "float32", "float8_e5m2"], lambda a, b: (a + b) * 0.5 + 0.1),
    "sqrt(a*a + b*b)": (["float16", "float32", "float64"], lambda a, b: numpy.sqrt(a * a + b * b)),
    "a*b / (a + b)": (["float32", "float64"], lambda a, b: a * b / (a + b)),
    "(a - b) / a": (["complex64", "complex128"], lambda a, b: (a - b) / a),
    "pow(a, b & 15)": (["int16", "uint32"], lambda a, b: numpy.power(a, b & 15)),
    "a + b + 1e999": (["float32"], lambda a, b: a + b + numpy.inf),
}
WRITTEN = [(text, name) for text, (names, _) in EXPRESSIONS.items() for name in names]
NEAR = [("exp(a) - log(b) + 5", "float32"), ("pow(abs(a), b)", "float64")]  # without a standard of rounding

CORE_REDUCE = [tuple(words.split()) for words in (
    "sum float32", "max float32", "sum float64", "sum float16", "sum int16", "sum int8", "bxor int32", "bxor uint8",
    "prod complex64", "prod complex128", "lor bool", "land int64", "lxor uint32", "band uint16", "bor uint64",
    "min float8_e4m3fn", "max bfloat16", "avg float8_e5m2", "sum int32")]
CORE_SCALE = [("divide", "float8_e4m3fn"), ("divide", "complex64"), ("divide", "float64"), ("multiply", "bfloat16"),
              ("multiply", "int16"), ("multiply", "complex128"), ("truth", "float32"), ("truth", "bool")]
CONVERSIONS = [("multiply", name) for name in NARROW]
CORE_WRITTEN = [(text, names[0]) for text, (names, _) in EXPRESSIONS.items()]

def reductions(cases):
    return [sources.reducing("reduce", OPS.get(op) or elementwise_op(op), DTYPES[name]) for op, name in cases]


def scales(cases):
    return [sources.instance("scale", what, DTYPES[name]) for what, name in cases]


CORE = [reductions(CORE_REDUCE[::2]), reductions(CORE_REDUCE[1::2]), reductions([*CORE_WRITTEN, *NEAR]),
        [*MOVES, *scales(dict.fromkeys(CORE_SCALE + CONVERSIONS))]]
UNITS = [*CORE, scales(SCALES),
         *(reductions([case for case in (*CASES, *WRITTEN) if case[1] == name]) for name in NAMES)]


def often(core, everything):
    """Return the cases for a test; cases outside the core are nightly."""
    return [pytest.param(*case, marks=() if case in core else pytest.mark.nightly) for case in everything]
