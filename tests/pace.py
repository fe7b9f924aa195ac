"""How fast this machine is, so that a test's patience grows with it: no healthy run ends by a clock.

    seconds(60)             # a minute on the machine that the tests were written on, more on a slower or busier one
    patience = Patience(60)
    patience.left()         # of these seconds; 0 only where a probe says that the machine is not slower now

The first probe runs in the first process of a run; its workers and ranks are told by the environment.
"""

import os
import statistics
import time

VARIABLE = "GPUCOLL_TEST_PACE"
REFERENCE = 0.012  # seconds for the loop of `probe` on an idle core of 2026
MOST = 50.0


def probe() -> float:
    """How many times as long as on the reference a loop takes here and now, at least 1."""
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
    """The patience, in seconds, that stands for `wanted` seconds on the reference machine."""
    return wanted * pace()


class Patience:
    """A deadline `wanted` seconds of the reference from now; when it has passed, the machine is probed again."""

    def __init__(self, wanted: float) -> None:
        self.start, self.wanted, self.factor = time.monotonic(), wanted, pace()

    def left(self) -> float:
        """Seconds until the deadline, 0 after it."""
        if self._left() <= 0:
            self.factor = max(self.factor, probe())
        return max(0.0, self._left())

    def at_most(self, seconds: float) -> None:
        """Bring the deadline forward: no more than these seconds of the reference from now."""
        passed = time.monotonic() - self.start
        self.wanted = min(self.wanted, passed / self.factor + seconds)

    def _left(self) -> float:
        return self.start + self.wanted * self.factor - time.monotonic()
