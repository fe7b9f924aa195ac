"""Preflight: ranks that only send each other messages compare what they call before data move.

One small exchange a call: the least and the greatest of a number that stands for the call in words. Where they are
unlike, every rank learns everybody's words, and raises the same. A rank that refuses its own arguments takes part with
its refusal, so that the others are told, and the communicator goes on. Ranks of one node need none of this: the engine
compares calls as they meet.
"""

from __future__ import annotations

from typing import Any

import numpy

from gpucoll.fingerprint import call_site, disagreement, fingerprint, shortened
from gpucoll.waits import keep_for_ever
from gpucoll.work import Operation

WORDS = 512  # bytes of a call in words, and where it is


class Preflight:
    """Compares the calls of one communicator; `wire` is an mpi4py communicator, on which collectives are ours."""

    def __init__(self, wire: Any) -> None:
        from mpi4py import MPI

        self._wire, self._min = wire, MPI.MIN
        self._calls = 0
        self.is_comparing = False  # which takes every rank

    def compare(self, words: str) -> Operation:
        """Return when all ranks are known to make this call; raise MismatchError, or PeerError, on all of them."""
        self._calls += 1
        number = (fingerprint(words) >> 4) + self._calls
        self.is_comparing = True
        mine, least = numpy.array([number, -number]), numpy.empty(2, numpy.int64)
        yield from self._ended(self._wire.Iallreduce(mine, least, self._min), mine, least)
        if least[0] == -least[1]:
            self.is_comparing = False
            return
        text, everyone = numpy.zeros(WORDS, numpy.uint8), numpy.empty((self._wire.size, WORDS), numpy.uint8)
        row = numpy.frombuffer(shortened(f"{words}\n{call_site()}", WORDS).encode(), numpy.uint8)[:WORDS]
        text[:len(row)] = row
        yield from self._ended(self._wire.Iallgather(text, everyone), text, everyone)
        self.is_comparing = False
        raise disagreement(range(len(everyone)),
                           [bytes(one).rstrip(b"\0").decode(errors="replace") for one in everyone])

    def _ended(self, request: Any, *memory: Any) -> Operation:
        try:
            while not request.Test():
                yield request.Test
        except BaseException:
            keep_for_ever((request, memory))
            raise
