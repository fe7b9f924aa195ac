"""Prove what all ranks do, made at once: every round is a few operations on arrays over all ranks.

The same checks as `gpucoll.analysis.verify` makes one by one, for schedules in which all ranks
take their rounds in step. It says yes or no; where it says no, `verify` looks again and tells why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.collectives import Collective
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Round, Send, Slice, moved

Array: TypeAlias = Any
BITS = 64


class Doubt(Exception):
    """Something is wrong, or not as simple as it is looked at here."""


class Wanted(NamedTuple):
    """What output holds in the end: of each rank (row) and chunk (column) the chunk of the inputs, and whose."""

    chunks: Array
    ranks: Array


def agreed(row: Collective, size: int, chunks: int, rounds: Iterable[Round]) -> int | None:
    """Return how many messages met where all ranks' `rounds`, made at once, keep the promise of `row`, or None."""
    taken = list(rounds)
    memory = _Memory(row, size, chunks, taken)
    try:
        messages = sum(memory.run(steps) for steps in taken)
        memory.check_result()
    except Doubt:
        return None
    return messages


def of_rank(rounds: Iterable[Round], rank: int) -> list[Round]:
    """Return what `rank` does of `rounds` made at once.

    >>> import numpy
    >>> of_rank([(Send(Slice("input", numpy.array([3, 4])), numpy.array([1, 0])),)], 1)
    [(Send(src=Slice(buffer='input', first=4, count=1), peer=0),)]
    """
    def number(value: Any) -> int:
        return value if isinstance(value, int) else int(value[rank])

    def part(value: Slice) -> Slice | None:
        found = Slice(value.buffer, number(value.first), number(value.count))
        return found if found.count or isinstance(value.count, int) else None

    return list(moved(rounds, part, number))


def wanted(row: Collective, size: int, root: int, per_block: int, count: int) -> Wanted:
    """Return what the `count` chunks of output promise; inside a block they promise one chunk after the other."""
    inside, blocks = numpy.arange(per_block), range(count // per_block)
    pieces = [[row.result(rank, size, root, per_block, block * per_block) for block in blocks] for rank in range(size)]
    first = numpy.array([[piece.chunk for piece in ranks] for ranks in pieces]).reshape(size, len(blocks), 1)
    words = {piece.ranks: _bits(piece.ranks, size) for ranks in pieces for piece in ranks}
    whose = numpy.array([[words[piece.ranks] for piece in ranks] for ranks in pieces], numpy.uint64)
    return Wanted((first + inside).reshape(size, count), numpy.repeat(whose, per_block, axis=1))


def _bits(ranks: Iterable[int], size: int) -> list[int]:
    number = sum(1 << rank for rank in ranks)
    return [number >> BITS * word & (1 << BITS) - 1 for word in range(-(-size // BITS))]


class _Parts(NamedTuple):
    """A slice of each of several steps (rows) on each rank (columns): where it begins in all memory, and its length.

    A step is `there` on a rank unless its length is that of an array, and 0.
    """

    begin: Array
    count: Array
    there: Array


class _Memory:
    """All ranks' buffers, one after the other: of each chunk what it is made of, whose it is, whether twice."""

    def __init__(self, row: Collective, size: int, chunks: int, rounds: Sequence[Round]) -> None:
        self.row, self.size, self.chunks = row, size, chunks
        self.per_block = chunks // size if row.blocks else chunks
        ends = [numpy.max(part.first + part.count) for steps in rounds for step in steps for part in step
                if isinstance(part, Slice) and part.buffer == "scratch"]
        self.limits = {"input": self._extent(row.input.blocks), "output": self._extent(row.output.blocks),
                       "scratch": int(max(ends, default=0))}
        self.base = {"input": 0, "output": self.limits["input"],
                     "scratch": self.limits["input"] + self.limits["output"]}
        self.room = sum(self.limits.values())
        self.starts = numpy.arange(size) * self.room
        self.what = numpy.full(size * self.room, -1)
        self.whose = numpy.zeros((size * self.room, -(-size // BITS)), numpy.uint64)
        self.twice = numpy.zeros(size * self.room, bool)
        self.lengths = self._lengths()
        self._begin()

    def _extent(self, blocks: bool) -> int:
        return (self.chunks if blocks else self.per_block) if self.row.output.where != "nowhere" else 0

    def _begin(self) -> None:
        """Let every rank have its input."""
        inputs = self.starts[:, None] + numpy.arange(self.limits["input"])
        self.what[inputs] = numpy.arange(self.limits["input"])
        for rank in range(self.size):
            self.whose[inputs[rank]] = _bits([rank], self.size)

    def _lengths(self) -> Array:
        """Return for every chunk of memory what its length depends on, as in `verify`."""
        place = numpy.concatenate([numpy.arange(limit) for limit in self.limits.values()])
        if self.row.ragged is None:
            return numpy.tile(place % self.chunks % self.per_block, self.size)
        is_input = numpy.arange(self.room) < self.limits["input"]
        blocks = numpy.where(is_input, self.row.input.blocks, self.row.output.blocks)
        rank, other = numpy.arange(self.size)[:, None], numpy.where(blocks, place, -1)
        source, target = numpy.where(is_input, rank, other), numpy.where(is_input, other, rank)
        return {"source": source, "target": target, "pair": source * self.size + target}[self.row.ragged].ravel()

    def run(self, steps: Round) -> int:
        """Take a round on all ranks and return how many messages met; raise Doubt."""
        sends = [step for step in steps if isinstance(step, Send)]
        writes = [step for step in steps if not isinstance(step, Send)]
        target = self._parts([step.dst for step in writes])
        source = self._sources(sends, writes, target)
        origin, place = _expand(source, target.count), _expand(target.begin, target.count)
        if (self.lengths[origin] != self.lengths[place]).any() or (self.what[origin] < 0).any():
            raise Doubt
        reduces = numpy.array([isinstance(step, RecvReduce | Reduce) for step in writes], bool)
        self._check_targets(target, reduces, place)
        self._apply(origin, place, numpy.repeat(reduces, target.count.sum(axis=1)), target)
        return int(self._present(sends).sum())

    def _parts(self, slices: Sequence[Slice]) -> _Parts:
        """Return where `slices` are; raise Doubt where one is not in its buffer."""
        first, count = (numpy.empty((len(slices), self.size), int) for _ in range(2))
        there = numpy.ones((len(slices), self.size), bool)
        for index, part in enumerate(slices):
            first[index], count[index] = part.first, part.count
            if numpy.ndim(part.count):
                there[index] = part.count > 0
        limit = numpy.array([[self.limits[part.buffer]] for part in slices], int).reshape(-1, 1)
        if ((first < 0) | (count < 0) | (first + count > limit))[there].any():
            raise Doubt
        base = numpy.array([[self.base[part.buffer]] for part in slices], int).reshape(-1, 1)
        return _Parts(first + base + self.starts, count, there)

    def _present(self, sends: Sequence[Send]) -> Array:
        return self._parts([step.src for step in sends]).there

    def _sources(self, sends: Sequence[Send], writes: Sequence[Any], target: _Parts) -> Array:
        """Return where what each write reads begins: on this rank, or on the one whose message it takes."""
        source = numpy.zeros_like(target.begin)
        local = [index for index, step in enumerate(writes) if isinstance(step, Copy | Reduce)]
        came = [index for index, step in enumerate(writes) if isinstance(step, Recv | RecvReduce)]
        own = self._parts([writes[index].src for index in local])
        if (own.count != target.count[local]).any():
            raise Doubt
        source[local] = own.begin
        source[came] = self._matched(sends, [writes[index].peer for index in came],
                                     _Parts(*(column[came] for column in target)))
        return source

    def _matched(self, sends: Sequence[Send], peers: Sequence[int], receives: _Parts) -> Array:
        """Return where what each receive takes begins; the k-th message from a to b is for b's k-th receive from a."""
        sent = self._parts([step.src for step in sends])
        ranks = numpy.arange(self.size)
        to = self._peers([step.peer for step in sends])
        pairs, others = (ranks * self.size + to)[sent.there], (self._peers(peers) * self.size + ranks)[receives.there]
        order, turn = numpy.argsort(pairs, kind="stable"), numpy.argsort(others, kind="stable")
        if len(pairs) != len(others) or (pairs[order] != others[turn]).any() \
                or (sent.count[sent.there][order] != receives.count[receives.there][turn]).any():
            raise Doubt
        begin, found = numpy.zeros_like(receives.begin), numpy.empty(len(others), int)
        found[turn] = sent.begin[sent.there][order]
        begin[receives.there] = found
        return begin

    def _peers(self, peers: Sequence[int]) -> Array:
        found = numpy.empty((len(peers), self.size), int)
        for index, peer in enumerate(peers):
            found[index] = peer
        if ((found < 0) | (found >= self.size)).any():
            raise Doubt
        return found

    def _check_targets(self, target: _Parts, reduces: Array, place: Array) -> None:
        """Never input; of those to one chunk only the first may be a Copy or Recv, and all name the same slice."""
        if (place % max(1, self.room) < self.limits["input"]).any():
            raise Doubt
        order = numpy.argsort(place, kind="stable")
        again = numpy.flatnonzero(place[order][1:] == place[order][:-1])
        if len(again):
            entry = numpy.repeat(numpy.arange(target.count.size), target.count.ravel())[order]
            before, after = entry[again], entry[again + 1]
            alike = (target.begin.flat[before] == target.begin.flat[after]) \
                & (target.count.flat[before] == target.count.flat[after])
            if not (alike & reduces[after // self.size]).all():
                raise Doubt

    def _apply(self, origin: Array, place: Array, reduces: Array, target: _Parts) -> None:
        """Write what has been read before: first what is stored, then what is combined, in listed order."""
        what, whose, twice = self.what[origin], self.whose[origin], self.twice[origin]
        stored = place[~reduces]
        self.what[stored], self.whose[stored], self.twice[stored] = what[~reduces], whose[~reduces], twice[~reduces]
        rows = numpy.repeat(numpy.arange(len(target.count)), target.count.sum(axis=1))
        at_once = len(numpy.unique(place[reduces])) == reduces.sum()
        for chosen in [reduces] if at_once else [reduces & (rows == row) for row in numpy.unique(rows[reduces])]:
            into = place[chosen]
            if (self.what[into] != what[chosen]).any():
                raise Doubt
            self.twice[into] |= twice[chosen] | (self.whose[into] & whose[chosen]).any(axis=1)
            self.whose[into] |= whose[chosen]

    def check_result(self) -> None:
        """Raise Doubt where an output is not what the collective promises."""
        count = self.limits["output"]
        if count:
            end = wanted(self.row, self.size, 0, self.per_block, count)
            found = self.starts[:, None] + self.base["output"] + numpy.arange(count)
            promised = end.ranks.any(axis=2)
            kept = (self.what[found] == end.chunks) & (self.whose[found] == end.ranks).all(axis=2) & ~self.twice[found]
            if not kept[promised].all():
                raise Doubt


def _expand(begin: Array, count: Array) -> Array:
    """Return every place of ranges that begin somewhere and have so many places, range after range."""
    begins, counts = begin.ravel(), count.ravel()
    if len(counts) and (counts == counts[0]).all():
        return (begins[:, None] + numpy.arange(counts[0])).ravel()
    return numpy.repeat(begins - counts.cumsum() + counts, counts) + numpy.arange(counts.sum())
