"""NCCL's windows: memory of ncclMemAlloc that all ranks register together, after nccl.h of version 2.27."""

import zlib

from .cuda import runtime

_allocated = {}  # by ncclMemAlloc: address and bytes
INVALID_ARGUMENT = 4


class Windows:
    """Those of a communicator by their numbers, address and bytes; `count` is of collectives on arrays in windows."""

    def __init__(self):
        self.places, self.count = {}, 0

    def used(self, arrays):
        """A number for the places of a collective's arrays in windows: other ones are taken for another collective."""
        places = [self._place(*array) for array in arrays]
        self.count += None not in places
        return zlib.crc32(repr(places).encode()) % 997

    def _place(self, address, nbytes):
        return next(((number, address - start) for number, (start, length) in self.places.items()
                     if nbytes and start <= address and address + nbytes <= start + length), None)


def functions(communicators):
    """What the library has, by name: each returns a code."""
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
    runtime.free(pointer)
    return 0
