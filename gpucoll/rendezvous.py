"""What the ranks of an mpi4py communicator do together outside of collectives: wait for all, let rank 0 do a thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
NAP = 1e-4  # seconds between two looks


def wait_for_all(mpi: Any, timeout: float, nap: float = NAP) -> bool:
    """Return whether every rank of `mpi` has come within `timeout` seconds; who waits sleeps. A collective call.

    MPI's own Barrier has no deadline, and keeps a core busy.
    """
    return becomes(mpi.Ibarrier().Test, timeout, nap)


def becomes(done: Callable[[], bool], timeout: float, nap: float = NAP) -> bool:
    """Return whether `done()` within `timeout` seconds; who waits sleeps `nap` seconds between two looks."""
    deadline = time.monotonic() + timeout
    while not done():
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
