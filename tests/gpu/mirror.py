"""The checks of tests/kernels on a GPU: in host memory, accessible to the GPU at the same addresses."""

import checks
import cupy
import emulation
import numpy

from gpucoll.device.cuda import CudaDevice


class Memory(emulation.Memory):
    """Pinned memory, with space around an array that must not change."""

    def __init__(self, nbytes=1 << 17):
        self._pinned = cupy.cuda.alloc_pinned_memory(nbytes)
        self.bytes = numpy.frombuffer(self._pinned, numpy.uint8, nbytes)
        self.start = self.stop = 0


class OnGpu:
    """`Kernels` of a GPU; every launch has ended at the return of the call."""

    def __init__(self):
        self._device = CudaDevice(0)
        cupy.cuda.Device(0).use()
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def __getattr__(self, name):
        launch = getattr(self._device.kernels, name)

        def launch_and_wait(*arguments):
            launch(*arguments[:-1], self._stream)
            self._stream.synchronize()

        return launch_and_wait


def use():
    """Make the checks use memory accessible to a GPU, and return the kernels."""
    checks.Memory = Memory
    return OnGpu()
