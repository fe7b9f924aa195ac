"""``async_op=True``: progress while Python computes, order, errors, arrays kept alive."""

import gc as garbage
import time
import weakref

import numpy
import pytest

import gpucoll as gc


@pytest.fixture
def ranks(ranks_anywhere):
    return ranks_anywhere


def progress(mpi, algorithm):
    """The operation ends while this thread never calls the library, in pure Python."""
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        x = numpy.arange(100_000.0)
        work = comm.all_reduce(x, algorithm=algorithm, async_op=True)
        assert isinstance(work, gc.Work)
        give_up = time.monotonic() + 50
        while not work._ended() and time.monotonic() < give_up:  # reads a flag; is_completed() would help along
            sum(range(1000))
        assert work._ended()
        assert work.is_completed()
        assert (work.wait() == x * comm.size).all()
        assert work.wait() is work.result
    return True


def many_in_flight(mpi):
    """Asynchronous and blocking calls mixed: each has its own result, in the order of the calls."""
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        everyone = range(comm.size)
        works = [comm.all_reduce(numpy.full(1000 + 37 * i, i + comm.rank), async_op=True,
                                 algorithm=("ring", "tree", "native", "star")[i % 4]) for i in range(12)]
        now = comm.all_reduce(numpy.array([comm.rank]))
        gathered = comm.all_gather(numpy.array([comm.rank]), async_op=True)
        copied = comm.broadcast(numpy.full(5, comm.rank), root=1, async_op=True)
        barrier = comm.barrier(async_op=True)
        for i, work in reversed(list(enumerate(works))):
            assert (work.wait() == sum(i + rank for rank in everyone)).all()
        assert now[0] == sum(everyone)
        assert (gathered.wait()[:, 0] == numpy.arange(comm.size)).all()
        assert (copied.wait() == 1).all()
        assert barrier.wait() is None
        total = comm.reduce(numpy.ones(3), root=2, async_op=True).wait()
        assert (total is None) == (comm.rank != 2)
    return True


def strided_out(mpi):
    """A strided out is complete, gaps untouched, only when the work has ended."""
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        memory = numpy.zeros((100, 4))
        work = comm.all_reduce(numpy.ones((100, 2)), out=memory[:, ::2], async_op=True)
        assert (work.wait() == comm.size).all()
        assert memory.sum() == comm.size * 200
    return True


def kept_alive(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=60) as comm:
        x = numpy.ones(200_000)
        alive = weakref.ref(x)
        work = comm.all_reduce(x, async_op=True, algorithm="ring")
        del x
        garbage.collect()
        assert (work.wait() == comm.size).all()
        del work
        garbage.collect()
        assert alive() is None
    return True


def late(mpi):
    """A rank that never comes: the error is the work's, and the communicator is revoked."""
    comm = gc.Communicator.from_mpi(mpi, timeout=0.5)
    if comm.rank:
        work = comm.all_reduce(numpy.ones(5), async_op=True, algorithm="ring")
        after = comm.all_reduce(numpy.ones(5), async_op=True)
        with pytest.raises(gc.CollectiveTimeout):
            work.wait()
        assert work.is_completed()
        with pytest.raises(gc.CollectiveTimeout):
            work.synchronize()
        with pytest.raises(gc.RevokedError):
            after.wait()
        with pytest.raises(gc.RevokedError):
            comm.barrier()
    comm.close()
    return True


@pytest.mark.parametrize("algorithm", ["ring", "tree", "native"])
@pytest.mark.parametrize("size", [2, 4])
def test_progress_while_python_computes(ranks, size, algorithm):
    ranks(progress, size, algorithm, timeout=90)


@pytest.mark.parametrize("size", [3, 8])
def test_many_in_flight(ranks, size):
    ranks(many_in_flight, size, timeout=90)


@pytest.mark.parametrize("program", [strided_out, kept_alive])
def test_arrays(ranks, program):
    ranks(program, 2)


def test_errors_are_the_works(ranks):
    ranks(late, 2, timeout=30)
