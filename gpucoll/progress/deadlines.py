"""The deadline of the wait under way on a thread, for the requests to other processes that the wait makes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator


class _Wait(threading.local):
    deadline = math.inf


_wait = _Wait()


@contextlib.contextmanager
def limited(deadline: float) -> Iterator[None]:
    """Limit all requests of this thread in the block to `deadline`, of `time.monotonic`."""
    before = _wait.deadline
    _wait.deadline = min(before, deadline)
    try:
        yield
    finally:
        _wait.deadline = before


def deadline_of(patience: float) -> float:
    """Return the deadline of a request that begins now: after `patience` seconds, or earlier with the wait around it.

    >>> with limited(time.monotonic() + 1.0):
    ...     deadline_of(60.0) <= time.monotonic() + 1.0
    True
    """
    return min(time.monotonic() + patience, _wait.deadline)
