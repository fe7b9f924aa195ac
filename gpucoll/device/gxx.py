"""Compile a kernel source for the CPU: g++, or what CXX names, makes a shared object of it."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess

from gpucoll.device import SOURCE_NAME, CompileError
from gpucoll.device.store import private_folder
from gpucoll.errors import BackendError

# -O1: by -O2 the emulated kernels took twice as long to compile, and ran as long, since what they do is mostly to go
# from fiber to fiber; who wants more says so. The last three keep the bits of a GPU's arithmetic: no product is fused
# into a sum, integers wrap, and what is written as words may be read as numbers. No -march=native: the objects may
# lie in a home that unlike hosts share.
PATIENCE = 600.0  # seconds for one run of the compiler
OPTIONS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing")


def compile_shared(source: str, *options: str) -> bytes:
    """Return the shared object that the compiler makes of `source`, with more `options`.

    Raises CompileError for a source that it refuses, BackendError where there is no compiler.
    """
    folder, remove = private_folder()
    try:
        target = folder / "kernels.so"
        # By its standard input, so that no path gets into the object or into what it complains about.
        job = _run(*OPTIONS, *options, "-x", "c++", "-", "-o", str(target), text=f'#line 1 "{SOURCE_NAME}"\n{source}')
        if job.returncode != 0:
            raise CompileError.of(_compiler()[0], job.stderr)
        return target.read_bytes()
    finally:
        remove()


def recipe() -> str:
    """Return what besides the source decides the object's bits: compiler, version, options, machine and C library."""
    words = _compiler()
    return "\n".join([*words, _version(words), *OPTIONS, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION") or ""])


@functools.cache
def _version(words: tuple[str, ...]) -> str:
    return _run("--version").stdout


def _compiler() -> tuple[str, ...]:
    """Return the command that CXX holds, with its own options, or g++."""
    try:
        return tuple(shlex.split(os.environ.get("CXX", ""))) or ("g++",)
    except ValueError as error:
        raise BackendError(f"CXX={os.environ['CXX']!r} is no command: {error}") from None


def _run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the compiler to its end; its messages are in English, whatever the user's language."""
    words = _compiler()
    try:
        return subprocess.run([*words, *arguments], input=text, capture_output=True, encoding="utf-8",
                              errors="replace", env={**os.environ, "LC_ALL": "C"}, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{words[0]} has not ended within {PATIENCE:g} s; is it the compiler that CXX means?") \
            from error
    except OSError as error:
        raise BackendError(f"the kernels need a C++ compiler on the CPU, and {words[0]} cannot be run "
                           f"({error.strerror}); install g++, or name a compiler in CXX") from error
