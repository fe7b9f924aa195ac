"""One rank of another project's tests on mpi4py: `python scripts/mpitests.py mpi4py|gpucoll FILE`, under mpiexec."""

import os
import sys

import pytest
from mpi4py import MPI

import gpucoll.mpi

if sys.argv[1] == "gpucoll":
    vars(MPI).update(COMM_WORLD=gpucoll.mpi.Comm(MPI.COMM_WORLD))


class Counts:
    """A plugin that prints the counts of this rank in one line."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the counts."""
        found = [f"{len(tests)} {name}" for name, tests in terminalreporter.stats.items() if name]
        print(f"\nrank {MPI.COMM_WORLD.rank}: {', '.join(found)}", flush=True)


sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null",
                      f"--rootdir={os.path.dirname(sys.argv[2])}", "--tb=short", sys.argv[2]], plugins=[Counts()]))
