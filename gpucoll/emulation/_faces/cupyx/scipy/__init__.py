"""`cupyx.scipy` by SciPy's functions of the same names, where SciPy is installed."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types

from cupy import _generic


class _Part(types.ModuleType):
    """A module of SciPy with its functions on arrays of the GPU."""

    def __getattr__(self, name):
        return _found(self.__name__, name)


def _found(here, name):
    """Return a part of SciPy, or a function of a part, as CuPy has it."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "get_fft_plan":
        return lambda *args, **options: contextlib.nullcontext()
    found = _generic.found_in(importlib.import_module(here.removeprefix("cupyx.")), name, here)
    return importlib.import_module(f"{here}.{name}") if isinstance(found, types.ModuleType) else found


def __getattr__(name):
    return _found(__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("cupyx.scipy."):
            return None
        importlib.import_module(name.removeprefix("cupyx."))  # ImportError without SciPy
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Part(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())


def get_array_module(*args):
    import cupy
    import scipy

    return sys.modules[__name__] if cupy.get_array_module(*args) is cupy else scipy
