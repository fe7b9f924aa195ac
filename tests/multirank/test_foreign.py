"""Arrays of other libraries: read without a copy, written where they are."""

import array

import numpy
import pytest

import gpucoll as gc


class Interface:
    """Anything with NumPy's array interface, e.g. an array of a C library."""

    def __init__(self, memory):
        self.memory = memory
        self.__array_interface__ = memory.__array_interface__


class Exchange:
    """Anything with DLPack and nothing else."""

    def __init__(self, memory):
        self.memory = memory

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.memory.__dlpack_device__()


def wrapped(mpi, kind):
    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        memory = numpy.arange(5.0) + comm.rank
        total = comm.size * numpy.arange(5.0) + sum(range(comm.size))
        found = comm.all_reduce(kind(memory))
        assert type(found) is numpy.ndarray
        assert (found == total).all()
        x, out = kind(memory), kind(numpy.zeros(5))
        assert comm.all_reduce(x, out=out) is out
        assert (out.memory == total).all()
        assert comm.all_reduce(x, out=x) is x
        assert (memory == total).all()
        plan = comm.plan("all_reduce", kind(numpy.full(2, 1.5)))
        assert [plan().tolist() for _ in range(2)] == [[1.5 * comm.size] * 2] * 2
        told = kind(numpy.full(3, comm.rank))
        assert comm.broadcast(told, root=1) is told
        assert (told.memory == 1).all()
        blocks = comm.all_to_all_v([kind(numpy.full(peer + 1, comm.rank)) for peer in range(comm.size)])
        assert [block.tolist() for block in blocks] == [[rank] * (comm.rank + 1) for rank in range(comm.size)]
        landing = kind(numpy.zeros(3))
        comm.sendrecv(kind(numpy.full(3, comm.rank + 0.5)), landing, (comm.rank + 1) % comm.size,
                      (comm.rank - 1) % comm.size)
        assert (landing.memory == (comm.rank - 1) % comm.size + 0.5).all()
        fixed = numpy.zeros(5)
        fixed.flags.writeable = False
        with pytest.raises(gc.ArgumentError):
            comm.all_reduce(memory.astype("f8")[[0] * 5], out=kind(fixed))
        with pytest.raises(gc.ArgumentError, match="not an array"):
            comm.all_reduce(array.array("d", [1, 2]))
    return True


def tensors(mpi):
    import torch

    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
                      torch.complex64, torch.float8_e5m2):
            x = torch.ones(6).to(dtype)
            out = torch.zeros(6).to(dtype)
            assert comm.all_reduce(x, out=out) is out
            expected = 1 if dtype is torch.bool else comm.size
            assert (out.to(torch.complex64) == expected).all(), dtype
            assert comm.all_reduce(x, out=x) is x
            assert (x.to(torch.complex64) == expected).all(), dtype
        found = comm.all_reduce(torch.ones(2, 3))
        assert type(found) is numpy.ndarray
        assert found.shape == (2, 3)
        turned = torch.arange(6.0).reshape(2, 3).t()
        assert (comm.all_reduce(turned) == comm.size * turned.numpy()).all()
        room = torch.zeros(3, 4)
        comm.all_reduce(torch.ones(3, 2), out=room[:, ::2])
        assert room.tolist() == [[comm.size, 0, comm.size, 0]] * 3
        weights = torch.nn.Parameter(torch.full((4,), float(comm.rank)))
        comm.broadcast(weights, root=1)
        assert (weights == 1).all()
        with pytest.raises(gc.ArgumentError, match="no access to its memory"):
            comm.all_reduce(torch.ones(2).to_sparse())
    return True


@pytest.mark.parametrize("kind", [Interface, Exchange])
def test_whatever_shows_its_memory(ranks, kind):
    ranks(wrapped, 2, kind)


def test_pytorch_tensors(ranks):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
    ranks(tensors, 2)


def large(mpi, algorithm, gibibytes):
    """More bytes than 31 bits count."""
    with gc.Communicator.from_mpi(mpi, timeout=200) as comm:
        count = int(gibibytes * (1 << 30)) + 3
        x = numpy.zeros(count, numpy.uint8)
        x[[0, 1 << 20, count - 1]] = comm.rank + 1
        if algorithm == "send":
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                comm.recv(x, 0)
            assert x[[0, 1 << 20, count - 1]].tolist() == [1, 1, 1]
        else:
            found = comm.all_reduce(x, out=x, algorithm=algorithm)
            assert found[[0, 1 << 20, count - 1]].tolist() == [3, 3, 3]
            assert numpy.count_nonzero(found) == 3
    return True


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "star", "send"])
def test_arrays_over_two_gibibytes(ranks, algorithm):
    ranks(large, 2, algorithm, 2.1, timeout=220)
