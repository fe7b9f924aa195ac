"""The executors that the contract holds for, each on threads of this process."""

import dataclasses

import pytest

import programs
from compiled import PEER, make_peer_kernels
from mixture import PAIRS
from thread_ranks import on_threads


@dataclasses.dataclass(frozen=True)
class Executor:
    """How one executor is reached, and what it is tried on by default."""

    name: str
    device: str
    pairs: list  # ops and dtypes
    sizes: tuple  # numbers of ranks, some more often than others

    def run(self, size, program, *arguments, **options):
        """The results of `program(comm, *arguments)`, one per rank."""
        return on_threads(size, program, *arguments, **{"executor": self.name, **options})

    def algorithms(self, collective):
        """All names that can be given: threads have no native collectives."""
        return [name for name in programs.algorithms(collective) if name != "native"]


FEW, MORE = (1, 2, 2, 2, 3, 3, 4), (1, 2, 2, 3, 3, 4, 5, 8)
EXECUTORS = {"mpi": Executor("mpi", "cpu", PAIRS, MORE), "shared": Executor("shared", "cpu", PAIRS, MORE),
             "nccl": Executor("nccl", "emulated", PAIRS, FEW), "peer": Executor("peer", "emulated", PEER, FEW)}


@pytest.fixture(params=["mpi", "shared",
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
    """What the executor peer needs for its ops and dtypes; they stay in the user's cache."""
    make_peer_kernels(PEER)


@pytest.fixture(scope="session")
def every_peer_kernel(emulated_kernels):
    """All that there are: minutes of compiling, for the whole grid."""
    make_peer_kernels(PAIRS)
