"""`cupyx.scipy` by SciPy's functions of the same names, where SciPy is installed."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

from cupy import _generic

PARTS = ("special", "ndimage", "signal", "fft", "linalg", "stats", "interpolate", "spatial")


class _Part(types.ModuleType):
    """A module of SciPy with its functions on arrays of the GPU."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _generic.found_in(importlib.import_module(self.__name__.removeprefix("cupyx.")), name, self.__name__)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("cupyx.scipy.") and name.removeprefix("cupyx.scipy.") in PARTS:
            importlib.import_module(name.removeprefix("cupyx."))  # ImportError without SciPy
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec):
        return _Part(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())


def get_array_module(*args):
    import cupy
    import scipy

    return sys.modules[__name__] if cupy.get_array_module(*args) is cupy else scipy
