"""The table of reduce ops: for each op the names in NumPy, CUDA, NCCL and MPI, and ops defined by the user.

Names are strings, and the modules using NCCL, MPI or CUDA resolve the names. On bool, `sum` and `max` mean `lor`,
`prod` and `min` mean `land`, as in NumPy's add, maximum, multiply and minimum.
"""

from __future__ import annotations

import ast
import enum
import math
import struct
import sys
from numbers import Number
from typing import Any, Literal, NamedTuple

from gpucoll.core import parsing
from gpucoll.errors import ArgumentError, nearest


class Op(NamedTuple):
    """A row of the table; the op is defined for dtypes of the `kinds`.

    `cuda` is a C++ expression in a and b of a type W, calling functions of ``kernels/device/functions.h``. `nccl` and
    `mpi` are None where NCCL or MPI has no such op: other executors, or NumPy within MPI, serve. Ops of the user have a
    `factor` (see `premul_sum`) or an `expression` (see `elementwise_op`).
    """

    name: str
    numpy: str
    cuda: str
    nccl: str | None
    mpi: str | None
    identity: Any
    kinds: tuple[str, ...]
    factor: Any = None
    expression: str = ""


_ALL = ("bool", "int", "float", "complex")
_REAL = ("bool", "int", "float")
_BITS = ("bool", "int")

OpName = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor"]
OPS: dict[str, Op] = {
    row.name: row
    for row in (
        Op("sum", "add", "add(a, b)", "ncclSum", "SUM", "0", _ALL),
        Op("prod", "multiply", "multiply(a, b)", "ncclProd", "PROD", "1", _ALL),
        Op("min", "minimum", "minimum(a, b)", "ncclMin", "MIN", "highest", _REAL),
        Op("max", "maximum", "maximum(a, b)", "ncclMax", "MAX", "lowest", _REAL),
        Op("avg", "add", "add(a, b)", "ncclAvg", "SUM", "0", ("float", "complex")),
        Op("band", "bitwise_and", "a & b", None, "BAND", "all ones", _BITS),
        Op("bor", "bitwise_or", "a | b", None, "BOR", "0", _BITS),
        Op("bxor", "bitwise_xor", "a ^ b", None, "BXOR", "0", _BITS),
        Op("land", "logical_and", "a && b", None, "LAND", "1", _REAL),
        Op("lor", "logical_or", "a || b", None, "LOR", "0", _REAL),
        Op("lxor", "logical_xor", "!a != !b", None, "LXOR", "0", _REAL),
    )
}
# Other libraries' names of the ops.
ALIASES = {**{row.numpy: row.name for row in reversed(OPS.values())}, "mean": "avg", "product": "prod"}
# The sum and the mean formed exactly and rounded once, in place of `sum` and `avg` with deterministic="exact". All
# contributions are combined at once; `cuda` is the type in ``kernels/device/exact.h``.
EXACT = {name: Op(f"exact_{name}", "", cuda, None, "", "0", ("float", "complex"))
         for name, cuda in (("sum", "ExactOp<false>"), ("avg", "ExactOp<true>"))}
# How the contributions to an element are to be combined: in any way, in rank order, or in rank order by a single
# reduction, without rounding in between.
Order = Literal["any", "in order", "at once"]
EXACT_NAMES = tuple(row.name for row in EXACT.values())
LOGICAL = ("land", "lor", "lxor")
NOT_IN = {"scan": ("avg",), "exscan": ("avg",)}  # ops refused by a collective
# Functions allowed in a user's expression: NumPy's function of the same meaning, and the number of arguments.
FUNCTIONS = {"min": ("minimum", 2), "max": ("maximum", 2), "abs": ("absolute", 1), "fabs": ("absolute", 1),
             "sqrt": ("sqrt", 1), "exp": ("exp", 1), "log": ("log", 1), "pow": ("power", 2)}
# NumPy's function of each operator. The kernels define functions of the same names, because C++'s own operators widen
# and shift differently from NumPy's.
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide", ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or", ast.BitXor: "bitwise_xor", ast.LShift: "left_shift", ast.RShift: "right_shift",
    ast.USub: "negative", ast.UAdd: "positive", ast.Invert: "invert"}


class ReduceOp(enum.Enum):
    """The ops as an enumeration, with torch's names too.

    Every collective also accepts the name as a string.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> gc.run_local(lambda comm: comm.all_reduce(numpy.array([comm.rank]), op=gc.ReduceOp.MAX), 3)[0]
    array([2])
    """

    SUM = "sum"
    PROD = PRODUCT = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"
    LXOR = "lxor"

    @staticmethod
    def PREMUL_SUM(factor: Any) -> Op:
        """Return `premul_sum` of the factor.

        Parameters
        ----------
        factor : number
            The factor of this rank.

        Returns
        -------
        Op
            The op, for the argument `op` of a reduction.

        See Also
        --------
        premul_sum : The same, as a function.

        Examples
        --------
        >>> import gpucoll as gc
        >>> gc.ReduceOp.PREMUL_SUM(0.5).factor
        0.5
        """
        return premul_sum(factor)


def op_of(op: object) -> Op:
    """Return the row of `op`: a name, a `ReduceOp`, an op of mpi4py or a function of the same meaning, a user's op.

    Names of other libraries count, too: any case, ``"mean"``, ``numpy.add``, ``cupy.maximum``, ``max``. Raises
    ArgumentError, with the nearest name, for an unknown op.

    >>> op_of("max").mpi
    'MAX'
    >>> import numpy
    >>> [op_of(op).name for op in ("SUM", "mean", numpy.add, max)]
    ['sum', 'avg', 'sum', 'max']
    """
    if isinstance(op, Op):
        return op
    name = op.value if isinstance(op, ReduceOp) else op
    # The caller holds an mpi4py op, so mpi4py is imported already: this module must not import MPI itself.
    if type(op).__module__ == "mpi4py.MPI":
        mpi = sys.modules["mpi4py.MPI"]
        name = next((row.name for row in OPS.values() if row.mpi and op == getattr(mpi, row.mpi, None)), op)
    if type(op).__name__ == "ufunc" or any(op is one for one in (min, max, sum)):  # NumPy's, CuPy's or Python's own
        name = getattr(op, "__name__", "").removeprefix("cupy_")
    if isinstance(name, str):
        name = ALIASES.get(name.lower(), name.lower())
    if isinstance(name, str) and name in OPS:
        return OPS[name]
    raise ArgumentError(f"no reduce op is named {op!r}{nearest(op, OPS)}", code="GC-OP")


def premul_sum(factor: Any) -> Op:
    """Return the op that adds every rank's input times `factor`.

    Each rank has its own factor, as with NCCL's ``ncclRedOpCreatePreMulSum``.

    Parameters
    ----------
    factor : number
        The factor of this rank; for integer dtypes an integer.

    Returns
    -------
    Op
        The op, for the argument `op` of a reduction.

    Raises
    ------
    ArgumentError
        `factor` is not a number (GC-OP).

    See Also
    --------
    elementwise_op : Any other op.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> gc.run_local(lambda comm: comm.all_reduce(numpy.ones(1), op=gc.premul_sum(comm.rank + 1)), 2)[0]
    array([3.])
    """
    if isinstance(factor, bool) or not isinstance(factor, Number):
        raise ArgumentError(f"premul_sum: the factor {factor!r} is not a number", code="GC-OP")
    return OPS["sum"]._replace(name="premul_sum", nccl="premul", kinds=_ALL[1:], factor=factor)


def elementwise_op(expression: str, identity: Any = 0) -> Op:
    """Return the op that combines `a` and `b` by an expression, valid both as CUDA C++ and as NumPy.

    The op must be associative and commutative.

    Parameters
    ----------
    expression : str
        Numbers, ``a b + - * / & | ^ << >> ~``, parentheses, and min max abs fabs sqrt exp log pow.
    identity : number, optional
        The result of exscan on rank 0.

    Returns
    -------
    Op
        The op, for the argument `op` of a reduction.

    Raises
    ------
    ArgumentError
        The expression is none, does not use both names, or has different meanings in Python and in C++ (GC-OP).

    See Also
    --------
    premul_sum : A factor for each rank.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> either = gc.elementwise_op("a + b - a*b")  # the probability that one of two events takes place
    >>> gc.run_local(lambda comm: comm.all_reduce(numpy.array([0.5]), op=either), 2)[0]
    array([0.75])
    """
    try:
        tree = parsing.tree_of(expression.strip())
    except (SyntaxError, AttributeError, ValueError) as error:
        raise ArgumentError(f"elementwise_op: {expression!r} is not an expression: {error}", code="GC-OP") from None
    if not isinstance(identity, Number):
        raise ArgumentError(f"elementwise_op: the identity {identity!r} is not a number", code="GC-OP")
    try:
        cuda = _cuda(expression, tree.body)
    except ArgumentError:
        raise
    except (ArithmeticError, ValueError) as error:
        raise ArgumentError(f"elementwise_op: part of {expression!r} has no value: {error}", code="GC-OP") from None
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if not used >= {"a", "b"}:
        raise ArgumentError(f"elementwise_op: {expression!r} must use both a and b", code="GC-OP")
    return Op("elementwise", "", cuda, None, "", identity, _ALL, expression=expression.strip())


def _cuda(expression: str, node: ast.AST) -> str:
    """Return a part of an expression as C++: every step has the type W and the meaning of NumPy's function.

    Raises ArgumentError for a part with different meanings in Python and in C++.
    """
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            function, parts = OPERATORS[type(operator)], [left, right]
        case ast.UnaryOp(operator, operand) if type(operator) in OPERATORS:
            function, parts = OPERATORS[type(operator)], [operand]
        case ast.Call(ast.Name(name), arguments, []) if FUNCTIONS.get(name, ("", -1))[1] == len(arguments):
            function, parts = FUNCTIONS[name][0], arguments
        case ast.Name("a" | "b" as function):
            return function
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            return _constant(number)
        case _:
            part = ast.get_source_segment(expression.strip(), node) if isinstance(node, ast.expr) else node
            raise ArgumentError(f"elementwise_op: {part!r} in {expression!r} has different meanings in NumPy and C++",
                                code="GC-OP")
    texts = [_cuda(expression, part) for part in parts]
    if all(isinstance(part, _ARITHMETIC) for part in ast.walk(node)):
        # Python computes constant parts, as on the host: 1 / 2 is 0.5 for every W, in C++ an integer W would give 0.
        return _constant(eval(parsing.code_of(ast.Expression(node), "<elementwise_op>", "eval")))
    return f"{function}({', '.join(texts)})"


_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


def _constant(number: int | float) -> str:
    if isinstance(number, float) and not math.isfinite(number):
        (bits,) = struct.unpack("<Q", struct.pack("<d", number))
        return f"W(double_of({bits:#x}))"
    return f"W({number}{'ull' * (isinstance(number, int) and number >= 1 << 63)})"
