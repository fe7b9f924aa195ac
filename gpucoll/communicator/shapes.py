"""The types of the calls, a shape for each family of methods: the result is what was put in.

A NumPy or CuPy array gives an array of its type and dtype, `out` gives itself, and
``async_op=True`` a `Work`. At run time `shaped` leaves a method as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, cast, overload

from gpucoll.work import Work


class ArrayLike(Protocol):
    """What NumPy's and CuPy's arrays have in common, and PyTorch's have not: those give NumPy arrays."""

    def __array_namespace__(self, *, api_version: Any = ...) -> Any:
        """Return the array module."""


A = TypeVar("A", bound=ArrayLike)
O = TypeVar("O")  # noqa: E741 (the result)
C = TypeVar("C", covariant=True)


class Reducing(Protocol):
    """all_reduce, reduce_scatter, scan, exscan."""

    @overload
    def __call__(self, x: A, out: None = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                 stream: Any = None, async_op: Literal[False] = False) -> A: ...
    @overload
    def __call__(self, x: Any, out: O, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                 stream: Any = None, async_op: Literal[False] = False) -> O: ...
    @overload
    def __call__(self, x: Any, out: Any = None, op: Any = "sum", *, dtype: Any = None, algorithm: str = "auto",
                 stream: Any = None, async_op: Literal[True]) -> Work: ...


class ReducingToRoot(Protocol):
    """reduce: None off the root."""

    @overload
    def __call__(self, x: A, out: None = None, op: Any = "sum", root: int = 0, *, dtype: Any = None,
                 algorithm: str = "auto", stream: Any = None, async_op: Literal[False] = False) -> A | None: ...
    @overload
    def __call__(self, x: Any, out: O, op: Any = "sum", root: int = 0, *, dtype: Any = None, algorithm: str = "auto",
                 stream: Any = None, async_op: Literal[False] = False) -> O | None: ...
    @overload
    def __call__(self, x: Any, out: Any = None, op: Any = "sum", root: int = 0, *, dtype: Any = None,
                 algorithm: str = "auto", stream: Any = None, async_op: Literal[True]) -> Work: ...


class Moving(Protocol):
    """all_gather, all_to_all."""

    @overload
    def __call__(self, x: A, out: None = None, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[False] = False) -> A: ...
    @overload
    def __call__(self, x: Any, out: O, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[False] = False) -> O: ...
    @overload
    def __call__(self, x: Any, out: Any = None, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[True]) -> Work: ...


class MovingToRoot(Protocol):
    """gather: None off the root."""

    @overload
    def __call__(self, x: A, out: None = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[False] = False) -> A | None: ...
    @overload
    def __call__(self, x: Any, out: O, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[False] = False) -> O | None: ...
    @overload
    def __call__(self, x: Any, out: Any = None, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[True]) -> Work: ...


class Overwriting(Protocol):
    """broadcast."""

    @overload
    def __call__(self, x: O, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[False] = False) -> O: ...
    @overload
    def __call__(self, x: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                 async_op: Literal[True]) -> Work: ...


class _Method(Protocol[C]):
    def __get__(self, instance: Any, owner: Any = None) -> C: ...


def shaped(shape: type[C]) -> Callable[[Callable[..., Any]], _Method[C]]:
    """Give the decorated method the type `shape`."""
    return lambda method: cast(_Method[C], method)
