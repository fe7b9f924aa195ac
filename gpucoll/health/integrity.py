"""Data compared after each call, with ``check="data"``: checksums of moved blocks and integer sums, samples of others.

A checksum is a sum of words, weighted by page, modulo a power of two: a flip of a single bit changes the sum, and the
sum of arrays has the sum of their checksums. Every rank has the checksums of all inputs and outputs after the call, and
finds the same wrong blocks as the other ranks. The results of other reductions are formed again, for a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from gpucoll.arrays import HOST, Array, combiner
from gpucoll.core.collectives import COLLECTIVES, Side
from gpucoll.core.dtypes import numpy_dtype
from gpucoll.core.ops import LOGICAL
from gpucoll.core.schedule import Recv, RecvReduce
from gpucoll.errors import BackendError, listed
from gpucoll.executors import ReadyCall

PAGE = 4096  # bytes with the same weight in a checksum
WEIGHT = 0x9E3779B97F4A7C15  # odd: page i weighs WEIGHT ** i
SAMPLE = 64  # elements of a block formed again
SHOWN = 8  # wrong blocks named in an error


class ResultBlock(NamedTuple):
    """A block of the output of a rank."""

    rank: int
    block: int
    sources: tuple[int, ...]  # the ranks that contribute
    chunk: int  # the number of the input's block that it is made of


class DataCheck:
    """Checksums or samples of a rank's arrays in a call: of the input before data move, of the output afterwards.

    `number` counts the calls, equally on all ranks, and chooses the samples.
    """

    def __init__(self, call: ReadyCall, size: int, number: int) -> None:
        request = call.request
        self._call, self._request, self._size, self._number = call, request, size, number
        self._row = COLLECTIVES[request.collective]
        # Checksums of sums are sums: a word is an element then. Of other ops a sample is formed again.
        op = request.op
        self._adds = op is not None and op.name == "sum" and request.dtype.kind == "int" and op.factor is None
        self._samples = op is not None and not self._adds
        self._word = numpy.dtype(f"u{request.dtype.itemsize}" if self._adds else "u8")
        self._input = self._of(call.source, self._row.input, 0)

    def completed(self) -> Array:
        """Return the row for the other ranks: words for the blocks of the input, then for those of the output."""
        parts = [self._input, self._of(self._call.target, self._row.output, 1)]
        return numpy.concatenate(parts).view(numpy.uint8)

    def compare(self, rows: Array) -> None:
        """Raise BackendError if the rows of all ranks disagree; the same on all ranks."""
        sides = numpy.split(rows.view(numpy.uint64), [len(self._input)], axis=1)
        words = [side.reshape(self._size, self._blocks(of), -1)
                 for side, of in zip(sides, (self._row.input, self._row.output), strict=True)]
        wrong = [found for found in self._pieces() if not self._agrees(found, *words)]
        if wrong:
            raise self._error(wrong)

    def _blocks(self, side: Side) -> int:
        return self._size if side.blocks else 1

    def _of(self, row: Array | None, side: Side, number: int) -> Array:
        """Return the words of all blocks of a side; zeros for a side not on this rank."""
        blocks, words = self._blocks(side), self._words
        found = numpy.zeros((blocks, words), numpy.uint64)
        if row is not None and side.where != "nowhere":
            lengths = self._request.lengths[number] if self._request.lengths and side.blocks else ()
            ends = itertools.accumulate(lengths or [len(row) // blocks] * blocks)
            for block, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
                self._show(row[start:stop], found[block])
        return found.reshape(-1)

    @property
    def _words(self) -> int:
        """Words for a block: a checksum, or a sample and its length."""
        return 1 + SAMPLE * self._request.dtype.itemsize // 8 if self._samples else 1

    def _show(self, block: Array, to: Array) -> None:
        if not self._samples:
            to[0] = checksum(block, self._word)
            return
        start = self._number * WEIGHT % 2**64 % max(1, len(block) - SAMPLE + 1)
        sample = numpy.ascontiguousarray(block[start:start + SAMPLE])
        to[0] = len(sample)
        to[1:].view(numpy.uint8)[:sample.nbytes] = sample.view(numpy.uint8)

    def _pieces(self) -> Iterator[ResultBlock]:
        """Yield every block of every output."""
        row, root = self._row, self._request.root
        for rank in range(self._size):
            if row.output.exists(rank, root):
                for block in range(self._blocks(row.output)):
                    piece = row.result(rank, self._size, root, 1, block)
                    if piece.ranks:  # the first rank of an exscan has none
                        yield ResultBlock(rank, block, tuple(sorted(piece.ranks)), piece.chunk)

    def _agrees(self, found: ResultBlock, inputs: Array, outputs: Array) -> bool:
        """Return whether a block of an output has the words that follow from the inputs."""
        shown, given = outputs[found.rank, found.block], inputs[list(found.sources), found.chunk]
        if not self._samples:
            # Modulo 2**64, then modulo the range of a word.
            return (int(given.sum(dtype=numpy.uint64)) - int(shown[0])) % 2 ** (8 * self._word.itemsize) == 0
        kind = numpy_dtype(self._request.dtype.name)
        values, *contributions = (row[1:].view(kind)[:int(shown[0])] for row in (shown, *given))
        return self._is_result(values, contributions)

    def _is_result(self, values: Array, contributions: Sequence[Array]) -> bool:
        """Return whether these are elements of the reduction of the contributions, in any allowed order."""
        op, dtype, count = self._request.op, self._request.dtype, len(contributions)
        assert op is not None
        formed = contributions[0].copy()
        if count > 1:
            combiner(op, dtype)(formed, contributions[0], contributions[1:])
        HOST.finish(op, formed, dtype, count)
        is_sum, is_ordered = op.name in ("sum", "avg", "premul_sum"), self._request.order != "any"
        if dtype.kind in ("bool", "int") or op.name in ("min", "max", *LOGICAL) or (is_sum and count <= 2) \
                or (is_ordered and not op.expression):
            return _same(values, formed)
        if not is_sum:
            return True  # the bits depend on the order of the algorithm, and on fused operations of the processor
        with numpy.errstate(all="ignore"):
            rows = numpy.abs([_parts(row) for row in contributions])
            total, wanted, part = rows.sum(axis=0), _parts(formed), formed.real.dtype
            unit, least = (float(numpy.spacing(numpy.full(1, value, part))[0]) for value in (1, 0))
            bound = 2 * count * (unit * total / (count if op.name == "avg" else 1) + least)
            # Where a sum overflows, or has a NaN, the result depends on the order.
            is_open = ~(numpy.isfinite(_parts((2 * total).astype(part))) & numpy.isfinite(wanted))
            return bool((is_open | (numpy.abs(_parts(values) - wanted) <= bound)).all())

    def _error(self, blocks: Sequence[ResultBlock]) -> BackendError:
        name = self._request.collective
        ranks = tuple(sorted({found.rank for found in blocks}))
        at_fault = {(found.rank, found.block) for found in blocks}
        lines = []
        for found in blocks[:SHOWN]:
            what = f"block {found.block} of the result of rank {found.rank}" if self._row.output.blocks else \
                f"the result of rank {found.rank}"
            senders = () if self._row.reduces else self._senders(found)
            right = [one for one in senders if (one, found.block) not in at_fault or one == found.sources[0]]
            way = f", moved on the link from rank {listed(right)}" if right else ""
            of = f"rank{'s' * (len(found.sources) > 1)} {listed(found.sources)}"
            lines.append(f"{what}, made of the input of {of}{way}")
        more = f" and {len(blocks) - SHOWN} more" if len(blocks) > SHOWN else ""
        error = BackendError(f"{name}: data changed in the call: {'; '.join(lines)}{more}; do not use the "
                             "results: memory or a link of these ranks may be faulty", code="GC-DATA", ranks=ranks)
        error.settled = True  # raised by all ranks in the same call
        return error

    def _senders(self, found: ResultBlock) -> tuple[int, ...]:
        """Return the ranks from which this rank received a moved block, by the schedule; else the block's source."""
        plan = self._request.plan
        if plan is None or plan.schedules is None:
            return found.sources
        schedule = plan.schedules(found.rank)
        blocks = self._blocks(self._row.output)
        each = schedule.chunks // (self._size if self._row.blocks else 1)
        wanted = range(found.block * each, (found.block + 1) * each) if blocks > 1 else range(schedule.chunks)
        peers = {step.peer for steps in schedule for step in steps
                 if isinstance(step, Recv | RecvReduce) and step.dst.buffer == "output"
                 and any(chunk in wanted for chunk in range(step.dst.first, step.dst.first + step.dst.count))}
        return tuple(sorted(peers)) or found.sources


def checksum(block: Array, word: numpy.dtype) -> int:
    """Return the sum of the words of a contiguous array, page by page with weights, modulo the range of a word.

    >>> checksum(numpy.arange(5), numpy.dtype("u8"))
    10
    """
    raw = numpy.ascontiguousarray(block).view(numpy.uint8)
    pages, rest = divmod(raw.nbytes, PAGE)
    whole = raw[:pages * PAGE].view(word).reshape(pages, PAGE // word.itemsize)
    tail = numpy.zeros(-rest % word.itemsize + rest, numpy.uint8)
    tail[:rest] = raw[pages * PAGE:]
    sums = numpy.append(whole.sum(axis=1, dtype=word), tail.view(word).sum(dtype=word))
    return int((sums * _weights(len(sums), word)).sum(dtype=word))


def _weights(count: int, word: numpy.dtype) -> Array:
    """Return the weights of pages, modulo the range of a word: WEIGHT ** 0, WEIGHT ** 1, ..."""
    steps = numpy.full(count, WEIGHT % 2 ** (8 * word.itemsize), word)
    steps[0] = 1
    return numpy.multiply.accumulate(steps, dtype=word)


def _parts(row: Array) -> Array:
    """Return an array in float64, of real and imaginary parts for complex numbers."""
    with numpy.errstate(all="ignore"):  # of NaN
        return numpy.asarray(row.view(row.real.dtype) if row.dtype.kind == "c" else row).astype(numpy.float64)


def _same(a: Array, b: Array) -> bool:
    """Return whether two arrays have equal elements; a NaN is a NaN."""
    if a.dtype.kind in "biu":
        return bool((a == b).all())
    a, b = _parts(a), _parts(b)
    return bool(((a == b) | (numpy.isnan(a) & numpy.isnan(b))).all())
