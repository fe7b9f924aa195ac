"""Reports during a run of the tests: a record with each result as it happens.

The first process of a run reports: pytest-xdist passes on the results of the workers. Only the starts of tests are
written by the workers themselves, since workers may be killed. A line of the record is `started`, `passed`, `failed` or
`skipped`, and the name of a test. `read` computes totals, for any end of the run.
"""

import os
from collections import Counter

import pytest

from harness import budgets
from harness.grids import SEED

RECORD = "GPUCOLL_TEST_RECORD"  # environment variable: the file to append to


def read(path):
    """Return the number of tests by outcome, the failed tests, and the tests running at the end of the record."""
    states = {}
    with open(path) as file:
        for line in file:
            state, _, name = line.rstrip("\n").partition(" ")
            if states.get(name) != "failed":
                states[name] = state
    chosen = {word: [name for name, state in states.items() if state == word] for word in ("failed", "started")}
    return Counter(states.values()), chosen["failed"], chosen["started"]


def write(state, name):
    if RECORD in os.environ:
        with open(os.environ[RECORD], "a") as file:
            file.write(f"{state} {name}\n")


class Clock:
    """In each process running tests: adds the processor seconds of its phase to every report."""

    def __init__(self):
        self.before = budgets.processor_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item):
        now = budgets.processor_seconds()
        item.user_properties.append(("cpu", now - self.before))  # the report copies all entries; the last is its own
        self.before = now


class Starts(Clock):
    """In a worker."""

    def pytest_runtest_logstart(self, nodeid):
        write("started", nodeid)


class Reporter(Clock):
    """In the first process of a run."""

    def __init__(self):
        super().__init__()
        self.ledger = budgets.Ledger()
        self.outcomes, self.failed = {}, 0

    def pytest_collectreport(self, report):
        if not report.passed:
            write(report.outcome, report.nodeid)

    def pytest_runtest_logstart(self, nodeid):
        write("started", nodeid)

    def pytest_runtest_logreport(self, report):
        """Record a failed test at once: the process of the test may not reach its end."""
        self.ledger.add(report)
        if report.failed:
            if self.outcomes.get(report.nodeid) != "failed":
                self.failed += 1
                write("failed", report.nodeid)
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes.setdefault(report.nodeid, "skipped")

    def pytest_runtest_logfinish(self, nodeid):
        outcome = self.outcomes.pop(nodeid, "passed")
        if outcome != "failed":
            write(outcome, nodeid)

    def pytest_sessionfinish(self, session):
        if session.exitstatus == 0 and self.ledger.far_over():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if RECORD in os.environ:  # set by scripts/test
            terminalreporter.section("what took longest, and the folders' budgets")
            terminalreporter.write("".join(f"{line}\n" for line in self.ledger.lines()))
            for folder in self.ledger.far_over():
                terminalreporter.write_line(f"FAILED tests/{folder}: far more processor seconds than its budget, see "
                                            "tests/harness/budgets.py", red=True)
        if self.failed:
            terminalreporter.write_line(f"samples were drawn by GPUCOLL_TEST_SEED={SEED}: scripts/test --seed {SEED} "
                                        "draws the same")
