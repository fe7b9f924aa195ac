"""The engine: C++ that carries out plans (kernels/engine.h), where it can be compiled.

It takes a compiler, and Python's and NumPy's headers.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import sysconfig
from typing import Any

import numpy

from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.sources import inlined
from gpucoll.device.store import user_store
from gpucoll.errors import BackendError


@functools.cache
def library() -> Any:
    """Return the compiled module, None where there is no compiler, or one that cannot."""
    try:
        return built()
    except (BackendError, ImportError, OSError):
        return None


def built() -> Any:
    """Return the compiled module; raise BackendError, ImportError or OSError, which say what is lacking."""
    source = inlined("engine.cc", set())
    options = ["-O3", *(f"-I{folder}" for folder in (sysconfig.get_paths()["include"], numpy.get_include()))]
    made_by = "\n".join([recipe(), *options, sys.version, numpy.__version__])
    build = functools.partial(compile_shared, source, *options)
    return imported(user_store().loadable(source, ".so", build, flags=made_by))


def imported(path: str) -> Any:
    """Return the compiled module at `path`."""
    loader = importlib.machinery.ExtensionFileLoader("engine", path)
    spec = importlib.util.spec_from_loader("engine", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
