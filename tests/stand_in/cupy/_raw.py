"""Kernels: `RawModule(path=)` of a "cubin", here a shared object that g++ made of the same source."""

import ctypes

import numpy

from . import _memory
from ._machine import MACHINE
from .cuda.driver import CUDADriverError

_modules = {}


class RawModule:
    def __init__(self, *, path):
        self.file_path = path

    def get_function(self, name):
        return _RawKernel(self.file_path, name)


class RawKernel:
    """One of CUDA source: nothing here can run it, so that a launch has no effect but on what its stream has issued."""

    def __init__(self, code, name):
        self.code, self.name = code, name

    def __call__(self, grid, block, args):
        from .cuda import get_current_stream
        MACHINE.submit(MACHINE.queue(get_current_stream().ptr), lambda: lambda: True)


class _RawKernel:
    def __init__(self, path, name):
        self._path, self.name = path, name
        self.kernel  # noqa: B018 (as in CuPy the module is loaded here)

    @property
    def kernel(self):
        key = (self._path, MACHINE.device())
        if key not in _modules:
            try:
                _modules[key] = ctypes.CDLL(self._path)
            except OSError as error:
                raise CUDADriverError(200, f"invalid kernel image: {error}") from error
        return Function(_modules[key], self.name, MACHINE.device())


class Function:
    """A kernel of the current device; it may be launched on that device's streams only."""

    def __init__(self, library, name, device):
        try:
            self._library, self._call = library, getattr(library, name)
        except AttributeError as error:
            raise CUDADriverError(500, f"named symbol not found: {name}") from error
        self._call.restype, self._name, self._device = ctypes.c_char_p, name, device

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        from .cuda import get_current_stream
        if MACHINE.device() != self._device:
            raise CUDADriverError(400, f"{self._name} was loaded on GPU {self._device}, not {MACHINE.device()}")
        queue = MACHINE.queue((get_current_stream() if stream is None else stream).ptr)
        if queue.device != self._device:
            raise CUDADriverError(400, f"{self._name}: a stream of GPU {queue.device}")
        (given,) = args
        if not isinstance(given, numpy.ndarray) or given.size != 1:
            raise TypeError(f"{given!r} is not a structure that is passed by value")
        if not (1 <= block[0] <= 1024 and grid[0] >= 1):
            raise CUDADriverError(1, f"grid {grid}, block {block}")
        check_addresses(self._name, given, self._device)
        argument = given.copy()
        MACHINE.submit(queue, lambda: self._begin(grid[0], block[0], argument))

    def _begin(self, blocks, threads, argument):
        """What runs the kernel; one that waits for other ranks does so piece by piece."""
        if hasattr(self._library, "gc_world"):
            return Waiting(self._library, self._name, blocks, threads, argument)
        return lambda: self._run(blocks, threads, argument)

    def _run(self, blocks, threads, argument):
        fault = self._call(blocks, threads, ctypes.c_void_p(argument.ctypes.data))
        if fault is not None:
            raise RuntimeError(f"{self._name}: {fault.decode()}")
        return True


class Waiting:
    """A kernel under way, as the dialect's fibers have it."""

    def __init__(self, library, name, blocks, threads, argument):
        self._library, self._name, self._grid, self._argument = library, name, (blocks, threads), argument
        library.gc_world.restype, library.gc_complaint.restype = ctypes.c_void_p, ctypes.c_char_p
        self._world = None

    def __call__(self):
        if self._world is None:
            self._world = ctypes.c_void_p(self._library.gc_world(ctypes.c_uint64(0), self._grid[0], 0))
            self._library.gc_launch(self._world, 0, getattr(self._library, f"{self._name}_thread"),
                                    ctypes.c_void_p(self._argument.ctypes.data), *self._grid)
        if self._library.gc_advance(self._world, 0):
            return False
        fault = self._library.gc_complaint(self._world)
        if fault is not None:
            raise RuntimeError(f"{self._name}: {fault.decode()}")
        self._library.gc_end(self._world)
        return True


def check_addresses(name, argument, device):
    """No word of the argument is an address of memory that has been freed, or that is another GPU's."""
    for word in argument.view(numpy.uint64) if argument.nbytes % 8 == 0 else ():
        chunk = _memory.chunk_at(int(word))
        if chunk is not None and not (chunk.live and chunk.device == device):
            state = f"memory of GPU {chunk.device}" if chunk.live else "memory that was freed"
            raise RuntimeError(f"{name} is given {int(word):#x}, {state}")
