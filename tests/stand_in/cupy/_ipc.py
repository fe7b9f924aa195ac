"""Memory beside the pool, which other processes can map by a handle, and memory of the host that a GPU reaches."""

import ctypes
import mmap
import os
import struct

import numpy

from ._machine import MACHINE, check
from ._memory import Chunk

HANDLE = struct.Struct("=3q40x")  # process, file, bytes: 64 bytes as CUDA's

_own, _opened = {}, {}  # by address: file, what is mapped, and the chunk; what is mapped


def malloc(size):
    file = os.memfd_create("stand-in")
    os.ftruncate(file, size)
    row = _mapped(file, size)
    row[:] = 0xC5
    _own[row.ctypes.data] = file, row, Chunk(size, MACHINE.device(), given=row)
    return row.ctypes.data


def free(ptr):
    if ptr:
        check(ptr in _own, 1, f"no allocation begins at {ptr:#x}")
        file, _, chunk = _own.pop(ptr)
        os.close(file)
        chunk.forget()


def memset(ptr, value, size):
    row = _own[ptr][1]
    check(size <= row.nbytes, 1)
    row[:size] = value


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
    return (ctypes.c_char * size)()


def _mapped(file, nbytes):
    return numpy.frombuffer(mmap.mmap(file, nbytes), numpy.uint8)
