"""Preflight: ranks that only send each other messages compare what they call before data move.

One small exchange a call: the least and the greatest of a number that stands for the call in words. Where they are
unlike, every rank learns everybody's words, and raises the same. A rank that refuses its own arguments takes part with
its refusal, so that the others are told, and the communicator goes on. Ranks of one node need none of this: the engine
compares calls as they meet.
"""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

import numpy

from gpucoll.errors import MismatchError, PeerError
from gpucoll.executors.shared.plans import signature_of
from gpucoll.waits import keep_for_ever
from gpucoll.work import Operation

WORDS = 256  # bytes of a call in words
REFUSED = "refused: "


def _field(pattern: re.Pattern[str], words: str) -> str:
    match = pattern.search(words)
    return match[1] if match else ""


# What is unlike, by the first part of the words that is
FIELDS = [(code, functools.partial(_field, re.compile(pattern))) for code, pattern in (
    ("GC-COLLECTIVE", r"^(\w+) by"), ("GC-ALGO", r"by (.*), \d+ bytes"), ("GC-DTYPE", r"bytes of (\w+)"),
    ("GC-SHAPE", r", (\d+) bytes"), ("GC-OP", r", op (.*), root"), ("GC-ROOT", r", root (\d+)"))]


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
        number = signature_of(f"{self._calls} {words}") >> 1
        self.is_comparing = True
        mine, least = numpy.array([number, -number]), numpy.empty(2, numpy.int64)
        yield from self._ended(self._wire.Iallreduce(mine, least, self._min), mine, least)
        if least[0] == -least[1]:
            self.is_comparing = False
            return
        text, everyone = numpy.zeros(WORDS, numpy.uint8), numpy.empty((self._wire.size, WORDS), numpy.uint8)
        row = numpy.frombuffer(words.encode()[:WORDS], numpy.uint8)
        text[:len(row)] = row
        yield from self._ended(self._wire.Iallgather(text, everyone), text, everyone)
        self.is_comparing = False
        raise unlike([bytes(one).rstrip(b"\0").decode(errors="replace") for one in everyone])

    def _ended(self, request: Any, *memory: Any) -> Operation:
        try:
            while not request.Test():
                yield request.Test
        except BaseException:
            keep_for_ever((request, memory))
            raise


def unlike(calls: list[str]) -> MismatchError | PeerError:
    """Return what all ranks raise whose calls, in words, are these."""
    groups: dict[str, list[int]] = collections.defaultdict(list)
    for rank, words in enumerate(calls):
        groups[words].append(rank)
    refused = tuple(rank for words, ranks in groups.items() if words.startswith(REFUSED) for rank in ranks)
    table = "; ".join(f"ranks {', '.join(map(str, ranks))}: {words}" for words, ranks in groups.items())
    if refused:
        named = ", ".join(map(str, refused))
        error: MismatchError | PeerError = PeerError(
            f"ranks {named} refused their arguments, and nothing was moved: {table}", ranks=refused)
    else:
        _, *others = groups.values()
        code = next((code for code, field in FIELDS if len({field(words) for words in groups}) > 1), "GC-MISMATCH")
        error = MismatchError(f"ranks make different calls, and nothing was moved: {table}", code=code,
                              ranks=tuple(sorted(rank for ranks in others for rank in ranks)))
    error.settled = True
    return error
