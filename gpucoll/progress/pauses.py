"""Short pauses between two looks at what is waited for."""

from __future__ import annotations

import os
import time

NAP = 20e-6  # seconds
DEAR = 500e-6  # seconds: a yield that takes longer has handed the core to a process that computes
# The progress thread takes its looks out of the time of the computing thread: it naps for this share of the time in
# which nothing has gone on, so that an operation is late by no more than that, and for so many seconds at most.
NAP_SHARE, LONGEST_NAP = 1 / 16, 200e-6


def yields_at_once() -> bool:
    """Yield the core; return whether it came back at once.

    Where a process outside the job computes on this core, a yield hands that process a slice of milliseconds. The
    caller sleeps from then on: a sleep costs tens of microseconds.
    """
    began = time.monotonic()
    os.sched_yield()
    return time.monotonic() - began < DEAR


def nap_after(waited: float) -> float:
    """Return for how many seconds to sleep before the next look, after so many in which nothing has gone on."""
    return min(LONGEST_NAP, max(NAP, NAP_SHARE * waited))
