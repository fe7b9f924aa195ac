"""Hazards silently mishandled by similar libraries: foreign arrays, and more bytes than 31 bits can count."""

import numpy
import pytest

import gpucoll as gc
from pace import seconds
from thread_ranks import on_threads


class Interface:
    """An object with NumPy's array interface, e.g. an array of a C library."""

    def __init__(self, memory):
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__


class Exchange:
    """An object with DLPack and no other interface."""

    def __init__(self, memory):
        self.memory, self.__dlpack__, self.__dlpack_device__ = memory, memory.__dlpack__, memory.__dlpack_device__


@pytest.mark.parametrize("kind", [Interface, Exchange])
def test_whatever_shows_its_memory(kind):
    """Foreign arrays are read without a copy, and written in place."""
    def program(comm):
        memory, total = numpy.arange(5.0) + comm.rank, comm.size * numpy.arange(5.0) + sum(range(comm.size))
        x, out, told = kind(memory), kind(numpy.zeros(5)), kind(numpy.full(3, comm.rank))
        assert type(comm.all_reduce(x)) is numpy.ndarray
        assert comm.all_reduce(x, out=out) is out
        assert comm.all_reduce(x, out=x) is x
        assert (out.memory == total).all()
        assert (memory == total).all()
        assert comm.broadcast(told, root=1) is told
        assert (told.memory == 1).all()
        plan = comm.plan("all_reduce", kind(numpy.full(2, 1.5)))
        assert [plan().tolist() for _ in range(2)] == [[1.5 * comm.size] * 2] * 2
        blocks = comm.all_to_all_v([kind(numpy.full(peer + 1, comm.rank)) for peer in range(comm.size)])
        assert [block.tolist() for block in blocks] == [[rank] * (comm.rank + 1) for rank in range(comm.size)]
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.sendrecv(kind(numpy.full(5, comm.rank + 0.5)), out, right, left)
        assert (out.memory == left + 0.5).all()
        memory.flags.writeable = False
        with pytest.raises(gc.ArgumentError):
            comm.all_reduce(numpy.ones(5), out=kind(memory))

    on_threads(2, program, timeout=seconds(60))


def test_pytorch_tensors():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

    def program(comm):
        for name in "float32 float16 bfloat16 int64 uint8 bool complex64 float8_e5m2".split():
            x, total = torch.ones(6).to(getattr(torch, name)), 1 if name == "bool" else comm.size
            out = torch.zeros_like(x)
            assert comm.all_reduce(x, out=out) is out
            assert (out.to(torch.complex64) == total).all(), name
        assert type(comm.all_reduce(torch.ones(2, 3).t())) is numpy.ndarray
        with pytest.raises(gc.ArgumentError, match="no access to the memory"):
            comm.all_reduce(torch.ones(2).to_sparse())

    on_threads(2, program, timeout=seconds(60))


def large(mpi, algorithm):
    """Move more bytes than 31 bits can count."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(200)) as comm:
        count = int(2.1 * (1 << 30)) + 3
        x, some = numpy.zeros(count, numpy.uint8), [0, 1 << 20, count - 1]
        x[some] = comm.rank + 1
        if algorithm == "send":
            comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
        else:
            comm.all_reduce(x, out=x, algorithm=algorithm)
        assert x[some].tolist() == [1 if algorithm == "send" else 3] * 3
        assert numpy.count_nonzero(x) == 3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "star", "send"])
def test_arrays_over_two_gibibytes(ranks, algorithm):
    ranks(large, 2, algorithm, timeout=seconds(220))
