"""CuPy's functions that make arrays, and those on arrays that are enqueued: their shapes do not depend on values."""

import numpy

from . import _dlpack, _memory
from ._array import call, ndarray, write
from ._dlpack import CUDA
from ._machine import MACHINE, on_device
from .cuda import runtime
from .cuda.stream import get_current_stream


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    obj = obj.__cupy_get_ndarray__() if hasattr(obj, "__cupy_get_ndarray__") else obj
    if isinstance(obj, ndarray):
        obj = obj if obj.data.device_id == MACHINE.device() else obj.copy(order)
        found = obj.astype(obj.dtype if dtype is None else dtype, order, copy=bool(copy))
        return found.reshape((1,) * (ndmin - found.ndim) + found.shape) if found.ndim < ndmin else found
    if isinstance(obj, list | tuple) and any(True for _ in nested(obj)):
        found = call(lambda *rows: numpy.stack(rows), *[one if isinstance(one, ndarray) else array(one) for one in obj])
        return array(found, dtype, False, order, subok, ndmin)
    if hasattr(obj, "__cuda_array_interface__"):
        found = from_interface(obj.__cuda_array_interface__, obj)
        return array(found, dtype, copy, order, subok, ndmin)
    host = numpy.array(obj, dtype=dtype, ndmin=ndmin)
    order = "F" if order == "F" or (order in "KA" and host.flags.fnc) else "C"
    found = ndarray(host.shape, host.dtype, order=order)
    found.set(numpy.asarray(host, order=order))
    return found


def nested(value):
    """Yield the arrays of the GPU in lists of lists."""
    for one in value:
        if isinstance(one, list | tuple):
            yield from nested(one)
        elif isinstance(one, ndarray):
            yield one


def asarray(a, dtype=None, order=None, *, blocking=False):
    return array(a, dtype, copy=False, order=order or "K")


def from_interface(described, owner):
    """Import an array from `__cuda_array_interface__`; as in CuPy, the host first waits for the producer's stream."""
    if described.get("stream") is not None:
        runtime.streamSynchronize(described["stream"])
    return unowned(described["shape"], described["typestr"], described["data"][0], owner, described.get("strides"))


def unowned(shape, dtype, address, owner, strides):
    """Return an array in memory of another library; the array keeps `owner` alive."""
    chunk = _memory.chunk_at(address)
    memory = _memory.UnownedMemory(address, 0, owner, chunk.device if chunk else MACHINE.device())
    return ndarray(shape, dtype, _memory.MemoryPointer(memory, 0), strides)


def from_dlpack(x):
    kind, ordinal = x.__dlpack_device__()
    if kind != CUDA:
        raise TypeError("CPU arrays cannot be directly imported to CuPy")
    with on_device(ordinal):
        given = x.__dlpack__(stream=get_current_stream().ptr or runtime.streamLegacy)
    address, shape, dtype, strides = _dlpack.described(given)
    return unowned(shape, dtype, address, (given, x), strides)


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def full(shape, fill_value, dtype=None, order="C"):
    found = ndarray(shape, numpy.asarray(fill_value).dtype if dtype is None else dtype, order=order)
    found.fill(fill_value)
    return found


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    order = ("F" if prototype.flags.fnc else "C") if order in "KA" else order
    shape, dtype = prototype.shape if shape is None else shape, prototype.dtype if dtype is None else dtype
    return ndarray(shape, dtype, order=order)


def full_like(a, fill_value, dtype=None, order="K", subok=None, shape=None):
    found = empty_like(a, dtype, order, shape=shape)
    found.fill(fill_value)
    return found


def _filled(value):
    return (lambda shape, dtype=float, order="C": full(shape, value, dtype, order),
            lambda a, dtype=None, order="K", subok=None, shape=None: full_like(a, value, dtype, order, shape=shape))


(zeros, zeros_like), (ones, ones_like) = map(_filled, (0, 1))


def arange(start, stop=None, step=1, dtype=None):
    """Return evenly spaced values, written by a kernel instead of a copy from the host."""
    values = numpy.arange(start, stop, step, dtype) if stop is not None else numpy.arange(0, start, step, dtype)
    return call(lambda: values)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    if isinstance(a, ndarray):
        return a.get(stream, order, out)
    found = numpy.asarray(array(a).get() if hasattr(a, "__cuda_array_interface__") else a, order=order)
    if out is None:
        return found
    out[...] = found
    return out


def copyto(dst, src, casting="same_kind", where=None):
    write(dst, lambda host, given: numpy.copyto(host, given, casting="same_kind"), src)


def asfortranarray(a, dtype=None):
    return call(numpy.asfortranarray, asarray(a, dtype))


def where(condition, x=None, y=None):
    """Return elements by a condition; without `x` and `y` the indices, for which the host waits."""
    if x is None:
        return condition.nonzero()
    return call(numpy.where, condition, x, y)


def ascontiguousarray(a, dtype=None):
    a = asarray(a, dtype)
    return a if a.flags.c_contiguous else a.copy()


def clip(a, a_min=None, a_max=None, out=None):
    if out is None:
        return call(lambda host: numpy.clip(host, a_min, a_max), a)
    write(out, lambda host, given: numpy.clip(given, a_min, a_max, out=host), a)
    return out


def joined(name):
    return lambda arrays, axis=0, **options: call(lambda *hosts: getattr(numpy, name)(hosts, axis), *arrays)


concatenate, stack = map(joined, ("concatenate", "stack"))


def split(ary, indices_or_sections, axis=0):
    return [ary._window(part) for part in numpy.split(ary._host, indices_or_sections, axis)]


def argpartition(a, kth, axis=-1):
    return call(lambda host: numpy.argpartition(host, kth, axis), a)
