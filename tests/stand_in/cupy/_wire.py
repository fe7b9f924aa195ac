"""What carries NCCL's messages in the stand-in: MPI between processes, a queue for what a rank sends to itself.

The k-th message from a to b is the k-th that b receives from a; k is given when a call is enqueued, not when its stream
comes to it. A message tells its length and dtype, and who receives another one fails.
"""

import collections
import os
import socket
import struct
import time

import numpy

HEAD = struct.Struct("=QQ")  # bytes and dtype
TAGS = 1 << 15
MEETING = 23_000  # a tag of COMM_WORLD, of ours alone


class Mismatch(Exception):
    """Two ranks that do not agree: on a GPU they would hang, or worse."""


class Wire:
    """The messages of one communicator; `mpi` is None for a lone rank."""

    def __init__(self, rank, size, mpi):
        self.rank, self.size, self.mpi = rank, size, mpi
        self._counts = collections.Counter()
        self._own = {}  # messages to itself, by number

    def number(self, peer, way):
        self._counts[peer, way] += 1
        return self._counts[peer, way]

    def send(self, data, kind, peer, number):
        """A predicate: whether the message has gone. `data` may change from here on."""
        message = numpy.frombuffer(HEAD.pack(len(data), kind) + data.tobytes(), numpy.uint8)
        if peer == self.rank:
            self._own[number] = message
            return lambda: True
        return self.mpi.Isend([message, "B"], peer, number % TAGS).Test

    def receive(self, nbytes, kind, peer, number):
        """A function: the bytes once they are there, until then None."""
        if peer == self.rank:
            return lambda: opened(self._own.pop(number), nbytes, kind, peer) if number in self._own else None
        room = numpy.zeros(HEAD.size + nbytes, numpy.uint8)
        request = self.mpi.Irecv([room, "B"], peer, number % TAGS)
        return lambda: opened(room, nbytes, kind, peer) if request.Test() else None


def opened(message, nbytes, kind, peer):
    told = HEAD.unpack(message[:HEAD.size].tobytes())
    if told != (nbytes, kind):
        raise Mismatch(f"rank {peer} sent {told[0]} bytes of dtype {told[1]}, expected {nbytes} of {kind}")
    return message[HEAD.size:]


def meet(size, unique_id, rank, bus):
    """The communicator of all ranks that have this id, once all have come; and where each of them is."""
    here = (socket.gethostname(), bus)
    if size == 1:
        return None, [here]
    from mpi4py import MPI

    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RuntimeError("the stand-in's NCCL needs an MPI with MPI_THREAD_MULTIPLE")
    world = MPI.COMM_WORLD
    maker, tag = unpacked(unique_id)
    if world.rank == maker:
        news = gathered(world, size, tag, (rank, world.rank, here))
    else:
        wait(world.isend((rank, world.rank, here), maker, tag))
        news = wait(world.irecv(source=maker, tag=tag))
    return world.Create_group(world.group.Incl([number for _, number, _ in news]), tag), [spot for _, _, spot in news]


def gathered(world, size, tag, mine):
    from mpi4py import MPI

    news = sorted([mine, *(wait(world.irecv(source=MPI.ANY_SOURCE, tag=tag)) for _ in range(size - 1))])
    for _, number, _ in news:
        if number != world.rank:
            wait(world.isend(news, number, tag))
    return news


def wait(request):
    """What a request of mpi4py gives; asking again and again leaves other threads their turns."""
    while True:
        ended, value = request.test()
        if ended:
            return value
        time.sleep(1e-3)


def make_id():
    from mpi4py import MPI

    return struct.pack("=QQ", MPI.COMM_WORLD.rank, int.from_bytes(os.urandom(4), "little")).ljust(128, b"\1")


def unpacked(unique_id):
    maker, nonce = struct.unpack_from("=QQ", unique_id)
    return maker, MEETING + nonce % 9000
