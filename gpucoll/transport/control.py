"""Messages outside of calls: an exchange of numbers, and the cancellation of receives."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from typing import Any

import numpy

from gpucoll.errors import BackendError
from gpucoll.progress.operations import Pending, keep_for_ever
from gpucoll.transport.tags import BYTES, Tag

MOST_NUMBERS = 16  # of an exchange: enough for an id of NCCL, or for a number on each of the ranks of a node


class WireError(BackendError):
    """A message of the engine's has failed."""


def exchange(comm: Any, rank: int, ranks: Sequence[int],
             numbers: Sequence[int], tag: int = Tag.HANDSHAKE) -> Generator[Pending, None, list[list[int]]]:
    """Return the numbers of each of `ranks`, in this order; `rank` is this rank, and missing numbers are 0.

    Before the first call, ranks agree in this way on memory, devices and ways to reach them.
    """
    rows = numpy.zeros((len(ranks), MOST_NUMBERS), numpy.int64)
    mine = rows[ranks.index(rank)]
    mine[:len(numbers)] = numbers
    others = [(other, row) for other, row in zip(ranks, rows, strict=True) if other != rank]
    requests = [comm.Irecv([row.view(numpy.uint8), BYTES], other, tag) for other, row in others]
    requests += [comm.Isend([mine.view(numpy.uint8), BYTES], other, tag) for other, _ in others]
    try:
        for request in requests:
            while not request.Test():
                yield request.Test
    except BaseException:
        # MPI may still write to these rows.
        keep_for_ever((rows, requests))
        raise
    return rows.tolist()


class LossyRequest:
    """A request of MPI that may be tested again after an error.

    An MPI that goes on after a death reports the death of the other rank at a single test, and forgets the request. The
    request then counts as `ended`: a send has ended, a receive never will.
    """

    def __init__(self, request: Any, *, ended: bool) -> None:
        self._request, self._ended, self._is_lost = request, ended, False

    def Test(self) -> bool:
        """Return whether the request has ended."""
        if not self._is_lost:
            try:
                return bool(self._request.Test())
            except Exception as error:
                if not _is_death(error):
                    raise
                self._is_lost = True
        return self._ended

    def Cancel(self) -> None:
        """Cancel the request."""
        if not self._is_lost:
            self._request.Cancel()


def _is_death(error: Exception) -> bool:
    """Return whether MPI reports the death of a process."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and isinstance(error, MPI.Exception) \
        and error.Get_error_class() == getattr(MPI, "ERR_PROC_FAILED", None)


def cancel(receives: list[Any], owner: Any) -> None:
    """Cancel pending receives; keep `owner`, the memory that MPI may still read or write, for ever."""
    keep_for_ever((owner, receives))
    for request in receives:
        # A failed request may raise its error at each question: the caller has an error already.
        with contextlib.suppress(Exception):
            if not request.Test():
                request.Cancel()
                # No `Wait`: a message half sent by a rank that died neither arrives nor can be cancelled.
                request.Test()
