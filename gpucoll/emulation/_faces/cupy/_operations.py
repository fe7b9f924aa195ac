"""The calls of NCCL, as work of a stream: the launch of a group, messages and collectives."""

import numpy

from ._machine import MACHINE
from ._wire import Mismatch


class Launch:
    """The launch of a group, on a stream or kept by a graph; a graph finds the communicator in `comm`."""

    def __init__(self, comm, calls):
        self.comm, self.calls = comm, calls

    def __call__(self):
        return EnqueuedGroup(self.comm, self.calls)


class EnqueuedGroup:
    """The calls of a group, an action of the machine. Groups of a family run in order, on any streams."""

    def __init__(self, comm, calls):
        self.comm, self.family, self.calls, self.pending, self.turn = comm, comm.family, calls, None, comm.family.issued
        self.family.issued += 1

    def __call__(self):
        if self.family.aborted:
            return True
        if self.family.ended < self.turn:
            return False
        # All calls begin together: in sequence, two ranks could wait for each other.
        if self.pending is None:
            self.pending = [step for call in self.calls for step in call.begin()]
        try:
            self.pending = [step for step in self.pending if not step()]
        except Mismatch as error:
            # A program would wait for ever. gpucoll sees the communicator's error, and aborts it.
            if MACHINE.has_thread:
                raise
            self.comm.error, self.pending = error, [lambda: False]
        self.family.ended += not self.pending
        return not self.pending


class EnqueuedMessage:
    def __init__(self, comm, sends, address, nbytes, kind, peer, stream):
        self.comm, self.sends, self.peer, self.kind, self.stream = comm, sends, peer, kind, stream
        place = comm._place(address, nbytes)
        self.source, self.target = (place, None) if sends else (None, place)

    def begin(self):
        if self.sends:
            return [self.comm.wire.send(self.source, self.kind, self.peer)]
        return [self.comm.wire.receive(self.target, self.kind, self.peer)]


class EnqueuedCollective:
    """A collective: every rank sends its input to all ranks, and `form` makes this rank's result of all inputs."""

    def __init__(self, comm, name, source, target, given, taken, kind, stream, form, reaches=()):
        self.comm, self.stream, self.form = comm, stream, form
        self.reaches = reaches  # ranks to send to and to receive from; () is a collective around the ring
        # The label of the messages: ranks differing in the collective or in the places in windows do not match.
        self.kind = kind + 100 * sum(map(ord, name)) + 100_000 * comm.windows.used([(source, given), (target, taken)])
        self.source = comm._place(source, given)
        self.target = comm._place(target, taken) if taken else None

    def begin(self):
        wire, mine = self.comm.wire, self.source.copy()
        rooms = [numpy.empty(mine.size, numpy.uint8) for _ in range(wire.size)]
        receives = [wire.receive(room, self.kind, peer) for peer, room in enumerate(rooms)]

        def has_ended():
            receives[:] = [receive for receive in receives if not receive()]
            if not receives and self.target is not None:
                self.target[:] = self.form(rooms)
            return not receives

        return [*(wire.send(mine, self.kind, peer) for peer in range(wire.size)), has_ended]
