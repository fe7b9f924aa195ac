"""Values that depend on the rank's number, in a process that runs a program once for several equal ranks.

Arithmetic and comparisons are computed for each of the ranks. Where the program needs a single value, as in a branch,
an index or a text, the process forks into a process for each value; see `equal_ranks`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy

# Types whose operations depend on the values alone, and change nothing.
PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
ROUNDINGS: dict[str, Callable[..., Any]] = {"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil}


class Ranks(Protocol):
    """The equal ranks of a process; `numbers` are their numbers in the world."""

    numbers: tuple[int, ...]

    def choose(self, values: Mapping[int, Any]) -> Any:
        """Return the value of the ranks of this process, after a fork into a process for each different value."""


class PerRank:
    """A plain value for each of some equal ranks, all of one type; it passes for an object of this type."""

    __slots__ = ("_ranks", "_values")

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

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        function = getattr(ufunc, method)
        if options or method != "__call__":  # an array may be written
            return function(*map(single, inputs), **{name: single(value) for name, value in options.items()})
        return lift(function, *inputs)

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


class PerRankText(PerRank):
    """A text, or bytes, for each of some equal ranks."""

    __slots__ = ()

    def __len__(self) -> int:
        length: int = single(lift(len, self))
        return length

    def __getitem__(self, index: Any) -> Any:
        return lift(operator.getitem, self, index)

    def __contains__(self, part: Any) -> bool:
        return bool(lift(operator.contains, self, part))

    def __iter__(self) -> Any:
        return iter(self.one)


def is_plain(value: Any) -> bool:
    """Return whether operations on a value depend on the value alone."""
    return type(value) in PLAIN or isinstance(value, numpy.number | numpy.bool_)


def single(value: Any) -> Any:
    """Return the single value of this process, after a fork if its ranks have different values."""
    return value.one if isinstance(value, PerRank) else value


def per_rank(ranks: Ranks, values: Mapping[int, Any]) -> Any:
    """Return the value of all ranks if the values are equal, else a `PerRank`.

    The process forks at once if a program can tell the values apart without a method of `PerRank`: values of different
    types; truth values, as by ``value is True``; and objects that are not plain.
    """
    if not all(is_plain(values[number]) for number in ranks.numbers):
        return ranks.choose(values)
    if len({type(values[number]) for number in ranks.numbers}) > 1:
        ranks.choose({number: type(values[number]) for number in ranks.numbers})
    own = {number: values[number] for number in ranks.numbers}
    first = own[ranks.numbers[0]]
    mark = mark_of(first)
    if all(mark_of(value) == mark for value in own.values()):
        return first
    if isinstance(first, bool | numpy.bool_):
        return ranks.choose(own)
    return (PerRankText if type(first) in (str, bytes) else PerRank)(ranks, own)


def mark_of(value: Any) -> Any:
    """Return a mark, equal for equal values only; an object that can be changed is equal to no other object."""
    if type(value) is float:
        return float, value.hex()  # 0.0 differs from -0.0
    if type(value) in PLAIN:
        return type(value), value
    if type(value) is numpy.ndarray and value.size == 0:
        return value.dtype.str, value.shape
    return (value.dtype.str, value.tobytes()) if is_plain(value) else id(value)


def lift(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `function`, for each rank if an argument differs; `function` must have no side effects."""
    ranks = next((one._ranks for one in arguments if isinstance(one, PerRank)), None)
    if ranks is not None and all(isinstance(one, PerRank) or is_plain(one) for one in arguments):
        try:
            return per_rank(ranks, {number: function(*(value_of(one, number) for one in arguments))
                                    for number in ranks.numbers})
        except Exception:  # of some ranks, or of all: each value raises for itself
            pass
    return function(*map(single, arguments))


def value_of(value: Any, number: int) -> Any:
    """Return the value of rank `number`."""
    return value.of(number) if isinstance(value, PerRank) else value


def _add_operators() -> None:
    def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *others: lift(function, self, *others)

    def reflected(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, other: lift(lambda one, another: function(another, one), self, other)

    for name in (*UNARY, *BINARY, *COMPARISONS):
        setattr(PerRank, f"__{name}__", lifted(getattr(operator, f"__{name}__") if name != "pow" else pow))
    for name, function in ROUNDINGS.items():
        setattr(PerRank, f"__{name}__", lifted(function))
    for name in BINARY:
        setattr(PerRank, f"__r{name}__", reflected(getattr(operator, f"__{name}__")))


_add_operators()


def follow_json() -> None:
    """Let `json` write the single value of a `PerRank`: the encoder asks for exact types."""
    default = json.JSONEncoder.default
    json.JSONEncoder.default = lambda self, o: o.one if isinstance(o, PerRank) else default(self, o)  # type: ignore[method-assign]
