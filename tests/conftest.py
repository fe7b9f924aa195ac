"""Shared parts of the tests: ranks for running programs, and the mark of tests needing ranks."""

import functools
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))  # pytest's "importlib" mode does not: tests import from the rooms of this folder
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # beside other tests, threads of one product wait for each other

from harness import grids, leftovers, pace, reporting  # noqa: E402 (the path comes first)
from harness.emulate import emulate as run_emulated  # noqa: E402
from harness.ranks import INSTALL_HINT, RankPool, find_launcher, launch  # noqa: E402

HANGS = 300.0  # seconds, scaled by the machine's pace, until a test counts as hanging
GRID = 6  # factor for a test of the nightly tier


def pytest_configure(config):
    """Let pytest-timeout's own option stop hanging tests, unless set on the command line. Restore SIGINT's usual
    effect.

    A shell without job control starts `pytest &` with SIGINT ignored, inherited by programs started by a test.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if getattr(config.option, "timeout", 0) is None and not config.getoption("usepdb"):
        config.option.timeout = pace.seconds(HANGS)


@pytest.hookimpl(tryfirst=True)  # before the header is printed, and after pytest has created its printers
def pytest_sessionstart(session):
    is_worker = hasattr(session.config, "workerinput")  # of xdist
    plugin = reporting.Starts() if is_worker else reporting.Reporter()
    session.config.pluginmanager.register(plugin, "gpucoll-reporting")


def pytest_collection_finish():
    """Leave modules and tests out of garbage collections from now on: some tests collect several times."""
    gc.collect()
    gc.freeze()


def pytest_report_header():
    launcher = find_launcher()
    mpi = f"{launcher.version} ({launcher.path})" if launcher else INSTALL_HINT
    return [f"mpi: {mpi}", f"samples: GPUCOLL_TEST_SEED={grids.SEED}",
            f"patience: {pace.pace():.1f} times that for the machine that the tests were written on"]


def pytest_collection_modifyitems(config, items):
    # The suites that tests write elsewhere are run whole.
    left_out = [item for item in items if item.path.is_relative_to(HERE) and not grids.is_in_share(item.nodeid)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in {*left_out}]
    for item in items:
        if item.path.is_relative_to(HERE / "multirank"):
            item.add_marker("multirank")
        if item.get_closest_marker("nightly") and item.config.option.timeout:  # whole grids, side by side
            item.add_marker(pytest.mark.timeout(GRID * item.config.option.timeout))
    items.sort(key=lambda item: item.path.is_relative_to(HERE / "unit"))  # the short tests fill the gaps at the end


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fail a test that changes the state of its process: an environment variable, an algorithm, a descriptor."""
    before = leftovers.look()
    yield
    left = [line for line in leftovers.restored(before) if leftovers.FILTERS not in line]  # pytest restores these
    if left:
        pytest.fail(f"the test left behind: {'; '.join(left)}", pytrace=False)


@pytest.fixture(scope="session")
def launcher():
    """The mpiexec in use; the test is skipped without an mpiexec."""
    return find_launcher() or pytest.skip(INSTALL_HINT)


@pytest.fixture(scope="session")
def rank_pool(launcher):
    """The pool of eight ranks for the whole session."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks(rank_pool):
    """`ranks(program, size, *args, timeout=...)`: the results of `program(comm, *args)`, one per rank."""
    return rank_pool.run


@pytest.fixture(params=["cpu", pytest.param("emulated", marks=pytest.mark.emulated)])
def ranks_anywhere(request, rank_pool):
    """`ranks` on the host and on the emulated device; a file may use this fixture as its own `ranks`."""
    if request.param == "cpu":
        return rank_pool.run
    request.getfixturevalue("emulated_kernels")
    return functools.partial(rank_pool.run, env={"GPUCOLL_DEVICE": "emulated"})


@pytest.fixture(scope="session")
def mpiexec(launcher):
    """`mpiexec(ranks, *argv, timeout=...)`: the `subprocess.CompletedProcess` of a separate job."""
    return launch


@pytest.fixture(scope="session")
def emulated_kernels():
    """Compile all kernels of the collectives on every core, into the user's cache. Skip without a compiler."""
    compiler = os.environ.get("CXX", "g++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"the emulated device needs a C++ compiler, and there is no {compiler}")
    from harness.compiled import make_usual

    make_usual()


@pytest.fixture(scope="session")
def nvrtc_release():
    """NVRTC's version, as numbers; the test is skipped without NVRTC."""
    from gpucoll.device import nvrtc
    from gpucoll.errors import BackendError

    try:
        return nvrtc.version()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture
def own_algorithms():
    """Remove algorithms registered by the test; use names unique to the test, since others may be cached."""
    with leftovers.without_algorithms():
        yield


@pytest.fixture
def emulate(tmp_path, emulated_kernels):
    """Yield `emulate(text, *options)`, which runs a program by `gpucoll emulate`."""
    return functools.partial(run_emulated, tmp_path)
