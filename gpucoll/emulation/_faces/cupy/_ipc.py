"""Memory of cudaMalloc with cudaIpc handles for other processes, and CuPy's pinned memory of the host.

Rules of CUDA: a handle opens only in another process, a freed or exported pointer is the start of an allocation.
"""

import collections
import ctypes
import mmap
import os
import struct

import numpy

from ._capture import synchronising
from ._machine import MACHINE, check
from ._memory import GARBAGE, Chunk, chunk_at, pinned, view
from .hostile import on

HANDLE = struct.Struct("=3q40x")  # process, file, bytes: 64 bytes like CUDA's handle

_own, _opened = {}, {}  # by address: (file, mapped bytes, chunk); mapped bytes
_pinned = collections.defaultdict(list)  # by size: pinned memory for reuse


def malloc(size):
    device = MACHINE.use()
    synchronising("cudaMalloc", device)
    file = os.memfd_create("emulated")
    os.ftruncate(file, size)
    row = _mapped(file, size)
    if MACHINE.has_thread:  # a program's memory; gpucoll's own is set at once
        row[:] = GARBAGE
    _own[row.ctypes.data] = file, row, Chunk(size, device, given=row)
    return row.ctypes.data


def free(ptr):
    if ptr and MACHINE.runs_here():  # a finalizer on the GPU's own thread would wait for itself
        MACHINE.due.append(lambda: free(ptr))
    elif ptr:
        check(ptr in _own, 1, f"no allocation begins at {ptr:#x}")
        synchronising("cudaFree", _own[ptr][2].device)
        unmap(ptr)


def unmap(ptr):
    """Take memory away, also from work under way; return the bytes."""
    file, row, chunk = _own.pop(ptr)
    os.close(file)
    chunk.forget()
    return row


def memset(ptr, value, size):
    check(size <= _own[ptr][1].nbytes, 1)
    if on("null_stream"):
        memsetAsync(ptr, value, size, 0)
    else:
        _own[ptr][1][:size] = value


def memsetAsync(ptr, value, size, stream):
    chunk = chunk_at(ptr)
    check(chunk is not None and chunk.live, 1, f"no living allocation has {ptr:#x}")
    row = view(ptr, size, chunk.device)
    MACHINE.submit(MACHINE.queue(stream), lambda: lambda: row.fill(value) is None)


def ipcGetMemHandle(devPtr):
    check(devPtr in _own, 1, f"no allocation begins at {devPtr:#x}")
    file, row, _ = _own[devPtr]
    return HANDLE.pack(os.getpid(), file, row.nbytes)


def ipcOpenMemHandle(handle, flags=1):
    process, number, nbytes = HANDLE.unpack(handle)
    check(process != os.getpid(), 201, "a handle cannot be opened in the process that it is of")
    file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    row = _mapped(file, nbytes)
    os.close(file)
    _opened[row.ctypes.data] = row
    return row.ctypes.data


def ipcCloseMemHandle(devPtr):
    check(devPtr in _opened, 1, f"no handle was opened at {devPtr:#x}")
    del _opened[devPtr]


def alloc_pinned_memory(size):
    """Return memory of the host; by the rule `memory` rounded up, reused and not cleared, as by CuPy's pool."""
    if not on("memory"):
        return (ctypes.c_char * size)()
    rounded = max(1, -(-size // 512)) * 512
    if not _pinned[rounded]:
        synchronising("cudaHostAlloc", MACHINE.use())
        _pinned[rounded].append(bytearray([GARBAGE]) * rounded)
    room = _pinned[rounded].pop()
    place = ctypes.addressof(ctypes.c_char.from_buffer(room)), rounded
    pinned.append(place)

    def given_back(_):
        pinned.remove(place)
        _pinned[rounded].append(room)

    return type("Pinned", (ctypes.c_char * rounded,), {"__del__": given_back}).from_buffer(room)


def _mapped(file, nbytes):
    return numpy.frombuffer(mmap.mmap(file, nbytes), numpy.uint8)
