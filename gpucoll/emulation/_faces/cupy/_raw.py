"""`cupy.RawModule` and `RawKernel`: source is compiled by g++; gpucoll's "cubins" are shared objects of their source.

Rules of CUDA: a kernel is launched only on the device of its module, loading and unloading may synchronise, and the
addresses in the arguments are living memory of the device.
"""

import ctypes
import functools
import os
import sys
import types

import numpy

from gpucoll.errors import UsageError

from . import _memory
from ._array import ndarray
from ._capture import synchronising
from ._machine import MACHINE
from ._order import span, touched, written
from ._source import HostFunction, has_run, kernels_of, library, no_counterpart, split_options, three
from .cuda.driver import CUDADriverError
from .cuda.stream import get_current_stream

_loaded = {}  # modules by device and path


class RawModule:
    """A module of CUDA source, or gpucoll's own shared object by `path`."""

    def __init__(self, *, code=None, path=None, options=(), backend="nvrtc", translate_cucomplex=False,
                 enable_cooperative_groups=False, name_expressions=None, jitify=False):
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if path is not None and not os.path.isfile(path):
            raise CUDADriverError("CUDA_ERROR_FILE_NOT_FOUND", f"file not found: {path}")
        if path is not None and not _is_shared_object(path):
            raise UsageError(f"{path}: a compiled GPU binary cannot run on the host; pass the source as code=",
                             code="GC-EMULATION")
        if jitify:
            raise no_counterpart("jitify")
        if backend not in ("nvrtc", "nvcc") or (backend == "nvcc" and name_expressions):
            raise ValueError("backend must be nvrtc, or nvcc without name_expressions")
        self.code, self.file_path, self.backend, self.name_expressions = code, path, backend, name_expressions
        self.options, self.enable_cooperative_groups = split_options(options), enable_cooperative_groups
        self._names = None if code is None else (*dict.fromkeys([*kernels_of(code), *(name_expressions or ())]),)

    def get_function(self, name):
        device = MACHINE.use()
        if self.code is not None:
            return UserKernel(self, name)
        # CuPy's cache of modules has no lock: the second of two threads unloads its own module again.
        if (device, self.file_path) not in _loaded:
            _loaded.setdefault((device, self.file_path), _Module(self.file_path, device))
        return types.SimpleNamespace(kernel=Function(self.file_path, name, device))

    def compile(self, log_stream=None):
        self.library()

    def library(self):
        """Return the shared object of the source; raise CompileException."""
        return library(self.code, self._names, self.options)

    def entry(self, name):
        """Return the entry of a kernel; raise CUDADriverError for an unknown name, as CUDA does."""
        if name not in self._names:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND", f"named symbol not found: {name}")
        return HostFunction(self.library(), self._names.index(name), name)

    def get_global(self, name):
        """Return the memory of a `__constant__` or `__device__` variable."""
        place = ctypes.addressof(ctypes.c_char.in_dll(self.library(), name))
        _memory.variables.add(place)
        return _memory.MemoryPointer(_memory.UnownedMemory(place, 0, self, MACHINE.device()), 0)


EM_CUDA = 190  # the machine in the head of an ELF file


def _is_shared_object(path):
    with open(path, "rb") as file:
        head = file.read(20)
    return head[:4] == b"\x7fELF" and int.from_bytes(head[18:20], "little") != EM_CUDA


class _Module:
    """A module loaded by cuModuleLoad and unloaded by cuModuleUnload; both may synchronise."""

    def __init__(self, path, device):
        synchronising("cuModuleLoad", device)
        self.path, self._device = path, device

    def __del__(self, is_shutting_down=sys.is_finalizing):
        if not is_shutting_down() and not MACHINE.runs_here() and _loaded.get((self._device, self.path)) is not self:
            synchronising("cuModuleUnload", self._device)


FIGURES = ("binary_version", "cache_mode_ca", "const_size_bytes", "local_size_bytes", "max_dynamic_shared_size_bytes",
           "max_threads_per_block", "num_regs", "preferred_shared_memory_carveout", "ptx_version", "shared_size_bytes")


class UserKernel:
    """A kernel of a program: a launch takes grid, block and arguments, as CuPy's functions do."""

    def __init__(self, module, name):
        self._module, self.name, self.max_dynamic_shared_size_bytes = module, name, 48 << 10
        self._module.entry(name)  # raises CUDADriverError

    _entry = functools.cached_property(lambda self: self._module.entry(self.name))
    kernel = property(lambda self: self)
    enable_cooperative_groups, backend, options, code = (
        property(lambda self, name=name: getattr(self._module, name))
        for name in ("enable_cooperative_groups", "backend", "options", "code"))
    max_threads_per_block = 1024
    num_regs = 32  # the host has no such figures; programs print them
    shared_size_bytes = const_size_bytes = local_size_bytes = binary_version = ptx_version = 0
    cache_mode_ca, preferred_shared_memory_carveout = False, -1

    @property
    def attributes(self):
        return {name: getattr(self, name) for name in FIGURES}

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_entry"}

    def __call__(self, grid, block, args, *, shared_mem=0, stream=None):
        entry, grid, block = self._entry, three(grid, "grid"), three(block, "block")
        if max(block) < 1 or max(grid) < 1 or block[0] * block[1] * block[2] > 1024:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE", "invalid argument: grid or block")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE", "invalid argument: dynamic shared memory")
        queue = MACHINE.queue((get_current_stream() if stream is None else stream).ptr)
        if queue.device != MACHINE.device():
            raise CUDADriverError("CUDA_ERROR_INVALID_HANDLE", f"the stream is of GPU {queue.device}")
        if len(args) < entry.parameters:
            raise UsageError(f"{self.name} has {entry.parameters} parameters, and is given {len(args)}",
                             code="GC-EMULATION")
        given = [*map(argument, args[:entry.parameters])]
        for row in given:
            if len(row) == 8:
                check_addresses(self.name, numpy.frombuffer(row, numpy.uint64), queue.device)

        constants = entry.constants()
        read = [one for one, is_read in zip(args, constants, strict=False) if is_read and isinstance(one, ndarray)]
        enqueue_kernel(queue, self.name, lambda: entry.run(grid, block, given, shared_mem), read,
                       [int.from_bytes(row, "little") for row in given if len(row) == 8])
        spans = [span(one) if isinstance(one, ndarray) else first_byte(row)
                 for one, row in zip(args, given, strict=False)]
        touched(queue, [one for one, is_read in zip(spans, constants, strict=False) if is_read],
                [one for one, is_read in zip(spans, constants, strict=False) if not is_read], self.name)


def enqueue_kernel(queue, name, run, read, addresses):
    """Enqueue a program's kernel: UsageError if it reads arrays without values, or writes beside the memory it has."""
    check_written, running = written(read), _memory.bounded(name, addresses)

    def act():
        check_written()
        with running():
            run()
        return True

    MACHINE.submit(queue, lambda: act, kernel=True)


def first_byte(row):
    """Return the span of the byte at an argument that is an address of a GPU; its other bytes are not known."""
    place = int.from_bytes(row, "little") if len(row) == 8 else 0
    return (place, place + 1) if _memory.chunk_at(place) else (0, 0)


class RawKernel(UserKernel):
    def __init__(self, code, name, options=(), backend="nvrtc", translate_cucomplex=False, *,
                 enable_cooperative_groups=False, jitify=False):
        self.name, self.max_dynamic_shared_size_bytes = name, 48 << 10
        expressions = (name,) if name not in kernels_of(code) else None
        self._module = RawModule(code=code, options=options, backend=backend, name_expressions=expressions,
                                 enable_cooperative_groups=enable_cooperative_groups, jitify=jitify)

    def compile(self, log_stream=None):
        self._module.compile()


def argument(value):
    """Return the bytes of a kernel's argument, as CuPy passes them: arrays by address, Python's numbers in full."""
    if hasattr(value, "ptr") and hasattr(value, "mem"):
        return int(value.ptr).to_bytes(8, "little")
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return (value & (1 << 64) - 1).to_bytes(8, "little")
    if isinstance(value, float | complex):
        return numpy.asarray(value).tobytes()
    if isinstance(value, numpy.generic) or (isinstance(value, numpy.ndarray) and value.dtype.kind == "V"):
        return value.tobytes()
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"Unsupported type {type(value)}")
    return int(interface["data"][0]).to_bytes(8, "little")


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
        queue = MACHINE.queue((get_current_stream() if stream is None else stream).ptr)
        if not self._device == MACHINE.device() == queue.device:
            raise CUDADriverError(400, f"{self._name} was loaded on GPU {self._device}, not {queue.device}")
        (given,) = args  # a single structure, passed by value
        check_addresses(self._name, given, self._device)
        argument = given.copy()
        MACHINE.submit(queue, lambda: self._begin(grid[0], block[0], argument), kernel=True)

    def _begin(self, blocks, threads, argument):
        """Return the action of a kernel; a kernel waiting for other ranks runs in pieces."""
        if hasattr(self._library, "gc_world"):
            return _RunningKernel(self._library, self._name, blocks, threads, argument)
        return lambda: has_run(self._name, self._call(blocks, threads, ctypes.c_void_p(argument.ctypes.data)))


class _RunningKernel:
    """An action running a kernel with fibers as threads: when all fibers wait for other ranks, the call returns."""

    def __init__(self, library, name, blocks, threads, argument):
        self._library, self._name, self._grid, self._argument = library, name, (blocks, threads), argument
        library.gc_world.restype, library.gc_complaint.restype = ctypes.c_void_p, ctypes.c_char_p
        self._world = None

    def __call__(self):
        # The launch waits for the action's turn in the queue, because the kernel reads the results of earlier actions.
        library = self._library
        if self._world is None:
            self._world = ctypes.c_void_p(library.gc_world(ctypes.c_uint64(0), self._grid[0], 0))
            library.gc_launch(self._world, 0, getattr(library, f"{self._name}_thread"),
                              ctypes.c_void_p(self._argument.ctypes.data), *self._grid)
        if library.gc_advance(self._world, 0):
            return False
        try:
            return has_run(self._name, library.gc_complaint(self._world))
        finally:
            library.gc_end(self._world)


def check_addresses(name, argument, device):
    """Raise RuntimeError if a word of the argument is an address of freed memory or of another GPU's memory."""
    for word in argument.view(numpy.uint64) if argument.nbytes % 8 == 0 else ():
        chunk = _memory.chunk_at(int(word))
        if chunk is None:
            continue
        if not (chunk.live and (chunk.device == device or (device, chunk.device) in _memory.peers)):
            state = f"memory of GPU {chunk.device}" if chunk.live else "memory that was freed"
            raise RuntimeError(f"{name} is given {int(word):#x}, {state}")
        chunk.is_used = True
