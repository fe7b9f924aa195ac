"""The kernels on the CPU: synchronous launches, and memory between protected pages."""

import ctypes
import functools
import mmap

import numpy

from gpucoll.device.launch import Kernels
from gpucoll.device.sources import text
from gpucoll.device.store import compile_shared, recipe, user_store
from harness.compiled import compile_all

CANARY = 0xA5
PROCESSORS, THREADS = 2, 64
MOST_BLOCKS = 3  # any grid gives the same result; with so few blocks, each block soon iterates
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Fault(Exception):
    """A kernel's action not allowed on a GPU, or a wait beyond the deadline."""


def library(source, *flags):
    """Return the shared object of `source`, built once; `flags` are further flags of the compiler."""
    build = functools.partial(compile_shared, source, *flags)
    return ctypes.CDLL(str(user_store().path(source, ".so", build, flags=recipe() + " ".join(flags))))


def libraries(sources):
    sources = list(sources)
    compile_all(sources)
    return [library(source) for source in sources]


def run(made, entry, blocks, threads, arguments):
    function = getattr(made, entry)
    function.restype = ctypes.c_char_p
    fault = function(blocks, threads, ctypes.c_void_p(arguments.ctypes.data))
    if fault is not None:
        raise Fault(fault.decode())


def device(units, change=lambda source: source, processors=PROCESSORS, threads=THREADS):
    """Return `Kernels` from `units`, lists of instances; a unit's text is changed and compiled when first needed."""
    unit_of = {instance: number for number in reversed(range(len(units))) for instance in units[number]}

    @functools.cache
    def made(number):
        return library(change(text(*units[number])))

    def load(instance):
        def launch(blocks, threads, arguments):
            return lambda stream: run(made(unit_of[instance]), instance.entry, min(blocks, MOST_BLOCKS), threads,
                                      arguments)

        return launch

    return Kernels(load, processors, threads=threads)


class Memory:
    """Room for an array, between two protected pages."""

    def __init__(self, nbytes=1 << 17):
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for guard in (first, first + mmap.PAGESIZE + room):
            assert _libc.mprotect(guard, mmap.PAGESIZE, 0) == 0
        self.bytes = numpy.frombuffer(pages, numpy.uint8, room, mmap.PAGESIZE)
        self.start = self.stop = 0

    def place(self, dtype, count, misaligned=0):
        """Return an array `misaligned` bytes after a multiple of 16, as near as possible to the page behind."""
        nbytes = count * dtype.itemsize
        start = len(self.bytes) - nbytes
        self.start = start - (start - misaligned) % 16
        self.stop = self.start + nbytes
        self.bytes[:] = CANARY
        return self.bytes[self.start:self.stop].view(dtype)

    def hold(self, values, misaligned=0):
        """Place an array with these values."""
        array = self.place(values.dtype, values.size, misaligned)
        array.view(numpy.uint8)[:] = values.view(numpy.uint8)
        return array

    def is_clean(self):
        """Return whether only the array was written."""
        return bool((self.bytes[:self.start] == CANARY).all() and (self.bytes[self.stop:] == CANARY).all())


def address(array):
    return array.ctypes.data
