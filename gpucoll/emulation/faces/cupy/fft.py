"""`cupy.fft` by NumPy's functions of the same names."""

import numpy.fft

from . import _generic


def __getattr__(name):
    return _generic.found_in(numpy.fft, name, "cupy.fft")
