"""Descriptions of calls in memory mapped by all ranks of a node: quicker than messages, 3 us and not 11 for two ranks.

Each rank has a segment with two rows for the descriptions of its calls, used in turn, and the number of its last call.
A row is written again two calls later: by then all ranks have published the call in between, and had judged the call
before. Beside each row stands the time at which the rank came to the call.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Collection
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.segments import Segment, attach

PAGE = 4096
# The words of 8 bytes with the number, the token and the two arrivals, and the byte of the first row.
NUMBER, TOKEN, ARRIVED, FIRST = 0, 1, 2, 64
# The description of a call is stored before the number. Only these processors keep the order of two stores of Python.
ORDERED = {"x86_64", "AMD64"}
OFFER = 4  # numbers of 8 bytes in an offer: process, key and token of a segment, and whether the rank maps all segments


class MappedDescriptions:
    """The segments of all ranks, at first only this rank's; `nbytes` is the size of a row.

    `offer` goes to all other ranks, `accept` takes the offers of all ranks.
    """

    def __init__(self, rank: int, nodes: tuple[int, ...], nbytes: int) -> None:
        self._rank, self._nbytes = rank, nbytes
        self.others: frozenset[int] = frozenset()
        self.numbers: list[Any] = []  # by rank: a view of the number of the last call
        self.rows: tuple[list[Array], ...] = ()  # by the parity of the call: the rows of all ranks
        self.offer = numpy.zeros(OFFER, numpy.int64)
        if len(set(nodes)) == 1 and platform.machine() in ORDERED:
            try:
                self._own = Segment(PAGE)
            except OSError:  # the ranks go on by messages
                return
            token = secrets.randbits(62)
            self._own.row[:FIRST].view(numpy.int64)[TOKEN] = token
            self.offer[:] = os.getpid(), self._own.key, token, 0

    def accept(self, offers: Array) -> None:
        """Map the segments of all ranks; say in the own `offer` whether this has succeeded."""
        try:
            segments = [attach(int(process), int(key)) for process, key, _, _ in offers if key]
        # The process is in another container, has other rights, or has ended.
        except (OSError, ValueError):
            return
        if any(len(segment) != PAGE for segment in segments):
            return
        heads = [segment[:FIRST].view(numpy.int64) for segment in segments]
        # In another container the same process number may mean another process: then the token differs.
        if [int(head[TOKEN]) for head in heads] != offers[:, 2].tolist():
            return
        self.numbers = [head.data for head in heads]
        self.rows = tuple([segment[start:start + self._nbytes] for segment in segments]
                          for start in (FIRST, FIRST + self._nbytes))
        self.others = frozenset(range(len(segments))) - {self._rank}
        self.offer[3] = 1

    def publish(self, number: int, row: Array, arrived: int) -> None:
        """Show all ranks the description of this rank's call `number`, and when the rank came to the call."""
        self.rows[number % 2][self._rank][:] = row
        self.numbers[self._rank][ARRIVED + number % 2] = arrived
        self.numbers[self._rank][NUMBER] = number

    def arrivals(self, number: int) -> list[int]:
        """Return when each rank came to call `number`, once all have published the call."""
        return [one[ARRIVED + number % 2] for one in self.numbers]

    def is_last(self, number: int) -> bool:
        """Return whether this rank's last published call is call `number`."""
        return bool(self.numbers[self._rank][NUMBER] == number)

    def later(self, ranks: Collection[int], number: int) -> frozenset[int]:
        """Return the ranks, among these, that have not published their call `number` yet."""
        numbers = self.numbers
        return frozenset([rank for rank in ranks if numbers[rank][NUMBER] < number])
