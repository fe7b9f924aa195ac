"""CuPy, CuPy's binding of NCCL, and CUDA's libraries, for the device code of this process.

By default the installed packages serve. `use` replaces them, for example by the packages of emulated GPUs. The rest of
gpucoll asks whether there is a GPU, and imports the installed CuPy.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

from gpucoll.errors import UsageError

# The module of each package, and the part that is meant.
_NAMES = {"cupy": ("cupy", ""), "nccl": ("cupy.cuda", "nccl"), "driver": ("cuda.bindings", "driver")}
APART = ("GPUCOLL_DEVICE=emulated emulates a GPU for NumPy arrays, and arrays of a real GPU need another process: pass "
         "arrays of one kind")
_given: dict[str, Any] = {}  # packages by the names above, and libraries by the names of their files


def use(given: Mapping[str, Any]) -> None:
    """Replace packages, by the names in `_NAMES`, and libraries, by the names of their files.

    Raises UsageError if the device code has used another CuPy.
    """
    cupy = given.get("cupy")
    used = getattr(sys.modules.get(f"{__package__}.cuda"), "cupy", cupy)
    # A program that `precheck` runs imports a CuPy for itself, for a while: its calls do not use the device code.
    if cupy is not None and used is not cupy and cupy.__name__ != "cupy":
        raise UsageError(APART, code="GC-EMULATION")
    _given.update(given)


def check_installed() -> None:
    """Raise UsageError if the program's CuPy is not the CuPy of the device code."""
    cupy = _given.get("cupy")
    if cupy is not None and sys.modules.get("cupy", cupy) is not cupy:
        raise UsageError(APART, code="GC-EMULATION")


def library(name: str) -> Any:
    return _given.get(name) or ctypes.CDLL(name)


def __getattr__(name: str) -> Any:
    """Import a package when it is first used: most programs need none."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _given:
        return _given[name]
    module, part = _NAMES[name]
    if name == "nccl" and "cupy" in _given:
        module = f"{_given['cupy'].__name__}.cuda"
    found = __import__(module, fromlist=[part] if part else [])
    return getattr(found, part) if part else found
