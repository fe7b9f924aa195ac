"""Device memory and CuPy's memory pool: chunks of host memory, never given back, handed out again at once.

As in CuPy, freed memory serves the next allocation of equal size on the same stream (the stream current at the
allocation), even while other streams still use the memory. Rule of CUDA: an access outside of living memory of the
device is cudaErrorIllegalAddress.
"""

import bisect
import collections
import ctypes
import threading

import numpy

from gpucoll.errors import UsageError

from ._capture import synchronising
from ._machine import MACHINE, Queue, check
from .hostile import on

UNIT = 512
GARBAGE = 0xC5
CONSTANT = 1 << 16  # the most bytes of a module's variable that are looked for
variables = set()  # addresses of `__constant__` and `__device__` variables of modules

# Reentrant: a finalizer may free memory on a thread holding the lock.
_lock = threading.RLock()
_starts, _chunks = [], []  # sorted by address, for bisection
foreign = []  # not empty: all other memory of the process is memory of each GPU, see torch_streams.py
_free = collections.defaultdict(list)  # free chunks by (device, stream, size)


class Chunk:
    """A range of device memory. `live`: used by an array, or, for memory `given` by malloc, not yet freed."""

    def __init__(self, nbytes, device, given=None):
        # UNIT spare bytes make room for CuPy's alignment to UNIT.
        room = numpy.full(nbytes + UNIT, GARBAGE, numpy.uint8) if given is None else given
        self.start = -(-room.ctypes.data // UNIT) * UNIT
        first = self.start - room.ctypes.data
        self.bytes, self.nbytes, self.device = room[first:first + nbytes], nbytes, device
        self.live = given is not None
        self.spoiler = None  # the stream that overwrites the freed memory
        self.reads, self.writes = [], []  # the last accesses, see _order.py
        with _lock:
            place = bisect.bisect(_starts, self.start)
            _starts.insert(place, self.start)
            _chunks.insert(place, self)

    def forget(self):
        """Remove the chunk, so that addresses in the chunk become invalid."""
        with _lock:
            self.live = False
            place = _chunks.index(self)
            del _starts[place], _chunks[place]


class Memory:
    """An allocation; the pool gets the memory back after the end of the last array in the memory."""

    def __init__(self, nbytes):
        self.device_id, self.size = MACHINE.use(), nbytes
        limit = _pool.get_limit()
        if limit and _pool.used_bytes() + nbytes > limit:
            raise OutOfMemoryError(f"Out of memory allocating {nbytes:,} bytes (limit set to: {limit:,} bytes).")
        self.chunk, self.ptr = None, 0
        if nbytes:
            from .cuda import get_current_stream
            self._key = (self.device_id, get_current_stream().ptr, -(-nbytes // UNIT) * UNIT)
            # Memory freed before must be available to this allocation, as in CuPy.
            MACHINE.settle()
            with _lock:
                self.chunk = _free[self._key].pop() if _free[self._key] else None
            if self.chunk is None:
                synchronising("cudaMalloc", self.device_id)
                self.chunk = Chunk(self._key[2], self.device_id)
            self.chunk.live = True
            # A destroyed stream leaves memory to the stream with its handle: that stream's work is the next to write.
            if self.chunk.spoiler is not _queue(self._key):
                self.chunk.spoiler = None
            self.ptr = self.chunk.start

    def __del__(self):
        if getattr(self, "chunk", None) is not None:
            self.chunk.live = False
            # Deferred: a finalizer may run inside any lock, and on the GPU's thread.
            if on("memory"):
                MACHINE.due.append(lambda key=self._key, chunk=self.chunk: _spoil(key, chunk))
            else:
                with _lock:
                    _free[self._key].append(self.chunk)


def _spoil(key, chunk):
    """Return freed memory to the pool, overwritten in the order of its stream as by the next owner.

    A missing synchronization then shows as garbage. For a destroyed stream, a new stream with the same handle, if any,
    overwrites the memory, without order after the old stream.
    """
    queue = _queue(key)
    if queue is not None and MACHINE.fault is None:
        chunk.spoiler = queue
        MACHINE.put(queue, lambda: _overwritten(chunk, queue))
    with _lock:
        _free[key].append(chunk)


def _queue(key):
    """Return the stream to which freed memory belongs now, None if there is none."""
    queue = MACHINE.queues[key[0]] if key[1] in (0, 1) else MACHINE.objects.get(key[1])
    return queue if isinstance(queue, Queue) else None


def _overwritten(chunk, queue):
    """Overwrite memory, unless an array on another stream has it already; return True."""
    if chunk.spoiler is queue:
        chunk.bytes.fill(GARBAGE)
    return True


class UnownedMemory:
    """Memory of another library; `owner` is kept alive."""

    def __init__(self, ptr, size, owner, device_id):
        self.ptr, self._owner, self.device_id = ptr, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.device_id = mem, mem.device_id
        self.ptr = mem.ptr + offset if mem.ptr else 0

    def __int__(self):
        return self.ptr

    def _copied(self, size, stream, other, to_host):
        """Copy between this memory and an address of the host or of a GPU, in the order of a stream."""
        from .cuda import get_current_stream
        host = chunk_at(other) is None
        here = view(self.ptr, size, self.device_id)
        there = numpy.frombuffer((ctypes.c_char * size).from_address(other), numpy.uint8) if host \
            else view(other, size, chunk_at(other).device)
        dst, src = (there, here) if to_host else (here, there)
        MACHINE.submit(MACHINE.queue((get_current_stream() if stream is None else stream).ptr),
                       lambda: lambda: numpy.copyto(dst, src) is None)

    def copy_from_device_async(self, src, size, stream=None):
        self._copied(size, stream, int(src.ptr), to_host=False)

    def copy_from_host_async(self, mem, size, stream=None):
        self._copied(size, stream, _address(mem), to_host=False)

    def copy_to_host_async(self, mem, size, stream=None):
        self._copied(size, stream, _address(mem), to_host=True)

    def copy_from_async(self, mem, size, stream=None):
        self._copied(size, stream, _address(mem), to_host=False)

    def _then_wait(name):
        def call(self, mem, size):
            from .cuda import get_current_stream
            getattr(self, f"{name}_async")(mem, size)
            get_current_stream().synchronize()

        return call

    copy_from_device, copy_from_host, copy_to_host, copy_from = map(
        _then_wait, ("copy_from_device", "copy_from_host", "copy_to_host", "copy_from"))
    del _then_wait

    def memset_async(self, value, size, stream=None):
        from .cuda import get_current_stream
        row = view(self.ptr, size, self.device_id)
        MACHINE.submit(MACHINE.queue((get_current_stream() if stream is None else stream).ptr),
                       lambda: lambda: row.fill(value) is None)

    memset = memset_async

    @property
    def device(self):
        from .cuda import Device
        return Device(self.device_id)

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)


def _address(mem):
    """Return the address of memory: an object of ctypes or of CuPy, or a number."""
    return int(getattr(mem, "ptr", None) or getattr(mem, "value", None) or mem)


def chunk_at(address):
    """Return the chunk containing this address, or None."""
    with _lock:
        place = bisect.bisect(_starts, address) - 1
        found = _chunks[place] if place >= 0 else None
    return found if found is not None and address < found.start + found.nbytes else None


def view(address, nbytes, device):
    """Return the bytes at `address`; raise cudaErrorIllegalAddress unless all are living memory of `device`."""
    if nbytes == 0:
        return numpy.empty(0, numpy.uint8)
    chunk = chunk_at(address)
    if chunk is None and foreign:
        return numpy.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
    if chunk is None and any(start <= address < start + CONSTANT for start in variables):
        return numpy.frombuffer((ctypes.c_char * nbytes).from_address(address), numpy.uint8)
    check(chunk is not None and chunk.live, 700, f"no memory at {address:#x}")
    check(chunk.device == device, 700, f"{address:#x} is memory of GPU {chunk.device}, not {device}")
    first = address - chunk.start
    check(first + nbytes <= chunk.nbytes, 700, f"{nbytes} bytes at {address:#x} are more than were allocated")
    return chunk.bytes[first:first + nbytes]


class OutOfMemoryError(MemoryError):
    """The limit of a pool."""


class MemoryPool:
    """The figures of CuPy's pool; all memory of a process comes from a single one."""

    _limit = 0  # of all pools, as these are one

    def __init__(self, allocator=None):
        pass

    def malloc(self, size):
        return alloc(size)

    def used_bytes(self):
        MACHINE.settle()
        with _lock:
            return sum(chunk.nbytes for chunk in _chunks if chunk.live)

    def total_bytes(self):
        with _lock:
            return sum(chunk.nbytes for chunk in _chunks)

    def free_bytes(self):
        return self.total_bytes() - self.used_bytes()

    def n_free_blocks(self):
        MACHINE.settle()
        with _lock:
            return sum(map(len, _free.values()))

    def free_all_blocks(self, stream=None):
        MACHINE.settle()
        with _lock:
            for chunks in _free.values():
                for chunk in chunks:
                    chunk.forget()
                chunks.clear()

    def set_limit(self, size=None, fraction=None):
        MemoryPool._limit = size or int((fraction or 0) * (1 << 30))

    def get_limit(self):
        return self._limit


class PinnedMemoryPool:
    def __init__(self, allocator=None):
        pass

    def malloc(self, size):
        from ._ipc import alloc_pinned_memory
        return alloc_pinned_memory(size)

    def n_free_blocks(self):
        return 0

    def free_all_blocks(self):
        pass


_pool, _pinned_pool = MemoryPool(), PinnedMemoryPool()


def alloc(size):
    return MemoryPointer(Memory(size), 0)


malloc_managed = alloc


def set_allocator(allocator=None):
    """Accept a pool's allocator, as all memory comes from the one pool; refuse a function of the program."""
    if allocator not in (None, alloc) and not isinstance(getattr(allocator, "__self__", None), MemoryPool):
        raise UsageError("an allocator of the program has no counterpart on the host; pass a MemoryPool's malloc",
                         code="GC-EMULATION")


def get_default_memory_pool():
    return _pool


def get_default_pinned_memory_pool():
    return _pinned_pool
