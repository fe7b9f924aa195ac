"""The calls of NCCL, as work of a stream: the launch of a group, messages, collectives and reductions."""

import ml_dtypes
import numpy

from ._machine import MACHINE
from ._wire import Mismatch
from .hostile import on

KINDS = [numpy.dtype(kind) for kind in ("i1 u1 i4 u4 i8 u8 f2 f4 f8".split())] + [
    numpy.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
PAIRS = (numpy.add, numpy.multiply, numpy.maximum, numpy.minimum, numpy.add)
_AVG = 4


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


def reduced(kind, op, rooms, root=None):
    """Return the reduction in rank order: short floats in float32, an integer average rounded towards zero."""
    dtype = KINDS[kind]
    if on("rounding") and dtype.kind not in "iu":
        return _by_hops(dtype, op, [room.view(dtype) for room in rooms], root)
    wide = numpy.float32 if dtype.itemsize < 4 and dtype.kind not in "iu" else dtype
    with numpy.errstate(all="ignore"):
        total = rooms[0].view(dtype).astype(wide)
        for room in rooms[1:]:
            total = PAIRS[op](total, room.view(dtype).astype(wide))
        total = total / len(rooms) if op == _AVG else total
        return total.astype(dtype).view(numpy.uint8)


def _by_hops(dtype, op, rooms, root):
    """Return the reduction around the ring, rounded at each rank; a part ends at a rank and begins at the next rank."""
    wide, size = numpy.float32 if dtype.itemsize < 4 else dtype, len(rooms)
    with numpy.errstate(all="ignore"):
        if op == _AVG:  # NCCL divides the inputs
            rooms = [(room.astype(wide) * wide.type(1 / size) if wide is dtype else room.astype(wide) / wide(size)
                      ).astype(dtype) for room in rooms]
        split = [numpy.array_split(room, size) if root is None else [room] for room in rooms]
        for part, last in enumerate(range(size) if root is None else [root]):
            total = split[(last + 1) % size][part]
            for hop in range(2, size + 1):
                total = PAIRS[op](split[(last + hop) % size][part].astype(wide), total.astype(wide)).astype(dtype)
            split[0][part] = total
        return numpy.concatenate(split[0]).view(numpy.uint8)
