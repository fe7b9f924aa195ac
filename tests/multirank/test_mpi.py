"""The mpi4py interface: equal calls by mpi4py and by gpucoll, and mpi4py's own tests."""

import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from harness.grids import SEED, often
from harness.pace import seconds

HERE = Path(__file__).parents[1]
SUITE = ("test_cco_buf", "test_cco_vec", "test_cco_nb_buf", "test_cco_nb_vec", "test_p2p_buf")
BY = "import sys; sys.path.insert(0, sys.argv[1]); from multirank import mpi_calls, mpi_kept; from mpi4py import MPI; "


@pytest.mark.parametrize("size", often([1, 3, 4], 3))
def test_what_mpi4py_does(mpiexec, size):
    job = mpiexec(size, sys.executable, "-c", f"{BY}mpi_calls.against_mpi4py(MPI.COMM_WORLD, '{SEED}/{size}', 12)",
                  HERE, timeout=seconds(100))
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_refused_and_what_is_mpi4pys(mpiexec, size):
    job = mpiexec(size, sys.executable, "-c", f"{BY}mpi_calls.others(MPI.COMM_WORLD)", HERE, timeout=seconds(60))
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize("size", often([1, 3], 3))
@pytest.mark.parametrize("program", ["frequent", "kept"])
def test_small_buffers_and_a_comm_made_where_it_is_used(mpiexec, size, program):
    job = mpiexec(size, sys.executable, "-c", f"{BY}mpi_kept.{program}(MPI.COMM_WORLD)", HERE, timeout=seconds(60))
    assert job.returncode == 0, job.stderr


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """Return the folder of mpi4py's own tests, from the source distribution of the installed version."""
    folder = tmp_path_factory.mktemp("mpi4py")
    pip = next((found for name in ("pip3", "pip") if (found := shutil.which(name))), None)
    if pip is None:
        pytest.skip("mpi4py's own tests: there is no pip to download its sources")
    download = subprocess.run([pip, "download", "--quiet", "--no-deps", "--no-binary", "mpi4py", "--dest", folder,
                               f"mpi4py=={version('mpi4py')}"], capture_output=True, text=True, check=False)
    archives = [*folder.glob("mpi4py-*.tar.gz")]
    if not archives:
        pytest.skip(f"mpi4py's own tests: its sources cannot be downloaded: {download.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("mpi4py-*/test"))


@pytest.mark.slow
def test_mpi4pys_own_tests(mpiexec, suite):
    """mpi4py's own tests pass on gpucoll. Half of the tests use COMM_SELF, and so cover one rank as well."""
    job = mpiexec(3, sys.executable, HERE / "multirank" / "mpi_suite.py", suite, *SUITE, timeout=seconds(200))
    assert job.returncode == 0, job.stderr
    found = re.findall(r"rank \d+: (\d+) tests, (\d+) calls ours", job.stdout)
    assert len(found) == 3, job.stdout
    assert all(int(tests) > 300 and int(calls) > 3000 for tests, calls in found), found
