"""Programs on memory that ranks share by the `peer` executor on the emulated device, for threads and for processes."""

import contextlib
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from pace import seconds

LARGE = 1_100_000  # elements of four bytes: more than are staged at a time


def staged(comm):
    """What was ever staged in this rank's slab."""
    meeting = comm._gpus["emulated"].executors[0]._meeting
    first = meeting.room.offsets["staging"]
    return meeting.memory.slab.row[first:first + meeting.room.staging]


def shared(comm):
    """Results are right wherever the ranks' arrays are, and nothing is staged where all pass the same ones."""
    x, y, other = (comm.empty(LARGE, "float32", device=device) for device in (None, "cpu", None))
    everyone = [numpy.arange(LARGE, dtype=numpy.float32) % 1000 + rank for rank in range(comm.size)]
    odd = comm.rank % 2
    for number, (source, target) in enumerate((
            (x, y), (y, y), (x[5:], y[5:]), (x, y if odd else other), (other if odd else x, other if odd else x),
            (numpy.empty_like(x) if odd else x, y), (x, numpy.empty_like(x)))):
        for algorithm in ("two_shot", "one_shot"):
            source[...] = everyone[comm.rank][:source.size]
            found = comm.all_reduce(source, out=target, algorithm=algorithm)
            assert (found == sum(everyone)[:source.size]).all(), (number, algorithm)
            if number == 0 or (number < 3 and algorithm == "two_shot"):
                assert not staged(comm).any() or number, algorithm
    return bool(staged(comm).any())


def between_processes(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        return shared(comm)


def short_of_memory(mpi):
    """One rank has no more memory: no rank gets any, and then all of them do."""
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        comm.empty(3, "int8")
        heap = comm._heaps["emulated"]
        none_left = mock.patch.object(heap, "_make", side_effect=OSError("none left"))
        with none_left if comm.rank else contextlib.nullcontext(), \
                pytest.raises(gc.BackendError if comm.rank else gc.PeerError):
            comm.empty(1 << 27, "uint8")
        x = comm.empty((1 << 26) + 5000, "uint8")
        x[:] = 1
        return int(comm.all_reduce(x[-5000:], algorithm="two_shot").max()), bool(staged(comm).any())
