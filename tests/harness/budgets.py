"""The budget of time for each folder of tests in the default tier, and the time spent.

Two clocks run. The wall-clock seconds of a test are printed: users wait for these seconds, but the figure depends on
other load on the machine. The processor seconds of a test's own processes hardly do. Therefore only processor seconds
may fail a run, and only with `scripts/test --all`, at `LIMIT` times the budget. A single test never fails by a clock.
Processor seconds of a compiler do not count: results are kept, and a fresh machine compiles everything once.
"""

import contextlib
import os
import resource
from collections import Counter
from typing import NamedTuple

from harness import pace

HOLD = "GPUCOLL_TEST_HOLD"  # environment variable: a folder far above its budget fails the run
LIMIT = 2.0
SLOWEST = 20
# Seconds on the reference machine, summed over the processes of pytest: a run with two processes takes half of the
# sum. The right column has the processor seconds of all processes started by the tests.
BUDGETS = {
    "contract": (90, 80),
    "engine": (15, 20),
    "kernels": (25, 30),
    "multirank": (320, 260),
    "peer": (11, 15),
    "unit": (140, 120),
}
used_by_ranks = [0.0]  # processor seconds of the ranks of living pools, as reported by the ranks
used_by_compilers = [0.0]  # processor seconds of the children that compiled


class Spent(NamedTuple):
    """The cost of the tests of one folder: number of tests, seconds and processor seconds."""

    tests: int
    seconds: float
    cpu: float


def processor_seconds():
    """Return the processor seconds of this process, of all its children already waited for, and of the pool's ranks."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    used = own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
    return used + used_by_ranks[0] - used_by_compilers[0]


def children_seconds():
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return others.ru_utime + others.ru_stime


@contextlib.contextmanager
def compiling():
    """Leave out the processor seconds of the children in the `with` block."""
    before = children_seconds()
    try:
        yield
    finally:
        used_by_compilers[0] += children_seconds() - before


class Ledger:
    """The reports of the tests of the default tier in one run."""

    def __init__(self):
        self.seconds, self.cpu = Counter(), Counter()

    def add(self, report):
        if not {"slow", "nightly"} & {*report.keywords}:
            self.seconds[report.nodeid] += report.duration
            self.cpu[report.nodeid] += dict(report.user_properties).get("cpu", 0.0)

    def folders(self):
        """Return the cost of each folder with a budget."""
        found = {}
        for name in self.seconds:
            folder = name.split("/")[1] if name.count("/") > 1 else ""
            if folder in BUDGETS:
                tests, seconds, cpu = found.get(folder, (0, 0.0, 0.0))
                found[folder] = Spent(tests + 1, seconds + self.seconds[name], cpu + self.cpu[name])
        return dict(sorted(found.items()))

    def lines(self):
        """Return the slowest tests, and a line for each folder."""
        shown = [f"{taken:6.1f} s  {name}" for name, taken in self.seconds.most_common(SLOWEST)]
        for folder, spent in self.folders().items():
            seconds, cpu = (pace.seconds(one) for one in BUDGETS[folder])
            loud = "  <-- OVER BUDGET" if spent.cpu > cpu else ""
            shown.append(f"tests/{folder}: {spent.tests} tests, {spent.seconds:.0f} of {seconds:.0f} s, "
                         f"{spent.cpu:.0f} of {cpu:.0f} processor seconds{loud}")
        return shown

    def far_over(self):
        """Return the folders that fail the run, if the environment asks for this check."""
        if not os.environ.get(HOLD):
            return []
        return [folder for folder, spent in self.folders().items()
                if spent.cpu > LIMIT * pace.seconds(BUDGETS[folder][1])]
