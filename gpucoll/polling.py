"""How a wait looks: for how long it polls, when it yields its core, when it sleeps, and for how long."""

from __future__ import annotations

import os
import time

SPIN = 5e-3  # seconds of polling that only yields the processor; a wait that lasts longer also sleeps
CROWDED_SPIN = 1e-3  # the same where ranks outnumber processors: who waits must leave them to who computes
NAP = 20e-6  # seconds
DEAR = 500e-6  # seconds: a yield that takes longer has handed the core to a process that computes
WAITED = 100e-6  # seconds: a look that takes longer, as the engine's, has waited and needs no nap after it
SOON = 1e-3  # seconds of looking after a message between two ranks, before it is left to whoever goes on with such
# The progress thread takes its looks out of the time of who computes beside it: it naps for this share of how long
# nothing has gone on, so that an operation is late by no more than that, and for so many seconds at most.
NAP_SHARE, LONGEST_NAP = 1 / 16, 200e-6


def yields_at_once() -> bool:
    """Yield the core; return whether it came back at once.

    Where a process outside the job computes on this core, a yield hands that process a slice of milliseconds. The
    caller sleeps from then on: a sleep costs tens of microseconds.
    """
    began = time.monotonic()
    os.sched_yield()
    return time.monotonic() - began < DEAR


def nap(waited: float) -> float:
    """Return for how many seconds to sleep before the next look, after so many in which nothing has gone on."""
    return min(LONGEST_NAP, max(NAP, NAP_SHARE * waited))
