"""Values that depend on the rank's number, in a process that runs a program once for several equal ranks.

Arithmetic and comparisons are computed for each of the ranks. Where the program needs a single value, as in a branch,
an index or a text, the process forks into a process for each value; see `equal_ranks`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy

PLAIN = (int, float, str, bytes, type(None), numpy.generic)  # types whose operations depend on the values alone
SINGLE = (bool, type(None), numpy.bool_)  # types with one object for each value
UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class Ranks(Protocol):
    """The equal ranks of a process; `numbers` are their numbers in the world."""

    numbers: tuple[int, ...]

    def choose(self, values: Mapping[int, Any]) -> Any:
        """Return the value of the ranks of this process, after a fork into a process for each different value."""


class PerRank:
    """A value for each of some equal ranks; it passes for an object of the type of its values."""

    __slots__ = ("_ranks", "_values")
    __array_ufunc__ = None  # NumPy leaves ``array + value`` to the methods of this class

    def __init__(self, ranks: Ranks, values: Mapping[int, Any]) -> None:
        self._ranks, self._values = ranks, values

    @property
    def one(self) -> Any:
        """The single value of this process; the process forks if its ranks have different values."""
        return self._ranks.choose(self._values)

    @property
    def sample(self) -> Any:
        """The value of the first rank, for text that nobody reads."""
        return self._values[self._ranks.numbers[0]]

    def of(self, number: int) -> Any:
        """Return the value of rank `number` of the world."""
        return self._values[number]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # read by `isinstance`
        return type(self.sample)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not callable(getattr(self.sample, name)):
            return lift(operator.attrgetter(name), self)
        return lambda *arguments, **options: lift(
            lambda value, *others: getattr(value, name)(*others, **options), self, *arguments)

    def __bool__(self) -> bool:
        return bool(lift(bool, self))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __hash__(self) -> int:
        return hash(self.one)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return numpy.asarray(self.one, dtype)

    def __copy__(self) -> PerRank:
        return self

    def __deepcopy__(self, memo: Any) -> PerRank:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.one
        return type(value), (value,)

    def __format__(self, spec: str) -> str:
        return format(self.one, spec)

    def __str__(self) -> str:
        return str(self.one)

    def __repr__(self) -> str:
        return repr(self.one)

    def __index__(self) -> int:
        return operator.index(self.one)

    def __int__(self) -> int:
        return int(self.one)

    def __float__(self) -> float:
        return float(self.one)


def per_rank(ranks: Ranks, values: Mapping[int, Any]) -> Any:
    """Return the value of all ranks if the values are equal, else a `PerRank`; truth values are told apart at once."""
    own = {number: values[number] for number in ranks.numbers}
    first = own[ranks.numbers[0]]
    mark = mark_of(first)
    if all(mark_of(value) == mark for value in own.values()):
        return first
    # A program may ask ``value is None`` or ``value is True``, without a method called here.
    return ranks.choose(own) if any(isinstance(value, SINGLE) for value in own.values()) else PerRank(ranks, own)


def mark_of(value: Any) -> Any:
    """Return a mark, equal for equal values only; an object of another type is equal to no other object."""
    if isinstance(value, float):
        return type(value), value.hex()  # 0.0 differs from -0.0
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype != object:
        return value.dtype.str, value.shape, value.tobytes()
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


def lift(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function`, for each rank if an argument differs; `function` must have no side effects."""
    ranks = next((one._ranks for one in arguments if type(one) is PerRank), None)
    if ranks is not None and all(type(one) is PerRank or isinstance(one, PLAIN) for one in arguments):
        try:
            return per_rank(ranks, {number: function(*(value_of(one, number) for one in arguments))
                                    for number in ranks.numbers})
        except Exception:  # of some ranks, or of all: each value raises for itself
            pass
    return function(*(one.one if type(one) is PerRank else one for one in arguments))


def value_of(value: Any, number: int) -> Any:
    """Return the value of rank `number`."""
    return value.of(number) if type(value) is PerRank else value


def _add_operators() -> None:
    def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *others: lift(function, self, *others)

    def reflected(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, other: lift(lambda one, another: function(another, one), self, other)

    for name in (*UNARY, *BINARY, *COMPARISONS):
        setattr(PerRank, f"__{name}__", lifted(getattr(operator, f"__{name}__")))
    for name in BINARY:
        setattr(PerRank, f"__r{name}__", reflected(getattr(operator, f"__{name}__")))


_add_operators()
