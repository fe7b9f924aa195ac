"""The loader of the engine, the C++ module that carries out plans (kernels/engine, kernels/binding)."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gpucoll.device.sources import folder
from gpucoll.executors.engine.digest import MODULE, digest


@functools.cache
def library() -> Any:
    """Return the engine's module, or None if no module was built from these sources."""
    try:
        return built()
    except (ImportError, OSError):
        return None


def built() -> Any:
    """Return the module built with the package; raise ImportError or OSError, with the reason, if unusable."""
    try:
        found = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        raise ImportError("the engine was not built when gpucoll was installed") from error
    if found.sources != digest(folder()):
        raise ImportError("the engine was built from different sources")
    return found
