"""What carries NCCL's messages in the stand-in: MPI between processes, a queue for what a rank sends to itself.

Messages of two ranks arrive in the order that they were sent in. Each tells its length and dtype, and who receives
another one fails.
"""

import collections
import os
import socket
import struct
import time

import numpy

HEAD = struct.Struct("=QQ")  # bytes and dtype
MEETING = 23_000  # a tag of COMM_WORLD, of ours alone


class Mismatch(Exception):
    """Two ranks that do not agree: on a GPU they would hang, or worse."""


class Wire:
    """The messages of one communicator; `mpi` is None for a lone rank."""

    def __init__(self, rank, size, mpi):
        self.rank, self.size, self.mpi = rank, size, mpi
        self._own = collections.deque()  # messages to itself

    def send(self, data, kind, peer):
        """A predicate: whether the message has gone. `data` may change from here on."""
        message = numpy.frombuffer(HEAD.pack(len(data), kind) + data.tobytes(), numpy.uint8)
        if peer == self.rank:
            self._own.append(message)
            return lambda: True
        return self.mpi.Isend([message, "B"], peer).Test

    def receive(self, target, kind, peer):
        """A predicate: whether the message has come; from then on it is in `target`."""
        room = numpy.zeros(HEAD.size + target.size, numpy.uint8)
        request = None if peer == self.rank else self.mpi.Irecv([room, "B"], peer)

        def has_come():
            if not (self._own if request is None else request.Test()):
                return False
            message = self._own.popleft() if request is None else room
            told = HEAD.unpack(message[:HEAD.size].tobytes())
            if told != (target.size, kind):
                raise Mismatch(f"rank {peer} sent {told} bytes and dtype, expected {target.size, kind}")
            target[:] = message[HEAD.size:]
            return True

        return has_come


def meet(size, unique_id, rank, bus):
    """The communicator of all ranks that have this id, once all have come; and where each of them is."""
    here = (socket.gethostname(), bus)
    if size == 1:
        return None, [here]
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    maker, tag = unpacked(unique_id)
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
