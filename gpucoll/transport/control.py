"""Messages that end a communicator: a rank leaves in order, or goes no further; and receives that are called back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy

from gpucoll.errors import RankFailedError
from gpucoll.progress.operations import Operation, keep_for_ever
from gpucoll.transport.tags import BYTES, Tag


def shutdown(comm: Any, others: Collection[int], *, failed: bool) -> Operation:
    """Tell `others` that this one leaves; unless it has failed, wait to hear the same of all of them.

    Raises RankFailedError as soon as one says that it has failed.
    """
    said, heard = numpy.full(1, failed, numpy.uint8), numpy.zeros(1 + max(others, default=0), numpy.uint8)
    receives = [] if failed else [comm.Irecv([heard[other:other + 1], BYTES], other, Tag.SHUTDOWN) for other in others]
    sends = [comm.Isend([said, BYTES], other, Tag.SHUTDOWN) for other in others]

    def heard_of_all() -> bool:
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
    if failed:
        keep_for_ever((said, sends))


def abort(comm: Any, others: Collection[int], why: int) -> None:
    """Tell `others` that this one goes no further, and why, in a number of the guard's; waits for nobody."""
    said = numpy.full(1, why, numpy.int64).view(numpy.uint8)
    keep_for_ever((said, [comm.Isend([said, BYTES], other, Tag.ABORT) for other in others]))


def came(comm: Any, tag: int) -> dict[int, int]:
    """Return the last number that each rank has told by messages of this tag since this was asked last."""
    from mpi4py import MPI

    told, status, said = dict[int, int](), MPI.Status(), numpy.zeros(1, numpy.int64)
    while comm.Iprobe(MPI.ANY_SOURCE, tag, status):
        comm.Recv([said.view(numpy.uint8), BYTES], status.source, tag)
        told[status.source] = int(said[0])
    return told


def cancel(receives: list[Any], owner: Any) -> None:
    """Call back what may still be received, and keep `owner`, with what MPI may still read or write, for ever."""
    keep_for_ever((owner, receives))
    for request in receives:
        if not request.Test():
            request.Cancel()
            request.Test()  # no wait: what a rank had begun to send when it died neither comes nor is called back


def _all(requests: list[Any]) -> Operation:
    """Wait for `requests`, unless they have ended already."""
    left = [request for request in requests if not request.Test()]

    def done() -> bool:
        left[:] = [request for request in left if not request.Test()]
        return not left

    if left:
        yield done
