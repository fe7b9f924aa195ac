"""Meetings of the ranks of an mpi4py communicator: a barrier with a deadline, a roll call, an action by rank 0.

The module also finds the address of this host for another host.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
POLL_INTERVAL = 1e-4  # seconds between two polls: a meeting may last minutes, and must not keep a core busy
# The tag of a roll call: the highest tag that every MPI has, because the communicator is the user's and low tags may be
# in use.
HERE = (1 << 15) - 1
ROLL_CALL = 1.0  # seconds for ranks to answer a roll call


class RollCall:
    """A roll call among the ranks of `mpi`: begun at a deadline, answered by the waiting ranks; silent before."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._here = mpi, {mpi.rank}
        self._sent: list[Any] = []

    def answer(self) -> bool:
        """Receive other ranks' messages, and send this rank's after the first; return whether all ranks are here."""
        from mpi4py import MPI

        status = MPI.Status()
        # Without blocking: this is called between the polls of a wait.
        while self._mpi.Iprobe(MPI.ANY_SOURCE, HERE, status):
            self._mpi.Recv([bytearray(1), "B"], status.source, HERE)
            self._here.add(status.source)
        if len(self._here) > 1:
            self._say()
        return len(self._here) == self._mpi.size

    def missing(self) -> tuple[int, ...]:
        """Begin a roll call and return the ranks that do not answer within ROLL_CALL seconds."""
        self._say()
        becomes(self.answer, ROLL_CALL)
        return tuple(sorted({*range(self._mpi.size)} - self._here))

    def _say(self) -> None:
        # Once per roll call. Keep the requests: nothing waits for the sends.
        if not self._sent:
            others = {*range(self._mpi.size)} - {self._mpi.rank}
            self._sent = [self._mpi.Isend([b"\0", "B"], other, HERE) for other in others]


def wait_for_all(mpi: Any, timeout: float, interval: float = POLL_INTERVAL) -> bool:
    """Wait for every rank of `mpi`; return whether all have come within `timeout` seconds. A collective call.

    MPI's Barrier has no deadline and keeps a core busy; this wait sleeps `interval` seconds between polls.
    """
    return becomes(mpi.Ibarrier().Test, timeout, interval)


def becomes(done: Callable[[], bool], timeout: float, interval: float = POLL_INTERVAL) -> bool:
    """Poll every `interval` seconds; return whether `done()` is true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def by_first_rank(mpi: Any, do: Callable[[], T]) -> T:
    """Call `do` on rank 0; return the result, or raise the error, on every rank. A collective call.

    Result and error travel pickled: every error of the library can be pickled.
    """
    # Broadcast the error, too: otherwise the other ranks would wait for a result that never comes.
    result: Any = None
    error: Exception | None = None
    if mpi.rank == 0:
        try:
            result = do()
        except Exception as raised:
            error = raised
    result, error = mpi.bcast((result, error))
    if error is not None:
        raise error
    return result


def route(address: str) -> str | None:
    """Return the local address used to send to another host's address; None without a route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 9))  # a UDP socket only looks up the route: nothing is sent
        return str(asked.getsockname()[0])
    return None
