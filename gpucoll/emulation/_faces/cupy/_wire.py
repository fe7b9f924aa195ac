"""The transport of the emulated NCCL's messages: MPI between the processes of a job of MPI, otherwise files.

Messages of two ranks arrive in the order of sending. Each message carries its length and dtype, and a receive of
another length or dtype fails.
"""

import collections
import os
import socket
import struct
import sys
import time

import numpy

from gpucoll.executors.messages import receiver

from . import _files

HEAD = struct.Struct("=QQ")  # bytes and dtype
MEETING = 23_000  # first of the tags of COMM_WORLD reserved for meetings
BY_FILES = b"\2"  # fills the id of a communicator without MPI
OF_MPI = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # set by launchers of MPI
DATA = 0  # tag of data; tags from 1 on carry the host's own messages


class Mismatch(Exception):
    """A disagreement of two ranks; on a GPU the ranks would hang, or worse."""


class Wire:
    """The messages of a communicator; `mpi` is None for a lone rank."""

    def __init__(self, rank, size, mpi):
        self.rank, self.size, self.mpi = rank, size, mpi
        self._receiver = receiver(mpi)  # safe from MPIs that write behind a buffer
        self._own = collections.deque()  # messages of this rank to itself
        self._told = []  # pending sends of the host's own messages

    def send(self, data, kind, peer):
        """Start a send and return a predicate for its end; the caller may change `data` at once."""
        message = numpy.frombuffer(HEAD.pack(len(data), kind) + data.tobytes(), numpy.uint8)
        if peer == self.rank:
            self._own.append(message)
            return lambda: True
        return _under_way(self.mpi.Isend([message, "B"], peer, tag=DATA), message)

    def receive(self, target, kind, peer):
        """Start a receive and return a predicate for its end; after the end, the message is in `target`."""
        room = numpy.zeros(HEAD.size + target.size, numpy.uint8)
        arrived = self._own.__len__ if peer == self.rank else _under_way(
            self._receiver.Irecv([room, "B"], peer, tag=DATA), room)

        def has_come():
            try:
                if not arrived():
                    return False
            except Exception as error:  # the message is longer
                raise Mismatch(f"rank {peer} sent more than {target.size} bytes") from error
            message = self._own.popleft() if peer == self.rank else room
            told = HEAD.unpack(message[:HEAD.size].tobytes())
            if told != (target.size, kind):
                raise Mismatch(f"rank {peer} sent {told} bytes and dtype, expected {target.size, kind}")
            target[:] = message[HEAD.size:]
            return True

        return has_come

    def put(self, peer, tag, value):
        """Send a value to the host of another rank, without waiting."""
        # mpi4py's requests must live until their ends; drop only ended requests.
        self._told = [one for one in self._told if not one.test()[0]]
        self._told.append(self.mpi.isend(value, peer, 1 + tag))

    def take(self, peer, tag, check):
        """Wait for a value from another host, blocking only the calling thread; `check` may raise meanwhile."""
        # Poll: a blocking receive could not be ended by an abort.
        while not self.mpi.iprobe(peer, 1 + tag):
            check()
            time.sleep(1e-4)
        return self.mpi.recv(source=peer, tag=1 + tag)


_left = {}  # pending requests with their memory, in use by MPI even after an abort


def _under_way(request, room):
    """Return a predicate for the end of a request; the memory stays alive until the predicate is true."""
    _left[id(request)] = request, room

    def ended():
        return id(request) not in _left or (request.Test() and _left.pop(id(request)) is not None)

    return ended


def meet(size, unique_id, rank, bus):
    """Wait for all ranks with this id; return their communicator (None for a lone rank) and the GPU of each rank."""
    here = (socket.gethostname(), bus)
    if size == 1:
        return None, [here]
    if unique_id.endswith(BY_FILES):
        comm = by_files(unique_id, rank, size)
        return comm, _files.met(unique_id[:8].hex(), rank, size, here, _files.folder_of(unique_id[:8].hex()))
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    maker, nonce = struct.unpack_from("=QQ", unique_id)
    tag = MEETING + nonce % 9000
    # The maker of the id collects rank, number in COMM_WORLD and GPU of every rank, and sends the sorted list to all.
    # With the list, ranks outside of the communicator need not take part in Create_group.
    if world.rank == maker:
        news = sorted([(rank, world.rank, here),
                       *(wait(world.irecv(source=MPI.ANY_SOURCE, tag=tag)) for _ in range(size - 1))])
        for _, number, _ in news:
            if number != world.rank:
                wait(world.isend(news, number, tag))
    else:
        wait(world.isend((rank, world.rank, here), maker, tag))
        news = wait(world.irecv(source=maker, tag=tag))
    return world.Create_group(world.group.Incl([number for _, number, _ in news]), tag), [spot for _, _, spot in news]


def undefined(comm):
    """Return the color of ranks without a part, for the communicator that is split."""
    return None if isinstance(comm, _files.FileComm) else sys.modules["mpi4py.MPI"].UNDEFINED


def wait(request):
    """Return the value of an mpi4py request; polling lets other threads run."""
    from mpi4py import MPI

    while True:
        # The end of the process finds this thread still waiting for a rank that does not come.
        while MPI.Is_finalized():
            time.sleep(1)
        ended, value = request.test()
        if ended:
            return value
        time.sleep(1e-3)


def by_files(unique_id, rank, size):
    name = unique_id[:8].hex()
    return _files.FileComm(name, rank, size, _files.folder_of(name))


def make_id(here=False):
    """Return the id of a communicator, whose ranks are `here` in this process, or anywhere on this host."""
    has_mpi = "mpi4py.MPI" in sys.modules or any(name in os.environ for name in OF_MPI)
    if has_mpi and not here and "EMULATED_FOLDER" not in os.environ:
        from mpi4py import MPI

        if MPI.COMM_WORLD.size > 1:
            # The maker's number in COMM_WORLD and a random number, the source of the tag; 128 bytes as in NCCL.
            return struct.pack("=QQ", MPI.COMM_WORLD.rank, int.from_bytes(os.urandom(4), "little")).ljust(128, b"\1")
    return os.urandom(8).ljust(128, BY_FILES)
