"""NCCL's windows: memory of ncclMemAlloc registered by all ranks together, after nccl.h of version 2.27.

Rules of NCCL: ncclMemFree waits for no work, only memory of ncclMemAlloc is registered, all ranks register together,
and the arrays of a collective have the same places in windows on all ranks.
"""

import zlib

from ._ipc import unmap
from ._memory import GARBAGE
from .cuda import runtime

_allocated = {}  # bytes by address, of ncclMemAlloc
INVALID_ARGUMENT = 4


class WindowTable:
    """A communicator's windows: address and bytes by number. `count` counts collectives with all arrays in windows."""

    def __init__(self):
        self.places, self.count = {}, 0

    def used(self, arrays):
        """Return a number for the places of a collective's arrays in windows; unequal ranks do not match."""
        places = [self._place(*array) for array in arrays]
        self.count += None not in places
        return zlib.crc32(repr(places).encode()) % 997

    def _place(self, address, nbytes):
        return next(((number, address - start) for number, (start, length) in self.places.items()
                     if nbytes and start <= address and address + nbytes <= start + length), None)


def functions(communicators):
    """Return the library's functions for windows by name; each function returns NCCL's code."""
    def register(comm, start, nbytes, window, flags):
        if _allocated.get(start, 0) < nbytes:
            return INVALID_ARGUMENT
        communicators[comm]._meet_all()
        places = communicators[comm].windows.places
        window._obj.value = 1 + len(places)
        places[1 + len(places)] = start, nbytes
        return 0

    def deregister(comm, window):
        return 0 if communicators[comm].windows.places.pop(window, None) else INVALID_ARGUMENT

    return {"ncclMemAlloc": _allocate, "ncclMemFree": _free, "ncclCommWindowRegister": register,
            "ncclCommWindowDeregister": deregister}


def _allocate(pointer, nbytes):
    pointer._obj.value = runtime.malloc(nbytes)
    _allocated[pointer._obj.value] = nbytes
    return 0


def _free(pointer):
    if _allocated.pop(pointer, None) is None:
        return INVALID_ARGUMENT
    unmap(pointer)[:] = GARBAGE  # a page fault on a GPU
    return 0
