"""Preflight: ranks compare by messages what they call.

One small exchange a call: the least of a number that stands for the call in words, and of its negative. Where they show
that ranks differ, every rank learns everybody's words, and raises the same. A rank that refuses its own arguments takes
part with its refusal, so that the others are told. Ranks of one node need none of this for arrays on the host: the
engine compares calls as they meet.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy

from gpucoll.arrays import Array
from gpucoll.executors import (
    BYTES,
    COMPARED,
    DIFFERS,
    LINGERS,
    REFUSED,
    call_site,
    disagreement,
    fingerprint,
    shortened,
)
from gpucoll.executors.mpi import came
from gpucoll.guard.guard import LOOK
from gpucoll.guard.network import TELL
from gpucoll.waits import Waits, keep_for_ever
from gpucoll.work import Operation

WORDS = 512  # bytes of a call in words, and where it is
MOST = 256  # calls that nobody has waited for


class Begun(NamedTuple):
    """A comparison that has begun: number and words of the call, and, once `request` has ended, the `least` of all."""

    call: tuple[int, str]
    mine: Array
    least: Array
    request: Any

    @property
    def agrees(self) -> bool:
        return bool(self.least[0] == -self.least[1])


class _Least:
    """The least of all ranks' numbers, by a message to each: a request, where a link has no collectives."""

    def __init__(self, wire: Any, others: list[int], mine: Array, least: Array) -> None:
        self._rows, self._least = [mine, *(numpy.empty_like(mine) for _ in others)], least
        self._requests = [wire.Irecv([row.view(numpy.uint8), BYTES], other, COMPARED)
                          for other, row in zip(others, self._rows[1:], strict=True)]
        self._requests += [wire.Isend([mine.view(numpy.uint8), BYTES], other, COMPARED) for other in others]

    def Test(self) -> bool:
        self._requests = [request for request in self._requests if not request.Test()]
        if not self._requests:
            self._least[...] = numpy.min(self._rows, 0)
        return not self._requests


class Preflight:
    """Compares the calls of one communicator before data move, by messages of its `link` that are ours.

    `elsewhere` tells whom a call that is compared in another way waits for, and its words: where such a one has waited
    for long to compare a call of its own, this rank compares the two.

    Those that only `begin` are looked at while ranks wait, and in later calls: where they differ the communicator has
    failed, since data have moved.
    """

    def __init__(self, link: Any, waits: Waits, elsewhere: Callable[[], tuple[Collection[int], str]]) -> None:
        self._wire, self._waits, self._rank, self._size = link.wire, waits, link.place.rank, link.place.size
        self._others = sorted({*range(self._size)} - {self._rank})
        self._begin: Callable[[Array, Array], Any] = functools.partial(_Least, link.wire, self._others)
        if link.has_collectives:
            from mpi4py import MPI

            self._begin = functools.partial(link.wire.Iallreduce, op=MPI.MIN)
        self._calls = 0
        self.current = self.reached = (0, "")  # the number and the words of the last call, here and on all ranks
        self._begun: collections.deque[Begun] = collections.deque()
        self._telling: Operation | None = None  # everybody's words are awaited
        self.is_comparing = False  # which takes every rank
        self._elsewhere = elsewhere
        self._looked, self._told = 0.0, 0
        self._lingering: dict[int, int] = {}  # the ranks that have waited for long, and the numbers of their calls
        self._missed = set[int]()  # those of them that this rank waited for when it looked last
        waits.hooks.append(self.check)
        if link.has_collectives:
            waits.hooks.append(self._look)

    def compare(self, words: str) -> Operation:
        """Return when all ranks are known to make this call; raise MismatchError, or PeerError, on all of them."""
        begun = self._started(words)
        self.is_comparing = True
        yield from _ended([begun.request], begun)
        if not begun.agrees:
            yield from self._differ(begun, moved=False)
        self.is_comparing = False
        self.reached = self.current

    def begin(self, words: str) -> None:
        """Compare without waiting; raise where ranks are known to differ in an earlier call."""
        self.check()
        if len(self._begun) == MOST:
            self._waits.until(self._begun[0].request.Test, "comparing calls", self._waits.deadline())
        self._begun.append(self._started(words))

    def check(self) -> None:
        """Raise where ranks are known to differ in a call that has begun."""
        while self._telling is None and self._begun and self._begun[0].request.Test():
            begun = self._begun.popleft()
            if not begun.agrees:
                self._telling = self._differ(begun, moved=True)
            self.reached = begun.call
        if self._telling is not None and next(self._telling, None) is None:
            self._telling = None

    def _look(self) -> None:
        """Tell the others of a comparison that takes long; take part in that of a rank that will not come otherwise."""
        now = time.monotonic()
        if now < self._looked + LOOK:
            return
        self._looked = now
        # Below 0 where all take part in it
        first = -self._calls if self.is_comparing else self._calls - len(self._begun) + 1
        if (self._begun or self.is_comparing) and self._told != first and now > self._waits.waits_since + TELL:
            self._told, row = first, numpy.full(1, first, numpy.int64).view(numpy.uint8)
            keep_for_ever((row, [self._wire.Isend([row, BYTES], other, LINGERS) for other in self._others]))
        self._lingering.update(came(self._wire, LINGERS))
        awaited, words = self._elsewhere() if self._lingering else ((), "")
        missed = {rank for rank, number in self._lingering.items() if number > self._calls and rank in awaited}
        if missed & self._missed:
            self._begun.append(self._started(words))
        self._missed = missed

    def waiting(self) -> set[int]:
        """Return the ranks that are known to wait in this call, as this one does."""
        return {rank for rank, number in self._lingering.items() if abs(number) >= self._calls}

    def finish(self) -> Operation:
        """Return when all that has begun is known to agree."""
        yield lambda: self._telling is None and not self._begun

    def _started(self, words: str) -> Begun:
        self._calls += 1
        self.current = self._calls, words
        number = (fingerprint(words) >> 4) + self._calls
        mine, least = numpy.array([number, -number]), numpy.empty(2, numpy.int64)
        return Begun(self.current, mine, least, self._begin(mine, least))

    def _differ(self, begun: Begun, *, moved: bool) -> Operation:
        """Raise what all ranks have called, unless all refuse it.

        By messages: ranks come to it after unlike numbers of other calls.
        """
        row = numpy.zeros(WORDS, numpy.uint8)
        text = shortened(f"{begun.call[1]}\n{call_site()}" if not moved else begun.call[1], WORDS).encode()
        row[:len(text)] = numpy.frombuffer(text, numpy.uint8)
        everyone = numpy.zeros((self._size, WORDS), numpy.uint8)
        everyone[self._rank] = row
        requests = [self._wire.Irecv([everyone[other], BYTES], other, DIFFERS) for other in self._others]
        requests += [self._wire.Isend([row, BYTES], other, DIFFERS) for other in self._others]
        yield from _ended(requests, (row, everyone))
        self.is_comparing = False
        calls = [bytes(one).rstrip(b"\0").decode(errors="replace") for one in everyone]
        if not all(one.startswith(REFUSED) for one in calls):
            raise disagreement(range(len(everyone)), calls, moved=moved)


class Deferred:
    """The same for calls that do not wait for it."""

    def __init__(self, preflight: Preflight) -> None:
        self.begin = preflight.begin

    def compare(self, words: str) -> Operation:
        """Begin to compare this call."""
        self.begin(words)
        return iter(())


def _ended(requests: list[Any], memory: object) -> Operation:
    try:
        for request in requests:
            while not request.Test():
                yield request.Test
    except BaseException:
        keep_for_ever((requests, memory))
        raise
