"""The v-variants: blocks that differ in their first axis. Counts are discovered by one host message.

What is wrong on one rank is raised on every rank: the host message carries the refusal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy

from gpucoll.arrays import Array, Sizes, check_blocks, check_rows, flat, joined, kind_of, on_gpu, prepare_blocks
from gpucoll.collectives import COLLECTIVES
from gpucoll.communicator.core import How, counted
from gpucoll.communicator.headers import Headers, News, check_alike
from gpucoll.dtypes import numpy_dtype, row_of
from gpucoll.errors import ArgumentError, GpucollError

if TYPE_CHECKING:
    from gpucoll.communicator.collectives import Collectives

T = TypeVar("T")


class VectorVariants(Headers):
    """Methods of `Communicator`."""

    def all_gather_v(self, x: Any, *, algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the list of all ranks' `x` (shape (n_i, \\*s)) on every rank; views of one array. MPI-5.0, 6.7."""
        return self._gather_v("all_gather_v", x, 0, How(algorithm, async_op, stream))

    def gather_v(self, x: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                 async_op: bool = False) -> Any:
        """Return the list of all ranks' `x` (shape (n_i, \\*s)) on `root`, None elsewhere. MPI-5.0, 6.5."""
        return self._gather_v("gather_v", x, root, How(algorithm, async_op, stream))

    def _gather_v(self, name: str, x: Any, root: Any, how: How) -> Any:
        who = self._sizes(name, root)
        source, news = self._agree(name, lambda: self._opened(check_rows, name, x, how.stream),
                                   lambda row: {"counts": [len(row)], "plain": self._is_plain_call(how)})
        return self._gather_told(name, source, [one["counts"][0] for one in news], who, how, _are_even(news))

    @counted
    def _gather_told(self, name: str, source: Array, counts: list[int], who: Sizes, how: How, are_even: bool) -> Any:
        if are_even:
            plain = cast("Collectives", self)
            rows = plain.all_gather(source) if name == "all_gather_v" else plain.gather(source, root=who.root)
            return None if rows is None else list(rows)
        row, here = COLLECTIVES[name], COLLECTIVES[name].output.exists(self.rank, who.root)
        space = self._space(name, source, stream=how.stream)
        call = prepare_blocks(row, flat(source, space), ((len(source),), counts if here else ()), sum(counts),
                              source.shape[1:], source.dtype, space, has_output=here, given=source)
        return self._run(name, call, how, root=who.root)

    def scatter_v(self, xs: Any, root: int = 0, *, algorithm: str = "auto", stream: Any = None,
                  async_op: bool = False) -> Any:
        """Return array `rank` of the root's list `xs` of arrays (shape (n_i, \\*s)); None elsewhere. MPI-5.0, 6.6."""
        who = self._sizes("scatter_v", root)
        here = self.rank == who.root
        blocks, mine = None, None
        if here:
            blocks, mine = _attempt(lambda: self._opened(check_blocks, "scatter_v", xs, stream, self.size))
        news: News = {"error": str(mine)} if mine else _news(blocks, _counts) if blocks else {}
        told = self._told_by(who.root, news, "scatter_v", mine)
        return self._scatter_v_told(blocks, told, who, How(algorithm, async_op, stream))

    @counted
    def _scatter_v_told(self, blocks: list[Array] | None, told: News, who: Sizes, how: How) -> Any:
        here, stream = blocks is not None, how.stream
        counts, tail, dtype = told["counts"], tuple(told["tail"]), numpy_dtype(told["dtype"])
        space = self._told_space("scatter_v", told, blocks and blocks[0], None, stream)
        source = None if blocks is None else joined(blocks, space)
        call = prepare_blocks(COLLECTIVES["scatter_v"], source, (counts if here else (), (counts[self.rank],)),
                              sum(counts), tail, dtype, space, given=blocks)
        return self._run("scatter_v", call, how, root=who.root)

    def all_to_all_v(self, xs: Any, *, algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return the list whose array i is array `rank` of rank i's list `xs` (shapes (n_ij, \\*s)). MPI-5.0, 6.8."""
        name = "all_to_all_v"
        self._check_usable()
        how = How(algorithm, async_op, stream)
        blocks, news = self._agree(name, lambda: self._opened(check_blocks, name, xs, stream, self.size),
                                   lambda blocks: {**_counts(blocks), "plain": self._is_plain_call(how)})
        return self._all_to_all_told(blocks, [one["counts"] for one in news], how, _are_even(news))

    @counted
    def _all_to_all_told(self, blocks: list[Array], everyone: list[list[int]], how: How, are_even: bool) -> Any:
        name = "all_to_all_v"
        if are_even:
            return list(cast("Collectives", self).all_to_all(numpy.stack(blocks)))
        most = max(sum(side) for side in (*everyone, *zip(*everyone, strict=True)))
        lengths = everyone[self.rank], [row[self.rank] for row in everyone]
        space = self._space(name, blocks[0], stream=how.stream)
        call = prepare_blocks(COLLECTIVES[name], joined(blocks, space), lengths, most, blocks[0].shape[1:],
                              blocks[0].dtype, space, given=blocks)
        return self._run(name, call, how)

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], op: Any = "sum", *, dtype: Any = None,
                         algorithm: str = "auto", stream: Any = None, async_op: bool = False) -> Any:
        """Return rows of the reduction of all ranks' `x` (shape (sum(counts), \\*s)): `counts[rank]` of them.

        `counts` is the same on all ranks. MPI-5.0, 6.10.2.
        """
        name = "reduce_scatter_v"
        self._check_usable()

        lengths: list[int] = []

        def check() -> Array:
            rows = self._opened(check_rows, name, x, stream)
            lengths[:] = self._check_counts(name, counts, len(rows))
            return rows

        source, news = self._agree(name, check, lambda rows: {"counts": lengths})
        check_alike(name, news, "counts", "GC-COUNTS")
        return self._reduce_told(source, lengths, op, dtype, How(algorithm, async_op, stream))

    @counted
    def _reduce_told(self, source: Array, lengths: list[int], op: Any, dtype: Any, how: How) -> Any:
        name = "reduce_scatter_v"
        space = self._space(name, source, stream=how.stream)
        call = prepare_blocks(COLLECTIVES[name], flat(source, space), (lengths, (lengths[self.rank],)),
                              sum(lengths), source.shape[1:], source.dtype, space, given=source,
                              kind=kind_of(name, source, dtype))
        return self._run(name, call, how, self._check_op(name, op, call))

    def _is_plain_call(self, how: How) -> bool:
        """Return whether this rank makes a call that a collective of even blocks could stand for."""
        return how == How() and self._group is None

    def _check_counts(self, name: str, counts: Any, rows: int) -> list[int]:
        whole = isinstance(counts, Sequence | numpy.ndarray) and all(
            isinstance(count, int | numpy.integer) and not isinstance(count, bool) and count >= 0 for count in counts)
        if not whole or len(counts) != self.size or sum(counts) != rows:
            raise ArgumentError(f"{name}: counts {counts!r} must be {self.size} numbers whose sum is {rows}, the "
                                "length of x's first axis", code="GC-COUNTS")
        return [int(count) for count in counts]

    def _opened(self, check: Callable[..., T], name: str, x: Any, stream: Any, *more: int) -> T:
        """Return what `check` returns, called while the call's stream is the current one."""
        with self._current(stream, x if isinstance(x, list | tuple) else [x]):
            return check(name, x, *more)

    def _agree(self, name: str, check: Callable[[], Any], told: Callable[[Any], News]) -> tuple[Any, list[News]]:
        """Return this rank's checked argument and everybody's news; raise alike everywhere what is wrong anywhere."""
        checked, mine = _attempt(check)
        everyone = self._told_by_all({"error": str(mine)} if mine else _news(checked, told), name, mine)
        check_alike(name, everyone, "dtype", "GC-DTYPE")
        check_alike(name, everyone, "tail", "GC-SHAPE")
        check_alike(name, everyone, "gpu", "GC-DEVICE")
        return checked, everyone


def _attempt(check: Callable[[], Any]) -> tuple[Any, GpucollError | None]:
    try:
        return check(), None
    except GpucollError as error:
        return None, error


def _news(checked: Any, told: Callable[[Any], News]) -> News:
    some = checked[0] if isinstance(checked, list) else checked
    return {"dtype": row_of(some.dtype).name, "tail": list(some.shape[1:]), "gpu": on_gpu(some), **told(checked)}


def _are_even(news: Sequence[News]) -> bool:
    """Return, on every rank alike, whether a collective of even blocks stands for a call: those are quicker."""
    counts = {count for one in news for count in one["counts"]}
    return len(counts) == 1 and min(counts) > 0 and all(one["plain"] and not one["gpu"] for one in news)


def _counts(blocks: list[Array]) -> News:
    return {"counts": [len(block) for block in blocks]}

