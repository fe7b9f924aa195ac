"""GPU tensors of PyTorch, as far as gpucoll uses tensors; this module takes the place of `torch`.

As in torch/_tensor.py, the property `__cuda_array_interface__` raises RuntimeError for a tensor requiring grad and
KeyError for a dtype unknown to NumPy. `__dlpack__` makes the requested stream wait for the tensor's stream.
"""

import contextlib
import threading
import types

import cupy
import numpy

from gpucoll.core.dtypes import numpy_dtype


class dtype:
    def __init__(self, name):
        self.name, self.itemsize = name, numpy_dtype(name).itemsize
        self.is_carried = name.startswith(("float8", "bfloat16"))

    def __repr__(self):
        return f"torch.{self.name}"


float32, float16, bfloat16, int16, uint8, float8_e4m3fn, float8_e5m2 = map(
    dtype, "float32 float16 bfloat16 int16 uint8 float8_e4m3fn float8_e5m2".split())


class Tensor:
    """The elements of a CuPy array, made and used on `stream`."""

    def __init__(self, array, kind=None, requires_grad=False, stream=None):
        self._array, self.requires_grad = array, requires_grad
        self.dtype = dtype(array.dtype.name) if kind is None else kind
        self._stream = stream or _streams()[-1]

    shape = property(lambda self: self._array.shape)
    is_cuda = True
    device = property(lambda self: types.SimpleNamespace(type="cuda", index=self._array.device.id))

    @property
    def __cuda_array_interface__(self):
        if self.requires_grad:
            raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad. "
                               "If gradients aren't required, use var.detach()")
        if self.dtype.is_carried:
            raise KeyError(self.dtype)
        return self._array.__cuda_array_interface__

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        with cupy.cuda.Device(self._array.device.id), self._stream:
            return self._array.__dlpack__(stream=stream, max_version=max_version)

    def detach(self):
        return Tensor(self._array, self.dtype, False, self._stream)

    def view(self, kind):
        assert kind.itemsize == self.dtype.itemsize
        array = self._array if kind.is_carried else self._array.view(numpy.dtype(kind.name))
        return Tensor(array, kind, self.requires_grad, self._stream)

    def element_size(self):
        return self.dtype.itemsize


_local = threading.local()


def _streams():
    """Return the thread's stack of PyTorch streams, the current stream last; CuPy has separate streams."""
    if not hasattr(_local, "streams"):
        _local.streams = [cupy.cuda.Stream.null]
    return _local.streams


def _current_stream(device=None):
    stream = _streams()[-1]
    return types.SimpleNamespace(cuda_stream=stream.ptr, __cuda_stream__=lambda: (0, stream.ptr))


@contextlib.contextmanager
def _stream(stream):
    """Make `stream` the current stream of PyTorch, but not of CuPy, within the `with` block."""
    _streams().append(stream)
    try:
        yield
    finally:
        _streams().pop()


cuda = types.SimpleNamespace(current_stream=_current_stream, stream=_stream)
