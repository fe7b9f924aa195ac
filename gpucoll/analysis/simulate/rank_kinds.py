"""Kinds of ranks: a generator of rounds run on many ranks at once, as long as the ranks take the same branches.

A generator gets `Numbers` in place of its rank: a number for each rank of a set. Arithmetic acts on all ranks. Where a
condition such as ``rank == 0`` has unlike answers, the run goes on with the larger part of the ranks, and the other
part gets a run of its own. So a kind is a set of ranks with one course through the generator. Nothing is assumed about
the algorithm: the rounds of every rank come from the algorithm's own code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.core.schedule import Copy, RecvReduce, Reduce, Round, Send

Array: TypeAlias = numpy.ndarray
MOST_WORK = 1 << 11  # numbers computed, for each rank
MOST_STEPS = 1 << 17  # of a kind
MOST_PEERS = 64  # of a kind


class Unlike(Exception):
    """The ranks are of too many kinds, or have too many peers, for this way to be quick."""


class Course:
    """A run of a generator: the `ranks` still on the course, the cuts so far, and the sets of ranks cut off."""

    def __init__(self, ranks: Array, work: int) -> None:
        self.ranks, self.work = ranks, work
        self.cuts: list[Array] = []
        self.left: list[Array] = []

    def plain(self, values: Array) -> Any:
        """Return the number if all `values` are equal, otherwise Numbers; raise Unlike after too much work."""
        self.work -= len(values)
        if self.work < 0:
            raise Unlike
        first = values[0]
        return first.item() if first == values[-1] and (values == first).all() else Numbers(values, self)

    def cut(self, holds: Array) -> bool:
        """Go on with the ranks in the larger part: those where `holds` is true, or the others; return which."""
        answer = bool(2 * numpy.count_nonzero(holds) >= len(holds))
        kept = holds if answer else ~holds
        self.left.append(self.ranks[~kept])
        self.ranks = self.ranks[kept]
        self.cuts.append(kept)
        return answer


class Numbers:
    """A number for each rank on a course."""

    __hash__ = object.__hash__

    def __init__(self, values: Array, course: Course) -> None:
        self._values, self._course, self._seen = values, course, len(course.cuts)

    @property
    def values(self) -> Array:
        """The numbers of the ranks still on the course."""
        for cut in self._course.cuts[self._seen:]:
            self._values = self._values[cut]
        self._seen = len(self._course.cuts)
        return self._values

    def __bool__(self) -> bool:
        holds = self.values != 0
        return bool(holds[0]) if (holds == holds[0]).all() else self._course.cut(holds)

    def __index__(self) -> int:
        while True:
            value = self.values[len(self.values) // 2]
            holds = self.values == value
            if holds.all() or self._course.cut(holds):
                return int(value)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def any(self) -> bool:
        """Return whether any number differs from zero."""
        return bool(self.values.any())

    def bit_length(self) -> Any:
        """Return the number of bits of each number; numbers are below 2^53."""
        return self._course.plain(numpy.frexp(self.values.astype(float))[1].astype(numpy.int64))


def _method(compute: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Numbers, *others: Any) -> Any:
        operands = [one.values if isinstance(one, Numbers) else one for one in (self, *others)]
        return self._course.plain(compute(*(reversed(operands) if swapped else operands)))

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"):
    _compute, _stem = getattr(operator, _name), _name.strip("_")
    setattr(Numbers, f"__{_stem}__", _method(_compute))
    setattr(Numbers, f"__r{_stem}__", _method(_compute, swapped=True))
for _name in ("neg", "invert", "lt", "le", "eq", "ne", "gt", "ge"):
    setattr(Numbers, f"__{_name}__", _method(getattr(operator, _name)))


class PeerMessage(NamedTuple):
    """All sends of a round to one peer, or all receives from one peer."""

    round: int
    peer: int  # a row of the kind's peers
    sends: bool
    chunks: int


class Kind(NamedTuple):
    """Ranks with one course: row j of `peers` has a peer of each rank; `reduced` has the chunks combined in a round."""

    ranks: Array
    peers: Array
    messages: list[PeerMessage]
    reduced: list[int]


def kinds(make: Callable[[Any], Iterable[Round]], size: int) -> Iterator[Kind]:
    """Yield the kinds of `size` ranks with the rounds ``make(rank)``; raise Unlike for too many kinds or peers."""
    waiting, work = [numpy.arange(size)], MOST_WORK * size
    while waiting:
        course = Course(waiting.pop(), work)
        yield _kind(course, make(course.plain(course.ranks)))
        waiting += course.left
        work = course.work - MOST_WORK  # a share for the run itself


def _kind(course: Course, rounds: Iterable[Round]) -> Kind:
    peers = _Peers(course)
    messages, reduced, seen = [], [], 0
    for number, steps in enumerate(rounds):
        seen += len(steps) + 1
        if seen > MOST_STEPS:
            raise Unlike
        sums: dict[tuple[int, bool], Any] = {}
        for step in steps:
            if not isinstance(step, Copy | Reduce):
                end = peers.row(step.peer), isinstance(step, Send)
                sums[end] = sums.get(end, 0) + step[0].count
        messages += [PeerMessage(number, *end, operator.index(chunks)) for end, chunks in sums.items()]
        combined = sum(step.dst.count for step in steps if isinstance(step, RecvReduce | Reduce))
        reduced.append(operator.index(combined))
    return Kind(course.ranks, peers.array(), messages, reduced)


class _Peers:
    """The distinct peers on a course, as rows; two rows never agree on a rank."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._rows: list[Numbers] = []
        self._known: dict[object, tuple[int, object]] = {}  # with a reference: an id in use is not given again

    def row(self, peer: Any) -> int:
        """Return the row of a step's peer; ranks for which two rows would agree in part are cut off."""
        key: object = (id(peer),) if isinstance(peer, Numbers) else peer
        if key not in self._known:
            self._known[key] = self._added(peer), peer
        return self._known[key][0]

    def _added(self, peer: Any) -> int:
        values = peer if isinstance(peer, Numbers) else Numbers(numpy.full(len(self._course.ranks), peer), self._course)
        for number, other in enumerate(self._rows):
            equal = other.values == values.values
            if equal.any() and (equal.all() or self._course.cut(equal)):
                return number
        if len(self._rows) == MOST_PEERS:
            raise Unlike
        self._rows.append(values)
        return len(self._rows) - 1

    def array(self) -> Array:
        return numpy.array([row.values for row in self._rows], numpy.int64).reshape(-1, len(self._course.ranks))
