"""The reduce ops of the contract: one row each, the names in NumPy, CUDA, NCCL and MPI side by side.

Names are strings, resolved by those who use them. On bool, `sum` and `max` are `lor`, `prod`
and `min` are `land`: NumPy's own add, multiply, maximum and minimum do just that.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from gpucoll.errors import ArgumentError, nearest


class Op(NamedTuple):
    """One row: `kinds` are the dtypes' kinds on which the op is defined."""

    name: str
    numpy: str
    cuda: str
    nccl: str | None
    mpi: str
    identity: str
    kinds: tuple[str, ...]


_ALL = ("bool", "int", "float", "complex")
_REAL = ("bool", "int", "float")
_BITS = ("bool", "int")

OPS: dict[str, Op] = {
    row.name: row
    for row in (
        Op("sum", "add", "a + b", "ncclSum", "SUM", "0", _ALL),
        Op("prod", "multiply", "a * b", "ncclProd", "PROD", "1", _ALL),
        Op("min", "minimum", "b < a || b != b ? b : a", "ncclMin", "MIN", "highest", _REAL),
        Op("max", "maximum", "b > a || b != b ? b : a", "ncclMax", "MAX", "lowest", _REAL),
        Op("avg", "add", "a + b", "ncclAvg", "SUM", "0", ("float", "complex")),
        Op("band", "bitwise_and", "a & b", None, "BAND", "all ones", _BITS),
        Op("bor", "bitwise_or", "a | b", None, "BOR", "0", _BITS),
        Op("bxor", "bitwise_xor", "a ^ b", None, "BXOR", "0", _BITS),
        Op("land", "logical_and", "a && b", None, "LAND", "1", _REAL),
        Op("lor", "logical_or", "a || b", None, "LOR", "0", _REAL),
        Op("lxor", "logical_xor", "!a != !b", None, "LXOR", "0", _REAL),
    )
}
LOGICAL = ("land", "lor", "lxor")


class ReduceOp(enum.Enum):
    """The ops by name, for those who like an enumeration; a string does as well."""

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"
    LXOR = "lxor"


def op_of(op: object) -> Op:
    """Return the row of `op`: a name or a `ReduceOp`; ArgumentError names the nearest.

    >>> op_of("max").mpi
    'MAX'
    """
    name = op.value if isinstance(op, ReduceOp) else op
    if isinstance(name, str) and name in OPS:
        return OPS[name]
    raise ArgumentError(f"no reduce op is named {op!r}{nearest(op, OPS)}", code="GC-OP")
