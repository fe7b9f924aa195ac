"""The stand-in for `cupy.ndarray` and CuPy's array functions: NumPy computes on the bytes of device memory.

Every operation is enqueued on the current stream, and NumPy runs the operation in stream order. Rules of CuPy and CUDA:
no mixing with NumPy arrays, no implicit conversion to NumPy (only `get` copies to the host), no float8, operands only
on the current device, and no copy from or to the host in a capture.
"""

import threading
import warnings

import numpy

from . import _memory
from ._machine import MACHINE, check, on_device
from .cuda import runtime
from .cuda.stream import _BaseStream, get_current_stream

CUDA = 2  # DLPack's type of device


class ndarray:
    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, int | numpy.integer) else tuple(shape)
        dtype = supported(dtype)
        nbytes = int(numpy.prod(shape, dtype=object)) * dtype.itemsize if shape else dtype.itemsize
        self.data = _memory.MemoryPointer(_memory.Memory(nbytes), 0) if memptr is None else memptr
        self._place(shape, dtype, numpy.empty(shape, dtype, order).strides if strides is None else tuple(strides))

    def _place(self, shape, dtype, strides):
        """Make `_host` a view of the memory at `data`, with this shape and these strides."""
        if 0 in shape:
            self._host = numpy.empty(shape, dtype)
            return
        reach = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + dtype.itemsize
        around = _memory.view(self.data.ptr + low, high - low, self.data.device_id)
        self._host = numpy.ndarray(shape, dtype, around, -low, strides)

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    size = property(lambda self: self._host.size)
    ndim = property(lambda self: self._host.ndim)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    flags = property(lambda self: self._host.flags)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self._window(self._host.T))
    __array_ufunc__ = None  # makes NumPy refuse to compute with these arrays
    __hash__ = None

    def _window(self, host):
        """Return an array of the same memory for `host`, another view of `_host`."""
        found = ndarray.__new__(type(self))
        offset = host.ctypes.data - self._host.ctypes.data if host.size else 0
        found.data, found._host = self.data + offset, host
        return found

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    # Protocols read by other libraries

    @property
    def __cuda_array_interface__(self):
        stream = get_current_stream().ptr or runtime.streamLegacy
        return {"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "stream": stream,
                "version": 3, "strides": None if self.flags.c_contiguous else self.strides,
                "data": (self.data.ptr if self.size else 0, False)}

    def __dlpack_device__(self):
        return CUDA, self.data.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        consumer = runtime.streamLegacy if stream is None else stream
        assert consumer == -1 or consumer > 0, "the protocol has no such stream"
        current = get_current_stream()
        if consumer != -1 and consumer != (current.ptr or runtime.streamLegacy):
            _BaseStream(consumer, -1).wait_event(current.record())
        return self._window(self._host)  # in place of a DLPack capsule

    # To the host and back

    def get(self, stream=None, order="C"):
        stream = get_current_stream() if stream is None else stream
        with on_device(self.data.device_id):
            queue = MACHINE.queue(stream.ptr)
            check(queue.capture is None, 900, "a copy to the host in a capture")
            found, host = numpy.empty(self.shape, self.dtype, order), self._host
            MACHINE.submit(queue, lambda: lambda: numpy.copyto(found, host) is None)
            with MACHINE.copying(queue):
                stream.synchronize()
        return found

    def set(self, arr, stream=None):
        if not isinstance(arr, numpy.ndarray) or (arr.dtype, arr.shape) != (self.dtype, self.shape):
            raise TypeError(f"only an array of {self.dtype} and shape {self.shape} can be set")
        staged, host = arr.copy(), self._host
        queue = MACHINE.queue((get_current_stream() if stream is None else stream).ptr)
        check(queue.capture is None, 900, "a copy from the host in a capture")
        MACHINE.submit(queue, lambda: lambda: numpy.copyto(host, staged) is None)

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    # Views and copies

    def __len__(self):
        return len(self._host)

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, ndarray) for part in parts):
            return call(lambda host, *chosen: host[tuple(chosen)], self, *parts)
        return self._window(self._host[(*parts, ...)] if Ellipsis not in parts else self._host[index])

    def __setitem__(self, index, value):
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, ndarray) for part in parts):
            write(self, lambda host, given, *chosen: host.__setitem__(tuple(chosen), given), value, *parts)
            return
        write(self[index], lambda host, given: host.__setitem__(..., given), value)

    def view(self, dtype=None, array_class=None):
        return self._window(self._host if dtype is None else self._host.view(numpy.dtype(dtype)))

    def reshape(self, *shape, order="C"):
        found = self._host.view()
        found.shape = shape[0] if len(shape) == 1 else shape  # AttributeError if no view has this shape
        return self._window(found)

    def astype(self, dtype, copy=True):
        dtype = supported(dtype)
        return call(lambda host: host.astype(dtype), self) if copy or dtype != self.dtype else self

    def copy(self):
        return call(numpy.copy, self)

    def fill(self, value):
        write(self, lambda host, given: host.fill(given), numpy.asarray(value, dtype=self.dtype)[()])

    def _reduced(name):
        return lambda self, axis=None, **options: call(lambda host: getattr(host, name)(axis=axis, **options), self)

    sum, mean, max, min, all, any, argmax = map(_reduced, ("sum", "mean", "max", "min", "all", "any", "argmax"))
    del _reduced

    def __matmul__(self, other):
        return call(numpy.matmul, self, other)

    def __neg__(self):
        return call(numpy.negative, self)


def supported(dtype):
    dtype = numpy.dtype(dtype)
    if dtype.name.startswith("float8") or (dtype.kind not in "biufc" and dtype.name != "bfloat16"):
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


def check_elements(array):
    """Raise ValueError unless the array is on the current device."""
    current = MACHINE.device()
    if array.data.device_id != current:
        raise ValueError("Array device must be same as the current device: array device = "
                         f"{array.data.device_id} while current = {current}.")


def hosts(operands):
    """Return the operands for NumPy; raise TypeError for NumPy arrays, as CuPy does."""
    for x in operands:
        if isinstance(x, numpy.ndarray):
            raise TypeError(f"Unsupported type {type(x)}")
        if isinstance(x, ndarray):
            check_elements(x)
    return [x._host if isinstance(x, ndarray) else x for x in operands]


# Warning filters belong to the process: two threads would restore each other's filters.
FILTERS = threading.RLock()


def call(function, *operands):
    """Return a new array for the result of `function` on the operands, computed on the current stream."""
    given = hosts(operands)
    with FILTERS, warnings.catch_warnings(), numpy.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        probe = numpy.asarray(function(*(numpy.zeros(x.shape, x.dtype) if isinstance(x, numpy.ndarray) else x
                                         for x in given)))
    found = ndarray(probe.shape, probe.dtype)
    host = found._host
    enqueue(lambda: numpy.copyto(host, function(*given)), found)
    return found


def write(target, function, *operands):
    given = hosts((target, *operands))
    enqueue(lambda: function(*given), target)


def enqueue(work, target):
    def act():
        with numpy.errstate(all="ignore"):
            work()
        return True

    if target.size:
        MACHINE.submit(MACHINE.queue(get_current_stream().ptr), lambda: act)


def operators(name, function):
    """Add an operator to `ndarray`, for both sides and in place; `call` refuses NumPy arrays, as CuPy does."""
    def in_place(self, other):
        write(self, lambda host, given: function(host, given, out=host, casting="same_kind"), other)
        return self

    setattr(ndarray, f"__{name}__", lambda self, other: call(function, self, other))
    setattr(ndarray, f"__r{name}__", lambda self, other: call(function, other, self))
    setattr(ndarray, f"__i{name}__", in_place)


for _name, _function in {"add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply, "truediv": numpy.true_divide,
                         "pow": numpy.power, "and": numpy.bitwise_and, "eq": numpy.equal,
                         "ne": numpy.not_equal, "lt": numpy.less, "gt": numpy.greater}.items():
    operators(_name, _function)


def array(obj, dtype=None, copy=True):
    if isinstance(obj, ndarray):
        check_elements(obj)
        return obj.astype(obj.dtype if dtype is None else dtype, copy)
    if hasattr(obj, "__cuda_array_interface__"):
        return from_interface(obj.__cuda_array_interface__, obj)
    host = numpy.array(obj, dtype=dtype)
    order = "F" if host.flags.fnc else "C"
    found = ndarray(host.shape, host.dtype, order=order)
    found.set(numpy.asarray(host, order=order))
    return found


def asarray(a, dtype=None):
    return array(a, dtype, copy=False)


def from_interface(described, owner):
    """Import an array from `__cuda_array_interface__`; as in CuPy, the host first waits for the producer's stream."""
    if described.get("stream") is not None:
        runtime.streamSynchronize(described["stream"])
    return unowned(described["shape"], described["typestr"], described["data"][0], owner, described["strides"])


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
        given = x.__dlpack__(stream=get_current_stream().ptr or runtime.streamLegacy, max_version=(1, 0))
    return unowned(given.shape, given.dtype, given.data.ptr, given, given.strides)


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


def arange(start, stop=None, step=1, dtype=None):
    """Return evenly spaced values, written by a kernel instead of a copy from the host."""
    values = numpy.arange(start, stop, step, dtype) if stop is not None else numpy.arange(0, start, step, dtype)
    return call(lambda: values)


def asnumpy(a):
    return a.get()


def copyto(dst, src):
    write(dst, lambda host, given: numpy.copyto(host, given, casting="same_kind"), src)


def asfortranarray(a):
    return call(numpy.asfortranarray, a)


def ufunc(name):
    return lambda *operands: call(getattr(numpy, name), *operands)


abs, exp, isfinite, log, rint, sqrt, tanh, where, ascontiguousarray = map(
    ufunc, ("abs", "exp", "isfinite", "log", "rint", "sqrt", "tanh", "where", "ascontiguousarray"))


def add(x1, x2, out):
    write(out, lambda host, one, other: numpy.add(one, other, out=host), x1, x2)


def clip(a, a_min, a_max, out):
    write(out, lambda host, given: numpy.clip(given, a_min, a_max, out=host), a)


def joined(name):
    return lambda arrays, axis=0: call(lambda *hosts: getattr(numpy, name)(hosts, axis), *arrays)


concatenate, stack = map(joined, ("concatenate", "stack"))


def split(ary, indices_or_sections, axis=0):
    return [ary._window(part) for part in numpy.split(ary._host, indices_or_sections, axis)]


def argpartition(a, kth, axis=-1):
    return call(lambda host: numpy.argpartition(host, kth, axis), a)
