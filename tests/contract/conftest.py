"""The executors that the contract holds for, each on threads of this process."""

import dataclasses

import pytest

import programs
from compiled import make_families
from gpucoll.device import sources
from gpucoll.dtypes import DTYPES
from gpucoll.ops import OPS
from mixture import PAIRS
from thread_ranks import on_threads

# The peer kernels of an op and a dtype are a unit to compile, so that by default it is not tried on every pair: on sums
# that the programs take, and on every op and every dtype at least once. The nightly grid has all pairs.
PEER = [*(("sum", name) for name in ("int32", "int64", "float16", "bfloat16", "float32", "float64", "complex128",
                                     "float8_e4m3fn", "float8_e5m2")),
        ("min", "float32"), ("max", "float32"), ("prod", "int8"), ("prod", "complex64"), ("max", "uint32"),
        ("min", "uint64"), ("avg", "float16"), ("band", "uint8"), ("bor", "uint16"), ("bxor", "int16"),
        ("land", "bool"), ("lor", "float64"), ("lxor", "int32")]


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


def make_peer_kernels(pairs):
    moves = sources.steps(None, DTYPES["int8"])
    make_families([moves, *(sources.steps(OPS[op], DTYPES[name]) for op, name in pairs)])
