"""`Communicator.empty` and `zeros`: memory that the ranks of a node map."""

import gc as collector

import numpy
import pytest

import gpucoll as gc


def arrays(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        x, y = comm.empty((3, 5), "float32"), comm.zeros(7, numpy.int16, device="cpu")
        assert (x.shape, x.dtype, y.shape, y.dtype) == ((3, 5), numpy.float32, (7,), numpy.int16)
        assert x.flags.c_contiguous
        assert x.flags.writeable
        assert not y.any()
        assert comm.zeros((), "bfloat16").shape == ()
        assert comm.zeros((4, 0), bool).size == 0
        y += comm.rank
        x[...] = comm.rank
        assert comm.all_reduce(y, out=y) is y
        assert (y == sum(range(comm.size))).all()
        assert (x == comm.rank).all()
    assert (x == mpi.rank).all()  # it outlives the communicator


def nothing_is_copied(mpi):
    """Large symmetric arrays, and parts of them, are read where they are: the system copies nothing."""
    from unittest import mock

    from gpucoll.arrays.segments import Copier

    with gc.Communicator.from_mpi(mpi, timeout=30, executor="shared") as comm:
        comm.barrier()
        with mock.patch.object(Copier, "read", side_effect=AssertionError), \
                mock.patch.object(Copier, "write", side_effect=AssertionError):
            for algorithm in ("two_shot", "one_shot", "ring"):
                room = comm.empty(2 * (1 << 21), "float32")
                x, y = room[5:1 << 21], room[1 << 21:].reshape(2, -1)[0, :(1 << 20)]
                x[:] = comm.rank + 1
                y[:] = comm.rank
                assert (comm.all_reduce(x, out=x, algorithm=algorithm) == sum(range(comm.size + 1))).all()
                assert (comm.all_reduce(y, out=y, algorithm=algorithm) == sum(range(comm.size))).all()


def used_again(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        places = set()
        for number in range(50):
            x = comm.zeros(1 << 20, "float64")
            x += number
            assert (comm.all_reduce(x, out=x) == comm.size * number).all()
            places.add(x.ctypes.data)
            del x
            collector.collect()
        assert len(places) <= 2


def errors(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        odd = comm.rank == comm.size - 1
        for arguments, code in (((3 + odd, "int8"), "GC-SHAPE"), ((3, "int8" if odd else "uint8"), "GC-DTYPE")):
            with pytest.raises(gc.MismatchError) as refused:
                comm.empty(*arguments)
            assert refused.value.code == code
            assert refused.value.ranks == (comm.size - 1,)
        for arguments, kind in (((3, "int8", "gpu"), gc.ArgumentError), ((-1, "int8"), gc.ArgumentError),
                                (("ab", "int8"), gc.ArgumentError), ((2, object), gc.DtypeError)):
            with pytest.raises(kind if odd else gc.PeerError):
                comm.zeros(*(arguments if odd else (3, "int8")))
        assert comm.zeros(3, "int8").sum() == 0
    with pytest.raises(gc.ClosedError):
        comm.empty(3, "int8")


def too_much(mpi):
    """More than an address space has: an error on every rank, and the communicator goes on."""
    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        with pytest.raises(gc.BackendError):
            comm.empty(1 << 60, "float64")
        assert comm.zeros(3, "int8").sum() == 0


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("program", [arrays, nothing_is_copied, used_again])
def test_symmetric_memory(ranks, program, size):
    ranks(program, size)


def test_wrong_arguments(ranks):
    ranks(errors, 3)


@pytest.mark.parametrize("size", [1, 3])
def test_no_memory(ranks, size):
    ranks(too_much, size)
