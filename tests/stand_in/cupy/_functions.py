"""Functions on arrays, as far as they are used."""

import numpy

from ._array import array, call, ndarray, write


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def full(shape, fill_value, dtype=None, order="C"):
    found = ndarray(shape, numpy.asarray(fill_value).dtype if dtype is None else dtype, order=order)
    found.fill(fill_value)
    return found


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype, order)


def ones(shape, dtype=float, order="C"):
    return full(shape, 1, dtype, order)


def empty_like(prototype, dtype=None):
    return ndarray(prototype.shape, prototype.dtype if dtype is None else dtype)


def zeros_like(a, dtype=None):
    return zeros(a.shape, a.dtype if dtype is None else dtype)


def ones_like(a, dtype=None):
    return ones(a.shape, a.dtype if dtype is None else dtype)


def arange(start, stop=None, step=1, dtype=None):
    """By a kernel, not by a copy from the host."""
    values = numpy.arange(start, stop, step, dtype) if stop is not None else numpy.arange(0, start, step, dtype)
    return call(lambda: values)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    return a.get(stream=stream, order=order, out=out, blocking=blocking) if isinstance(a, ndarray) else numpy.asarray(a)


def copyto(dst, src, casting="same_kind", where=None):
    write(dst, lambda host, given: numpy.copyto(host, given, casting=casting), src)


def ascontiguousarray(a, dtype=None):
    return a if a.flags.c_contiguous and dtype in (None, a.dtype) else array(a, dtype).copy()


def asfortranarray(a, dtype=None):
    return call(numpy.asfortranarray, a)


def concatenate(tup, axis=0):
    return call(lambda *xs: numpy.concatenate(xs, axis), *tup)


def stack(tup, axis=0):
    return call(lambda *xs: numpy.stack(xs, axis), *tup)


def broadcast_to(array, shape):
    strides = numpy.broadcast_to(array._host, shape).strides
    return array._window(numpy.lib.stride_tricks.as_strided(array._host, shape, strides))


def ufunc(name):
    def function(*operands):
        if not any(isinstance(x, ndarray) for x in operands):
            raise TypeError(f"Unsupported type {type(operands[0])}")
        return call(getattr(numpy, name), *operands)
    return function


exp, log, tanh, isnan = map(ufunc, ("exp", "log", "tanh", "isnan"))
sqrt, maximum, minimum = map(ufunc, ("sqrt", "maximum", "minimum"))
