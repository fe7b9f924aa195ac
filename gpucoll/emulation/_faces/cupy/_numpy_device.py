"""The GPU of a rank with GPUCOLL_DEVICE=emulated: NumPy arrays, on which gpucoll's device code works as on a GPU's."""

import functools

import numpy

from gpucoll.device.cuda import CudaDevice
from gpucoll.device.launch import Kernels
from gpucoll.device.sources import family, text
from gpucoll.device.store import compile_shared, recipe, user_store
from gpucoll.errors import ArgumentError

from . import _memory
from ._dlpack import Owner
from ._machine import MACHINE
from .cuda.stream import _BaseStream

# A CUDA thread of a kernel that waits is a fiber, so threads are expensive, and a few threads show the same errors.
PROCESSORS, CHANNELS, THREADS = 2, 2, 64


class EmulatedDevice(CudaDevice):
    """The GPU `ordinal` of the machine, and all memory of the process as memory of this GPU."""

    name, asynchronous = "emulated", False
    most_threads, warp, staging = THREADS, 1, 1 << 20

    def __init__(self, ordinal):
        super().__init__(ordinal)
        _memory.foreign[:] = [self]
        self.kernels = Kernels(self._load, PROCESSORS, threads=THREADS)
        # A call always finds this stream and this GPU current: the host waits for its end.
        self._main, self.current_stream, self.active = self.new_stream(), lambda: self._main, lambda: ordinal

    channels = staticmethod(lambda ranks: CHANNELS)
    moves_rows = is_current = staticmethod(lambda _: True)
    is_blocking = staticmethod(lambda stream: False)
    place = staticmethod(lambda array: array.__array_interface__["data"][0])
    owns = staticmethod(lambda array: None if isinstance(array, numpy.ndarray) else "on a GPU")
    array_on = staticmethod(lambda block, shape, dtype: numpy.asarray(block)[
        :int(numpy.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape))

    def stream(self, given):
        """Return the main stream for None and for any CUDA stream, so that GPU programs run unchanged."""
        if isinstance(given, _BaseStream):
            return given
        if given is None or hasattr(given, "ptr") or hasattr(given, "__cuda_stream__") or isinstance(given, int):
            return self._main
        raise ArgumentError(f"stream {given!r} is not a stream", code="GC-STREAM")

    def compiled(self, instance):
        source = text(*family(instance))
        return str(user_store().path(source, ".so", functools.partial(compile_shared, source), flags=recipe()))

    def new_array(self, shape, dtype):
        row = CudaDevice.new_array(max(1, int(numpy.prod(shape)) * dtype.itemsize), "u1")
        return self.array_on(Owner(row), shape, dtype)

    def fill(self, row, value, stream):
        MACHINE.submit(MACHINE.queue(stream.ptr), lambda: lambda: row.view(value.dtype).fill(value[0]) is None)

    def fill_with_nan(self, places):
        """Do nothing: the host waits for every call, so no incomplete result is ever returned."""

    def settle(self, stream):
        """Wait until all work given to `stream` so far has ended."""
        event = self.mark(stream)
        while not event.done:
            yield lambda: event.done
