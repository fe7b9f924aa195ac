"""`cupy.linalg` by NumPy's functions of the same names."""

import numpy.linalg

from . import _generic


def __getattr__(name):
    return _generic.found_in(numpy.linalg, name, "cupy.linalg")
