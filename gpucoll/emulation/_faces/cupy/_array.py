"""`cupy.ndarray` and CuPy's array functions: NumPy computes on the bytes of device memory.

Every operation is enqueued on the current stream, and NumPy runs the operation in stream order. Rules of CuPy and CUDA:
no mixing with NumPy arrays, no implicit conversion to NumPy (only `get` copies to the host), no float8, operands only
on the current device, and no copy from or to the host in a capture.
"""

import functools
import operator
import sys
import threading
import warnings

import numpy

from . import _dlpack, _memory
from ._machine import MACHINE, check, on_device
from ._operands import hosts, indices, inside, like
from ._order import span, touched, written
from .cuda import runtime
from .cuda.stream import _BaseStream, get_current_stream


class ndarray:
    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, int | numpy.integer) else tuple(shape)
        dtype = supported(dtype)
        nbytes = int(numpy.prod(shape, dtype=object)) * dtype.itemsize if shape else dtype.itemsize
        self.data = _memory.alloc(nbytes) if memptr is None else memptr
        self._device = self.data.device_id
        self._place(shape, dtype, numpy.empty(shape, dtype, order).strides if strides is None else tuple(strides))

    def __getattr__(self, name):
        if name != "data":
            raise AttributeError(name)
        if self.base is None:
            self.data = _memory.adopted(self._host, self._device)
        else:
            there = self.base._host.ctypes.data
            self.data = self.base.data + ((self._host.ctypes.data if self.size else there) - there)
        return self.data

    def _place(self, shape, dtype, strides):
        """Make `_host` a view of the memory at `data`, with this shape and these strides."""
        if 0 in shape:
            self._host = numpy.empty(shape, dtype)
            return
        reach = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + dtype.itemsize
        around = _memory.view(self.data.ptr + low, high - low, self.data.device_id)
        self._host = numpy.ndarray(shape, dtype, around, -low, strides)

    shape = property(lambda self: self._host.shape, lambda self, shape: setattr(self._host, "shape", shape))
    strides, dtype, size, ndim, itemsize, nbytes, flags = (property(operator.attrgetter(f"_host.{name}")) for name in (
        "strides", "dtype", "size", "ndim", "itemsize", "nbytes", "flags"))
    device = property(lambda self: self.data.device)
    T = property(lambda self: self._window(self._host.T))
    real = property(lambda self: self._window(self._host.real) if self.dtype.kind == "c" else self,
                    lambda self, value: self.real.__setitem__(..., value))
    imag = property(lambda self: self._window(self._host.imag) if self.dtype.kind == "c" else call(numpy.imag, self),
                    lambda self, value: self._imaginary().__setitem__(..., value))
    base = None  # the array of which this is a view
    __array_priority__ = 100
    __hash__ = None

    def __array_ufunc__(self, function, method, *operands, **options):
        """Serve NumPy's ufuncs on arrays of the GPU, as CuPy does; NumPy's arrays among the operands are refused."""
        from . import _generic
        for one in (*operands, *options.get("out", ())):
            if isinstance(one, numpy.ndarray) and one.ndim:
                raise TypeError(f"Unsupported type {type(one)}")
        served = _generic.Ufunc(function)
        return (served if method == "__call__" else getattr(served, method))(*operands, **options)

    def __array_function__(self, function, types, args, kwargs):
        cupy = sys.modules[__package__]
        part = next((one for one in ("linalg", "fft", "testing") if f".{one}" in function.__module__), None)
        return getattr(getattr(cupy, part) if part else cupy, function.__name__)(*args, **kwargs)

    def _imaginary(self):
        if self.dtype.kind != "c":
            raise TypeError("cupy.ndarray does not have imaginary part to set")
        return self.imag

    def _window(self, host, kind=None):
        """Return an array of the same memory for `host`, another view of `_host`."""
        found = ndarray.__new__(kind or type(self))
        found._host, found._device, found.base = host, self._device, self if self.base is None else self.base
        return found

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    # Protocols read by other libraries

    @property
    def __cuda_array_interface__(self):
        stream = get_current_stream().ptr or runtime.streamLegacy
        return {"shape": self.shape, "typestr": self.dtype.str, "descr": [("", self.dtype.str)], "stream": stream,
                "version": 3, "strides": None if self.flags.c_contiguous else self.strides,
                "data": (self.data.ptr if self.size else 0, False)}

    def __dlpack_device__(self):
        return _dlpack.CUDA, self.data.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        consumer = runtime.streamLegacy if stream is None else stream
        assert consumer == -1 or consumer > 0, "the protocol has no such stream"
        current = get_current_stream()
        if consumer == -1:
            # The consumer copies the memory itself, as MPI does by cudaMemcpy, which follows the null stream.
            with on_device(self.data.device_id):
                runtime.streamSynchronize(0)
        elif consumer != (current.ptr or runtime.streamLegacy):
            _BaseStream(consumer, -1).wait_event(current.record())
        return _dlpack.capsule(self, max_version)

    toDlpack = __dlpack__

    # To the host and back

    def get(self, stream=None, order="C", out=None, blocking=True):
        if out is not None:
            if (out.dtype, out.shape) != (self.dtype, self.shape):
                raise ValueError(f"out is {out.dtype} of shape {out.shape}, the array {self.dtype} of {self.shape}")
            if out.flags.forc == self.flags.forc and _memory.is_pinned(out.ctypes.data):
                self.data.copy_to_host_async(out.ctypes.data, self.nbytes, stream)
                if blocking:
                    (get_current_stream() if stream is None else stream).synchronize()
                return out
            out[...] = self.get(stream, order)
            return out
        stream = get_current_stream() if stream is None else stream
        with on_device(self.data.device_id):
            queue = MACHINE.queue(stream.ptr)
            check(queue.capture is None, 900, "a copy to the host, but the stream is capturing")
            order = ("F" if self.flags.fnc else "C") if order in "AK" else order
            found, host = numpy.empty(self.shape, self.dtype, order), self._host
            MACHINE.submit(queue, lambda: lambda: numpy.copyto(found, host) is None)
            touched(queue, [span(self)], [])
            with MACHINE.copying(queue):
                stream.synchronize()
        return found

    def set(self, arr, stream=None):
        if not isinstance(arr, numpy.ndarray) or (arr.dtype, arr.shape) != (self.dtype, self.shape):
            raise TypeError(f"only an array of {self.dtype} and shape {self.shape} can be set")
        if self.flags.c_contiguous and arr.flags.c_contiguous and _memory.is_pinned(arr.ctypes.data):
            return self.data.copy_from_host_async(arr.ctypes.data, self.nbytes, stream)
        staged, host = arr.copy(), self._host
        queue = MACHINE.queue((get_current_stream() if stream is None else stream).ptr)
        check(queue.capture is None, 900, "a copy from the host in a capture")
        MACHINE.submit(queue, lambda: lambda: numpy.copyto(host, staged) is None)
        touched(queue, [], [span(self)])

    def __reduce__(self):
        from ._creation import array
        return array, (self.get(),)

    # Views and copies

    def __len__(self):
        return len(self._host)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index):
        parts = indices(index)
        if any(isinstance(part, ndarray) and part.dtype == bool for part in parts):
            from ._generic import at_once
            return at_once(lambda host, chosen: host[tuple(chosen)], (self, list(parts)), {})
        if any(isinstance(part, ndarray) for part in parts):
            return call(lambda host, *chosen: host[inside(host, chosen)], self, *parts)
        return self._window(self._host[(*parts, ...)] if not any(part is ... for part in parts) else self._host[parts])

    def __setitem__(self, index, value):
        parts = indices(index)
        if any(isinstance(part, ndarray) for part in parts):
            if isinstance(value, numpy.ndarray | list | tuple):
                from ._creation import array
                value = array(value, self.dtype)
            write(self, lambda host, given, *chosen: host.__setitem__(inside(host, chosen), given), value, *parts)
            return
        if (isinstance(value, numpy.ndarray) and value.ndim == 0) or isinstance(value, numpy.generic):
            value = value.item()
        write(self[index], lambda host, given: host.__setitem__(..., given), value)

    def view(self, dtype=None, array_class=None):
        if isinstance(dtype, type) and issubclass(dtype, ndarray):
            dtype, array_class = None, dtype
        return self._window(self._host if dtype is None else self._host.view(numpy.dtype(dtype)), array_class)

    def reshape(self, *shape, order="C"):
        shape = shape[0] if len(shape) == 1 else shape
        found = self._host.reshape(shape, order=order)
        if not self.size or numpy.may_share_memory(found, self._host):
            return self._window(found)
        return call(lambda host: host.reshape(shape, order=order), self)

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        dtype = supported(dtype)
        return call(lambda host: host.astype(dtype, order), self) if copy or dtype != self.dtype else self

    def copy(self, order="C"):
        if self.data.device_id == MACHINE.device():
            return call(lambda host: numpy.copy(host, order), self)
        order = ("F" if self.flags.fnc else "C") if order in "AK" else order
        found, given = ndarray(self.shape, self.dtype, order=order), self._host
        if get_current_stream().ptr in (0, 1):  # CUDA orders such a copy behind all work of both devices
            queue, there = MACHINE.queue(0), self.data.device_id
            after = [(other, other.issued) for other in MACHINE.queues if other.device == there]
            MACHINE.submit(queue, lambda: lambda: True, after=after)
        enqueue(lambda: numpy.copyto(found._host, given), found, (self,))
        return found

    __copy__ = __pos__ = copy

    def __deepcopy__(self, memo):
        with on_device(self.data.device_id):
            return self.copy()

    def _view(name):
        return lambda self, *args, **options: self._window(getattr(self._host, name)(*args, **options))

    transpose, squeeze, swapaxes, diagonal = map(_view, ("transpose", "squeeze", "swapaxes", "diagonal"))

    def ravel(self, order="C"):
        return self.reshape(-1, order=order)

    def fill(self, value):
        is_array = isinstance(like(value), ndarray)
        write(self, lambda host, given: host.fill(given), value if is_array else numpy.asarray(value, self.dtype)[()])

    def _reduced(name):
        return lambda self, axis=None, **options: call(lambda host: getattr(host, name)(axis=axis, **options), self)

    sum, mean, max, min, all, any, argmax = map(_reduced, ("sum", "mean", "max", "min", "all", "any", "argmax"))
    __neg__, __abs__, __invert__ = (
        lambda self, function=function: call(function, self) for function in (numpy.negative, numpy.abs, numpy.invert))
    del _reduced, _view

    def __divmod__(self, other):
        return self // other, self % other


def _of_copy(name):
    return lambda self, *args: getattr(self.get(), name)(*args)


for _name in """__bool__ __int__ __float__ __complex__ __index__ __repr__ __str__ __format__ item tolist tobytes
        dump""".split():
    setattr(ndarray, _name, _of_copy(_name))
ndarray.__bytes__ = ndarray.tobytes


def supported(dtype):
    return _supported(numpy.dtype(dtype))


@functools.cache  # the name of a dtype takes longer than most operations
def _supported(dtype):
    if dtype.name.startswith("float8") or (dtype.kind not in "biufc" and dtype.name != "bfloat16"):
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


# Warning filters belong to the process: two threads would restore each other's filters.
FILTERS = threading.RLock()


def call(function, *operands):
    """Return a new array for the result of `function` on the operands, computed on the current stream."""
    operands = [like(one) for one in operands]
    given = hosts(operands)
    if getattr(function, "func", function) is numpy.matmul and MACHINE.is_capturing(get_current_stream().ptr):
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    if MACHINE.is_idle():
        with numpy.errstate(all="ignore"):
            return made(function(*given))
    with FILTERS, warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        probe = numpy.asarray(function(*(numpy.broadcast_to(numpy.zeros((), x.dtype), x.shape)
                                         if isinstance(x, numpy.ndarray) else x for x in given)))
    found = ndarray(probe.shape, probe.dtype, order="F" if probe.flags.fnc else "C")
    host = found._host
    enqueue(lambda: numpy.copyto(host, function(*given)), found, operands,
            used=operands if isinstance(function, numpy.ufunc) else ())
    return found


def made(result):
    """Return the array of the GPU for a result of NumPy that is known at once; see `_memory.adopted`."""
    host = numpy.asarray(result)
    if host.base is not None or not host.flags.writeable:
        host = host.copy("K")
    supported(host.dtype)
    MACHINE.settle()
    if _memory.get_allocator() != _memory.DEFAULT:
        found = ndarray(host.shape, host.dtype, order="F" if host.flags.fnc else "C")
        found._host[...] = host
        return found
    found = ndarray.__new__(ndarray)
    found._host, found._device = host, MACHINE.device()
    return found


def write(target, function, *operands, used=()):
    operands = [like(one) for one in operands]
    given = hosts((target, *operands))
    enqueue(lambda: function(*given), target, operands, used)


def enqueue(work, target, operands=(), used=()):
    """Enqueue work that reads `operands` and writes `target`; it computes with the values of `used`."""
    check_written = written([one for one in used if isinstance(one, ndarray)])

    def act():
        check_written()
        with numpy.errstate(all="ignore"):
            work()
        return True

    if target.size and MACHINE.is_idle():
        act()
    elif target.size:
        queue = MACHINE.queue(get_current_stream().ptr)
        MACHINE.submit(queue, lambda: act)
        touched(queue, [span(one) for one in operands if isinstance(one, ndarray)], [span(target)])


def operators(name, function):
    """Add an operator to `ndarray`, for both sides and in place; `call` refuses NumPy arrays, as CuPy does."""
    def in_place(self, other):
        write(self, lambda host, given: function(host, given, out=host, casting="same_kind"), other, used=(self, other))
        return self

    def binary(self, other):
        if getattr(other, "__array_priority__", 0) > self.__array_priority__:
            return NotImplemented  # as a sparse matrix has
        return call(function, self, other)

    setattr(ndarray, f"__{name}__", binary)
    setattr(ndarray, f"__r{name}__", lambda self, other: call(function, other, self))
    setattr(ndarray, f"__i{name}__", in_place)


for _name, _function in {"add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply, "truediv": numpy.true_divide,
                         "pow": numpy.power, "matmul": numpy.matmul, "and": numpy.bitwise_and, "eq": numpy.equal,
                         "ne": numpy.not_equal, "lt": numpy.less, "gt": numpy.greater}.items():
    operators(_name, _function)
