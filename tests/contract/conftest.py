"""The executors under the contract, with ranks as threads of this process."""

import contextlib
import dataclasses

import pytest

from harness.compiled import PEER, make_peer_kernels
from harness.extension import by_python
from harness.thread_ranks import on_threads
from mixture import PAIRS
from programs import collectives


@dataclasses.dataclass(frozen=True)
class Executor:
    """An executor under test: name, device, and default samples."""

    name: str
    device: str
    pairs: list  # pairs of op and dtype
    sizes: tuple  # numbers of ranks; repeated numbers are drawn more often
    by_python: bool = False  # the messages are Python's, as of a store and of a program's transport

    def run(self, size, program, *arguments, **options):
        """Return the results of `program(comm, *arguments)`, by rank."""
        with by_python() if self.by_python else contextlib.nullcontext():
            return on_threads(size, program, *arguments, **{"executor": self.name, **options})

    def algorithms(self, collective):
        """Return the names of all usable algorithms: threads have no native collectives."""
        return [name for name in collectives.algorithms(collective) if name != "native"]


FEW, MORE = (1, 2, 2, 2, 3, 3, 4), (1, 2, 2, 3, 3, 4, 5, 8)
EXECUTORS = {"mpi": Executor("mpi", "cpu", PAIRS, MORE), "shared": Executor("shared", "cpu", PAIRS, MORE),
             "python": Executor("mpi", "cpu", PAIRS, FEW, by_python=True),
             "nccl": Executor("nccl", "emulated", PAIRS, FEW), "peer": Executor("peer", "emulated", PEER, FEW)}


# Files about what is built upon collectives: by default with one executor of the host, and one of the device.
BUILT_UPON = ("test_training.py", "test_compression.py", "test_partner.py", "test_pipeline.py")
AT_NIGHT = ("shared", "python", "peer")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in BUILT_UPON and hasattr(item, "callspec") and \
                item.callspec.params.get("executor") in AT_NIGHT:
            item.add_marker("nightly")


@pytest.fixture(params=["mpi", "shared", "python",
                        *(pytest.param(name, marks=pytest.mark.emulated) for name in ("nccl", "peer"))])
def executor(request):
    return prepared(request, EXECUTORS[request.param])


def prepared(request, executor):
    if executor.device == "emulated":
        request.getfixturevalue("emulated_kernels")
        request.getfixturevalue("monkeypatch").setenv("GPUCOLL_DEVICE", "emulated")
    if executor.name == "peer":
        request.getfixturevalue("peer_kernels")
    return executor


@pytest.fixture(scope="session")
def peer_kernels(emulated_kernels):
    """Compile the kernels of the peer executor's sample of ops and dtypes; the user's cache keeps the kernels."""
    make_peer_kernels(PEER)


@pytest.fixture(scope="session")
def every_peer_kernel(emulated_kernels):
    """Compile all kernels of the peer executor for the whole grid, which takes minutes."""
    make_peer_kernels(PAIRS)
