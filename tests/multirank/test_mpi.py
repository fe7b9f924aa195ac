"""The mpi4py interface: equal calls by mpi4py and by gpucoll, refusals, and a `Comm` made where it is used."""

import sys
from pathlib import Path

import pytest

from harness.grids import SEED, often
from harness.pace import seconds

HERE = Path(__file__).parents[1]
BY = "import sys; sys.path.insert(0, sys.argv[1]); from multirank import mpi_calls; from mpi4py import MPI; "


@pytest.mark.parametrize("size", often([1, 3, 4], 3))
def test_what_mpi4py_does(mpiexec, size):
    job = mpiexec(size, sys.executable, "-c", f"{BY}mpi_calls.against_mpi4py(MPI.COMM_WORLD, '{SEED}/{size}', 12)",
                  HERE, timeout=seconds(100))
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("program", ["others", "as_mpi4py", "derived", "kept"])
@pytest.mark.parametrize("size", often([1, 3], 3))
def test_a_comm_is_one_of_mpi4py(mpiexec, size, program):
    job = mpiexec(size, sys.executable, "-c", f"{BY}mpi_calls.{program}(MPI.COMM_WORLD)", HERE, timeout=seconds(60))
    assert job.returncode == 0, job.stderr
