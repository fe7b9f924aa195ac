"""CUDA C++ of programs, compiled by g++: the source of NVRTC's, with the host variant of CUDA in front.

Every kernel gets an entry of its own in the shared object; entries take the grid, and a buffer for each argument.
"""

import ctypes
import functools
import re
import shlex

import numpy

from gpucoll.device import CompileError, sources, store
from gpucoll.device.store import user_store
from gpucoll.errors import UsageError

HEADERS = """cuda_fp16.h cuda_runtime.h cuda.h cuComplex.h math_constants.h vector_types.h stdint.h stdio.h math.h
assert.h cupy/complex.cuh cupy/carray.cuh cupy/atomics.cuh cupy/math_constants.h thrust/complex.h cooperative_groups.h
float.h device_launch_parameters.h cuda_runtime_api.h vector_functions.h cooperative_groups/reduce.h cuda/atomic
cupy/float16.cuh math_functions.h device_functions.h sm_30_intrinsics.h""".split()
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]+)[>\"].*$", re.MULTILINE)
STANDARD = re.compile(r"(c?(std\w+|math|float|limits|assert)(\.h)?|cuda/std/\w+|type_traits|algorithm|utility|tuple|"
                      r"array|limits|complex|new)$")
DYNAMIC = re.compile(r"\bextern\s+__shared__\s+(?:__align__\(\d+\)\s*)?(?:alignas\(\d+\)\s*)?"
                     r"([\w:<>, \t]+?)\s+(\w+)\s*\[\s*\]\s*;")
KERNEL = re.compile(r"(template\s*<[^{};]*>\s*)?(?:extern\s+\"C\"\s*)?(?:static\s+)?__global__\s+(?:static\s+)?"
                    r"(?:(?:void|__launch_bounds__\s*\([^)]*\)|inline)\s+)+(\w+)\s*\(")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
TIMER = re.compile(r'asm\s+volatile\s*\(\s*"mov\.u64\s+%0,\s*%(?:globaltimer|clock64);"\s*:\s*'
                   r'"=l"\((\w+)\)\s*\)')
INTEGER = re.compile(r"\btypedef\s+[\w\s]+\s+u?int(?:8|16|32|64)_t\s*;")  # NVRTC lacks these types
STATIC = re.compile(r"\bstatic\s+__shared__|\b__shared__\s+static\b")
PTX = re.compile(r"\basm\s*(volatile)?\s*\(")
GRID = re.compile(r"\bthis_grid\s*\(|\bcoalesced_threads\s*\(|<<<")
LACKING = {"cooperative_groups": "this part of cooperative groups", "cub/": "CUB", "curand": "cuRAND inside kernels",
           "mma.h": "wmma", "cuda/": "libcu++", "thrust/": "Thrust"}


class CompileException(Exception):
    """As `cupy.cuda.compiler.CompileException`: the compiler's messages, and what it was given."""

    def __init__(self, msg, source="", name="", options=(), backend="nvrtc"):
        super().__init__()
        self._msg, self.source, self.name, self.options, self.backend = msg, source, name, options, backend

    def __str__(self):
        return self._msg

    def get_message(self):
        return self._msg


def no_counterpart(what):
    """Return the error for what the host lacks."""
    return UsageError(f"{what} has no counterpart on the host", code="GC-EMULATION")


def host_source(code):
    """Return the source as g++ takes it; raise UsageError for headers and assembly without a counterpart."""
    code = TIMER.sub(r"\1 = gc_nanoseconds()", code)
    bare = COMMENT.sub(" ", code)
    if PTX.search(bare):
        raise no_counterpart("inline PTX")
    beyond = GRID.search(bare)
    if beyond is not None:
        raise no_counterpart(beyond[0].strip("( "))

    def header(found):
        name = found[1]
        if name in HEADERS:
            return ""
        if STANDARD.match(name):
            return f"#include <{name.removeprefix('cuda/std/')}>"
        what = next((words for part, words in LACKING.items() if part in name), None)
        if what is not None:
            raise no_counterpart(f"<{name}>: {what}")
        return found[0]

    code = STATIC.sub("__shared__", INTEGER.sub("", INCLUDE.sub(header, code)))
    return DYNAMIC.sub(r"GC_DYNAMIC(\1, \2);", code)


def kernels_of(code):
    """Return the names of the kernels of a source that are no templates."""
    return [name for template, name in KERNEL.findall(COMMENT.sub(" ", code)) if not template]


def options_of(given):
    """Return the options of NVRTC that mean something to g++; raise CompileException for an unknown option."""
    kept = []
    for option in given:
        if option.startswith(("-I", "-D", "-U", "--include-path=", "--define-macro=")):
            name, _, value = option.partition("=")
            short = {"--include-path": "-I", "--define-macro": "-D"}.get(name)
            kept.append(option if short is None else short + value)
        elif re.match(r"-{1,2}std=c\+\+\d\d$", option):
            kept += [f"-{option.lstrip('-')}"] if int(option[-2:]) > 17 else []
        elif not option.startswith("-"):
            raise CompileException(f"nvrtc: error: unrecognized option {option} found", options=tuple(given))
    return tuple(kept)


@functools.lru_cache(256)
def library(code, names, options=()):
    """Return the shared object of a source with the entries of the kernels in `names`, loaded once."""
    lines = "".join(f"GC_USER_ENTRY({number}, {name})\n" for number, name in enumerate(names))
    source = "\n".join([sources.inlined("emulation/user.h", set()), '#line 1 "program.cu"', host_source(code),
                        '#line 1 "entries"', lines])
    # A kernel may have the name of a function of the C library, such as `times`.
    flags = ("-O2", "-w", "-Wl,-Bsymbolic-functions", *options_of(options))
    try:
        path = user_store().path(source, ".so", functools.partial(store.compile_shared, source, *flags),
                                 flags="\n".join([store.recipe(), *flags]))
    except CompileError as error:
        raise CompileException(str(error), code, "program.cu", tuple(options)) from None
    return ctypes.CDLL(str(path))


class HostFunction:
    """An entry of a shared object: `run` executes a grid on the bytes of the arguments."""

    def __init__(self, shared_object, number, name):
        self.name, self._call = name, getattr(shared_object, f"gc_user_{number}")
        self._call.restype = ctypes.c_char_p
        self.parameters = getattr(shared_object, f"gc_parameters_{number}")()
        self._constants = getattr(shared_object, f"gc_constants_{number}")
        self._constants.restype = ctypes.c_uint64

    def constants(self):
        """Return for each of the first 64 parameters whether it is a pointer to const."""
        mask = self._constants()
        return [bool(mask >> bit & 1) for bit in range(64)]

    def run(self, grid, block, arguments, shared):
        """Run the kernel; raise RuntimeError with the first fault of a thread."""
        sizes = (ctypes.c_uint64 * len(arguments))(*map(len, arguments))
        texts = [ctypes.cast(ctypes.c_char_p(one), ctypes.c_void_p) for one in arguments]
        has_run(self.name, self._call((ctypes.c_uint32 * 6)(*grid, *block), ctypes.c_uint64(shared),
                                      (ctypes.c_void_p * len(arguments))(*texts), sizes))


def has_run(name, fault):
    """Return True; raise RuntimeError if the kernel has found a fault."""
    if fault is not None:
        raise RuntimeError(f"{name}: {fault.decode()}")
    return True


def split_options(given):
    return tuple(shlex.split(given)) if isinstance(given, str) else tuple(given)


def three(numbers, what):
    """Return a grid or block of three numbers."""
    numbers = (numbers,) if isinstance(numbers, int | numpy.integer) else tuple(numbers)
    if not 1 <= len(numbers) <= 3:
        raise ValueError(f"{what} must have one to three numbers")
    return (*map(int, numbers), *(1,) * (3 - len(numbers)))
