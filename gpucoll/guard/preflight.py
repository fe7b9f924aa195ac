"""Preflight: ranks compare by messages what they call.

One small exchange a call: the least of a number that stands for the call in words, and of its negative. Where they show
that ranks differ, every rank learns everybody's words, and raises the same. A rank that refuses its own arguments takes
part with its refusal, so that the others are told. Ranks of one node need none of this for arrays on the host: the
engine compares calls as they meet.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import numpy

from gpucoll.arrays import Array
from gpucoll.executors import REFUSED, call_site, disagreement, fingerprint, shortened
from gpucoll.executors.mpi import BYTES, DIFFERS
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


class Preflight:
    """Compares the calls of one communicator before data move; `wire` is mpi4py's, on which collectives are ours.

    Those that only `begin` are looked at while ranks wait, and in later calls: where they differ the communicator has
    failed, since data have moved.
    """

    def __init__(self, wire: Any, waits: Waits) -> None:
        from mpi4py import MPI

        self._wire, self._waits, self._min = wire, waits, MPI.MIN
        self._calls = 0
        self.current = self.reached = (0, "")  # the number and the words of the last call, here and on all ranks
        self._begun: collections.deque[Begun] = collections.deque()
        self._telling: Operation | None = None  # everybody's words are awaited
        self.is_comparing = False  # which takes every rank
        waits.hooks.append(self.check)

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

    def finish(self) -> Operation:
        """Return when all that has begun is known to agree."""
        yield lambda: self._telling is None and not self._begun

    def _started(self, words: str) -> Begun:
        self._calls += 1
        self.current = self._calls, words
        number = (fingerprint(words) >> 4) + self._calls
        mine, least = numpy.array([number, -number]), numpy.empty(2, numpy.int64)
        return Begun(self.current, mine, least, self._wire.Iallreduce(mine, least, self._min))

    def _differ(self, begun: Begun, *, moved: bool) -> Operation:
        """Raise what all ranks have called, unless all refuse it.

        By messages: ranks come to it after unlike numbers of other calls.
        """
        row = numpy.zeros(WORDS, numpy.uint8)
        text = shortened(f"{begun.call[1]}\n{call_site()}" if not moved else begun.call[1], WORDS).encode()
        row[:len(text)] = numpy.frombuffer(text, numpy.uint8)
        everyone = numpy.zeros((self._wire.size, WORDS), numpy.uint8)
        everyone[self._wire.rank] = row
        others = [rank for rank in range(len(everyone)) if rank != self._wire.rank]
        requests = [self._wire.Irecv([everyone[other], BYTES], other, DIFFERS) for other in others]
        requests += [self._wire.Isend([row, BYTES], other, DIFFERS) for other in others]
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
