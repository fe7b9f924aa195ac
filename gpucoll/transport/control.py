"""Messages outside of calls: an exchange of numbers, and the cancellation of receives."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Generator, Sequence
from typing import Any

import numpy

from gpucoll.errors import BackendError
from gpucoll.progress.operations import Pending, keep_for_ever
from gpucoll.transport.tags import BYTES, Tag

MOST_NUMBERS = 18  # of an exchange: two handles of CUDA, an id of NCCL, or a number on each rank of a node


class WireError(BackendError):
    """A message of the engine's has failed."""


class Exchange:
    """An exchange of rows, one of each of `ranks`, by messages, for any thread; `rank` is this rank.

    In this way ranks tell each other numbers (`exchange`), and the calls that they make (`health.preflight`).
    """

    def __init__(self, wire: Any, rank: int, ranks: Sequence[int], rows: Any, tag: int) -> None:
        self._rows, mine = rows.view(numpy.uint8), ranks.index(rank)
        self._testing = threading.Lock()  # MPI forbids two threads to test one request at the same time
        # Note each request once posted: if a later one raises, `__del__` keeps the memory of the earlier ones.
        self._receives, self._sends = dict[int, LossyRequest](), list[LossyRequest]()
        for place, other in enumerate(ranks):
            if place != mine:
                self._receives[other] = LossyRequest(wire.Irecv([self._rows[place], BYTES], other, tag), ended=False)
        for other in self._receives:
            self._sends.append(LossyRequest(wire.Isend([self._rows[mine], BYTES], other, tag), ended=True))

    def missing(self) -> set[int]:
        """Return the ranks whose rows are not known to have arrived."""
        self.has_ended()
        return set(self._receives)

    def has_ended(self) -> bool:
        """Return whether all receives and sends are known to have completed; never waits."""
        # Without blocking: if another thread is testing, this thread learns the result at its next poll.
        if (self._receives or self._sends) and self._testing.acquire(blocking=False):
            try:
                self._receives = {other: one for other, one in self._receives.items() if not one.Test()}
                self._sends = [one for one in self._sends if not one.Test()]
            finally:
                self._testing.release()
        return not self._receives and not self._sends

    def __del__(self) -> None:
        # The communicator has failed or was dropped: MPI may still read and write the rows.
        if self._receives or self._sends:
            keep_for_ever((self._rows, self._receives, self._sends))


def exchange(comm: Any, rank: int, ranks: Sequence[int],
             numbers: Sequence[int], tag: int = Tag.HANDSHAKE) -> Generator[Pending, None, list[list[int]]]:
    """Return the numbers of each of `ranks`, in this order; `rank` is this rank, and missing numbers are 0.

    Before the first call, ranks agree in this way on memory, devices and ways to reach them.
    """
    rows = numpy.zeros((len(ranks), MOST_NUMBERS), numpy.int64)
    rows[ranks.index(rank), :len(numbers)] = numbers
    under_way = Exchange(comm, rank, ranks, rows, tag)
    while not under_way.has_ended():
        yield under_way.has_ended
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
