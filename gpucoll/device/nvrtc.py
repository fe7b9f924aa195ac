"""Compile a kernel source for a GPU into a cubin, by NVRTC through ctypes; needs neither a GPU nor CuPy.

CuPy's interface to NVRTC always adds ``-ftz=true`` and so would flush subnormal float32 numbers to zero in every sum.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
from collections.abc import Iterator, Mapping

from gpucoll.device import SOURCE_NAME, CompileError
from gpucoll.errors import BackendError

# IEEE arithmetic as in NumPy, so that the bits of results agree. -v puts ptxas' report of registers into the log.
# -default-device: NVRTC before 13.2 otherwise takes a generic lambda for a host function and rejects the lambda.
OPTIONS = ("--std=c++17", "-default-device", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true",
           "--ptxas-options=-v")
# Oldest architecture: earlier GPUs have no __nanosleep, and cannot read arguments in place, where the launch put them.
OLDEST = 70
MAJORS = (13, 12)  # major CUDA versions supported by the extras of gpucoll, newest first
WHEELS = {13: "cu13/lib", 12: "cuda_nvrtc/lib"}  # folder of the library in NVIDIA's wheels, below `nvidia`
SUCCESS, COMPILATION = 0, 6  # nvrtcResult

_int = ctypes.c_int


def compile_cubin(source: str, arch: str, major: int | None = None) -> tuple[bytes, str]:
    """Return the cubin of `source` for `arch`, such as "sm_90", and NVRTC's log, including ptxas' report.

    `major` is the CUDA version already used by the process, for example by CuPy; None selects the newest NVRTC found.
    Raises CompileError if NVRTC rejects the source, BackendError if NVRTC is missing or does not support `arch`.
    """
    check_arch(arch, major)
    library, program = _library(major), ctypes.c_void_p()
    options = [option.encode() for option in (*OPTIONS, f"-arch={arch}")]
    _call(library, "nvrtcCreateProgram", ctypes.byref(program), source.encode(), SOURCE_NAME.encode(), 0, None, None)
    try:
        result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _read(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        if result == COMPILATION:
            raise CompileError.of("NVRTC", log)
        _check(library, "nvrtcCompileProgram", result)
        return _read(library, "CUBIN", program), log
    finally:
        _call(library, "nvrtcDestroyProgram", ctypes.byref(program))


def recipe(arch: str, major: int | None = None) -> str:
    """Return all inputs of a build besides the source: NVRTC's version, options and `arch`."""
    return "\n".join(["NVRTC", *map(str, version(major)), *OPTIONS, arch])


def version(major: int | None = None) -> tuple[int, int]:
    """Return NVRTC's version, equal to the version of the CUDA toolkit: (13, 4)."""
    numbers = _int(), _int()
    _call(_library(major), "nvrtcVersion", *map(ctypes.byref, numbers))
    return numbers[0].value, numbers[1].value


@functools.cache
def archs(major: int | None = None) -> tuple[int, ...]:
    """Return the architectures supported by NVRTC, in ascending order: (75, 80, ...)."""
    count = _int()
    _call(_library(major), "nvrtcGetNumSupportedArchs", ctypes.byref(count))
    numbers = (_int * count.value)()
    _call(_library(major), "nvrtcGetSupportedArchs", numbers)
    return tuple(sorted(numbers))


def check_arch(arch: str, major: int | None) -> None:
    """Raise BackendError if kernels for `arch` cannot be compiled.

    A cubin runs only on one family of GPUs, so no other architecture can replace an unsupported architecture.
    """
    number = arch.removeprefix("sm_")
    if number.isdecimal() and int(number) < OLDEST:
        raise BackendError(f"the kernels need a GPU of compute capability {OLDEST / 10} or newer, "
                           f"sm_{OLDEST}; this is sm_{number}")
    known = archs(major)
    if arch not in (f"sm_{number}" for number in known):
        release = ".".join(map(str, version(major)))
        raise BackendError(f"NVRTC {release} does not compile for {arch}, only for sm_{known[0]} to sm_{known[-1]} "
                           f"({', '.join(map(str, known))}); a newer GPU needs a newer NVRTC, an older GPU CUDA 12's")


def _read(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(library, f"nvrtcGet{what}Size", program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    _call(library, f"nvrtcGet{what}", program, room)
    return room.raw


def _call(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    _check(library, function, getattr(library, function)(*arguments))


def _check(library: ctypes.CDLL, function: str, result: int) -> None:
    if result != SUCCESS:
        raise BackendError(f"{function}: {library.nvrtcGetErrorString(result).decode()}")


_libraries: dict[int | None, ctypes.CDLL] = {}  # by the requested major version; None: no version requested


def use(path: str) -> int:
    """Load the libnvrtc at `path` and return its major version.

    From now on the library serves all requests of this process for this major version or for no particular version.
    Raises BackendError if the file is no loadable NVRTC.
    """
    try:
        library = _load(os.path.abspath(path))
    # A library without NVRTC's functions gives AttributeError.
    except (OSError, AttributeError) as error:
        raise BackendError(f"no NVRTC can be loaded from {path}: {error}") from None
    _libraries[None] = library
    archs.cache_clear()
    major = version()[0]
    _libraries[major] = library
    return major


def _library(major: int | None) -> ctypes.CDLL:
    """Return libnvrtc of CUDA `major`, or of the newest CUDA found, loaded once; BackendError lists the failures."""
    if major in _libraries:
        return _libraries[major]
    tried = []
    for path in _places(MAJORS if major is None else (major,), os.environ):
        try:
            _libraries[major] = _load(path)
            return _libraries[major]
        except OSError as error:
            tried.append(str(error))
    raise BackendError("NVRTC is needed to compile kernels for a GPU: pip install "
                       f"'gpucoll[cuda{major or MAJORS[0]}]'; tried {'; '.join(tried)}")


def _load(path: str) -> ctypes.CDLL:
    """Load libnvrtc by path, or by a name known to the system's loader.

    libnvrtc-builtins in the same folder is loaded first.
    """
    # NVRTC opens libnvrtc-builtins by name when compiling. NVRTC 13.0 of the wheels does not search the folder of
    # libnvrtc, but finds a library of this name already loaded by the process.
    folder = os.path.dirname(path)
    for builtins in glob.glob(f"{glob.escape(folder)}/libnvrtc-builtins.so.*") if folder else ():
        ctypes.CDLL(builtins)
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _places(majors: tuple[int, ...], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield paths of libnvrtc, best first: the toolkit at CUDA_PATH, NVIDIA's wheels, the system's library.

    cuda-pathfinder is no substitute: a process finds one libnvrtc there, of no chosen major version. Beside a CuPy of
    CUDA 12 the wheel of CUDA 13 could be found, and the cubins would not load.
    """
    toolkit = environment.get("CUDA_PATH")
    if toolkit:
        yield from (f"{toolkit}/lib64/{_file(major)}" for major in majors)
    # `nvidia` is a namespace package, so the wheels may lie in several folders.
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield from (f"{folder}/{WHEELS[major]}/{_file(major)}" for major in majors if major in WHEELS)
    yield from map(_file, majors)


def _file(major: int) -> str:
    return f"libnvrtc.so.{major}"

