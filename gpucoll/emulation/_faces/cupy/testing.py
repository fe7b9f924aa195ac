"""`cupy.testing`: NumPy's comparisons, on arrays of the GPU copied to the host."""

import functools

import numpy

from ._array import ndarray
from ._creation import asnumpy


def _on_host(function):
    @functools.wraps(function)
    def compare(*args, **options):
        return function(*[asnumpy(one) if isinstance(one, ndarray) else one for one in args], **options)

    return compare


def __getattr__(name):
    if not name.startswith("assert_"):
        raise AttributeError(f"module 'cupy.testing' has no attribute {name!r}")
    return _on_host(getattr(numpy.testing, name))


def assert_array_list_equal(xlist, ylist, err_msg="", verbose=True):
    for x, y in zip(xlist, ylist, strict=True):
        numpy.testing.assert_array_equal(asnumpy(x), asnumpy(y), err_msg, verbose)
