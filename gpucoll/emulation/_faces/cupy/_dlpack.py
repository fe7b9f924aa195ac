"""DLPack's capsules of arrays on emulated GPUs: NumPy's capsule, with the GPU as its device."""

import ctypes

import numpy

CUDA = 2  # DLPack's type of device
KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64)]


class Owner:
    """Keeps the array alive below NumPy's view of its memory."""

    def __init__(self, array):
        self._array, self.__array_interface__ = array, {
            "shape": array.shape, "typestr": array.dtype.str, "strides": array.strides, "version": 3,
            "data": (array._host.ctypes.data, False)}


def _tensor(capsule):
    get, name = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    kind = name(capsule)
    # With a version come the version, the owner, its function and flags before the tensor.
    return _Tensor.from_address(get(capsule, kind) + (32 if kind.endswith(b"versioned") else 0))


def capsule(array, max_version=None):
    """Return a capsule of the array, which stays alive as long."""
    made = numpy.asarray(Owner(array)).__dlpack__(max_version=max_version)
    tensor = _tensor(made)
    tensor.kind, tensor.ordinal = CUDA, array.data.device_id
    return made


def described(given):
    """Return address, shape, dtype and strides in bytes of a capsule."""
    tensor = _tensor(given)
    dtype = numpy.dtype(f"{KINDS[tensor.code]}{tensor.bits // 8}")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = None if not tensor.strides else tuple(
        tensor.strides[axis] * dtype.itemsize for axis in range(tensor.ndim))
    return tensor.data + tensor.offset, shape, dtype, strides
