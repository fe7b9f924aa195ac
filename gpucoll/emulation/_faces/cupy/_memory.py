"""Device memory and CuPy's memory pool: chunks of host memory, never given back, handed out again at once.

As in CuPy, freed memory serves the next allocation of equal size on the same stream (the stream current at the
allocation), even while other streams still use the memory. Rule of CUDA: an access outside of living memory of the
device is cudaErrorIllegalAddress.
"""

import bisect
import collections
import contextlib
import ctypes
import functools
import threading
import time
import weakref

import numpy

from gpucoll.errors import UsageError

from . import _order
from ._capture import synchronising
from ._clocks import host_clock
from ._machine import MACHINE, Queue, check
from .hostile import on

UNIT = 512
TOTAL = 1 << 36  # the bytes that a GPU says to have
GARBAGE = 0xC5
IDLE = 0.25  # processor seconds, after which a copy to pinned memory is done although no thread waits
CONSTANT = 1 << 16  # the most bytes of a module's variable that are looked for
peers = set()  # pairs of a device and another one whose memory it may use
variables = set()  # addresses of `__constant__` and `__device__` variables of modules

# Reentrant: a finalizer may free memory on a thread holding the lock.
_lock = threading.RLock()
_starts, _chunks = [], []  # sorted by address, for bisection
pinned = []  # pinned memory of the host in use: pairs of address and bytes
foreign = []  # not empty: all other memory of the process is memory of each GPU, see torch_streams.py
_free = collections.defaultdict(list)  # free chunks by (device, stream, size, pool)
_freed = collections.defaultdict(list)  # by (device, stream): chunks freed since the last allocation there


class Chunk:
    """A range of device memory. `live`: used by an array, or, for memory `given` by malloc, not yet freed."""

    def __init__(self, nbytes, device, given=None, unit=UNIT, pool=None):
        # UNIT spare bytes make room for CuPy's alignment to UNIT, and UNIT bytes lie on both sides as guards.
        room = numpy.full(nbytes + 3 * UNIT, GARBAGE, numpy.uint8) if given is None else given
        self.start = -(-room.ctypes.data // unit) * unit + UNIT * (given is None)
        first = self.start - room.ctypes.data
        self.bytes, self.nbytes, self.device = room[first:first + nbytes], nbytes, device
        self.guards = [] if given is not None else [room[first - UNIT:first], room[first + nbytes:][:UNIT]]
        self.live = self.is_written = given is not None
        self.reads, self.writes = [], []  # the last accesses, see _order.py
        self.size, self.made, self.pool, self.is_used = nbytes, "", pool, False  # `made`: the line of the allocation
        with _lock:
            place = bisect.bisect(_starts, self.start)
            _starts.insert(place, self.start)
            _chunks.insert(place, self)

    def owned(self, size):
        """Give the memory to a new allocation."""
        self.size, self.made, self.is_written, self.live = size, _order.line() if on("order") else "", False, True
        # Whatever comes now is after the ended work of destroyed streams. Null streams are no objects.
        self.reads, self.writes = ([one for one in kept if (q := one.queue).ended < one.count or MACHINE.objects.get(
            q.handle, not q.handle and q) is q] for kept in (self.reads, self.writes))

    def clean(self, size):
        """Return whether each guard, and the rest behind `size` bytes, has the bytes of fresh memory."""
        return [bool((one == GARBAGE).all()) for one in (*self.guards, self.bytes[size:])]

    def forget(self):
        """Remove the chunk, so that addresses in the chunk become invalid."""
        with _lock:
            self.live = False
            place = _chunks.index(self, bisect.bisect_left(_starts, self.start))
            del _starts[place], _chunks[place]


class BaseMemory:
    """Memory of a GPU at `ptr`."""


class Memory(BaseMemory):
    """An allocation; the pool gets the memory back after the end of the last array in the memory."""

    def __init__(self, nbytes, pool=None):
        self.device_id, self.size, pool = MACHINE.use(), nbytes, pool or _pool
        limit = pool.get_limit()
        if limit and pool.used_bytes() + nbytes > limit:
            raise OutOfMemoryError(nbytes, pool.total_bytes(), limit)
        self.chunk, self.ptr = None, 0
        if nbytes:
            self._key = (self.device_id, _ptr(), -(-nbytes // UNIT) * UNIT, pool)
            # Memory freed before must be available to this allocation, as in CuPy.
            MACHINE.settle()
            # As by the owner of this allocation, which could be any of these: a missing order shows as garbage.
            for chunk in _freed.pop(self._key[:2], ()):
                if on("memory") and MACHINE.fault is None:
                    MACHINE.put(MACHINE.queue(self._key[1]), functools.partial(_overwritten, chunk))
            with contextlib.suppress(IndexError):
                self.chunk = _free[self._key].pop()
            if self.chunk is None:
                synchronising("cudaMalloc", self.device_id)
                self.chunk = Chunk(self._key[2], self.device_id, pool=pool)
            self.chunk.owned(nbytes)
            self.ptr = self.chunk.start

    def free(self):
        if getattr(self, "chunk", None) is not None:
            chunk, self.chunk = self.chunk, None
            chunk.live = chunk.is_used = False
            # This thread knows that some accesses have ended: they are before all of the next owner, in any thread.
            chunk.reads, chunk.writes = ([one for one in kept if host_clock().get(one.queue, 0) < one.count]
                                         for kept in (chunk.reads, chunk.writes))
            # Deferred: a finalizer may run inside any lock, and on the GPU's thread.
            MACHINE.due.append(lambda key=self._key: (_free[key].append(chunk), _freed[key[:2]].append(chunk)))

    __del__ = free


def bounded(name, addresses):
    """Return a function for the context of a kernel's run: UsageError if it writes beside the memory at an address.

    Called by the launch: before the kernel runs, the host may free the memory and make a shorter allocation there.
    """
    given = [(one, one.size, one.made) for one in ({*map(chunk_at, addresses)} - {None} if on("memory") else ())]

    @contextlib.contextmanager
    def running():
        before = [chunk.clean(size) for chunk, size, _ in given]
        yield
        for (chunk, size, made), clean in zip(given, before, strict=True):
            if chunk.clean(size) != clean:
                raise UsageError(f"kernel {name} writes out of bounds: beside the {size} bytes that were allocated "
                                 f"at {made}", code="GC-EMULATION")

    return running


class Adopted:
    """Memory of an array of NumPy as memory of a GPU, for as long as an array of the GPU uses it."""

    def __init__(self, host, device):
        self.device_id, self.ptr, self.size = device, host.ctypes.data, host.nbytes
        self._chunk, self._host = Chunk(self.size, device, bytes_at(self.ptr, self.size), unit=1), host

    def __del__(self):
        if hasattr(self, "_chunk"):
            # The chunk keeps the memory until the work under way has ended.
            self._chunk.host, self._chunk.live = self._host, False
            MACHINE.due.append(lambda chunk=self._chunk: _after_all(chunk.forget))


def adopted(host, device):
    """Return a pointer to the memory of a new array of NumPy. Most results need none, so nothing is done before."""
    return MemoryPointer(Adopted(host, device) if host.size else Memory(0), 0)


def _after_all(action):
    """Do `action` once all work given so far has ended, on a stream that orders nothing else."""
    with MACHINE.news:
        under_way = [(queue, queue.issued) for queue in MACHINE.busy]
        if not under_way:
            return action()
        MACHINE.queues.append(Queue(0, False, channel=-1))
        MACHINE.put(MACHINE.queues[-1], lambda: action() is None, under_way)


def _overwritten(chunk):
    """Overwrite memory, unless an owner uses it, perhaps on another stream; return True."""
    if not chunk.is_used:
        chunk.bytes.fill(GARBAGE)
    return True


class UnownedMemory(BaseMemory):
    """Memory of another library; `owner` is kept alive."""

    def __init__(self, ptr, size, owner, device_id=-1):
        chunk = chunk_at(ptr)
        there = chunk.device if chunk else MACHINE.device()
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id if device_id >= 0 else there


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.device_id = mem, mem.device_id
        self.ptr = mem.ptr + offset if mem.ptr else 0

    def __int__(self):
        return self.ptr

    def copy_from_async(self, mem, size, stream=None):
        copied(_of(stream), self.ptr, _address(mem), size)

    copy_from_device_async = copy_from_host_async = copy_from_async

    def copy_to_host_async(self, mem, size, stream=None):
        copied(_of(stream), _address(mem), self.ptr, size)

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
        row, queue = view(self.ptr, size, self.device_id), _of(stream)
        MACHINE.submit(queue, lambda: lambda: row.fill(value) is None)
        _order.touched(queue, [], [(self.ptr, self.ptr + size)])

    memset = memset_async

    @property
    def device(self):
        from .cuda import Device
        return Device(self.device_id)

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset


def _ptr(stream=None):
    from .cuda import get_current_stream
    return (get_current_stream() if stream is None else stream).ptr


def _of(stream):
    """Return the queue of a stream, by default the current one."""
    return MACHINE.queue(_ptr(stream))


def copied(queue, dst, src, size):
    """Copy between addresses of GPUs and of the host in the order of a stream, as cudaMemcpyAsync does.

    Only pinned memory of the host is copied late, and to the host when a thread waits, or after IDLE. The host
    may not read or change the memory before the end: the bytes to read are overwritten first, a change is an error.
    """
    chunks = [chunk_at(address) for address in (dst, src)]
    to, begun = (bytes_at(address, size) if chunk is None else view(address, size, chunk.device)
                 for address, chunk in zip((dst, src), chunks, strict=True))
    is_late = [chunk is not None or is_pinned(address) for address, chunk in zip((dst, src), chunks, strict=True)]
    staged = begun.copy() if chunks[1] is None else begun
    to_pinned = chunks[0] is None and is_late[0]
    if to_pinned:
        to[:] = GARBAGE
    place, begun_at = _order.line() if is_late[1] and chunks[1] is None else "", time.process_time()

    def copy():
        if to_pinned and not MACHINE.hurry and time.process_time() < begun_at + IDLE:
            return False
        if place and not numpy.array_equal(staged, begun):
            raise UsageError(f"the host has changed pinned memory before the copy of {place} has ended; wait for the "
                             "stream first", code="GC-EMULATION")
        numpy.copyto(to, staged)
        return True

    MACHINE.submit(queue, lambda: copy)
    _order.touched(queue, *([(address, address + size)] if chunk is not None else []
                      for address, chunk in zip((src, dst), reversed(chunks), strict=True)))
    if not is_late[0]:
        MACHINE.finish([(queue, queue.issued)])


def is_pinned(address):
    """Return whether the address is of pinned memory of the host, by the rule `memory`."""
    return any(start <= address < start + size for start, size in pinned)


def _address(mem):
    """Return the address of memory: an object of ctypes or of CuPy, or a number."""
    return int(getattr(mem, "ptr", None) or getattr(mem, "value", None) or mem)


def chunk_at(address):
    """Return the chunk containing this address, or None."""
    with _lock:
        place = bisect.bisect(_starts, address) - 1
        found = _chunks[place] if place >= 0 else None
    return found if found is not None and address < found.start + found.nbytes else None


def bytes_at(address, nbytes):
    """Return the bytes at an address, which nothing checks."""
    return numpy.frombuffer((ctypes.c_char * nbytes).from_address(address), numpy.uint8)


def view(address, nbytes, device):
    """Return the bytes at `address`; raise cudaErrorIllegalAddress unless all are living memory of `device`."""
    if nbytes == 0:
        return numpy.empty(0, numpy.uint8)
    chunk = chunk_at(address)
    if chunk is None and (foreign or any(start <= address < start + CONSTANT for start in variables)):
        return bytes_at(address, nbytes)
    check(chunk is not None and chunk.live, 700, f"no memory at {address:#x}")
    check(chunk.device == device, 700, f"{address:#x} is memory of GPU {chunk.device}, not {device}")
    first = address - chunk.start
    check(first + nbytes <= chunk.nbytes, 700, f"{nbytes} bytes at {address:#x} are more than were allocated")
    return chunk.bytes[first:first + nbytes]


class OutOfMemoryError(MemoryError):
    """The limit of a pool."""

    def __str__(self):
        size, total, limit = self.args
        return (f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes, limit set to: {limit:,} "
                "bytes).")


class MemoryPool:
    """A pool of its own, with a part for each stream."""

    def __init__(self, allocator=None):
        self._limit = 0

    def malloc(self, size):
        return MemoryPointer(Memory(size, self), 0)

    def _chunks(self):
        MACHINE.settle()
        return [chunk for chunk in [*_chunks] if (chunk.pool or _pool) is self]

    def used_bytes(self):
        return sum(chunk.nbytes for chunk in self._chunks() if chunk.live)

    def total_bytes(self):
        return sum(chunk.nbytes for chunk in self._chunks())

    def free_bytes(self):
        return self.total_bytes() - self.used_bytes()

    def n_free_blocks(self):
        MACHINE.settle()
        return sum(len(chunks) for key, chunks in [*_free.items()] if key[3] is self)

    def free_all_blocks(self, stream=None):
        MACHINE.settle()
        for key, chunks in [*_free.items()]:
            while chunks and key[3] is self and (stream is None or key[1] == stream.ptr):
                with contextlib.suppress(IndexError):  # another thread was first
                    chunk = chunks.pop()
                    chunk.forget()
                    _after_all(lambda kept=chunk: None)  # the work under way may use the memory

    def set_limit(self, size=None, fraction=None):
        if (size or 0) < 0 or not 0 <= (fraction or 0) <= 1:
            raise ValueError("a limit is a number of bytes, or a fraction from 0 to 1")
        self._limit = size or int((fraction or 0) * TOTAL)

    def get_limit(self):
        return self._limit


MemoryAsyncPool = MemoryPool


class PinnedMemoryPool(MemoryPool):
    def malloc(self, size):
        from ._ipc import alloc_pinned_memory
        return alloc_pinned_memory(size)

    def n_free_blocks(self):
        return 0

    free_all_blocks = n_free_blocks


_pool, _pinned_pool = MemoryPool(), PinnedMemoryPool()
DEFAULT = _malloc = malloc_managed = malloc_async = _pool.malloc
_allocators, _of_thread = [DEFAULT], threading.local()


def get_allocator():
    """Return the allocator of the `with` block of this thread, else that of all threads."""
    return (getattr(_of_thread, "allocators", None) or _allocators)[-1]


def alloc(size):
    return get_allocator()(size)


def set_allocator(allocator=None):
    if getattr(_of_thread, "allocators", None):
        raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
    _allocators[-1] = allocator or MemoryPool().malloc


@contextlib.contextmanager
def using_allocator(allocator=None):
    _of_thread.allocators = [*getattr(_of_thread, "allocators", ()), allocator or MemoryPool().malloc]
    try:
        yield
    finally:
        _of_thread.allocators.pop()


class PythonFunctionAllocator:
    """An allocator of the program: functions of size and device that return and take an address."""

    def __init__(self, malloc_func, free_func):
        self._malloc, self._free = malloc_func, free_func

    def malloc(self, size):
        device = MACHINE.device()
        memory = UnownedMemory(self._malloc(size, device), size, self, device)
        weakref.finalize(memory, self._free, memory.ptr, device)
        return MemoryPointer(memory, 0)


def get_default_memory_pool():
    return _pool


def get_default_pinned_memory_pool():
    return _pinned_pool
