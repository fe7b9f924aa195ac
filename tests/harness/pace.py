"""The speed of this machine, so that tests wait longer on slower machines: no healthy run ends by a clock.

    seconds(60)             # a minute on the reference machine, more on a slower or busier machine
    patience = Patience(60)
    patience.left()         # of these seconds; 0 only if a new probe finds the machine not slower

The first process of a run probes; its workers and ranks get the result by the environment.
"""

import os
import statistics
import time

VARIABLE = "GPUCOLL_TEST_PACE"
REFERENCE = 0.012  # seconds for the loop of `probe` on an idle core of 2026
MOST = 50.0


def probe() -> float:
    """Return the time of a loop here and now relative to the reference machine, at least 1."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        sum(number * number for number in range(200_000))
        times.append(time.perf_counter() - start)
    return min(MOST, max(1.0, statistics.fmean(times) / REFERENCE))


def pace() -> float:
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{probe():.2f}"
    return float(os.environ[VARIABLE])


def seconds(wanted: float) -> float:
    """Return the seconds equivalent to `wanted` seconds on the reference machine."""
    return wanted * pace()


class Patience:
    """A deadline `wanted` seconds of the reference from now; after the deadline the machine is probed again."""

    def __init__(self, wanted: float) -> None:
        self.start, self.wanted, self.factor = time.monotonic(), wanted, pace()

    def left(self) -> float:
        """Return the seconds until the deadline, 0 afterwards."""
        if self._left() <= 0:
            self.factor = max(self.factor, probe())
        return max(0.0, self._left())

    def at_most(self, seconds: float) -> None:
        """Bring the deadline forward: at most these seconds of the reference from now."""
        passed = time.monotonic() - self.start
        self.wanted = min(self.wanted, passed / self.factor + seconds)

    def _left(self) -> float:
        return self.start + self.wanted * self.factor - time.monotonic()
