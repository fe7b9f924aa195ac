"""Memory that other processes of the host can map: it has no name, so that nothing is left of it when they end."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import weakref

import numpy

from gpucoll.arrays.accept import Array, address

_SERIALS = itertools.count(1)
_FILES = 1 << 20  # more than a process may have open
_WRITABLE = 0x200  # PyBUF_WRITE
_OWN: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()  # of this process, by key
_NOTHING = numpy.empty(0, numpy.uint8)

_Vector = ctypes.c_size_t * 2  # the C library's struct iovec: base and length
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Segment:
    """Memory of this process. `key` tells others of it: its file here, and a number that no later one has.

    Nobody else can map one that is not `shared`.
    """

    def __init__(self, nbytes: int, *, shared: bool = True) -> None:
        self.key = 0
        # Where the system has no such files the memory is this process' own, and `attach` raises.
        self._file = os.memfd_create("gpucoll") if shared and hasattr(os, "memfd_create") else -1
        try:
            # The system promises more than this machine has, and ends whoever takes it.
            if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than this machine has")
            if self._file >= 0:
                os.ftruncate(self._file, nbytes)
            self.row = _mapped(self._file, nbytes)
        except BaseException:
            self.close()
            raise
        self.key = next(_SERIALS) * _FILES + max(0, self._file)
        self.start, self.nbytes = address(self.row), nbytes
        _OWN[self.key] = self

    def close(self) -> None:
        """Let nobody map it any more; it lives until the last array on it has gone."""
        _OWN.pop(self.key, None)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def attach(process: int, key: int) -> Array:
    """Return the bytes of the segment `key` of `process`; raise OSError where the system forbids it."""
    own = _OWN.get(key) if process == os.getpid() else None
    if own is not None:
        return own.row
    file = os.open(f"/proc/{process}/fd/{key % _FILES}", os.O_RDWR)
    try:
        return _mapped(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def _mapped(file: int, nbytes: int) -> Array:
    return numpy.frombuffer(mmap.mmap(file, nbytes), numpy.uint8)


def at(place: int, nbytes: int) -> Array:
    """Return the bytes at an address of this process, which they do not keep alive."""
    return numpy.frombuffer(_view(place, nbytes, _WRITABLE), numpy.uint8) if nbytes else _NOTHING


class Copier:
    """Reads another process' memory by the system. Raises OSError where that forbids it, or the process is gone."""

    def __init__(self) -> None:
        self._call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
        if self._call is not None:
            self._call.restype = ctypes.c_ssize_t
            self._call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
                                   ctypes.c_ulong)

    def read(self, process: int, there: int, here: int, nbytes: int) -> None:
        """Copy from address `there` of `process` to `here`, all at once."""
        if self._call is None:
            raise OSError("this system has no process_vm_readv")
        mine, theirs = (_Vector(start, nbytes) for start in (here, there))
        if self._call(process, mine, 1, theirs, 1, 0) != nbytes:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
