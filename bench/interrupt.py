"""Ctrl-C: every rank ends within two seconds, and rank 0 saves the measurements.

Both SIGINT and SIGTERM are handled: launchers differ in the signal sent to their ranks.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from gpucoll.cli import ctrl_c

SAVING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAVE_TIME = 1.2  # seconds the other ranks give rank 0 to save: launchers kill all ranks once the first has ended


def watched(rank: int, save: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
    """Return a context of the main thread in which a signal makes rank 0 `save`, and ends the process with code 130."""
    return ctrl_c.watched(lambda: save() if rank == 0 else time.sleep(SAVE_TIME), SAVING_SIGNALS)
