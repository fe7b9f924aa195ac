"""Communicators of processes for programs on the pool: on one node, or on two pretended nodes."""

import functools
from unittest import mock

import gpucoll as gc
from gpucoll.arrays import at
from gpucoll.communicator.links import MpiLink
from harness.pace import seconds


def on_shared(test):
    """Return a program of `comm`, on the executor `shared`, as a program of MPI's communicator."""
    @functools.wraps(test)
    def run(mpi, *arguments):
        with gc.Communicator.from_mpi(mpi, executor="shared", timeout=seconds(60)) as comm:
            return test(comm, *arguments)

    return run


def on_two_nodes(mpi, executor, **options):
    """Return a communicator with the ranks placed on two pretended nodes in turn."""
    link = MpiLink(mpi, 30.0)
    link.place = link.place._replace(nodes=tuple(rank % 2 for rank in range(mpi.size)))
    with mock.patch("gpucoll.communicator.methods.MpiLink", return_value=link):
        return gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor=executor, **options)


def staged(comm):
    """Return the staging buffer in this rank's slab; all zero if nothing was ever staged."""
    meeting = comm._core.gpus["emulated"].made_executors[0]._handshake
    return at(meeting.memory.slab.start + meeting.room.offsets["staging"], meeting.room.staging)
