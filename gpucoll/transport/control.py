"""Messages outside of calls: an exchange of numbers, the end of a communicator, and the cancellation of receives."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Generator, Sequence
from typing import Any

import numpy

from gpucoll.errors import RankFailedError
from gpucoll.progress.operations import Operation, Pending, keep_for_ever
from gpucoll.transport.tags import BYTES, Tag

NUMBERS = 16  # of an exchange: enough for a CUDA handle, or for a number on each of the ranks of a node


def exchange(comm: Any, rank: int, ranks: Sequence[int],
             numbers: Sequence[int]) -> Generator[Pending, None, list[list[int]]]:
    """Return the numbers of each of `ranks`, in this order; `rank` is this rank, and missing numbers are 0.

    Before the first call, ranks agree in this way on memory, devices and ways to reach them.
    """
    rows = numpy.zeros((len(ranks), NUMBERS), numpy.int64)
    mine = rows[ranks.index(rank)]
    mine[:len(numbers)] = numbers
    others = [(other, row) for other, row in zip(ranks, rows, strict=True) if other != rank]
    requests = [comm.Irecv([row.view(numpy.uint8), BYTES], other, Tag.HANDSHAKE) for other, row in others]
    requests += [comm.Isend([mine.view(numpy.uint8), BYTES], other, Tag.HANDSHAKE) for other, _ in others]
    try:
        for request in requests:
            while not request.Test():
                yield request.Test
    except BaseException:
        # MPI may still write to these rows.
        keep_for_ever((rows, requests))
        raise
    return rows.tolist()


def shutdown(comm: Any, others: Collection[int], *, failed: bool) -> Operation:
    """Tell the ranks `others` that this rank leaves; unless this rank has `failed`, wait for the same message of all.

    Raises RankFailedError as soon as another rank reports a failure. The message is a byte: 1 after a failure.
    """
    # A failed rank posts no receives: if no rank answers, a receive would have to be cancelled.
    said, heard = numpy.full(1, failed, numpy.uint8), numpy.zeros(1 + max(others, default=0), numpy.uint8)
    receives = [] if failed else [comm.Irecv([heard[other:other + 1], BYTES], other, Tag.SHUTDOWN) for other in others]
    sends = [comm.Isend([said, BYTES], other, Tag.SHUTDOWN) for other in others]

    def heard_of_all() -> bool:
        # A list and not a generator: test every request at each poll, because `Test` also drives MPI's progress.
        return all([request.Test() for request in receives]) or bool(heard.any())

    try:
        yield heard_of_all
        if heard.any():
            ranks = tuple(int(other) for other in numpy.flatnonzero(heard))
            raise RankFailedError(f"close: ranks {ranks} failed before", ranks=ranks)
        yield from _all([] if failed else sends)
    except BaseException:
        cancel(receives, (said, heard, sends))
        raise
    # The sends of a failed rank may never complete, so MPI may read the buffer until the process ends.
    if failed:
        keep_for_ever((said, sends))


def abort(comm: Any, others: Collection[int], why: int) -> None:
    """Tell the ranks `others` that this rank has aborted; `why` is a reason of `gpucoll.health.guard`. Never waits."""
    # Kept for ever: the sends may never complete.
    said = numpy.full(1, why, numpy.int64).view(numpy.uint8)
    keep_for_ever((said, [comm.Isend([said, BYTES], other, Tag.ABORT) for other in others]))


def came(comm: Any, tag: int) -> dict[int, int]:
    """Receive all pending messages with this tag; return the last number sent by each rank. Never waits."""
    from mpi4py import MPI

    reported, status, said = dict[int, int](), MPI.Status(), numpy.zeros(1, numpy.int64)
    while comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        comm.Recv([said.view(numpy.uint8), BYTES], status.source, tag)
        reported[status.source] = int(said[0])
    return reported


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


def _all(requests: list[Any]) -> Operation:
    """Wait for the `requests` still under way, if any."""
    left = [request for request in requests if not request.Test()]

    def done() -> bool:
        # Drop completed requests, so that no request is tested again after its end.
        left[:] = [request for request in left if not request.Test()]
        return not left

    if left:
        yield done
