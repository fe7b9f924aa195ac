"""Device memory: chunks on the host that are never given back, and a pool that hands them out again at once.

As CuPy's pool does it: by the stream that was current at the allocation, whatever other streams are still doing.
"""

import bisect
import collections
import threading

import numpy

from ._capture import synchronising
from ._machine import MACHINE, Queue, check
from .hostile import on

UNIT = 512
GARBAGE = 0xC5

_lock = threading.RLock()
_starts, _chunks = [], []
_free = collections.defaultdict(list)  # by device, stream and size


class Chunk:
    """A range of device memory; `live` while an array has it, or, of what is `given`, until it is forgotten."""

    def __init__(self, nbytes, device, given=None):
        room = numpy.full(nbytes + UNIT, GARBAGE, numpy.uint8) if given is None else given
        self.start = -(-room.ctypes.data // UNIT) * UNIT
        first = self.start - room.ctypes.data
        self.bytes, self.nbytes, self.device = room[first:first + nbytes], nbytes, device
        self.live = given is not None
        with _lock:
            place = bisect.bisect(_starts, self.start)
            _starts.insert(place, self.start)
            _chunks.insert(place, self)

    def forget(self):
        """From here on an address in it is that of nothing."""
        with _lock:
            self.live = False
            place = _chunks.index(self)
            del _starts[place], _chunks[place]


class Memory:
    """What an allocation gives; when the last array that uses it is gone, the pool has it again."""

    def __init__(self, nbytes):
        self.device_id = MACHINE.use()
        self.chunk, self.ptr = None, 0
        if nbytes:
            from .cuda import get_current_stream
            self._key = (self.device_id, get_current_stream().ptr, -(-nbytes // UNIT) * UNIT)
            MACHINE.settle()
            with _lock:
                self.chunk = _free[self._key].pop() if _free[self._key] else None
            if self.chunk is None:
                synchronising("cudaMalloc", self.device_id)
                self.chunk = Chunk(self._key[2], self.device_id)
            self.chunk.live = True
            self.ptr = self.chunk.start

    def __del__(self):
        if getattr(self, "chunk", None) is not None:
            self.chunk.live = False
            if on("memory"):
                MACHINE.due.append(lambda key=self._key, chunk=self.chunk: _spoil(key, chunk))
            else:
                with _lock:
                    _free[self._key].append(self.chunk)


def _spoil(key, chunk):
    """Memory that was freed is free once it is overwritten: as by the next one to have it, in the order of its stream.

    Where that stream is gone, as by the next stream of its handle, which comes after nothing.
    """
    queue = MACHINE.queues[key[0]] if key[1] in (0, 1) else MACHINE.objects.get(key[1])
    if isinstance(queue, Queue) and MACHINE.fault is None:
        MACHINE.put(queue, lambda: chunk.bytes.fill(GARBAGE) is None)
    with _lock:
        _free[key].append(chunk)


class UnownedMemory:
    """Memory that somebody else has, who lives as long."""

    def __init__(self, ptr, size, owner, device_id):
        self.ptr, self._owner, self.device_id = ptr, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.device_id = mem, mem.device_id
        self.ptr = mem.ptr + offset if mem.ptr else 0

    @property
    def device(self):
        from .cuda import Device
        return Device(self.device_id)

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def chunk_at(address):
    """The chunk that holds this address, or None."""
    with _lock:
        place = bisect.bisect(_starts, address) - 1
        found = _chunks[place] if place >= 0 else None
    return found if found is not None and address < found.start + found.nbytes else None


def view(address, nbytes, device):
    """The bytes there; cudaErrorIllegalAddress where they are not all in living memory of this device."""
    if nbytes == 0:
        return numpy.empty(0, numpy.uint8)
    chunk = chunk_at(address)
    check(chunk is not None and chunk.live, 700, f"no memory at {address:#x}")
    check(chunk.device == device, 700, f"{address:#x} is memory of GPU {chunk.device}, not {device}")
    first = address - chunk.start
    check(first + nbytes <= chunk.nbytes, 700, f"{nbytes} bytes at {address:#x} are more than were allocated")
    return chunk.bytes[first:first + nbytes]
