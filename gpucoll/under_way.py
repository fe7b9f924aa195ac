"""How long something has been under way: the time that who computes beside it may have hidden."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class UnderWay:
    """Seconds in which at least one operation was under way; the clock is read when the first begins, the last ends."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # which a signal handler may ask for again
        self._operations, self._since, self._before = 0, 0.0, 0.0

    def began(self) -> None:
        """Note that one more is under way."""
        with self._lock:
            if not self._operations:
                self._since = self._clock()
            self._operations += 1

    def ended(self) -> None:
        """Note that one has ended, well or badly."""
        with self._lock:
            self._operations -= 1
            if not self._operations:
                self._before += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Those until now."""
        with self._lock:
            return self._before + (self._clock() - self._since if self._operations else 0.0)
