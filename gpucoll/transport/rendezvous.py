"""What the ranks of an mpi4py communicator do together outside of collectives: wait for all, let rank 0 do a thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
NAP = 1e-4  # seconds between two looks
HERE = (1 << 15) - 1  # the tag of a roll call, the last one that every MPI has
ROLL_CALL = 1.0  # seconds that ranks have to answer one


class RollCall:
    """Who of the ranks of `mpi` is there: asked at a deadline, answered by those that wait. Nothing is sent before."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._here = mpi, {mpi.rank}
        self._sent: list[Any] = []

    def answer(self) -> bool:
        """Hear who asks, and let all know that this rank is here; return whether all are."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._mpi.Iprobe(MPI.ANY_SOURCE, HERE, status):
            self._mpi.Recv([bytearray(1), "B"], status.source, HERE)
            self._here.add(status.source)
        if len(self._here) > 1:
            self._say()
        return len(self._here) == self._mpi.size

    def missing(self) -> tuple[int, ...]:
        """Ask; return the ranks that do not answer."""
        self._say()
        becomes(self.answer, ROLL_CALL)
        return tuple(sorted({*range(self._mpi.size)} - self._here))

    def _say(self) -> None:
        if not self._sent:
            others = {*range(self._mpi.size)} - {self._mpi.rank}
            self._sent = [self._mpi.Isend([b"\0", "B"], other, HERE) for other in others]


def wait_for_all(mpi: Any, timeout: float, nap: float = NAP, meanwhile: Callable[[], object] | None = None) -> bool:
    """Return whether every rank of `mpi` has come within `timeout` seconds; who waits sleeps. A collective call.

    MPI's own Barrier has no deadline, and keeps a core busy.
    """
    return becomes(mpi.Ibarrier().Test, timeout, nap, meanwhile)


def becomes(done: Callable[[], bool], timeout: float, nap: float = NAP,
            meanwhile: Callable[[], object] | None = None) -> bool:
    """Return whether `done()` within `timeout` seconds; who waits sleeps `nap` seconds between two looks."""
    deadline = time.monotonic() + timeout
    while not done():
        if meanwhile is not None:
            meanwhile()
        if time.monotonic() > deadline:
            return False
        time.sleep(nap)
    return True


def by_first_rank(mpi: Any, do: Callable[[], T]) -> T:
    """Let rank 0 `do` it; what it returns is every rank's, and so is its error. A collective call.

    Result and error are pickled, as every error of the library can be.
    """
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
