"""The engine: C++ that carries out plans (kernels/engine.h), where it was built with the package."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gpucoll.device.sources import folder
from gpucoll.executors.shared.digest import MODULE, digest


@functools.cache
def library() -> Any:
    """Return the engine's module, None where there is none that fits these files."""
    try:
        return built()
    except (ImportError, OSError):
        return None


def built() -> Any:
    """Return the module that was built with the package; raise ImportError or OSError, which say what is lacking."""
    try:
        found = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise ImportError("it was not built when gpucoll was installed") from error
    if found.sources != digest(folder()):
        raise ImportError("it was built from other sources than these")
    return found
