"""The checks of tests/kernels on a GPU: what they have on the host is copied there and back around every launch."""

import ctypes
import weakref
from typing import ClassVar

import checks
import cupy
import emulation
import numpy

from gpucoll.device.cuda import CudaDevice

MARGIN = 64  # bytes on either side of an array that must stay as they are


class Memory(emulation.Memory):
    """Host memory whose surroundings of an array go to the GPU as well."""

    known: ClassVar = weakref.WeakSet()

    def __init__(self, nbytes=1 << 17):
        super().__init__(nbytes)
        Memory.known.add(self)

    def around(self):
        """The addresses that are copied."""
        first = self.bytes.ctypes.data
        return first + max(0, self.start - MARGIN), first + min(len(self.bytes), self.stop + MARGIN)


class Room:
    """A range of host memory and its copy on the GPU, which misses a multiple of 16 by as much."""

    def __init__(self, low, high):
        self.low, self.high = low, high
        self._host = numpy.ndarray(high - low, numpy.uint8, (ctypes.c_uint8 * (high - low)).from_address(low))
        room = cupy.empty(high - low + 16, numpy.uint8)
        first = (low - room.data.ptr) % 16
        self._there = room[first:first + high - low]
        self._there.set(self._host)

    def holds(self, address, nbytes):
        return self.low <= address and address + nbytes <= self.high

    def place(self, address):
        return self._there.data.ptr + address - self.low

    def give_back(self):
        self._host[:] = self._there.get()


class OnGpu:
    """`Kernels` of a GPU that take addresses of the host; the calls of `gpucoll.device.launch.Kernels`."""

    def __init__(self, ordinal=0):
        self.device = CudaDevice(ordinal)
        self.device.use()
        self._kernels, self._stream = self.device.kernels, cupy.cuda.Stream(non_blocking=True)

    def _on(self, ranges, launch):
        """Call `launch` with the places on the GPU of these (address, bytes)."""
        with self._stream:
            rooms = []
            for address, nbytes in ranges:
                if not any(room.holds(address, nbytes) for room in rooms):
                    rooms.append(Room(*surroundings(address, nbytes)))
            launch(*(next(room for room in rooms if room.holds(*one)).place(one[0]) for one in ranges))
            for room in rooms:
                room.give_back()

    def reduce(self, op, dtype, sources, dst, count, stream):
        nbytes = count * dtype.itemsize
        self._on([(address, nbytes) for address in (*sources, dst)], lambda *places: self._kernels.reduce(
            op, dtype, places[:-1], places[-1], count, self._stream))

    def copy(self, src, dst, count, width, stream):
        self._on([(src, count * width), (dst, count * width)],
                 lambda one, other: self._kernels.copy(one, other, count, width, self._stream))

    def scale(self, what, dtype, src, dst, count, factor, stream):
        nbytes = count * dtype.itemsize
        self._on([(src, nbytes), (dst, nbytes)],
                 lambda one, other: self._kernels.scale(what, dtype, one, other, count, factor, self._stream))

    def cast(self, source, target, src, dst, count, stream):
        self._on([(src, count * source.itemsize), (dst, count * target.itemsize)],
                 lambda one, other: self._kernels.cast(source, target, one, other, count, self._stream))

    def pack(self, src, shape, strides, itemsize, dst, stream):
        low, high = extent(shape, strides, itemsize)
        count = numpy.prod(shape, dtype=int)
        self._on([(src + low, high - low), (dst, int(count) * itemsize)], lambda one, other: self._kernels.pack(
            one - low, shape, strides, itemsize, other, self._stream))

    def unpack(self, src, dst, shape, strides, itemsize, stream):
        low, high = extent(shape, strides, itemsize)
        count = numpy.prod(shape, dtype=int)
        self._on([(src, int(count) * itemsize), (dst + low, high - low)], lambda one, other: self._kernels.unpack(
            one, other - low, shape, strides, itemsize, self._stream))


def surroundings(address, nbytes):
    """What is copied for an array: the memory around it, where it is known."""
    for memory in Memory.known:
        first = memory.bytes.ctypes.data
        if first <= address and address + nbytes <= first + len(memory.bytes) and memory.stop > memory.start:
            low, high = memory.around()
            return min(low, address), max(high, address + nbytes)
    return address, address + max(nbytes, 1)


def extent(shape, strides, itemsize):
    """The bytes, from the first element on, that a strided array has."""
    if 0 in shape:
        return 0, 0
    reach = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize


def use():
    """From here on the checks work in memory that goes to the GPU."""
    checks.Memory = Memory
    return OnGpu()

