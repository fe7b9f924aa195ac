"""The loader of the engine, the C++ module that carries out plans (kernels/engine, kernels/binding)."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from gpucoll.device.sources import folder
from gpucoll.errors import UsageError
from gpucoll.executors.engine.digest import MODULE, digest


@functools.cache
def library() -> Any:
    """Return the engine's module; raise UsageError, with the reason and the remedy, if it does not fit the package."""
    why = "it was built from other sources"
    try:
        found = importlib.import_module(MODULE)
        if found.sources == digest(folder()):
            return found
    except ModuleNotFoundError:
        why = "it was not built when gpucoll was installed"
    except (ImportError, OSError) as error:
        why = str(error)
    raise UsageError(f"this gpucoll lacks its engine, the C++ module {MODULE}: {why}; with g++ and Python's headers "
                     "(python3-dev) install again: pip install --force-reinstall --no-deps --no-cache-dir, and gpucoll "
                     "or its folder", code="GC-ENGINE")
