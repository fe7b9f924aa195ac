"""The types of the collective methods: a protocol for each family, so that results have the type of arguments.

A NumPy or CuPy array gives an array of the same type and dtype, `out` is itself the result, and ``async_op=True`` gives
a `Work`. `Blocking` and `Starting` are the options of a collective. At run time `shaped` returns the method unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Never, Protocol, Required, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

from gpucoll.communicator.points import ANY_SOURCE, ANY_TAG, Status
from gpucoll.core.ops import Op, OpName, ReduceOp
from gpucoll.progress.operations import Work


class ArrayLike(Protocol):
    """An array of NumPy or CuPy. PyTorch's tensors are different: a call returns NumPy arrays for these."""

    def __array_namespace__(self, *, api_version: Any = ...) -> Any:
        """Return the array module."""


A = TypeVar("A", bound=ArrayLike)
O = TypeVar("O")  # noqa: E741 (the result)
C = TypeVar("C", covariant=True)
Counts: TypeAlias = Sequence[int] | None
AnyOp: TypeAlias = OpName | ReduceOp | Op | Callable[..., Any]  # called: an op of mpi4py, a function of NumPy


class Blocking(TypedDict, total=False):
    """The options of a call that returns its result."""

    algorithm: str
    stream: Any
    async_op: Literal[False]


class Starting(TypedDict, total=False):
    """The options of a call that returns a `Work`."""

    algorithm: str
    stream: Any
    async_op: Required[Literal[True]]


class BlockingSum(Blocking, total=False):
    """The options of a reduction that returns its result."""

    dtype: Any


class StartingSum(Starting, total=False):
    """The options of a reduction that returns a `Work`."""

    dtype: Any


class Reducing(Protocol):
    """The type of all_reduce, reduce_scatter, scan, exscan."""

    @overload
    def __call__(self, x: A, out: None = None, op: AnyOp = "sum", **how: Unpack[BlockingSum]) -> A: ...
    @overload
    def __call__(self, x: Any, out: O, op: AnyOp = "sum", **how: Unpack[BlockingSum]) -> O: ...
    @overload
    def __call__(self, x: A, out: None = None, op: AnyOp = "sum", **how: Unpack[StartingSum]) -> Work[A]: ...
    @overload
    def __call__(self, x: Any, out: Any = None, op: AnyOp = "sum", **how: Unpack[StartingSum]) -> Work[Any]: ...


class ReducingToRoot(Protocol):
    """The type of reduce: None on other ranks than the root."""

    @overload
    def __call__(self, x: A, out: None = None, op: AnyOp = "sum", root: int = 0,
                 **how: Unpack[BlockingSum]) -> A | None: ...
    @overload
    def __call__(self, x: Any, out: O, op: AnyOp = "sum", root: int = 0, **how: Unpack[BlockingSum]) -> O | None: ...
    @overload
    def __call__(self, x: A, out: None = None, op: AnyOp = "sum", root: int = 0,
                 **how: Unpack[StartingSum]) -> Work[A | None]: ...
    @overload
    def __call__(self, x: Any, out: Any = None, op: AnyOp = "sum", root: int = 0,
                 **how: Unpack[StartingSum]) -> Work[Any]: ...


class Moving(Protocol):
    """The type of all_gather, all_to_all."""

    @overload
    def __call__(self, x: A, out: None = None, **how: Unpack[Blocking]) -> A: ...
    @overload
    def __call__(self, x: Any, out: O, **how: Unpack[Blocking]) -> O: ...
    @overload
    def __call__(self, x: A, out: None = None, **how: Unpack[Starting]) -> Work[A]: ...
    @overload
    def __call__(self, x: Any, out: Any = None, **how: Unpack[Starting]) -> Work[Any]: ...


class MovingToRoot(Protocol):
    """The type of gather: None on other ranks than the root."""

    @overload
    def __call__(self, x: A, out: None = None, root: int = 0, **how: Unpack[Blocking]) -> A | None: ...
    @overload
    def __call__(self, x: Any, out: O, root: int = 0, **how: Unpack[Blocking]) -> O | None: ...
    @overload
    def __call__(self, x: A, out: None = None, root: int = 0, **how: Unpack[Starting]) -> Work[A | None]: ...
    @overload
    def __call__(self, x: Any, out: Any = None, root: int = 0, **how: Unpack[Starting]) -> Work[Any]: ...


class Overwriting(Protocol):
    """The type of broadcast."""

    @overload
    def __call__(self, x: O, root: int = 0, **how: Unpack[Blocking]) -> O: ...
    @overload
    def __call__(self, x: O, root: int = 0, **how: Unpack[Starting]) -> Work[O]: ...


class GatheringBlocks(Protocol):
    """The type of all_gather_v."""

    @overload
    def __call__(self, x: A, out: None = None, counts: Counts = None, **how: Unpack[Blocking]) -> list[A]: ...
    @overload
    def __call__(self, x: Any, out: O, counts: Counts = None, **how: Unpack[Blocking]) -> O: ...
    @overload
    def __call__(self, x: A, out: None = None, counts: Counts = None, **how: Unpack[Starting]) -> Work[list[A]]: ...
    @overload
    def __call__(self, x: Any, out: Any = None, counts: Counts = None, **how: Unpack[Starting]) -> Work[Any]: ...


class GatheringBlocksToRoot(Protocol):
    """The type of gather_v: None on other ranks than the root."""

    @overload
    def __call__(self, x: A, root: int = 0, out: None = None, counts: Counts = None,
                 **how: Unpack[Blocking]) -> list[A] | None: ...
    @overload
    def __call__(self, x: Any, root: int, out: O, counts: Counts = None, **how: Unpack[Blocking]) -> O | None: ...
    @overload
    def __call__(self, x: Any, root: int = 0, *, out: O, counts: Counts = None,
                 **how: Unpack[Blocking]) -> O | None: ...
    @overload
    def __call__(self, x: A, root: int = 0, out: None = None, counts: Counts = None,
                 **how: Unpack[Starting]) -> Work[list[A] | None]: ...
    @overload
    def __call__(self, x: Any, root: int = 0, out: Any = None, counts: Counts = None,
                 **how: Unpack[Starting]) -> Work[Any]: ...


class ScatteringBlocks(Protocol):
    """The type of scatter_v: other ranks than the root pass None for the list."""

    @overload
    def __call__(self, xs: None, root: int = 0, *, out: None = None, **how: Unpack[Blocking]) -> Any: ...
    @overload
    def __call__(self, xs: Sequence[A] | None, root: int = 0, *, out: None = None, **how: Unpack[Blocking]) -> A: ...
    @overload
    def __call__(self, xs: Any, root: int = 0, *, out: O, **how: Unpack[Blocking]) -> O: ...
    @overload
    def __call__(self, xs: Any, root: int = 0, *, out: Any = None, **how: Unpack[Starting]) -> Work[Any]: ...


class ExchangingBlocks(Protocol):
    """The type of all_to_all_v."""

    @overload
    def __call__(self, xs: Sequence[A], out: None = None, **how: Unpack[Blocking]) -> list[A]: ...
    @overload
    def __call__(self, xs: Any, out: O, **how: Unpack[Blocking]) -> O: ...
    @overload
    def __call__(self, xs: Sequence[A], out: None = None, **how: Unpack[Starting]) -> Work[list[A]]: ...
    @overload
    def __call__(self, xs: Any, out: Any = None, **how: Unpack[Starting]) -> Work[Any]: ...


class ReducingBlocks(Protocol):
    """The type of reduce_scatter_v."""

    @overload
    def __call__(self, x: A, counts: Sequence[int], op: AnyOp = "sum", *, out: None = None,
                 **how: Unpack[BlockingSum]) -> A: ...
    @overload
    def __call__(self, x: Any, counts: Sequence[int], op: AnyOp = "sum", *, out: O,
                 **how: Unpack[BlockingSum]) -> O: ...
    @overload
    def __call__(self, x: A, counts: Sequence[int], op: AnyOp = "sum", *, out: None = None,
                 **how: Unpack[StartingSum]) -> Work[A]: ...
    @overload
    def __call__(self, x: Any, counts: Sequence[int], op: AnyOp = "sum", *, out: Any = None,
                 **how: Unpack[StartingSum]) -> Work[Any]: ...


class Receiving(Protocol):
    """The type of recv."""

    @overload
    def __call__(self, out: O, src: int = ANY_SOURCE, tag: int = 0, status: Any = None, *,
                 async_op: Literal[False] = False) -> O: ...
    @overload
    def __call__(self, out: O, src: int = ANY_SOURCE, tag: int = 0, status: Any = None, *,
                 async_op: Literal[True]) -> Work[O]: ...


class Probing(Protocol):
    """The type of probe."""

    @overload
    def __call__(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, status: None = None) -> Status: ...
    @overload
    def __call__(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, *, status: O) -> O: ...
    @overload
    def __call__(self, src: int, tag: int, status: O) -> O: ...


class Shown(Protocol[C]):
    """A method or a property, by the type that an instance shows."""

    def __get__(self, instance: Any, owner: Any = None, /) -> C: ...
    def __set__(self, instance: Any, value: Never, /) -> None: ...


def shaped(shape: type[C]) -> Callable[[Callable[..., Any]], Shown[C]]:
    """Give the decorated method the type `shape`."""
    return lambda method: cast(Shown[C], method)
