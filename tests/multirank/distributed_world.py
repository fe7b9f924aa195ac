"""gpucoll.distributed in test programs: the default group, data, and checks of return values and arrays."""

import contextlib

import numpy

import gpucoll as gc
import gpucoll.distributed as dist
from gpucoll.distributed import groups, start
from harness.pace import seconds


@contextlib.contextmanager
def world(mpi):
    """Create the default group on the ranks of a program; a failure leaves nothing behind for the next program."""
    start._init_from(gc.Communicator.from_mpi(mpi, timeout=seconds(60)))
    try:
        yield dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
    finally:
        groups.groups.clear()
        start._clear_variables()


def data(rank, shape=(2, 3), dtype="float64"):
    """Return small integers, different on every rank and for every index."""
    count = int(numpy.prod(shape))
    return (numpy.arange(count).reshape(shape) % 5 + 10 * rank + 1).astype(dtype)


def same(found, expected):
    """Check the values and dtype of `found`."""
    expected = numpy.asarray(expected)
    assert found.dtype == expected.dtype
    assert numpy.array_equal(found, expected), (found, expected)


def done(found, async_op):
    """Check that the call has returned the same as torch's; wait for the data of an asynchronous call."""
    assert isinstance(found, dist.Work) if async_op else found is None
    if async_op:
        assert found.wait() is True
        assert (found.is_completed(), found.is_success(), found.exception()) == (True, True, None)
        return found.result()
    return None
