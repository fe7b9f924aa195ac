"""Short pauses between two polls of a wait."""

from __future__ import annotations

import os
import time

SHORTEST_SLEEP = 20e-6  # seconds; less would gain nothing, as Linux adds a timer slack of some 50 us
DEAR = 500e-6  # seconds: a yield that takes longer has given the core to a computing process
# Polling steals CPU from the user's thread, so sleep 1/16 of the time since the last progress: an operation is late by
# at most 1/16 of its wait, and by at most 200 us for each rank on a core.
SLEEP_SHARE, LONGEST_SLEEP = 1 / 16, 200e-6


def yields_at_once() -> bool:
    """Yield the core; return whether this thread ran again at once.

    If another process computes on this core, a yield gives that process a slice of milliseconds. The caller then sleeps
    instead of yielding: a sleep costs only tens of microseconds.
    """
    began = time.monotonic()
    os.sched_yield()
    return time.monotonic() - began < DEAR


def nap_after(waited: float, crowd: float = 1.0) -> float:
    """Return the seconds to sleep before the next poll, after `waited` seconds without progress.

    `crowd` is the number of ranks per core: all may poll, and so share the core.
    """
    return min(max(1.0, crowd) * LONGEST_SLEEP, max(SHORTEST_SLEEP, SLEEP_SHARE * waited))
