"""Compile a kernel source for the CPU into a shared object, by g++ or the compiler named in CXX."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess

from gpucoll.device import SOURCE_NAME, CompileError
from gpucoll.device.store import private_folder
from gpucoll.errors import BackendError

COMPILER_TIMEOUT = 600.0  # seconds for one run of the compiler
# -O1: with -O2 the emulated kernels took twice as long to compile and ran no faster, since most time goes into switches
# between fibers. Callers may pass a higher level. The last three options keep the bits of a GPU's arithmetic: no fused
# multiply-add, integers wrap, and memory written as words may be read as numbers. No -march=native: hosts with
# different CPUs may share the home directory with the objects.
OPTIONS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing")


def compile_shared(source: str, *options: str) -> bytes:
    """Return the shared object compiled from `source`, with additional `options`.

    Raises CompileError if the compiler rejects the source, BackendError if no compiler can be run.
    """
    folder, remove = private_folder()
    try:
        target = folder / "kernels.so"
        # Source by standard input, so that neither the object nor the messages contain a path.
        job = _run(*OPTIONS, *options, "-x", "c++", "-", "-o", str(target), text=f'#line 1 "{SOURCE_NAME}"\n{source}')
        if job.returncode != 0:
            raise CompileError.of(_compiler()[0], job.stderr)
        return target.read_bytes()
    finally:
        remove()


def recipe() -> str:
    """Return all inputs of a build besides the source: compiler, version, options, machine and C library."""
    words = _compiler()
    return "\n".join([*words, _version(words), *OPTIONS, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION") or ""])


@functools.cache
def _version(words: tuple[str, ...]) -> str:
    return _run("--version").stdout


def _compiler() -> tuple[str, ...]:
    """Return the command in CXX, split into words, or g++."""
    try:
        return tuple(shlex.split(os.environ.get("CXX", ""))) or ("g++",)
    except ValueError as error:
        raise BackendError(f"CXX={os.environ['CXX']!r} is not a command: {error}") from None


def _run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the compiler with messages in English, whatever the user's language."""
    words = _compiler()
    try:
        return subprocess.run([*words, *arguments], input=text, capture_output=True, encoding="utf-8",
                              errors="replace", env={**os.environ, "LC_ALL": "C"}, timeout=COMPILER_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{words[0]} has not ended within {COMPILER_TIMEOUT:g} s; does CXX name the intended "
                           "compiler?") from error
    except OSError as error:
        raise BackendError(f"the kernels need a C++ compiler on the CPU, and {words[0]} cannot be run "
                           f"({error.strerror}); install g++, or name a compiler in CXX") from error
