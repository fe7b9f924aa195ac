"""The parts of `cupyx` that programs use."""

import cupy
import numpy
from cupy import _generic
from cupy._ipc import alloc_pinned_memory

from . import cusparse, distributed, jit, profiler, scipy

errstate = numpy.errstate


def empty_pinned(shape, dtype=float, order="C"):
    """Return an array of NumPy in pinned memory of the host."""
    shape = (shape,) if isinstance(shape, int | numpy.integer) else tuple(shape)
    count = int(numpy.prod(shape, dtype=int))
    memory = alloc_pinned_memory(max(1, count * numpy.dtype(dtype).itemsize))
    return numpy.frombuffer(memory, dtype, count).reshape(shape, order=order)


def zeros_pinned(shape, dtype=float, order="C"):
    found = empty_pinned(shape, dtype, order)
    found[...] = 0
    return found


def empty_like_pinned(a, dtype=None, order="K", subok=None, shape=None):
    return empty_pinned(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)


def zeros_like_pinned(a, dtype=None, order="K", subok=None, shape=None):
    return zeros_pinned(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)


scatter_add, scatter_max, scatter_min = map(_generic.scatter, (numpy.add, numpy.maximum, numpy.minimum))


def rsqrt(x):
    return 1 / cupy.sqrt(x)
