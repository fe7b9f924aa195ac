"""Descriptions of calls in memory mapped by all ranks of a node: quicker than messages.

The engine's module shows and compares the descriptions (kernels/binding/descriptions.h). This file makes each rank's
segment, and maps the segments of all ranks.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.segments import attach, reserved
from gpucoll.executors.engine.extension import library

PAGE = 4096
# The token is the second number of 8 bytes in a segment. The descriptions begin at byte 128.
TOKEN, FIRST = 1, 128
OFFER = 4  # numbers of 8 bytes in an offer: process, key and token of a segment, and whether the rank maps all segments


class MappedDescriptions:
    """The segments of all ranks, at first only this rank's; `nbytes` is the size of a description.

    `offer` goes to all other ranks, `accept` takes the offers of all ranks. Once accepted, `published` has the calls of
    all ranks, and `rows` their descriptions. Without the engine's module there is no offer.
    """

    def __init__(self, rank: int, nodes: tuple[int, ...], nbytes: int) -> None:
        self._rank, self._nbytes, self._module = rank, nbytes, library()
        self.published: Any = None  # a `Descriptions` of the engine's module
        self.rows: tuple[list[Array], ...] = ()  # by the parity of the call: the descriptions of all ranks
        self.offer = numpy.zeros(OFFER, numpy.int64)
        if len(set(nodes)) == 1 and self._module is not None:
            try:
                self._own = reserved(PAGE)
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
        # In another container the same process number may mean another process: then the token differs.
        tokens = [int(segment[:FIRST].view(numpy.int64)[TOKEN]) for segment in segments]
        if tokens != offers[:, 2].tolist():
            return
        self.published = self._module.Descriptions(segments, self._rank, self._nbytes)
        self.rows = tuple([segment[start:start + self._nbytes] for segment in segments]
                          for start in (FIRST, FIRST + self._nbytes))
        self.offer[3] = 1
