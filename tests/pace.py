"""How fast this machine is now, so that a test's patience grows with it: no healthy run ends by a clock.

    seconds(60)    # a minute on the machine that the tests were written on, more on a slower or busier one

The probe runs once, in the first process of a run; its workers and ranks are told by the environment.
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
