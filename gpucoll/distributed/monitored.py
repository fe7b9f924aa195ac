"""The barrier that says who is missing.

Rank 0 of the group gathers who has come and answers everybody, by small messages that have nothing to do with
collectives: whatever state those are in, the answer is right. A rank that comes late finds the verdict waiting.
"""

from __future__ import annotations

from typing import Any

from gpucoll.distributed.groups import ProcessGroup, member
from gpucoll.distributed.start import seconds_of
from gpucoll.errors import CollectiveTimeout
from gpucoll.executors.mpi import TAGS
from gpucoll.rendezvous import becomes

TAG = TAGS  # the first one that is not the user's
GRACE = 10.0  # seconds for rank 0's verdict to arrive, on a crowded host too


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Return when every rank of `group` has called it; raise CollectiveTimeout, its `ranks` being who did not come.

    `timeout` is a timedelta or a number of seconds, counted from when rank 0 of the group has come; None is the
    group's. Every missing rank is always named, with or without `wait_all_ranks`. The group can still be used.
    """
    name, pg = "monitored_barrier", member("monitored_barrier", group)
    if pg is None:
        return
    seconds = pg.communicator.timeout if timeout is None else seconds_of(name, timeout)
    number = next(pg.barriers)
    if pg.size() > 1:
        missing = _collect(pg, number, seconds) if pg.rank() == 0 else _report(pg, number, seconds)
        if missing:
            ranks = tuple(pg.ranks[rank] for rank in missing)
            raise CollectiveTimeout(f"{name}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come "
                                    f"within {seconds:g} s", ranks=ranks)


def _collect(pg: ProcessGroup, number: int, seconds: float) -> list[int]:
    """Rank 0: say that it is here, gather who else is, send everybody who is missing, and return that."""
    missing = set(range(1, pg.size()))
    _send_all(pg, (number, None))

    def everybody_here() -> bool:
        for rank, here in _messages(pg, number):
            (missing.discard if here else missing.add)(rank)
        return not missing

    becomes(everybody_here, seconds)
    _send_all(pg, (number, sorted(missing)))
    return sorted(missing)


def _report(pg: ProcessGroup, number: int, seconds: float) -> list[int]:
    """Another rank: send rank 0 that it is here, and return whom rank 0 calls missing, or rank 0 itself."""
    verdicts: list[list[int] | None] = []

    def receive() -> None:
        verdicts.extend(verdict for _, verdict in _messages(pg, number))

    def rank_0_here() -> bool:
        receive()
        return bool(verdicts)

    def verdict_here() -> bool:
        receive()
        return verdicts[-1] is not None

    _send(pg, 0, (number, True))
    if becomes(rank_0_here, seconds) and becomes(verdict_here, seconds + GRACE):
        return verdicts[-1] or []
    _send(pg, 0, (number, False))  # gone again, if rank 0 should still come
    return [0]


def _send_all(pg: ProcessGroup, message: tuple[int, Any]) -> None:
    for rank in range(1, pg.size()):
        _send(pg, rank, message)


def _send(pg: ProcessGroup, rank: int, message: tuple[int, Any]) -> None:
    """Send a few bytes, which MPI takes at once; the request is kept while the other side may still come."""
    pg.sending = [request for request in pg.sending if not request.Test()]
    pg.sending.append(pg.communicator.mpi.isend(message, rank, TAG))


def _messages(pg: ProcessGroup, number: int) -> list[tuple[int, Any]]:
    """Return what has come for barrier `number`, with the ranks that sent it; never waits.

    Older messages are of a barrier that is over; newer ones are kept: their ranks are a barrier ahead.
    """
    from mpi4py import MPI

    mpi, status = pg.communicator.mpi, MPI.Status()
    in_vain = 0
    while in_vain < 2:  # Open MPI looks first, and takes what has come since then out of its queues after that
        if mpi.Iprobe(MPI.ANY_SOURCE, TAG, status):
            pg.early.append((status.source, *mpi.recv(None, status.source, TAG)))
            in_vain = 0
        else:
            in_vain += 1
    now = [(rank, content) for rank, barrier, content in pg.early if barrier == number]
    pg.early = [message for message in pg.early if message[1] > number]
    return now
