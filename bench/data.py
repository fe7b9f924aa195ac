"""What every rank puts in, what it must get out, and how many elements are wrong.

Inputs differ by rank, by index and from repetition to repetition, and every result is exact (see `operands`).
Repetitions read the same row from different places, so that no result of an earlier one is right again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.dtypes import numpy_dtype

from .cases import ONE_FORM, SAME_SHAPE, Case
from .devices import Device, Host
from .operands import MOVED, identity, look_up, operands, random_bytes, reduced
from .summary import Array

PLACES = 32  # from which a row is read before the data come again
PROBE = 16  # elements with which the check is checked
STRIDE = 64  # elements from one place to the next: whole cache lines


class Turn(NamedTuple):
    """Which repetition, which of the calls that are aggregated in it (-m), and whether into the input itself."""

    repetition: int
    call: int = 0
    in_place: bool = False


class Data:
    """The arrays of one rank for one case and one size; `count` as in `Case.count`.

    ``outs`` are the arrays for the results of the `calls` that one repetition makes, None where this rank gets none or
    the library makes its own. `shift` elements, -u, misalign all of them. `fixed` inputs stay at one address, for
    graphs. Costs a row of bytes and a row of elements as long as the input.
    """

    def __init__(self, case: Case, rank: int, count: int, device: Device | None = None, *, calls: int = 1,
                 shift: int = 0, fixed: bool = False) -> None:
        self.case, self.rank, self.count, self.calls = case, rank, count, calls
        self.device, self._shift = device or Host(), shift
        given = operands(case.dtype, case.op if case.row.reduces else MOVED, case.ranks)
        self.given = given.astype(numpy_dtype(case.dtype))
        self.reduced = self._reduced(given) if case.row.reduces else None
        self.has_input, self.has_output = self._sides()
        self._shape = self._input_shape()
        self._draws = random_bytes(math.prod(self._shape) + PLACES * STRIDE + shift, seed=0)
        self._row = self._rows(self._draws.shape, self.has_input)
        if self.has_input:
            self.device.write(self._row, look_up(self.given[rank], self._draws))
        places = [self._room(self._shape, self.has_input) for _ in range(calls)] if fixed else None
        self._fixed = places if self.has_input else None
        self.outs = [self._room(self._output_shape(), self.has_output) for _ in range(calls)]

    def _reduced(self, given: Array) -> Array:
        """The reduction of whoever counts for this rank: of a prefix, those before it."""
        last = {"scan": self.rank + 1, "exscan": self.rank}.get(self.case.test, self.case.ranks)
        if last == 0:
            return numpy.broadcast_to(identity(self.case.op, self.case.dtype), given.shape[1:])
        return reduced(given[:last], self.case.op, self.case.dtype)

    def _sides(self) -> tuple[bool, bool]:
        """Whether this rank gives something, and whether it needs an array for what it gets."""
        row, root = self.case.row, self.case.root
        if self.case.test == "broadcast":
            return self.rank == root, self.rank != root
        return row.input.exists(self.rank, root), row.output.exists(self.rank, root) and row.ragged is None

    def _input_shape(self) -> tuple[int, ...]:
        row, count, ranks = self.case.row, self.count, self.case.ranks
        if row.ragged == "source":
            return (max(self.case.lengths(count)),)
        if row.ragged:
            return (sum(self.case.lengths(count)),)
        return (ranks, count) if row.input.blocks else (count,)

    def _output_shape(self) -> tuple[int, ...]:
        return (self.case.ranks, self.count) if self.case.row.output.blocks else (self.count,)

    def _room(self, shape: tuple[int, ...], wanted: bool) -> Any:
        """Return an array of `shape`, `shift` elements after the beginning of its memory; None where none is wanted."""
        row = self._rows((math.prod(shape) + self._shift,), wanted)
        return None if row is None else row[self._shift:].reshape(shape)

    def _rows(self, shape: tuple[int, ...], wanted: bool) -> Any:
        """Return a new row; symmetric memory takes all ranks and one length, whoever wants a row."""
        if not self.device.is_symmetric:
            return self.device.empty(shape, self.case.dtype) if wanted else None
        longest = max(math.prod(self._shape), math.prod(self._output_shape())) + PLACES * STRIDE + self._shift
        row = self.device.empty((longest,), self.case.dtype)
        return row[:shape[0]] if wanted else None

    def _place(self, turn: Turn, row: Any) -> Any:
        """Return what of a row is read in that turn."""
        start = (turn.repetition * self.calls + turn.call) % PLACES * STRIDE + self._shift
        return row[start:start + math.prod(self._shape)].reshape(self._shape)

    def arguments(self, turn: Turn) -> tuple[Any, ...]:
        """Return what to call with: (x, out), where there is one array (x,), where counts are given (x, counts)."""
        test, out = self.case.test, self.outs[turn.call]
        if test == "barrier":
            return ()
        if turn.in_place and self.works_in_place and out is not None:
            return out, out
        x = self._input(turn)
        if test == "broadcast":
            return (x if self.rank == self.case.root else out,)
        return RAGGED[test](self, x) if self.case.row.ragged else (x, out)

    def _input(self, turn: Turn) -> Any:
        if not self.has_input:
            return None
        return self._place(turn, self._row) if self._fixed is None else self._fixed[turn.call]

    @property
    def works_in_place(self) -> bool:
        """Whether the result may take the input's place; where not, both halves of a line measure the same call."""
        return self.case.test in SAME_SHAPE and self.case.test not in ONE_FORM

    def expected(self, turn: Turn) -> list[Array]:
        """Return what this rank must get: one array, of the ragged tests several; none where it gets nothing."""
        gets_blocks = self.case.row.ragged is not None and self.case.row.output.exists(self.rank, self.case.root)
        if not (self.has_output or gets_blocks):
            return []
        return EXPECTED[self.case.test](self, self._place(turn, self._draws))

    def prepare(self, turn: Turn, expected: Sequence[Array]) -> None:
        """Make the arrays ready for a call: the input in place, or an output whose every element is wrong.

        Without `expected` nothing will be checked, and an output keeps what it has.
        """
        out = self.outs[turn.call]
        if self._fixed is not None:
            self.device.copy(self._fixed[turn.call], self._place(turn, self._row))
        if out is None:
            return
        if turn.in_place and self.works_in_place:
            self.device.copy(out, self._place(turn, self._row))
        elif expected:
            spoilt = expected[0].copy()
            spoilt.reshape(-1).view(numpy.uint8)[...] ^= 1
            self.device.write(out, spoilt)

    def wrong(self, turn: Turn, found: Any, expected: Sequence[Array]) -> int:
        """Return how many elements of the result are not as `expected`; `found` is what the call returned."""
        if not expected:
            return 0
        got = [self.outs[turn.call]] if self.case.row.ragged is None else found
        results = got if isinstance(got, list) else [got]
        if len(results) != len(expected):
            return sum(map(len, expected))
        pairs = zip(results, expected, strict=True)
        return sum(self._differing(result, wanted) for result, wanted in pairs)

    def _differing(self, result: Any, wanted: Array) -> int:
        got = None if result is None else self.device.read(result, self.case.dtype)
        if got is None or got.size != wanted.size or got.dtype != wanted.dtype:
            return int(wanted.size)
        return int(numpy.count_nonzero(got.reshape(wanted.shape) != wanted))


def check_works(case: Case, rank: int, device: Device) -> bool:
    """Return whether the check of this case finds nothing wrong in what is right, and one wrong element in the rest."""
    data, turn = Data(case, rank, PROBE, device.ordinary()), Turn(0)
    expected = data.expected(turn)
    if not any(wanted.size for wanted in expected):
        return True
    right, spoilt = [wanted.copy() for wanted in expected], [wanted.copy() for wanted in expected]
    last = next(wanted for wanted in reversed(spoilt) if wanted.size)
    last.reshape(-1)[-1:].view(numpy.uint8)[0] ^= 1
    return _counted(data, right, expected) == 0 and _counted(data, spoilt, expected) == 1


def _counted(data: Data, results: list[Array], expected: Sequence[Array]) -> int:
    """The wrong elements, if a call had given these results."""
    found = [data.device.empty(result.shape, data.case.dtype) for result in results]
    for target, result in zip([data.outs[0]] if data.has_output else found, results, strict=True):
        data.device.write(target, result)
    return data.wrong(Turn(0), found, expected)


# What is expected: tables looked up at the draws that the input was made of.


def _everyone(data: Data, draws: Array) -> list[Array]:
    assert data.reduced is not None  # these tests reduce
    return [look_up(data.reduced, draws)]


def _own_block(data: Data, draws: Array) -> list[Array]:
    return _everyone(data, draws[data.rank])


def _from_root(data: Data, draws: Array) -> list[Array]:
    return [look_up(data.given[data.case.root], draws)]


def _from_left(data: Data, draws: Array) -> list[Array]:
    return [look_up(data.given[data.rank - 1], draws)]


def _block_of_each(data: Data, draws: Array) -> list[Array]:
    return [numpy.stack([look_up(given, draws) for given in data.given])]


def _block_from_root(data: Data, draws: Array) -> list[Array]:
    return _from_root(data, draws[data.rank])


def _block_from_each(data: Data, draws: Array) -> list[Array]:
    return _block_of_each(data, draws[data.rank])


def blocks(case: Case, count: int, source: int) -> list[slice]:
    """Return where in its input a rank has the block for each rank."""
    ends = itertools.accumulate((case.length(count, source, target) for target in range(case.ranks)), initial=0)
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


def _ragged_of_each(data: Data, draws: Array) -> list[Array]:
    lengths = data.case.lengths(data.count)
    return [look_up(given, draws[:length]) for given, length in zip(data.given, lengths, strict=True)]


def _ragged_from_root(data: Data, draws: Array) -> list[Array]:
    return _from_root(data, draws[blocks(data.case, data.count, data.case.root)[data.rank]])


def _own_ragged(data: Data, draws: Array) -> list[Array]:
    return _everyone(data, draws[blocks(data.case, data.count, data.rank)[data.rank]])


def _ragged_from_each(data: Data, draws: Array) -> list[Array]:
    return [look_up(given, draws[blocks(data.case, data.count, source)[data.rank]])
            for source, given in enumerate(data.given)]


EXPECTED: dict[str, Callable[[Data, Array], list[Array]]] = {
    "all_reduce": _everyone, "reduce": _everyone, "scan": _everyone, "exscan": _everyone, "broadcast": _from_root,
    "all_gather": _block_of_each, "gather": _block_of_each, "hypercube": _block_of_each, "scatter": _block_from_root,
    "reduce_scatter": _own_block, "all_to_all": _block_from_each, "sendrecv": _from_left,
    "all_gather_v": _ragged_of_each, "gather_v": _ragged_of_each, "scatter_v": _ragged_from_root,
    "reduce_scatter_v": _own_ragged, "all_to_all_v": _ragged_from_each,
}


def _own_rows(data: Data, x: Any) -> tuple[Any, ...]:
    return (x[:data.case.lengths(data.count)[data.rank]],)


def _list_of_blocks(data: Data, x: Any) -> tuple[Any, ...]:
    return (None if x is None else [x[block] for block in blocks(data.case, data.count, data.rank)],)


def _with_counts(data: Data, x: Any) -> tuple[Any, ...]:
    return x, data.case.lengths(data.count)


RAGGED: dict[str, Callable[[Data, Any], tuple[Any, ...]]] = {
    "all_gather_v": _own_rows, "gather_v": _own_rows, "scatter_v": _list_of_blocks, "all_to_all_v": _list_of_blocks,
    "reduce_scatter_v": _with_counts,
}
