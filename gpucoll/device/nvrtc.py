"""Compile a kernel source for a GPU: NVRTC makes a cubin of it, called by ctypes; needs neither a GPU nor CuPy.

CuPy's own way to NVRTC ends with ``-ftz=true``, which would flush float32's subnormals to zero in every sum.
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

# IEEE arithmetic as NumPy has it, so that the bits agree; ptxas' report is the log's only use where all is well. Before
# 13.2 NVRTC takes a generic lambda for a function of the host, and refuses it, unless the default is the device.
OPTIONS = ("--std=c++17", "-default-device", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true",
           "--ptxas-options=-v")
OLDEST = 70  # of the architectures: before it there is no __nanosleep, and no argument is read where the launch put it
MAJORS = (13, 12)  # the CUDA versions that gpucoll has an extra for, newest first
WHEELS = {13: "cu13/lib", 12: "cuda_nvrtc/lib"}  # where NVIDIA's wheels keep the library, below `nvidia`
SUCCESS, COMPILATION = 0, 6  # nvrtcResult

_int = ctypes.c_int


def compile_cubin(source: str, arch: str, major: int | None = None) -> tuple[bytes, str]:
    """Return the cubin of `source` for `arch`, such as "sm_90", and NVRTC's log, which holds ptxas' report.

    `major` is the CUDA version that the process uses already, as by CuPy; None takes the newest NVRTC there is.
    Raises CompileError for a source that NVRTC refuses, BackendError where NVRTC is missing or does not know `arch`.
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
    """Return what besides the source decides the cubin's bits: NVRTC's version, options and `arch`."""
    return "\n".join(["NVRTC", *map(str, version(major)), *OPTIONS, arch])


def version(major: int | None = None) -> tuple[int, int]:
    """Return NVRTC's version, which is that of its CUDA toolkit: (13, 4)."""
    numbers = _int(), _int()
    _call(_library(major), "nvrtcVersion", *map(ctypes.byref, numbers))
    return numbers[0].value, numbers[1].value


@functools.cache
def archs(major: int | None = None) -> tuple[int, ...]:
    """Return the architectures that NVRTC compiles for, in rising order: (75, 80, ...)."""
    count = _int()
    _call(_library(major), "nvrtcGetNumSupportedArchs", ctypes.byref(count))
    numbers = (_int * count.value)()
    _call(_library(major), "nvrtcGetSupportedArchs", numbers)
    return tuple(sorted(numbers))


def check_arch(arch: str, major: int | None) -> None:
    """Raise BackendError where kernels for `arch` cannot be compiled.

    A cubin runs on its own line of GPUs only: there is no next best for one that NVRTC does not know.
    """
    number = arch.removeprefix("sm_")
    if number.isdecimal() and int(number) < OLDEST:
        raise BackendError(f"the kernels need a GPU of compute capability {OLDEST / 10} or newer, "
                           f"sm_{OLDEST}; this is sm_{number}")
    known = archs(major)
    if arch not in (f"sm_{number}" for number in known):
        release = ".".join(map(str, version(major)))
        raise BackendError(f"NVRTC {release} does not compile for {arch}, only for sm_{known[0]} to sm_{known[-1]} "
                           f"({', '.join(map(str, known))}); a newer GPU needs a newer NVRTC, an older one CUDA 12's")


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


_libraries: dict[int | None, ctypes.CDLL] = {}  # by the version that is asked for


def use(path: str) -> int:
    """Load the libnvrtc at `path`, which serves this process from then on, and return its major version.

    It serves whoever asks for that version, or for none. Raises BackendError where it is no NVRTC that can be loaded.
    """
    try:
        library = _load(os.path.abspath(path))
    except (OSError, AttributeError) as error:  # the latter for a library without NVRTC's functions
        raise BackendError(f"no NVRTC can be loaded from {path}: {error}") from None
    _libraries[None] = library
    archs.cache_clear()
    major = version()[0]
    _libraries[major] = library
    return major


def _library(major: int | None) -> ctypes.CDLL:
    """Load libnvrtc, of CUDA `major` or of the newest that there is; BackendError says where it was looked for."""
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
    """Load libnvrtc, by its path or by the name that the system's loader knows.

    It opens a second library by name when it compiles. 13.0 of the wheels does not look for that beside itself, but
    takes the one of that name which the process has loaded.
    """
    folder = os.path.dirname(path)
    for builtins in glob.glob(f"{glob.escape(folder)}/libnvrtc-builtins.so.*") if folder else ():
        ctypes.CDLL(builtins)
    library = ctypes.CDLL(path)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _places(majors: tuple[int, ...], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what to load, best first: the toolkit that CUDA_PATH names, NVIDIA's wheels, the system's."""
    toolkit = environment.get("CUDA_PATH")
    if toolkit:
        yield from (f"{toolkit}/lib64/{_file(major)}" for major in majors)
    wheels = importlib.util.find_spec("nvidia")  # a package without a module of its own: as many folders as there are
    for folder in (wheels and wheels.submodule_search_locations) or ():
        yield from (f"{folder}/{WHEELS[major]}/{_file(major)}" for major in majors if major in WHEELS)
    yield from map(_file, majors)


def _file(major: int) -> str:
    return f"libnvrtc.so.{major}"

