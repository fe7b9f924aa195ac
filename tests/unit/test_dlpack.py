"""Foreign host arrays, by NumPy's interface or DLPack alone, are read and written in place."""

import gc as garbage
import sys
import weakref

import numpy
import pytest

import gpucoll as gc
from gpucoll.arrays import as_array
from harness.pace import seconds
from harness.thread_ranks import on_threads


class Interface:
    """An object with NumPy's array interface, e.g. an array of a C library."""

    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


class Unversioned:
    """An exporter from before DLPack 1.0, unable to mark an array read-only."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


class Versioned(Unversioned):
    def __dlpack__(self, **options):
        self.capsule = self.array.__dlpack__(**options)
        return self.capsule


@pytest.mark.parametrize("kind", [Interface, Unversioned, Versioned])
def test_whatever_shows_its_memory(kind):
    """Foreign arrays are read without a copy, and written in place."""
    def program(comm):
        memory, total = numpy.arange(5.0) + comm.rank, comm.size * numpy.arange(5.0) + sum(range(comm.size))
        x, out, told = kind(memory), kind(numpy.zeros(5)), kind(numpy.full(3, comm.rank))
        assert type(comm.all_reduce(x)) is numpy.ndarray
        assert comm.all_reduce(x, out=out) is out
        assert comm.all_reduce(x, out=x) is x
        assert (out.array == total).all()
        assert (memory == total).all()
        assert comm.broadcast(told, root=1) is told
        assert (told.array == 1).all()
        gaps = numpy.zeros((3, 4))[:, ::2]
        comm.broadcast(kind(gaps) if comm.rank else numpy.full((3, 2), 7.0))
        assert comm.rank == 0 or (gaps == 7).all()
        both = numpy.full(3, comm.rank + 1.0)
        comm.all_reduce(kind(both), kind(both), op="max")
        assert (both == comm.size).all()
        plan = comm.plan("all_reduce", kind(numpy.full(2, 1.5)))
        assert [plan().tolist() for _ in range(2)] == [[1.5 * comm.size] * 2] * 2
        blocks = comm.all_to_all_v([kind(numpy.full(peer + 1, comm.rank)) for peer in range(comm.size)])
        assert [block.tolist() for block in blocks] == [[rank] * (comm.rank + 1) for rank in range(comm.size)]
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.sendrecv(kind(numpy.full(5, comm.rank + 0.5)), out, right, left)
        assert (out.array == left + 0.5).all()
        memory.flags.writeable = False
        with pytest.raises(gc.ArgumentError):
            comm.all_reduce(numpy.ones(5), out=kind(memory))

    on_threads(2, program, timeout=seconds(60))


def test_a_capsule_lives_as_long_as_its_array():
    """An exporter may free with the capsule what the end of the array calls."""
    exporter = Versioned(numpy.ones(3))
    array = as_array("", "x", exporter)
    held = sys.getrefcount(exporter.capsule)
    del array
    left = sys.getrefcount(exporter.capsule)
    assert left == held - 1


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


def test_what_says_that_it_is_read_only_is_not_written():
    out = numpy.zeros(3)
    out.flags.writeable = False
    with pytest.raises(gc.ArgumentError, match=r"GC-READONLY.*out is read-only"):
        gc.run_local(lambda comm: comm.all_reduce(numpy.ones(3), Versioned(out)), 1)
    assert (out == 0).all()


def test_the_memory_lives_as_long_as_what_was_opened():
    array = numpy.arange(5)
    known = weakref.ref(array)
    opened = as_array("", "x", Unversioned(array))[2:]
    del array
    garbage.collect()
    assert known() is not None
    opened[0] = 9
    assert opened.tolist() == [9, 3, 4]
    del opened
    garbage.collect()
    assert known() is None
