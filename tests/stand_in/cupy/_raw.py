"""The stand-in for `cupy.RawModule` and `RawKernel`: a "cubin" is a shared object compiled by g++ from the same source.

Rules of CUDA: a kernel is launched only on the device of its module, loading and unloading may synchronise, and the
addresses in the arguments are living memory of the device.
"""

import ctypes
import sys
import time
import types

import numpy

from . import _memory
from ._capture import synchronising
from ._machine import MACHINE
from .cuda.driver import CUDADriverError

_loaded = {}  # modules by device and path


class RawModule:
    def __init__(self, *, path):
        self._path = path

    def get_function(self, name):
        device = MACHINE.use()
        # CuPy's cache of modules has no lock: the second of two threads unloads its own module again.
        if (device, self._path) not in _loaded:
            _loaded.setdefault((device, self._path), _Module(self._path, device))
        return types.SimpleNamespace(kernel=Function(self._path, name, device))


class _Module:
    """A module loaded by cuModuleLoad and unloaded by cuModuleUnload; both may synchronise."""

    def __init__(self, path, device):
        synchronising("cuModuleLoad", device)
        self.path, self._device = path, device

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if not is_shutting_down() and not MACHINE.runs_here() and _loaded.get((self._device, self.path)) is not self:
            synchronising("cuModuleUnload", self._device)


class RawKernel:
    """A kernel of CUDA source, not runnable here: always the bench's `hold`, ended by a flag or a deadline."""

    def __init__(self, code, name):
        assert name == "hold"

    def __call__(self, grid, block, args):
        from .cuda import get_current_stream
        opened, nanoseconds = ctypes.c_uint32.from_address(int(args[0])), int(args[1])

        def begin():
            deadline = time.monotonic_ns() + nanoseconds
            return lambda: opened.value != 0 or time.monotonic_ns() > deadline

        MACHINE.submit(MACHINE.queue(get_current_stream().ptr), begin, kernel=True)


class Function:
    """A kernel of the current device, to be launched only on streams of this device."""

    def __init__(self, path, name, device):
        try:
            self._library = ctypes.CDLL(path)
            self._call = getattr(self._library, name)
        except (OSError, AttributeError) as error:
            raise CUDADriverError(200, f"invalid kernel image: {error}") from error
        self._call.restype, self._name, self._device = ctypes.c_char_p, name, device

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        from .cuda import get_current_stream
        queue = MACHINE.queue((get_current_stream() if stream is None else stream).ptr)
        if not self._device == MACHINE.device() == queue.device:
            raise CUDADriverError(400, f"{self._name} was loaded on GPU {self._device}, not {queue.device}")
        (given,) = args  # a single structure, passed by value
        check_addresses(self._name, given, self._device)
        argument = given.copy()
        MACHINE.submit(queue, lambda: self._begin(grid[0], block[0], argument), kernel=True)

    def _begin(self, blocks, threads, argument):
        """Return the action of a kernel; a kernel waiting for other ranks runs in pieces, as on the emulated device."""
        if hasattr(self._library, "gc_world"):
            from gpucoll.device.emulated import RunningKernel
            return RunningKernel(self._library, self._name, blocks, threads, argument)
        return lambda: self._run(blocks, threads, argument)

    def _run(self, blocks, threads, argument):
        fault = self._call(blocks, threads, ctypes.c_void_p(argument.ctypes.data))
        if fault is not None:
            raise RuntimeError(f"{self._name}: {fault.decode()}")
        return True


def check_addresses(name, argument, device):
    """Raise RuntimeError if a word of the argument is an address of freed memory or of another GPU's memory."""
    for word in argument.view(numpy.uint64) if argument.nbytes % 8 == 0 else ():
        chunk = _memory.chunk_at(int(word))
        if chunk is not None and not (chunk.live and chunk.device == device):
            state = f"memory of GPU {chunk.device}" if chunk.live else "memory that was freed"
            raise RuntimeError(f"{name} is given {int(word):#x}, {state}")
