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
DATA = 0  # tags of a communicator: from 1 on those of the host's own messages


class Mismatch(Exception):
    """Two ranks that do not agree: on a GPU they would hang, or worse."""


class Wire:
    """The messages of one communicator; `mpi` is None for a lone rank."""

    def __init__(self, rank, size, mpi):
        self.rank, self.size, self.mpi = rank, size, mpi
        self._own = collections.deque()  # messages to itself
        self._told = []  # the host's own messages, under way

    def send(self, data, kind, peer):
        """A predicate: whether the message has gone. `data` may change from here on."""
        message = numpy.frombuffer(HEAD.pack(len(data), kind) + data.tobytes(), numpy.uint8)
        if peer == self.rank:
            self._own.append(message)
            return lambda: True
        return _under_way(self.mpi.Isend([message, "B"], peer, tag=DATA), message)

    def receive(self, target, kind, peer):
        """A predicate: whether the message has come; from then on it is in `target`."""
        room = numpy.zeros(HEAD.size + target.size, numpy.uint8)
        arrived = self._own.__len__ if peer == self.rank else _under_way(
            self.mpi.Irecv([room, "B"], peer, tag=DATA), room)

        def has_come():
            if not arrived():
                return False
            message = self._own.popleft() if peer == self.rank else room
            told = HEAD.unpack(message[:HEAD.size].tobytes())
            if told != (target.size, kind):
                raise Mismatch(f"rank {peer} sent {told} bytes and dtype, expected {target.size, kind}")
            target[:] = message[HEAD.size:]
            return True

        return has_come

    def put(self, peer, tag, value):
        """Send what a host tells another one; does not wait."""
        self._told = [one for one in self._told if not one.test()[0]]
        self._told.append(self.mpi.isend(value, peer, 1 + tag))

    def take(self, peer, tag, check):
        """Wait for what another host tells, in this thread alone; `check` may raise in between."""
        while not self.mpi.iprobe(peer, 1 + tag):
            check()
            time.sleep(1e-4)
        return self.mpi.recv(source=peer, tag=1 + tag)


_left = {}  # what MPI works on, though nobody may ask for it any more, as after an abort


def _under_way(request, room):
    """Whether the request has ended, asked again and again; until then its memory stays."""
    _left[id(request)] = request, room

    def ended():
        return id(request) not in _left or (request.Test() and _left.pop(id(request)) is not None)

    return ended


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
