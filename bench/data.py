"""Inputs and expected results of every rank, and the count of wrong elements.

Inputs differ by rank, by index and by repetition, and every result is exact (see `operands`). Repetitions read the
same row of data from different places. So the result of an earlier repetition is never correct again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.core.dtypes import numpy_dtype

from .cases import ONE_FORM, SAME_SHAPE, BenchCase
from .devices import BenchDevice, Host
from .operands import MOVED, identity, look_up, operands, random_bytes, reduced
from .summary import Array

START_OFFSETS = 32  # start offsets within a row, before the data repeat
STRIDE = 64  # elements between two places: whole cache lines


class BenchTurn(NamedTuple):
    """A call: the repetition, the number of the call within the repetition (-m), and whether the call is in place."""

    repetition: int
    call: int = 0
    in_place: bool = False


class Data:
    """The arrays of a rank for one case and size; `count` as in `Case.count`.

    ``outs`` are the arrays for the results of the `calls` calls of a repetition; None if this rank gets no result or
    the library allocates the result. `shift` elements (-u) misalign all arrays. `fixed` inputs stay at the same
    address, as needed by graphs. Cost: a row of bytes and a row of elements as long as the input.
    """

    def __init__(self, case: BenchCase, rank: int, count: int, device: BenchDevice | None = None, *, calls: int = 1,
                 shift: int = 0, fixed: bool = False) -> None:
        self.case, self.rank, self.count, self.calls = case, rank, count, calls
        self.device, self._shift = device or Host(), shift
        row, root = case.row, case.root
        given = operands(case.dtype, case.op if row.reduces else MOVED, case.ranks)
        self.given: Any = given.astype(numpy_dtype(case.dtype))
        self.reduced: Array = self._reduced(given) if row.reduces else given
        self.has_input = row.input.exists(rank, root)
        self.gets_result = row.output.exists(rank, root)
        if case.test == "broadcast":
            self.has_input, self.gets_result = rank == root, rank != root
        self._shape, self._out_shape = ((case.ranks, count) if side.blocks else (count,)
                                        for side in (row.input, row.output))
        if row.ragged:
            lengths = case.lengths(count)
            self._shape = (max(lengths) if row.ragged == "source" else sum(lengths),)
        self._draws = random_bytes(math.prod(self._shape) + START_OFFSETS * STRIDE + shift, seed=0)
        self._row = self._array(self._draws.shape, self.has_input)
        if self.has_input:
            self.device.write(self._row, look_up(self.given[rank], self._draws))
        self._fixed = [self._shifted(self._shape, self.has_input) for _ in range(calls)] if fixed else None
        has_out = self.gets_result and row.ragged is None
        self.outs: list[Any] = [self._shifted(self._out_shape, has_out) for _ in range(calls)]

    def _reduced(self, given: Array) -> Array:
        """Return the reduction over the ranks relevant for this rank: for a prefix, the ranks before."""
        last = {"scan": self.rank + 1, "exscan": self.rank}.get(self.case.test, self.case.ranks)
        if last == 0:
            return numpy.broadcast_to(identity(self.case.op, self.case.dtype), given.shape[1:])
        return reduced(given[:last], self.case.op, self.case.dtype)

    def _array(self, shape: tuple[int, ...], wanted: bool) -> Any:
        """Return a new row. Symmetric memory needs all ranks and the same length, even on ranks without a row."""
        if not self.device.is_symmetric:
            return self.device.empty(shape, self.case.dtype) if wanted else None
        longest = max(math.prod(self._shape), math.prod(self._out_shape)) + START_OFFSETS * STRIDE + self._shift
        row = self.device.empty((longest,), self.case.dtype)
        return row[:shape[0]] if wanted else None

    def _shifted(self, shape: tuple[int, ...], wanted: bool) -> Any:
        """Return an array of `shape`, `shift` elements after the beginning of the memory; None if not `wanted`."""
        row = self._array((math.prod(shape) + self._shift,), wanted)
        return None if row is None else row[self._shift:].reshape(shape)

    def _place(self, turn: BenchTurn, row: Any) -> Any:
        """Return the part of a row read in this turn."""
        start = (turn.repetition * self.calls + turn.call) % START_OFFSETS * STRIDE + self._shift
        return row[start:start + math.prod(self._shape)].reshape(self._shape)

    def arguments(self, turn: BenchTurn) -> tuple[Any, ...]:
        """Return a call's arguments: (x, out); (x,) for tests with a single array; (x, counts) if counts are given."""
        case, out = self.case, self.outs[turn.call]
        x: Any = None
        if case.test == "barrier":
            return ()
        if turn.in_place and self.works_in_place and out is not None:
            return out, out
        if self.has_input:
            x = self._place(turn, self._row) if self._fixed is None else self._fixed[turn.call]
        match case.test:
            case "broadcast":
                return (x if self.rank == case.root else out,)
            case "all_gather_v" | "gather_v":
                return (x[:case.lengths(self.count)[self.rank]],)
            case "scatter_v" | "all_to_all_v":
                return (None if x is None else [x[block] for block in blocks(case, self.count, self.rank)],)
            case "reduce_scatter_v":
                return x, case.lengths(self.count)
        return x, out

    @property
    def works_in_place(self) -> bool:
        """Whether the result may replace the input; if not, both halves of a line measure the same call."""
        return self.case.test in SAME_SHAPE and self.case.test not in ONE_FORM

    def expected(self, turn: BenchTurn) -> list[Array]:
        """Return the expected result of this rank: one array, several for the ragged tests, or nothing.

        Computed by table look-ups with the same random draws as the input.
        """
        if not self.gets_result:
            return []
        case, rank, draws = self.case, self.rank, self._place(turn, self._draws)
        root, from_each = self.given[case.root], range(case.ranks)
        match case.test:
            case "all_reduce" | "reduce" | "scan" | "exscan":
                return [look_up(self.reduced, draws)]
            case "reduce_scatter":
                return [look_up(self.reduced, draws[rank])]
            case "broadcast":
                return [look_up(root, draws)]
            case "scatter":
                return [look_up(root, draws[rank])]
            case "sendrecv":
                return [look_up(self.given[rank - 1], draws)]
            case "all_to_all":
                return [numpy.stack([look_up(self.given[source], draws[rank]) for source in from_each])]
            case "all_gather" | "gather" | "hypercube":
                return [numpy.stack([look_up(self.given[source], draws) for source in from_each])]
            case "all_gather_v" | "gather_v":
                lengths = case.lengths(self.count)
                return [look_up(self.given[source], draws[:lengths[source]]) for source in from_each]
            case "scatter_v":
                return [look_up(root, draws[blocks(case, self.count, case.root)[rank]])]
            case "reduce_scatter_v":
                return [look_up(self.reduced, draws[blocks(case, self.count, rank)[rank]])]
        return [look_up(self.given[source], draws[blocks(case, self.count, source)[rank]]) for source in from_each]

    def prepare(self, turn: BenchTurn, expected: Sequence[Array]) -> None:
        """Prepare the arrays for a call: copy the input into an in-place array, or make every element of the output
        wrong.

        Without `expected` nothing will be checked, and the output is left as is.
        """
        out = self.outs[turn.call]
        if self._fixed is not None and self.has_input:
            self.device.copy(self._fixed[turn.call], self._place(turn, self._row))
        if out is None:
            return
        if turn.in_place and self.works_in_place:
            self.device.copy(out, self._place(turn, self._row))
        elif expected:
            spoilt = expected[0].copy()
            spoilt.reshape(-1).view(numpy.uint8)[...] ^= 1
            self.device.write(out, spoilt)

    def wrong(self, turn: BenchTurn, returned: Any, expected: Sequence[Array]) -> int:
        """Return the number of elements different from `expected`; `returned` is the return value of the call."""
        got = [self.outs[turn.call]] if self.case.row.ragged is None else returned
        results = got if isinstance(got, list) else [got]
        if len(results) != len(expected):
            return sum(map(len, expected))
        count = 0
        for result, wanted in zip(results, expected, strict=True):
            content = None if result is None else self.device.read(result, self.case.dtype)
            if content is None or content.size != wanted.size or content.dtype != wanted.dtype:
                count += wanted.size
            else:
                count += int(numpy.count_nonzero(content.reshape(wanted.shape) != wanted))
        return count


def blocks(case: BenchCase, count: int, source: int) -> list[slice]:
    """Return the slices of a rank's input, one for each receiving rank."""
    ends = itertools.accumulate((case.length(count, source, target) for target in range(case.ranks)), initial=0)
    return [slice(first, last) for first, last in itertools.pairwise(ends)]
